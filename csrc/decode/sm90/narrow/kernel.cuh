// Narrow MLA decode for Hopper: few query rows against a long paged cache (swap-AB).
//
// A block of 64 tokens is the M side of every wgmma and the query rows are N, so 8 to 32 rows do
// not pay for a 64-row tile: S^T = K Q^T (A = K chunk, K-major), O^T += V^T P^T (A = the same
// bytes, MN-major). The cache streams through a ring of 8 KB chunks (64 tokens x 64 dims): of each
// block first the rope chunk, then the latent chunks.
// The math warpgroups share every block by dims: warpgroup w owns the latent chunks c = w mod 2 in
// both products and half of the rope chunk, and adds the other's partial scores through shared
// memory. S, P and softmax statistics are then bitwise equal in both, each chunk has one reader,
// and nothing is merged at the end of an item. The softmax is online with a lazy maximum (as in
// FlashAttention-4). Schedule: decode/split/schedule.h. Parts of split sequences:
// decode/split/combine.h.
//
// Roles: WG0, WG1 math. Producer: one warp that issues TMA boxes; four where pages are smaller than
// a block, each with one box of every chunk, or gathering with cp.async if no box fits. It finds
// the CTA's work and tells the math about it; until then warps of WG1 prefetch the page table and
// what will most likely be its first block (first_block.cuh), and no more: whatever they execute
// delays the producer's cold code.
//
// Barrier     kind      arrivals           who arrives, when    who waits, before  protects  fence
// q_full[s]   mbarrier  1, tx kQueryBytes  producer: item told, WG0, WG1: reading  sQ, items tx
//                                          Q under way          the item, QK       written   (TMA)
// q_empty[s]  mbarrier  kNumMathWgs        WG0, WG1: Q and item producer: next     sQ, items -
//                                          no longer needed     item's Q           reusable
// kv_full[s]  mbarrier  kFullArrivals, tx  producer: chunk on   the chunk's owner  kv,       tx, or
//                       kChunkBytes        its way; gather:     (rope: WG0, WG1):  key_mask  proxy.
//                                          a thread's copies    QK on it           written   async
// kv_empty[s] mbarrier  1                  owner: PV retired;   producer: refill   kv,       (1)
//                                          rope: WG0, past      of the slot        key_mask
//                                          math_all                                reusable
// math_all    named 3   kNumMathThreads    WG0, WG1: partial S  WG0, WG1: adding   exchange  -
//                                          stored; or no key in the other's; or    written,
//                                          the block: mask read slot freed         key_mask
// wg          named     kWarpgroupThreads  own WG: vote; maxima own WG: rescale,   row_stats (2)
//             1 + w                        or sums stored; P    PV, writing the    sP, V
//                                          stored               item               rows zero
// (1) Rows zeroed by the math are fenced (proxy.async) with P, before the next TMA write.
// (2) proxy.async between the P stores and the barrier: wgmma reads P and the zeroed rows.
// Phases: *_full start at 0; the producer first waits on *_empty with parity 1 (passes at once).
// The exchange buffer needs no empty barrier: it alternates, and a block's reads precede the next
// block's math_all.
// Registers: up to 79 (gathering 96), 96, 144 a thread for kBlockM 8, 16, 32, no setmaxnreg. Shared
// memory: sizeof(SharedMemory<Config>), and launch.cuh asserts that the combine kernel fits beside
// it.
#pragma once

#include <cuda.h>

#include <cfloat>
#include <type_traits>

#include "decode/params.h"
#include "decode/sm90/common/first_block.cuh"
#include "decode/sm90/narrow/box_producer.cuh"
#include "decode/sm90/narrow/config.h"
#include "decode/sm90/narrow/gather_producer.cuh"
#include "decode/sm90/narrow/math.cuh"
#include "decode/sm90/narrow/output.cuh"
#include "decode/sm90/narrow/params.cuh"
#include "decode/split/partial_range.cuh"
#include "decode/trace.cuh"
#include "gpu/element.h"
#include "gpu/launch.h"
#include "gpu/online_softmax.cuh"
#include "gpu/sm90.cuh"
#include "gpu/sm90_wgmma.cuh"

