// What the kernels with swapped operands do alike beside their math: barriers, the head start, the
// producer and the warp that appends.
#pragma once

#include <type_traits>

#include "decode/sm90/common/load/first_block.cuh"
#include "decode/sm90/swapped/box_loader.cuh"
#include "decode/sm90/swapped/gather_loader.cuh"
#include "decode/sm90/swapped/params.cuh"
#include "decode/trace.cuh"
#include "gpu/launch.h"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90 {

// Writes new rows, and rotates queries.
template <class C>
__device__ __forceinline__ void AppendRole(const KernelParams& params, typename C::Shared& shared,
                                           int row_tile) {
  const int rows_left = params.decode.num_heads - row_tile * C::kTileRows;
  Append::Run<C>(
      params.decode, params.new_rows, params.page_size, shared.append_task,
      [&](const AppendTask& task, float2 cos_sin) {
        uint8_t* rope_chunk = shared.q[task.query_stage] + C::kCkvQueryChunks * C::kQueryChunkBytes;
        RotateQueries<C::kDType, C::kDKpe>(params.new_rows.call.rope_interleaved, cos_sin, task,
                                           QueryBarriersOf<C>(shared, task.query_stage), rope_chunk,
                                           MinI32(rows_left, C::kTileRows));
      });
}

// Those of the rings, called by one elected lane: ptxas then knows that the addresses are uniform.
// For thread 0 it would make each barrier a loop over the lanes and a fence: 1,900 cycles, for
// which everybody waits. MbarrierInitFence has to follow.
template <class C>
__device__ __forceinline__ void InitRings(const NewRows& new_rows, typename C::Shared& shared) {
#pragma unroll 1
  for (int stage = 0; stage < C::kKvStages; ++stage) {
    hw::MbarrierInit(hw::SharedAddress(&shared.kv_full[stage]), C::kFullArrivals);
    hw::MbarrierInit(hw::SharedAddress(&shared.kv_empty[stage]), C::kEmptyArrivals);
  }
#pragma unroll
  for (int stage = 0; stage < C::kQueryStages; ++stage) {
    const QueryBarriers barriers = QueryBarriersOf<C>(shared, stage);
    hw::MbarrierInit(barriers.full, QueryFullArrivals<C>(new_rows));
    if constexpr (C::kAppends) hw::MbarrierInit(barriers.rope_full, 1);
    hw::MbarrierInit(hw::SharedAddress(&shared.q_empty[stage]), C::kQueryEmptyArrivals);
  }
}

// Prefetches the page table into L2, a line for each thread of all CTAs. Where a product wraps at
// 32 bits, less is prefetched.
__device__ inline void PrefetchPageTable(const DecodeParams& decode, int thread) {
  constexpr uint32_t kLineInts = 32;
  const uint32_t size = static_cast<uint32_t>(decode.batch) * decode.max_pages_per_seq;
  const uint32_t entry = (blockIdx.x + thread * gridDim.x) * kLineInts;
  if (entry < size) hw::PrefetchL2(decode.page_table + entry);
}

template <class C>
using Loader = std::conditional_t<C::kLoad == KvLoad::kGather, GatherLoader<C>, BoxLoader<C>>;

// What comes before the math: everything up to the barrier behind which the CTA's mbarriers are
// used. Returns whether the warp goes on. `init_barriers` makes them; `start` is what the producer
// then begins with.
template <class C, class InitBarriers>
__device__ __forceinline__ bool BeginCta(const KernelParams& params, typename C::Shared& shared,
                                         int warp, int row_tile, InitBarriers init_barriers,
                                         typename Loader<C>::Start& start) {
  static_assert(C::kThreads <= gpu::trace::kMaxWarps * kWarpThreads, "every warp has a track");
  constexpr int kInitWarp = 1, kTableWarp = kWarpgroupWarps + 1;
  constexpr int kFirstBlockWarp = kTeamWarps - kFirstBlockWarps<C::kLoad>;
  const bool is_producer = warp >= C::kMathWarps;
  const bool is_first_team = warp < kTeamWarps;
  if constexpr (C::kMovesRegisters) {
    if (is_producer) hw::SetMaxRegistersDown<C::kBudget.producer_registers>();
    if (warp >= C::kFirstIdleWarp) {
      SyncThreads<C>(kSyncThreads, C::kThreads);
      return false;
    }
  }
  if constexpr (C::kAppends) {
    if (warp == C::kAppendWarp) {
      gpu::PdlWait();
      gpu::PdlLaunchDependents();
      SyncAppendWarp<C>(params.new_rows, kSyncThreads, C::kThreads);
      AppendRole<C>(params, shared, row_tile);
      return false;
    }
  }
  if (is_producer) [[likely]] {
    // In a call of units the kernel in front writes rows to the cache, and has itself waited for
    // whoever wrote what the producer reads to begin with.
    if constexpr (C::kHasUnits) start = Loader<C>::Begin(params, shared);
    gpu::PdlWait();
    gpu::PdlLaunchDependents();
    if constexpr (!C::kHasUnits) start = Loader<C>::Begin(params, shared);
  } else {
    // In front of the wait for earlier kernels stands only what reads nothing that they may have
    // written; a prefetch into L2 does not count as reading. Warps 0 and 4 share the producer's
    // scheduler and do nothing before that wait.
    if (warp == kInitWarp) {
      if (hw::ElectOne()) init_barriers();
    } else if (!C::kHasUnits && is_first_team && warp >= kTableWarp &&
               (C::kLoad == KvLoad::kGather || warp < kFirstBlockWarp)) {
      PrefetchPageTable(params.decode, threadIdx.x - kTableWarp * kWarpThreads);
    }
    gpu::PdlWait();
    gpu::PdlLaunchDependents();
    if (!C::kHasUnits && is_first_team && warp >= kFirstBlockWarp && row_tile == 0) {
      PrefetchFirstBlock<C::kLoad, C::kCodes>(params.decode, params.schedule, params.page_size,
                                              WorkerOf(params.schedule, blockIdx.x),
                                              threadIdx.x - kFirstBlockWarp * kWarpThreads);
    }
  }
  SyncThreads<C>(kSyncThreads, C::kThreads);
  return true;
}

// A CTA from its first instruction to its last, of a kernel whose math warps all have one role:
// `math(shared, warp, row_tile)`.
template <class C, class MathRole>
__device__ __forceinline__ void RunCta(const KernelParams& params, const typename C::Maps& maps,
                                       MathRole math) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename C::Shared*>(shared_bytes);
  // The shuffle tells the compiler that it is uniform; wgmma's descriptors, which depend on it,
  // then live in uniform registers.
  const int warp = __shfl_sync(~0u, threadIdx.x / kWarpThreads, 0);
  const int row_tile = blockIdx.y;

  trace::Begin(params.decode, warp < kWarpgroupWarps  ? TraceRole::kMath0
                              : warp < C::kMathWarps  ? TraceRole::kMath1
                              : warp < C::kAppendWarp ? TraceRole::kProducer
                                                      : TraceRole::kHelper);
  typename Loader<C>::Start start;
  const auto init_barriers = [&] {
    InitRings<C>(params.new_rows, shared);
    hw::MbarrierInitFence();
  };
  if (BeginCta<C>(params, shared, warp, row_tile, init_barriers, start)) {
    if (warp >= C::kMathWarps) [[likely]] {
      Loader<C>::Run(params, maps, shared, start, row_tile);
    } else {
      math(shared, warp, row_tile);
    }
  }
  trace::End();
}

}  // namespace jax_mla::decode::sm90
