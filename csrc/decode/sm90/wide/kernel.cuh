// Wide Hopper decode kernel: 33 and more query rows, in tiles of up to 64 (wgmma's M).
//
// A CTA streams KV blocks of 64 tokens through shared memory and serves one row tile. Two math
// warpgroups own half of the columns of O each and work on blocks in pairs ("seesaw"): the lead
// computes S, P of the even block, the follower of the odd one, and each multiplies both P's with
// its half of V. The running maximum is a *reference* that is raised only when a score exceeds it
// by 2^8 (lazy rescale), so that in the common case O is never touched between two PV products.
// Chunk = 64 tokens x 64 dimensions (8 KB), group = two chunks, block = all groups and the rope.
// The seesaw is FlashMLA's idea (2025); producer warp, lazy rescale and buffer sharing are ours.
//
// Roles: warps 0-3 lead (left half of O), warps 4-7 follower (right half), warp 8 producer.
// Barrier          kind       arrivals         who arrives, when                    who waits,
// before what q_full           mbarrier   1, tx            producer: item published, Q copied math:
// item, first QK q_empty          mbarrier   2                lead, follower: last QK of the item
// producer: next item's Q kv_full[b][g]    mbarrier   1, tx            producer: group g of block b
// copied  lead (b 0), follower (b 1): QK kv_empty[0][kpe] mbarrier   1                lead: S of
// block 0 complete          producer: refill kv_empty[0][g]   mbarrier   1                the
// half's owner: PV of block 0      producer: refill kv_empty[1][g]   mbarrier   1 the half's owner:
// PV of block 1      producer: refill kv_empty[1][kpe] mbarrier   1                lead: PV with
// the follower's P       producer: refill kLeadPFull       named      256 (one way)    lead: P,
// reference, rescaled stored  follower: PV of block 0 kFollowPFull     named      256 (one way)
// follower: the same for block 1       lead: PV of block 1 kLeadScores      named      256 (one
// way)    lead: its QK is nearly done          follower: its own QK kItemEnd         named      256
// both: row sums stored                both: output kLeadTail,kFollowTail named 128 one warpgroup:
// rows past the end are zero   its PV Fences: P and zeroed V rows are written by st.shared and read
// by wgmma, hence fence.proxy.async before kLeadPFull, kFollowPFull. mbarriers start at phase 0;
// the producer first waits on *_empty with parity 1 and passes. What orders the reuse of buffers
// without a barrier of their own:
//   p            the lead's next P needs its next S, that needs right groups of block 0 refilled,
//   and
//                the follower frees those after its PV with p.
//   rope chunk 1 holds the follower's P from S of block 1 (rope read) to the lead's PV, which frees
//   it. reference, rescaled   written again after the other side's *PFull of the same pair. items,
//   sum, owned     two generations; kItemEnd or kLeadPFull lies between their uses.
// Named barriers pair up although arrivals are one-way: the arriving side cannot come twice, since
// what it does in between waits for groups that the other side frees after its own sync.
// Registers: math 232, producer 40 (setmaxnreg; config.h). Shared memory: SharedMemory<C>, checked
// below.
#pragma once

#include <cstdint>

#include "decode/sm90/wide/math.cuh"
#include "decode/sm90/wide/output.cuh"
#include "decode/sm90/wide/params.cuh"
#include "decode/sm90/wide/producer.cuh"
#include "gpu/launch.h"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::wide {

// Scores of a block, group by group. `after_first` runs when the first group is in flight. The last
// group is a commit group of its own: WgmmaWait<1> then means "nearly done".
template <class C, Half kHalf, class AfterFirst>
__device__ __forceinline__ void IssueScores(Math<C, kHalf>& math, AfterFirst after_first) {
  const uint32_t q = Opaque(SharedAddress(Shared<C>().q));
  const uint32_t k = Opaque(SharedAddress(Shared<C>().kv[math.kOwnBlock]));
#pragma unroll
  for (int i = 0; i < C::kNumGroups; ++i) {
    if (kHalf == kLead && i == C::kNumGroups - 1) gpu::sm90::WgmmaCommit();
    math.ScoreGroup(q, k, kHalf == kLead ? C::LeadGroup(i) : C::FollowGroup(i), i == 0);
    if (i == 0) after_first();
  }
  gpu::sm90::WgmmaCommit();
  math.full_phase ^= 1;
}
template <class C, Half kHalf>
__device__ __forceinline__ void IssueScores(Math<C, kHalf>& math) {
  IssueScores(math, [] {});
}

