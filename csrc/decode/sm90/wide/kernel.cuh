// Wide Hopper decode kernel: 17 and more query rows, in tiles of up to 64 (wgmma's M).
//
// A CTA streams KV blocks of 64 tokens through shared memory and serves one row tile. Two math
// warpgroups own half of the columns of O each and work on blocks in pairs ("seesaw"): the lead
// computes S and P of the even block, the follower of the odd one, and each multiplies both P's
// with its half of V. The running maximum is a *reference* that is raised only when a score exceeds
// it by 2^8 (lazy rescale), so that in the common case O is never touched between two PV products.
// Chunk = 64 tokens x 64 dims (8 KB), group = two chunks (gathered: all of a half of O), block =
// all groups and the rope chunk. One pair of blocks is in flight, or two where they are small
// (Config::kBlockPairs): a ring in which even blocks are the lead's and odd ones the follower's.
// The seesaw is FlashMLA's idea (2025), the lazy rescale FlashAttention-4's.
//
// Roles: warps 0-3 lead (left half of O), warps 4-7 follower (right half), warp 8 producer. While
// it finds the work, math warps initialise the barriers and prefetch what will most likely be the
// first block (first_block.cuh), and no more: whatever they execute delays the producer's cold
// code. Warps 9-11 only lend their registers; where pages are smaller than a block they copy KV
// beside warp 8.
// clang-format off
//
// Barrier          kind      arrivals    who arrives, when               who waits, before what         protects             fence
// q_full           mbarrier  1, tx       producer: item told, Q loading  math: item, first QK           q, items written     tx (async)
// q_empty          mbarrier  2           lead: last QK; follower: last P producer: next item's Q        q reusable           -
// kv_full[b][g]    mbarrier  1, tx       producer: group g loading       b even lead, odd follower: QK  kv, owned written    tx (async)
// kv_empty[b][g]   mbarrier  1           owner of the half: PV retired   producer: refill               kv[b] reusable       -
//   [even b][kpe]  mbarrier  1           lead: S of the block complete   producer: refill               its rope chunk       -
//   [odd b][kpe]   mbarrier  1           lead: PV with follower's P      producer: refill               its rope chunk       -
// kLeadPFull       named 1   one way     lead: P, reference stored       follower: PV of block 0        p                    proxy.async
// kFollowPFull     named 2   one way     follower: the same, PV issued   lead: PV of block 1            P in rope chunk 1    proxy.async
// kLeadScores      named 3   one way     lead: its QK nearly done        follower: its QK               order of the QKs     -
// kItemEnd         named 4   256         math: row sums stored           math: output                   sum                  -
//                  the same  one way     follower: the same, bf16 part   lead: the part's statistics    sum                  -
// kLeadTail        named 5   128         lead: V rows past the end = 0   lead: PV                       kv[0]                proxy.async
//                  the same  128         partials written; grid waited   grid arrival; merge            partials             -
// kFollowTail      named 6   128         follower: the same              follower: PV                   kv[1]                proxy.async
// grid barrier     driver's  all math    no partial left to write; for   who merges: reads partials     partials, kv, q      release,
//                            warpgroups  a CTA without work: producer                                                        acquire
// exchange_full        mbarrier  1, tx       thread 0; the peer's stores     math: adds the peer's part     q as ExchangeBuffer      tx
// cluster barrier  hardware  both CTAs   math: last PV retired           math: stores to the peer       q as ExchangeBuffer      -
// kMerge           named 7   256         math: sums stored               math: their use               q, kv: MergeScratch  -
//
// clang-format on
// Page sizes below a block take four producer warps (9-11 too). With boxes each copies one of every
// chunk, and the first one announces the bytes of all. When KV is gathered, the full barriers of kv
// count an arrival of every one of these warps, which has told which tokens it found, and of every
// thread's copies; who waits for one fences (proxy.async) before its wgmma.
// mbarriers start at phase 0; the producer first waits on *_empty with parity 1 (passes at once). A
// one-way barrier has 128 arrivals and 128 waiters. The arriving side cannot come twice before the
// other has waited: from one P to the next each side waits for the other's P, which is announced
// behind that wait, or at an item's end for kItemEnd; and the lead's scores of an item's first pair
// need queries, whose place the follower frees behind its wait for the last pair's kLeadScores.
// What orders the reuse of buffers that have no barrier of their own:
//   p                    the lead stores P after its wait for the follower's P of the pair before,
//                        announced when the follower's PV with p has retired, or for kItemEnd.
//   odd rope chunks      hold the follower's P from S of their block until the lead's PV.
//   reference, rescaled  are written again after the other side's *PFull of the same pair, or
//                        kItemEnd.
//   items, sum, owned    have generations; kItemEnd, kLeadPFull or (owned) a slot that was freed
//                        since lies between two uses. has_next, arrives: as items.
// Registers: math 216, producer 72; 256 dims: 200, 104 (setmaxnreg, config.h). Shared memory:
// SharedMemory<C>, checked below; nothing fits beside it, so CTAs of the combine kernel start late,
// when CTAs of this one end. It merges sequences of many parts, and parts of a fixed number, all
// the same (launch.cuh). Other split sequences are merged here: where lengths differ and there are
// two parts, by the second one's CTA, which still has it in registers (output.cuh), else in shares
// by several (merge.cuh).
#pragma once

