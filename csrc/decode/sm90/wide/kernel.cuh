// Wide Hopper decode kernel: for 17 and more query rows, in row tiles of up to 64 (wgmma's M).
//
// Algorithm. A CTA serves one row tile of one sequence after another and streams their KV through
// shared memory, in blocks of 64 tokens. Two math warpgroups, the lead and the follower, own one
// half of the columns of O each. They work on a block pair at a time ("seesaw"): the lead computes
// S = Q K^T and P = softmax(S) of the even block, the follower those of the odd one, and both
// multiply both P's with their half of V. So the tensor cores work for one warpgroup while the
// other computes its softmax. A row's reference, which stands for its running maximum, rises only
// when one of the warp's scores exceeds its row's reference by more than kWideRescaleThreshold
// ("lazy rescale"): otherwise nothing touches O between two PV products. The seesaw is FlashMLA's
// idea (2025), the lazy rescale FlashAttention-4's.
//
// Shared memory of KV. A chunk is 64 tokens x 64 dims (8 KB). A copy group is the chunks that share
// a pair of barriers: two latent chunks (where KV is gathered, the latent chunks of one half of the
// dims), or the rope chunk. A block is all its copy groups. The ring holds one block pair, or two
// where blocks are small (Config::kBlockPairs). Its even blocks are the lead's, its odd ones the
// follower's.
//
// Roles. Warps 0-3 are the lead, which owns the left half of O. Warps 4-7 are the follower, which
// owns the right half. Warp 8 is the producer: it finds the CTA's work and copies queries and KV.
// Warps 9-11 give their registers to the math warpgroups. Where page_size is no multiple of a block
// they also copy KV, beside warp 8. Where the kernel appends a step's new rows (Config::kAppends),
// warp 9 writes them to the cache (new_row.cuh) and, where the call says so, rotates the queries
// (rotate_queries.cuh). While the producer finds the first item, the math warps initialise the
// barriers and prefetch what will most likely be the first block (first_block.cuh). They do no more
// than that, because every instruction they execute delays the producer's cold code.
//
// What becomes of an item's result (item_end.h). The result of a whole sequence is written to
// `out`. A part of a sequence that is cut leaves a partial result: float16 of O times a power of
// two (merge/partial_range.cuh), in a slot of the scratch memory. Each half of O has its own power
// of two and therefore its own statistics, for which both halves wait for each other's row sums.
// Parts are merged in one of four ways:
//   - By the combine kernel, if the number of parts is fixed or large, or if the call has units and
//     KV is gathered (launch.cuh). No CTA fits beside one of this kernel, so the combine kernel
//     starts late.
//   - By this kernel behind a grid barrier: CTAs merge shares of the sequence (merge/shares.cuh).
//   - By the CTA that computed the second of two parts. It keeps that part in registers, waits at
//     the grid barrier and adds the first part from its slot (merge/add_part.cuh).
//   - By the two CTAs of a cluster that have one part each. Each thread sends one of its two rows
//     to the same thread of the other CTA, gets that thread's other row in return and adds it to
//     its own (merge/add_part.cuh). No slot is used.
//
// clang-format off
//
// Barrier          kind      arrivals    who arrives, when               who waits, before what         protects             fence
// q_full           mbarrier  1, tx       producer: item told, Q loading  math: item, first QK           q, items written     tx (async)
//   rotated        mbarrier  2, tx       the same; warp 9: rope chunk    the same                       the same             proxy.async
//                                        rotated; no item: producer
//                                        twice
// q_rope_full      mbarrier  1, tx       producer: rope chunk of Q       warp 9: rotation               q: rope chunk        tx (async)
//   rotated                              loading
// q_empty          mbarrier  2           lead: last QK; follower: last P producer: next item's Q        q reusable           -
// kv_full[b][g]    mbarrier  1, tx       producer: copy group g loading  b even lead, odd follower: QK  kv, owned written    tx (async)
// kv_empty[b][g]   mbarrier  1           owner of the half: PV retired   producer: refill               kv[b] reusable       -
//   [even b][kpe]  mbarrier  1           lead: S of the block complete   producer: refill               its rope chunk       -
//   [odd b][kpe]   mbarrier  1           lead: PV with follower's P      producer: refill               its rope chunk       -
// kLeadPFull       named 1   one way     lead: P, reference stored       follower: PV of even block     p                    proxy.async
// kFollowPFull     named 2   one way     follower: P stored, PV issued   lead: PV of odd block          P in odd rope chunk  proxy.async
// kLeadScores      named 3   one way     lead: its QK nearly done        follower: its QK, PV           order of the QKs     -
// kItemEnd         named 4   256         math: row sums stored           math: output, statistics       sum                  -
// kLeadTail        named 5   128         lead: V rows past the end = 0   lead: PV                       even kv              proxy.async
//                  the same  128         partials written; grid waited   grid arrival; merge            partials             -
// kFollowTail      named 6   128         follower: as the lead           follower: as the lead          odd kv, partials     as above
// grid barrier     driver's  all math    its last partial is written; if who merges: reads partials     partials, kv, q      release,
//                            warpgroups  a CTA has no work: producer                                                         acquire
// exchange_full    mbarrier  1, tx       thread 0; the peer's stores     math: adds the peer's rows     q as ExchangeBuffer  tx
// cluster barrier  hardware  both CTAs   math: last PV retired           math: stores to the peer       q as ExchangeBuffer  sm90_cluster.cuh
// kMerge           named 7   256         math: sums stored               math: their use                q, kv: MergeScratch  -
// kAppendTold      named 8   64          producer: append_task written   warp 9: the task               append_task          -
// kAppendDone      named 9   64          warp 9: new row written         producer: its block's copy     the row in the pool, proxy.async,
//                                                                                                       append_task          global memory
// kSyncThreads     named 0   384         all: barriers initialised;      all but warp 9: first use      mbarriers            mbarrier_init
//                                        warp 9 at once: it uses none,
//                                        unless it rotates queries
//
// clang-format on
// Phases. mbarriers start at phase 0. The producer first waits on *_empty with parity 1, which
// passes at once.
//
// One-way barriers have 128 threads that arrive and 128 that wait. The arriving side must not
// arrive twice before the other side has waited. Between two arrivals it therefore always waits for
// something that the other side announces only after its own wait: within an item that is the other
// side's P, and from one item to the next kItemEnd.
//
// Where page_size is no multiple of a block, KV is gathered by four producer warps. A full barrier
// of kv then counts one arrival of each of these warps, which releases what the warp wrote to
// `owned`, and one arrival of each of their threads when its copies have landed. These copies
// (cp.async) belong to the generic proxy. So whoever waits for such a barrier executes a
// proxy.async fence before its wgmma.
//
// Buffers without a barrier of their own:
//   p                    The lead stores the next P after it has waited for the follower's P, which
//                        the follower announces once its PV with `p` has retired. Between items it
//                        waits for kItemEnd.
//   odd rope chunks      The follower stores its P there when its S, which reads the chunk, is
//                        complete. The chunk is freed after the lead's PV with that P.
//   p[1]                 The follower's P where rows have no rope. It is stored when the follower's
//                        S is complete. The block of that S was copied into a place that the lead
//                        frees behind its PV with the P before, so nobody reads that P any more.
//   reference, rescaled  A side writes them again after it has waited for the other side's P of the
//                        same block pair, or for kItemEnd. The other side has read them before.
//   items, has_next,     Two generations. Before one is written again, both halves have freed the
//   arrives              queries of the item in between, and with that left the older item.
//   sum                  Two generations; the kItemEnd of the item in between separates their uses.
//   owned                Two generations for each block pair of the ring. Before one is written
//                        again, the producer has seen that the block pair it describes is free.
//
// Registers: kBudgets (config.h). Shared memory: SharedMemory<C>, whose size is checked below.
#pragma once