// Lets the follower start its scores; they must not delay the lead's.
template <class C>
__device__ __forceinline__ void ReleaseFollowScores() {
  if (C::kOrder == FollowOrder::kScoresFirst) {
    gpu::sm90::NamedBarrierArrive(kLeadScores, kNumMathThreads);
  }
}

template <class C, Half kHalf>
__device__ __forceinline__ void WaitScores(Math<C, kHalf>& math) {
  gpu::sm90::WgmmaWait<0>();
  gpu::sm90::WgmmaFenceOperand(math.scores);
}

template <class C, Half kHalf>
__device__ __forceinline__ void WaitValues(Math<C, kHalf>& math) {
  gpu::sm90::WgmmaWait<0>();
  gpu::sm90::WgmmaFenceOperand(math.out);
}

// The lead's PV with the follower's P, once that is there.
template <class C>
__device__ __forceinline__ void IssueFollowValues(Math<C, kLead>& math) {
  gpu::sm90::NamedBarrierSync(kFollowPFull, kNumMathThreads);
  if (math.FollowReference()) math.ScaleOut(math.factor);
  math.IssueValues(1, true);
}

// Even blocks: S, P; the left half of O.
template <class C>
__device__ __forceinline__ void LeadRole(const WideParams& params, const RowTile& tile) {
  Math<C, kLead> math(params, tile);
  math.NextItem();
  if (math.num_blocks() == 0) return;
  IssueScores(math);
  ReleaseFollowScores<C>();
  WaitScores(math);
  math.ResetSoftmax();
  int32_t done_blocks = 0;  // of the item, before this pair
#pragma unroll 1
  while (true) {
    const bool has_pair = done_blocks + 1 < math.num_blocks();
    const bool is_last = done_blocks + 2 >= math.num_blocks();
    const int32_t block = math.item.block_begin + done_blocks;
    math.Release(Shared<C>().kv_empty[0][C::kKpeGroup]);
    if (is_last) math.Release(Shared<C>().q_empty);
    if (math.Softmax(block) && done_blocks > 0) math.ScaleOut(math.factor);
    math.PublishP(block);
    math.IssueValues(0, done_blocks > 0);
    WaitValues(math);
    math.ReleaseValues(0);
    math.generation ^= 1;
    if (!is_last) {
      done_blocks += 2;
      IssueFollowValues(math);
      IssueScores(math, [&] {  // right behind PV, so that the tensor cores never wait for a release
        gpu::sm90::WgmmaCommit();
        gpu::sm90::WgmmaWait<1>();
        math.ReleaseLeadFollowBlock();
      });
      gpu::sm90::WgmmaWait<1>();
      ReleaseFollowScores<C>();
      WaitScores(math);
      gpu::sm90::WgmmaFenceOperand(math.out);
      continue;
    }
    if (has_pair) {
      IssueFollowValues(math);
      WaitValues(math);
      math.ReleaseLeadFollowBlock();
    }
    const Item done = math.item;
    const int done_idx = math.item_idx;
    const bool more = math.has_next;
    if (more) {
      math.NextItem();
      IssueScores(math);
      ReleaseFollowScores<C>();
    }
    WriteItem(math, done, done_idx);  // while the next item's scores are computed
    WaitScores(math);
    if (!more) return;
    math.ResetSoftmax();
    done_blocks = 0;
  }
}