#include <cstdint>

#include "decode/sm90/common/first_block.cuh"
#include "decode/sm90/wide/box_producer.cuh"
#include "decode/sm90/wide/gather_producer.cuh"
#include "decode/sm90/wide/math.cuh"
#include "decode/sm90/wide/merge.cuh"
#include "decode/sm90/wide/output.cuh"
#include "decode/sm90/wide/params.cuh"
#include "decode/sm90/wide/producer.cuh"
#include "gpu/launch.h"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::wide {

// Scores of a block, group by group as they were copied: the lead's rope first, the follower's
// last. `after_rope` runs when the lead's rope is in flight. Every latent group is a commit group
// of its own: WgmmaWait<1> then means "nearly done". The loop over them stays one: whatever a
// launch runs but once is fetched cold, at 6 to 14 cycles an instruction.
template <class C, Half kHalf, class AfterRope>
__device__ __forceinline__ void IssueScores(Math<C, kHalf>& math, int32_t block,
                                            AfterRope after_rope) {
  trace::Enter(Phase::kQk);
  const uint64_t q = gpu::sm90::SharedDescriptor(RecomputeHere(SharedAddress(Shared<C>().q)));
  const uint64_t k = gpu::sm90::SharedDescriptor(
      RecomputeHere(SharedAddress(Shared<C>().kv[math.RingBlock(math.kOwnBlock)])));
  gpu::sm90::WgmmaFenceOperand(math.scores);
  if constexpr (kHalf == kLead) {
    math.ScoreRope(q, k, /*accumulate=*/false);
    after_rope();
  }
#pragma unroll 1
  for (int i = 0; i < C::kCkvCopyGroups; ++i) {
    math.ScoreCopyGroup(q, k, kHalf == kLead ? i : C::FollowCopyGroup(i), kHalf == kLead || i > 0);
    gpu::sm90::WgmmaCommit();
  }
  if constexpr (kHalf == kFollow) {
    math.ScoreRope(q, k, /*accumulate=*/true);
    gpu::sm90::WgmmaCommit();
  }
  math.full_phases ^= 1u << C::RingBlockPair(math.block_pair);
  math.PrepareSoftmax(block);
}
template <class C, Half kHalf>
__device__ __forceinline__ void IssueScores(Math<C, kHalf>& math, int32_t block) {
  IssueScores(math, block, [] {});
}

// Lets the follower start its scores; they must not delay the lead's.
__device__ __forceinline__ void ReleaseFollowScores() {
  gpu::sm90::NamedBarrierArrive(kLeadScores, kNumMathThreads);
}

template <class C, Half kHalf>
__device__ __forceinline__ void WaitScores(Math<C, kHalf>& math) {
  trace::Enter(Phase::kWaitMma);
  gpu::sm90::WgmmaWait<0>();
  gpu::sm90::WgmmaFenceOperand(math.scores);
}

template <class C, Half kHalf>
__device__ __forceinline__ void WaitValues(Math<C, kHalf>& math) {
  trace::Enter(Phase::kWaitMma);
  gpu::sm90::WgmmaWait<0>();
  gpu::sm90::WgmmaFenceOperand(math.out);
}

// The lead's PV with the follower's P, once that is there.
template <class C>
__device__ __forceinline__ void IssueFollowValues(Math<C, kLead>& math) {
  trace::Enter(Phase::kWaitP);
  gpu::sm90::NamedBarrierSync(kFollowPFull, kNumMathThreads);
  if (math.FollowReference()) math.ScaleOut(math.factor);
  math.IssueValues(1, true);
}