#include <cstdint>

#include "decode/sm90/common/load/first_block.cuh"
#include "decode/sm90/wide/box_producer.cuh"
#include "decode/sm90/wide/gather_producer.cuh"
#include "decode/sm90/wide/math.cuh"
#include "decode/sm90/wide/merge/shares.cuh"
#include "decode/sm90/wide/output.cuh"
#include "decode/sm90/wide/params.cuh"
#include "decode/sm90/wide/producer.cuh"
#include "gpu/launch.h"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::wide {

// Issues the scores of the own block, copy group by copy group in the order in which they are
// copied. The lead begins with the rope chunk and the follower ends with it. `after_first` runs
// when the lead's first scores are issued, those of the rope chunk or, without one, of a copy
// group. Every latent copy group is a wgmma commit group of its own, so that WgmmaWait<1> means
// "nearly done". The loop is not unrolled, because a kernel fetches code that it has not executed
// yet at 6 to 14 cycles an instruction.
template <class C, Half kHalf, class AfterFirst>
__device__ __forceinline__ void IssueScores(Math<C, kHalf>& math, int32_t block,
                                            AfterFirst after_first) {
  trace::Enter(Phase::kQk);
  const uint64_t q = gpu::sm90::SharedDescriptor(RecomputeHere(SharedAddress(Shared<C>().q)));
  const uint64_t k = gpu::sm90::SharedDescriptor(
      RecomputeHere(SharedAddress(Shared<C>().kv[math.RingBlock(math.kOwnBlock)])));
  gpu::sm90::WgmmaFenceOperand(math.scores);
  constexpr bool kBeginsWithRope = kHalf == kLead && C::kHasRope;
  if constexpr (kBeginsWithRope) {
    math.ScoreRope(q, k, /*accumulate=*/false);
    after_first();
  }
#pragma unroll 1
  for (int i = 0; i < C::kCkvCopyGroups; ++i) {
    math.ScoreCopyGroup(q, k, kHalf == kLead ? i : C::FollowCopyGroup(i), kBeginsWithRope || i > 0);
    if constexpr (kHalf == kLead && !C::kHasRope) {
      if (i == 0) after_first();
    }
    gpu::sm90::WgmmaCommit();
  }
  if constexpr (kHalf == kFollow && C::kHasRope) {
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

// Lets the follower issue its scores. Issued earlier, they would delay the lead's.
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

// Issues the lead's PV with the follower's P, after waiting for that P.
template <class C>
__device__ __forceinline__ void IssueFollowValues(Math<C, kLead>& math) {
  trace::Enter(Phase::kWaitP);
  gpu::sm90::NamedBarrierSync(kFollowPFull, kNumMathThreads);
  if (math.FollowReference()) math.ScaleOut(math.factor);
  math.IssueValues(1, true);
}

// The lead: S and P of even blocks, and the left half of O.
template <class C>
__device__ __forceinline__ void LeadRole(const WideParams& params, const RowTile& tile) {
  Math<C, kLead> math(params, tile);
  do {
    math.NextItem();
    if (math.num_blocks == 0) return;
    int32_t block = math.Item().block_begin;
    IssueScores(math, block);
    ReleaseFollowScores();
    WaitScores(math);
    math.ResetSoftmax();
#pragma unroll 1
    for (int32_t done_blocks = 0;; done_blocks += 2, block += 2) {
      const bool has_follow_block = done_blocks + 1 < math.num_blocks;
      const bool is_last = done_blocks + 2 >= math.num_blocks;
      math.ReleaseRope(math.RingBlock(0));
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
        // The release comes after PV has retired, while the first scores are being computed: the
        // tensor cores do not wait for it.
        gpu::sm90::WgmmaCommit();
        gpu::sm90::WgmmaWait<1>();
        math.ReleaseLeadFollowBlock(done_block_pair);
      });
      gpu::sm90::WgmmaWait<1>();
      ReleaseFollowScores();
      WaitScores(math);
      gpu::sm90::WgmmaFenceOperand(math.out);
    }
    // Written before the next item's scores are issued, since their queries are only now copied.
    WriteItem(math, math.item_idx);
  } while (math.HasNext());
}

