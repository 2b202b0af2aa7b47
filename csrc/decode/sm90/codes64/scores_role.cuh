// The items of the warpgroup for the scores, block by block (scores.cuh). Roles and barriers:
// kernel.cuh.
#pragma once

#include <cstdint>

#include "decode/sm90/codes64/config.h"
#include "decode/sm90/codes64/scores.cuh"
#include "decode/sm90/codes64/tile_scores.cuh"
#include "decode/sm90/swapped/params.cuh"
#include "decode/trace.cuh"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::codes64 {

// Scores and softmax of an item's blocks. Returns what comes behind them.
template <class M>
__device__ __forceinline__ BlockToScore<M> ScoreBlocks(const M& math, ScoredCursor& place,
                                                       Softmax<M>& softmax) {
  using C = typename M::Config;
  static_assert(C::kKvStages >= 2 * C::kChunks, "a block and the next one must fit into the ring");
  BlockToScore<M> block = FindBlockToScore(math, math.kv, 0);
  typename M::Scores scores;
  PackedP<M> p;
  const auto send = [&](bool raises) {
    hw::FenceProxyAsyncShared();
    SendScored(math, place, block.key_mask, block.empty_blocks, raises);
  };
  const auto find_next = [&] {
    block = FindBlockToScore(math, block.place.Ahead(C::kChunks), block.idx + 1);
  };
  if constexpr (C::kHasRope) {
    if (!HasOneScale(math)) {
#pragma unroll 1
      while (block.key_mask != 0) {
        trace::Enter(Phase::kQk);
        ScoresOfTwoScales(math, block.place, scores);
        const bool raises = MakeP(math, block, place, softmax, scores, p);
        trace::Enter(Phase::kStoreP);
        StoreP(math, place, p);
        send(raises);
        find_next();
      }
      return block;
    }
  }
#pragma unroll 1
  while (block.key_mask != 0) {
    IssueProducts<0, kBlockProducts<C>>(math, block.place, scores);
    // This block, and those that follow each other behind it without an empty one between them.
#pragma unroll 1
    while (true) {
      trace::Enter(Phase::kWaitMma);
      WaitScores(scores);
      const bool raises = MakeP(math, block, place, softmax, scores, p);
      // No look further than at the next block: this one's stages are not freed before its P is
      // sent, and empty blocks could fill the rest of the ring.
      const auto next = block.place.Ahead(C::kChunks);
      const uint64_t next_mask = math.KeyMaskOf(next, block.idx + 1);
      trace::Enter(Phase::kStoreP);
      if (next_mask == 0) {
        StoreP(math, place, p);
        send(raises);
        break;
      }
      IssueProducts<0, 2>(math, next, scores);
      trace::Enter(Phase::kStoreP);
      StoreP(math, place, p);
      IssueProducts<2, kProductsBeforeSend<C>>(math, next, scores);
      send(raises);
      trace::Enter(Phase::kQk);
      IssueProducts<kProductsBeforeSend<C>, kBlockProducts<C>>(math, next, scores);
      block = {next, block.idx + 1, 0, next_mask};
    }
    find_next();
  }
  return block;
}

// Leaves the sums and references of an item's rows where the value warpgroups read them.
template <class M>
__device__ __forceinline__ void StoreStats(const M& math, const Softmax<M>& softmax) {
  const int item = ItemIndex<typename M::Config>(math.query);
#pragma unroll
  for (int r = 0; r < Softmax<M>::kRows; ++r) {
    float sum = softmax.sum[r];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (math.thread.lane % 4 != 0) continue;
    const int row = Softmax<M>::Row(math.thread, r);
    math.shared.scored.sums[item][row] = sum;
    math.shared.scored.references[item][row] = softmax.reference[r];
  }
}

// Scores and softmax of all items.
template <class C>
__device__ __forceinline__ void ScoresRole(const KernelParams& params, SharedMemory<C>& shared,
                                           int warp, int row_tile) {
  using M = Context<C>;
  using S = Softmax<M>;
  // Its thread.wg is 0, like WG0's. It uses none of WG0's barriers and chunks.
  M math(params, shared, Thread(0, warp - C::kValueWarps), row_tile);
  ScoredCursor place;
#pragma unroll 1
  while (true) {
    trace::Enter(Phase::kWaitItem);
    hw::MbarrierWait(hw::SharedAddress(&shared.q_full[math.query.stage]), math.query.parity);
    math.item = shared.items[ItemIndex<C>(math.query)];
    if (math.item.num_blocks == kNoMoreItems) break;
    math.LoadScales();  // first, since it takes as long as packing
    WaitPacked();
    const float scale_log2 = math.ScaleLog2() * (HasOneScale(math) ? 1.0f : math.scales.kpe);
    S softmax;
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) {
      const int row = S::Row(math.thread, r);
      // Rows that are not the unit's get scores of 0, which never ask for a higher reference.
      const bool is_own = !C::kHasUnits || row < math.RowsLeft();
      softmax.scale[r] = is_own ? scale_log2 * shared.query_scale[row] : 0.0f;
      softmax.reference[r] = softmax.sum[r] = 0.0f;
      softmax.has_key[r] = false;
    }
    BlockToScore<M> end;
    if constexpr (C::kScalesValues) {
      end = ScoreTileBlocks(math, place, softmax);
    } else {
      end = ScoreBlocks(math, place, softmax);
    }
    math.kv = end.place;
    WaitEmpty(math, place);
    StoreStats(math, softmax);
    SendScored(math, place, end.key_mask, end.empty_blocks, /*raises=*/false);
    SyncScores();
    if (math.thread.idx == 0) {
      hw::MbarrierArrive(hw::SharedAddress(&shared.q_empty[math.query.stage]));
    }
    math.query.Advance(1);
  }
}

}  // namespace jax_mla::decode::sm90::codes64