// Even blocks: S, P; the left half of O.
template <class C>
__device__ __forceinline__ void LeadRole(const WideParams& params, const RowTile& tile) {
  Math<C, kLead> math(params, tile);
  do {
    math.NextItem();
    if (math.num_blocks() == 0) return;
    IssueScores(math, math.item.block_begin);
    ReleaseFollowScores();
    WaitScores(math);
    math.ResetSoftmax();
#pragma unroll 1
    for (int32_t done_blocks = 0;; done_blocks += 2) {
      const bool has_follow_block = done_blocks + 1 < math.num_blocks();
      const bool is_last = done_blocks + 2 >= math.num_blocks();
      const int32_t block = math.item.block_begin + done_blocks;
      math.Release(Shared<C>().kv_empty[math.RingBlock(0)][C::kKpeCopyGroup]);
      if (is_last) math.Release(Shared<C>().q_empty);
      if (math.Softmax(block) && done_blocks > 0) math.ScaleOut(math.factor);
      math.FinishP(block);
      math.AnnounceP();
      math.IssueValues(0, done_blocks > 0);
      WaitValues(math);
      math.ReleaseValues(math.RingBlock(0));
      const int done_block_pair = math.block_pair;
      if (is_last) {
        if (has_follow_block) {
          IssueFollowValues(math);
          WaitValues(math);
          math.ReleaseLeadFollowBlock(done_block_pair);
        }
        math.NextBlockPair();
        break;
      }
      IssueFollowValues(math);
      math.NextBlockPair();
      IssueScores(math, block + 2, [&] {
        // Right behind PV, so that the tensor cores never wait for a release.
        gpu::sm90::WgmmaCommit();
        gpu::sm90::WgmmaWait<1>();
        math.ReleaseLeadFollowBlock(done_block_pair);
      });
      gpu::sm90::WgmmaWait<1>();
      ReleaseFollowScores();
      WaitScores(math);
      gpu::sm90::WgmmaFenceOperand(math.out);
    }
    // Not behind the next item's scores, whose queries are under way only now.
    WriteItem(math, math.item_idx);
  } while (math.HasNext());
}

// The follower's P, behind PV of the lead's block. Everybody waits for it, so the common case is
// told apart while the scores are computed (each branch waits for them), and has no other branch
// and no maximum.
template <class C>
__device__ __forceinline__ void MakeFollowP(Math<C, kFollow>& math, int32_t block, bool is_last) {
  const auto wait_scores = [&] {
    trace::Enter(Phase::kWaitMma);
    gpu::sm90::WgmmaWait<1>();
    gpu::sm90::WgmmaFenceOperand(math.scores);
  };
  const auto take_values = [&] {
    if (is_last) math.Release(Shared<C>().q_empty);
    WaitValues(math);  // done by now; the groups it frees are what the lead waits for next
    math.ReleaseValues(math.RingBlock(0));
  };
  if (math.is_plain) {
    wait_scores();
    float block_sum[2];
    if (math.TrySoftmax(block_sum)) {
      math.KeepSums(block_sum);
      take_values();
      gpu::sm90::FenceProxyAsyncShared();
      return;
    }
  } else {
    wait_scores();
  }
  const bool rescale = math.Softmax(block);
  take_values();
  math.FinishP(block);
  if (rescale) math.ScaleOut(math.factor);
}