// Makes the follower's P, after PV of the lead's block has been issued.
template <class C>
__device__ __forceinline__ void MakeFollowP(Math<C, kFollow>& math, int32_t block, bool is_last) {
  trace::Enter(Phase::kWaitMma);
  gpu::sm90::WgmmaWait<1>();
  gpu::sm90::WgmmaFenceOperand(math.scores);
  const bool rescale = math.Softmax(block);
  if (is_last) math.Release(Shared<C>().q_empty);
  WaitValues(math);  // has retired by now; the copy groups freed here are the first refilled
  math.ReleaseValues(math.RingBlock(0));
  math.FinishP(block);
  if (rescale) math.ScaleOut(math.factor);
}

// The follower: S and P of odd blocks, and the right half of O. The tensor cores compute its scores
// during the lead's softmax, and PV of the lead's block during its own softmax.
template <class C>
__device__ __forceinline__ void FollowRole(const WideParams& params, const RowTile& tile) {
  Math<C, kFollow> math(params, tile);
  do {
    math.NextItem();
    if (math.num_blocks == 0) return;
    math.ResetSoftmax();
    int32_t block = math.Item().block_begin + 1;
#pragma unroll 1
    for (int32_t done_blocks = 0; done_blocks < math.num_blocks; done_blocks += 2, block += 2) {
      const bool has_own = done_blocks + 1 < math.num_blocks;
      const bool is_last = done_blocks + 2 >= math.num_blocks;
      trace::Enter(Phase::kWaitTurn);
      gpu::sm90::NamedBarrierSync(kLeadScores, kNumMathThreads);
      if (has_own) {
        IssueScores(math, block);
      } else {
        // All warps of the follower have passed the barrier above, and so have seen q_full. If q
        // were freed earlier, q_full could complete its next phase before a slow warp tests it.
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
        math.AnnounceP();  // after the own PV, which then ends first and frees its half first
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

// Called by one elected lane.
template <class C>
__device__ __forceinline__ void InitBarriers(const WideParams& params) {
  const NewRows& new_rows = params.new_rows;
  constexpr int kOwners = 1, kBothHalves = 2;
#pragma unroll 1
  for (int i = 0; i < C::kRingBlocks * C::kNumCopyGroups; ++i) {
    gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().kv_full[0][i]), C::kFullArrivals);
    gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().kv_empty[0][i]), kOwners);
  }
  const QueryBarriers queries = QueryBarriersOf<C>();
  gpu::sm90::MbarrierInit(queries.full, QueryFullArrivals<C>(new_rows));
  if constexpr (C::kAppends) gpu::sm90::MbarrierInit(queries.rope_full, 1);
  gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().q_empty), kBothHalves);
  gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().exchange_full), kOwners);
  gpu::sm90::MbarrierInitFence();
}