namespace jax_mla::decode::sm90::narrow {

// The item whose block 0 is under way, block by block; then the next one.
template <class C>
__device__ __forceinline__ void MathRole(const KernelParams& params, SharedMemory<C>& shared,
                                         int warp, int row_tile) {
  Math<C> math(params, shared, warp, row_tile);
#pragma unroll 1
  while (math.NextItem()) {
    math.ResetSoftmax();
#pragma unroll 1
    for (int block = 0; block < math.item.num_blocks; ++block) {
      trace::Enter(Phase::kWaitKv);
      math.WaitChunk(math.kv);
      const uint64_t key_mask = shared.key_mask[math.kv.stage];
      if (key_mask == 0) {
        math.SkipEmptyBlock();
        continue;
      }
      math.ProcessBlock(block, key_mask);
    }
    WriteItem(math);
    math.query.Advance(1);
  }
}

// One elected lane, as ptxas then knows that addresses are uniform: for thread 0 it makes a loop
// over the lanes and a fence of every barrier, 1,900 cycles in all, for which everybody waits.
template <class C>
__device__ void InitBarriers(SharedMemory<C>& shared) {
#pragma unroll 1
  for (int stage = 0; stage < C::kKvStages; ++stage) {
    hw::MbarrierInit(hw::SharedAddress(&shared.kv_full[stage]), C::kFullArrivals);
    hw::MbarrierInit(hw::SharedAddress(&shared.kv_empty[stage]), 1);
  }
#pragma unroll
  for (int stage = 0; stage < C::kQueryStages; ++stage) {
    hw::MbarrierInit(hw::SharedAddress(&shared.q_full[stage]), 1);
    hw::MbarrierInit(hw::SharedAddress(&shared.q_empty[stage]), kNumMathWgs);
  }
  hw::MbarrierInitFence();
}

// Spreads the page table over the CTAs' prefetches. In 32 bits: where they wrap, less is
// prefetched.
__device__ inline void PrefetchPageTable(const DecodeParams& decode, int thread) {
  constexpr uint32_t kLineInts = 32;
  const uint32_t size = static_cast<uint32_t>(decode.batch) * decode.max_pages_per_seq;
  const uint32_t entry = (blockIdx.x + thread * gridDim.x) * kLineInts;
  if (entry < size) hw::PrefetchL2(decode.page_table + entry);
}

// Grid: (workers of the schedule, row tiles).
template <class C>
__global__ void __maxnreg__(C::kMaxRegisters)
    NarrowDecode(const __grid_constant__ KernelParams params,
                 const __grid_constant__ TensorMaps maps) {
  using P = std::conditional_t<C::kLoad == KvLoad::kGather, GatherProducer<C>, BoxProducer<C>>;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(shared_bytes);
  // Uniform to the compiler too: wgmma descriptors then live in uniform registers.
  const int warp = __shfl_sync(~0u, threadIdx.x / kWarpThreads, 0);
  const int row_tile = blockIdx.y;

  trace::Begin(params.decode, warp >= kNumMathWarps    ? TraceRole::kProducer
                              : warp < kWarpgroupWarps ? TraceRole::kMath0
                                                       : TraceRole::kMath1);
  constexpr int kInitWarp = 1, kTableWarp = kWarpgroupWarps + 1;
  constexpr int kFirstBlockWarp = kNumMathWarps - kFirstBlockWarps<C::kLoad>;
  const bool is_producer = warp >= kNumMathWarps;
  typename P::Start start;
  if (is_producer) [[likely]] {
    gpu::PdlWait();
    gpu::PdlLaunchDependents();
    start = P::Begin(params);
  } else {
    // What reads nothing that an earlier kernel may have written comes before the wait for it; a
    // prefetch into L2 does not count. Warps 0 and 4 share the producer's scheduler and do nothing.
    if (warp == kInitWarp) {
      if (hw::ElectOne()) InitBarriers(shared);
    } else if (warp >= kTableWarp && (C::kLoad == KvLoad::kGather || warp < kFirstBlockWarp)) {
      PrefetchPageTable(params.decode, threadIdx.x - kTableWarp * kWarpThreads);
    }
    gpu::PdlWait();
    gpu::PdlLaunchDependents();
    if (warp >= kFirstBlockWarp && row_tile == 0) {
      PrefetchFirstBlock<C::kLoad>(params.decode, params.schedule, params.page_size,
                                   1 << params.box_shift, WorkerOf(params.schedule, blockIdx.x),
                                   threadIdx.x - kFirstBlockWarp * kWarpThreads);
    }
  }
  __syncthreads();
  if (is_producer) [[likely]] {
    P::Run(params, maps, shared, start, row_tile);
  } else {
    MathRole(params, shared, warp, row_tile);
  }
  trace::End();
}

}  // namespace jax_mla::decode::sm90::narrow