// Odd blocks: S, P; the right half of O. Its scores cover the lead's softmax, PV of the lead's
// block covers its own.
template <class C>
__device__ __forceinline__ void FollowRole(const WideParams& params, const RowTile& tile) {
  Math<C, kFollow> math(params, tile);
  do {
    math.NextItem();
    if (math.num_blocks() == 0) return;
    math.ResetSoftmax();
#pragma unroll 1
    for (int32_t done_blocks = 0; done_blocks < math.num_blocks(); done_blocks += 2) {
      const bool has_own = done_blocks + 1 < math.num_blocks();
      const bool is_last = done_blocks + 2 >= math.num_blocks();
      const int32_t block = math.item.block_begin + done_blocks + 1;
      trace::Enter(Phase::kWaitTurn);
      gpu::sm90::NamedBarrierSync(kLeadScores, kNumMathThreads);
      if (has_own) {
        IssueScores(math, block);
      } else {
        // Only now: all warps have seen q_full, which freeing q may complete once more, and the
        // lead, which needs the next item's queries for that, may announce its scores again.
        math.Release(Shared<C>().q_empty);
      }
      trace::Enter(Phase::kWaitP);
      gpu::sm90::NamedBarrierSync(kLeadPFull, kNumMathThreads);
      if (math.FollowReference() && done_blocks > 0) {
        gpu::sm90::WgmmaWait<0>();
        math.ScaleOut(math.factor);
      }
      math.IssueValues(0, done_blocks > 0);
      if (has_own) {
        MakeFollowP(math, block, is_last);
        math.IssueValues(1, true);
        math.AnnounceP();  // only now: whose PV ends first frees its half first
        WaitValues(math);
        math.ReleaseValues(math.RingBlock(1));
      } else {
        WaitValues(math);
        math.ReleaseValues(math.RingBlock(0));
      }
      math.NextBlockPair();
    }
    WriteItem(math, math.item_idx);
  } while (math.HasNext());
}

// One elected lane.
template <class C>
__device__ __forceinline__ void InitBarriers() {
  constexpr int kOwners = 1, kBothHalves = 2;
#pragma unroll 1
  for (int i = 0; i < C::kRingBlocks * C::kNumCopyGroups; ++i) {
    gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().kv_full[0][i]), C::kFullArrivals);
    gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().kv_empty[0][i]), kOwners);
  }
  gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().q_full), kOwners);
  gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().q_empty), kBothHalves);
  gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().exchange_full), kOwners);
  gpu::sm90::MbarrierInitFence();
}

// Grid: row tiles x workers; the tiles of a worker are neighbours, so that L2 serves all but one of
// them.
template <class C>
__global__ void __launch_bounds__(kNumThreads, 1)
    WideDecode(const __grid_constant__ WideParams params, const __grid_constant__ TensorMaps maps) {
  static_assert(sizeof(SharedMemory<C>) <= kMaxSharedBytes,
                "shorten the KV ring or share a buffer");
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarpThreads, 0);
  using Copier = std::conditional_t<C::kLoad == KvLoad::kGather, GatherCopier<C>, BoxCopier<C>>;

  trace::Begin(params.decode, warp < kProducerWarp / 2               ? TraceRole::kMath0
                              : warp < kProducerWarp                 ? TraceRole::kMath1
                              : warp < kProducerWarp + C::kCopyWarps ? TraceRole::kProducer
                                                                     : TraceRole::kHelper);
  if (warp >= kProducerWarp) [[likely]] {  // its way to the first copy is what everybody waits for
    gpu::sm90::SetMaxRegistersDown<C::kProducerRegisters>();
    gpu::PdlWait();
    gpu::PdlLaunchDependents();
    if (warp < kProducerWarp + C::kCopyWarps) [[likely]] {
      const RowTile tile(params, blockIdx.x);  // early: else the gather spills
      ProducerStart<Copier> start = BeginProducer<C, Copier>(params, maps);
      __syncthreads();
      ProducerLoop<C>(start, tile);
    } else {
      __syncthreads();
    }
    trace::End();
    return;
  }
  // Warps 0 and 4 share the producer's scheduler and do nothing yet.
  if (warp == 1 && gpu::sm90::ElectOne()) InitBarriers<C>();
  gpu::PdlWait();
  gpu::PdlLaunchDependents();
  constexpr int kFirstBlockWarp = kProducerWarp - kFirstBlockWarps<C::kLoad>;
  if (warp >= kFirstBlockWarp && blockIdx.x == 0) {
    PrefetchFirstBlock<C::kLoad>(params.decode, params.plan.schedule, params.page_size,
                                 params.box_tokens, blockIdx.y,
                                 threadIdx.x - kFirstBlockWarp * kWarpThreads);
  }
  __syncthreads();
  const RowTile tile(params, blockIdx.x);
  gpu::sm90::SetMaxRegistersUp<C::kMathRegisters>();
  if (warp < kProducerWarp / 2) {
    LeadRole<C>(params, tile);
  } else {
    FollowRole<C>(params, tile);
  }
  if constexpr (C::kMerge == Merge::kInside) {
    if (Shared<C>().merges) MergeParts<C>(params, tile);
  }
  trace::End();
}

}  // namespace jax_mla::decode::sm90::wide