// Odd blocks: S, P; the right half of O.
template <class C>
__device__ __forceinline__ void FollowRole(const WideParams& params, const RowTile& tile) {
  constexpr bool kScoresFirst = C::kOrder == FollowOrder::kScoresFirst;
  Math<C, kFollow> math(params, tile);
  do {
    math.NextItem();
    if (math.num_blocks() == 0) return;
    math.ResetSoftmax();
    if (math.num_blocks() == 1) math.Release(Shared<C>().q_empty);
#pragma unroll 1
    for (int32_t done_blocks = 0; done_blocks < math.num_blocks(); done_blocks += 2) {
      const bool has_own = done_blocks + 1 < math.num_blocks();
      const bool is_last_own = done_blocks + 3 >= math.num_blocks();
      const int32_t block = math.item.block_begin + done_blocks + 1;
      if (kScoresFirst) {
        gpu::sm90::NamedBarrierSync(kLeadScores, kNumMathThreads);
        if (has_own) IssueScores(math);
      }
      gpu::sm90::NamedBarrierSync(kLeadPFull, kNumMathThreads);
      if (math.FollowReference() && done_blocks > 0) {
        gpu::sm90::WgmmaWait<0>();
        math.ScaleOut(math.factor);
      }
      math.IssueValues(0, done_blocks > 0);
      if (!kScoresFirst) {
        gpu::sm90::WgmmaWait<0>();
        gpu::sm90::WgmmaFenceOperand(math.out);
        math.ReleaseValues(0);
        if (has_own) {
          IssueScores(math);
          gpu::sm90::WgmmaWait<0>();
          gpu::sm90::WgmmaFenceOperand(math.scores);
        }
      }
      if (has_own) {
        if (kScoresFirst) {
          gpu::sm90::WgmmaWait<1>();
          gpu::sm90::WgmmaFenceOperand(math.scores);
        }
        if (is_last_own) math.Release(Shared<C>().q_empty);
        const bool rescale = math.Softmax(block);
        math.PublishP(block);
        if (rescale) {
          gpu::sm90::WgmmaWait<0>();
          gpu::sm90::WgmmaFenceOperand(math.out);
          math.ScaleOut(math.factor);
        }
        math.IssueValues(1, true);
        if (kScoresFirst) {
          gpu::sm90::WgmmaWait<1>();
          math.ReleaseValues(0);
        }
        gpu::sm90::WgmmaWait<0>();
        gpu::sm90::WgmmaFenceOperand(math.out);
        math.ReleaseValues(1);
      } else if (kScoresFirst) {
        gpu::sm90::WgmmaWait<0>();
        gpu::sm90::WgmmaFenceOperand(math.out);
        math.ReleaseValues(0);
      }
      math.generation ^= 1;
    }
    WriteItem(math, math.item, math.item_idx);
  } while (math.has_next);
}

template <class C>
__device__ __forceinline__ void InitBarriers() {
  constexpr int kOwners = 1, kBothHalves = 2;
  for (int block = 0; block < kBlocksInFlight; ++block) {
    for (int group = 0; group < C::kNumGroups; ++group) {
      gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().kv_full[block][group]), kOwners);
      gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().kv_empty[block][group]), kOwners);
    }
  }
  gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().q_full), kOwners);
  gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().q_empty), kBothHalves);
  gpu::sm90::MbarrierInitFence();
}

// The idle warps of all CTAs fetch the page table into L2 while the producers find their work.
__device__ __forceinline__ void PrefetchPageTable(const DecodeParams& p) {
  constexpr int kLineEntries = 128 / sizeof(int32_t);
  constexpr int kFirstThread = (kProducerWarp + 1) * kWarpThreads;
  const int64_t num_entries = int64_t{p.batch} * p.max_pages_per_seq;
  const int64_t line = blockIdx.x + int64_t{threadIdx.x - kFirstThread} * gridDim.x;
  if (line * kLineEntries < num_entries) gpu::sm90::PrefetchL2(p.page_table + line * kLineEntries);
}

// Grid: num_workers x row tiles; the tiles of a worker are neighbours, so that L2 serves all but
// one of them.
template <class C>
__global__ void __launch_bounds__(kNumThreads, 1)
    WideDecode(const __grid_constant__ WideParams params, const __grid_constant__ TensorMaps maps) {
  static_assert(sizeof(SharedMemory<C>) <= kMaxSharedBytes,
                "shorten the KV ring or share a buffer");
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarpThreads, 0);
  const int32_t num_tiles = params.plan.partials.num_row_tiles;
  const int32_t worker = blockIdx.x / num_tiles;
  const RowTile tile(params, blockIdx.x - worker * num_tiles);

  if (threadIdx.x == 0) InitBarriers<C>();
  if (warp == kProducerWarp && gpu::sm90::ElectOne()) {
    gpu::sm90::PrefetchTensorMap(&maps.q_nope);
    gpu::sm90::PrefetchTensorMap(&maps.ckv);
    gpu::sm90::PrefetchTensorMap(&maps.q_pe);
    gpu::sm90::PrefetchTensorMap(&maps.kpe);
  }
  gpu::PdlWait();
  gpu::PdlLaunchDependents();
  __syncthreads();

  if (warp >= kProducerWarp) {
    gpu::sm90::SetMaxRegistersDown<kProducerRegisters>();
    if (warp == kProducerWarp) {
      ProducerRole<C>(params, maps, tile, worker);
    } else {
      PrefetchPageTable(params.decode);
    }
  } else {
    gpu::sm90::SetMaxRegistersUp<kMathRegisters>();
    if (warp < kProducerWarp / 2) {
      LeadRole<C>(params, tile);
    } else {
      FollowRole<C>(params, tile);
    }
  }
}

}  // namespace jax_mla::decode::sm90::wide