// Grid: [row tiles, workers]. The row tiles of a worker are neighbours. They read the same KV at
// about the same time, so that L2 serves all but the first.
template <class C>
__global__ void __launch_bounds__(C::kNumThreads, 1)
    WideDecode(const __grid_constant__ WideParams params,
               const __grid_constant__ typename C::Maps maps) {
  static_assert(sizeof(SharedMemory<C>) <= kMaxSharedBytes,
                "shorten the KV ring or share a buffer");
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarpThreads, 0);
  using Copier = std::conditional_t<C::kLoad == KvLoad::kGather, GatherCopier<C>, BoxCopier<C>>;

  trace::Begin(params.decode, warp < kProducerWarp / 2               ? TraceRole::kMath0
                              : warp < kProducerWarp                 ? TraceRole::kMath1
                              : warp < kProducerWarp + C::kCopyWarps ? TraceRole::kProducer
                                                                     : TraceRole::kHelper);
  if (warp >= kProducerWarp) [[likely]] {  // every warp waits for the producer's first copy
    gpu::sm90::SetMaxRegistersDown<C::kBudget.producer_registers>();
    if constexpr (!C::kHasUnits) {  // otherwise ProducerLoop waits
      gpu::PdlWait();
      gpu::PdlLaunchDependents();
    }
    if (warp < kProducerWarp + C::kCopyWarps) [[likely]] {
      const RowTile tile(params,
                         blockIdx.x);  // made before the work is found, or the gather spills
      ProducerStart<Copier> start = BeginProducer<C, Copier>(params, maps);
      // In a call of units ProducerLoop does it.
      if constexpr (!C::kHasUnits) SyncThreads<C>(kSyncThreads, C::kNumThreads);
      ProducerLoop<C>(start, tile);
    } else if (C::kAppends && warp == kAppendWarp) {
      if constexpr (C::kAppends) {
        SyncAppendWarp<C>(params.new_rows, kSyncThreads, C::kNumThreads);
        const int num_rows = RowTile(params, blockIdx.x).num_rows;
        Append::Run<C>(params.decode, params.new_rows, params.page_size, Shared<C>().append_task,
                       [&](const AppendTask& task, float2 cos_sin) {
                         auto* rope_chunk = reinterpret_cast<uint8_t*>(Shared<C>().q[C::kKpeChunk]);
                         RotateQueries<C::kDType, C::kDKpe>(params.new_rows.call.rope_interleaved,
                                                            cos_sin, task, QueryBarriersOf<C>(),
                                                            rope_chunk, num_rows);
                       });
      }
    } else {
      SyncThreads<C>(kSyncThreads, C::kNumThreads);
    }
    trace::End();
    return;
  }
  // Warps 0 and 4 share a scheduler with the producer, so they get nothing to do here; only the
  // gather's first block needs warp 4.
  if (warp == 1 && gpu::sm90::ElectOne()) InitBarriers<C>(params);
  gpu::PdlWait();
  gpu::PdlLaunchDependents();
  constexpr int kFirstBlockWarp = kProducerWarp - kFirstBlockWarps<C::kLoad>;
  if (!C::kHasUnits && warp >= kFirstBlockWarp && blockIdx.x == 0) {
    PrefetchFirstBlock<C::kLoad, CacheCodes::kNone>(params.decode, params.plan.schedule,
                                                    params.page_size, blockIdx.y,
                                                    threadIdx.x - kFirstBlockWarp * kWarpThreads);
  }
  SyncThreads<C>(kSyncThreads, C::kNumThreads);
  const RowTile tile(params, blockIdx.x);
  gpu::sm90::SetMaxRegistersUp<C::kBudget.math_registers>();
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
