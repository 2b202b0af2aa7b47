// The softmax of a block in SWG: of the two rows of which a thread has scores. Query rows are
// wgmma's M, so a row's scores lie in four neighbouring lanes.
#pragma once

#include <cstdint>

#include "decode/sm90/codes64/math.cuh"
#include "decode/sm90/common/softmax.cuh"
#include "decode/sm90/tuning.h"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::codes64 {

// A block with keys, or what is behind an item's last block.
template <class M>
struct BlockToScore {
  typename M::Cursor place;
  int idx;               // of the item
  int32_t empty_blocks;  // in front of it
  uint64_t key_mask;     // 0 behind the last block
};

// Of the two rows of which a thread has scores.
template <class M>
struct Softmax {
  static constexpr int kRows = 2;
  float scale[kRows];      // of scores, to log2 units; 0 for rows that are not the unit's
  float reference[kRows];  // lazy running maximum, log2 units; 0 without a key
  float sum[kRows];        // of P, over the thread's tokens of the item
  bool has_key[kRows];

  static __device__ __forceinline__ int Row(const Thread& thread, int r) {
    return thread.warp * kMmaK + thread.lane / 4 + 8 * r;
  }
  // The row, and the token of a block, to which accumulator i belongs.
  static constexpr __device__ int RowOf(int i) { return i / 2 % 2; }
  static __device__ __forceinline__ int TokenOf(const Thread& thread, int i) {
    return i / 4 * 8 + thread.lane % 4 * 2 + i % 2;
  }
};

// Output::MaskScores for accumulators of this layout.
template <class M>
__device__ __forceinline__ void MaskScoresOfRows(const M& math, uint64_t key_mask, int tokens_left,
                                                 typename M::Scores& scores) {
  using C = typename M::Config;
  using S = Softmax<M>;
  const int first_token = S::TokenOf(math.thread, 0);
  uint64_t seen[S::kRows];  // from the thread's first token on
#pragma unroll
  for (int r = 0; r < S::kRows; ++r) {
    const int row = math.row_tile * C::kTileRows + S::Row(math.thread, r);
    const int limit = tokens_left + math.RowLimits().End(row);
    seen[r] = (key_mask & LowBits(limit)) >> first_token;
  }
#pragma unroll
  for (int i = 0; i < C::kAccumulators; ++i) {
    if (!(seen[S::RowOf(i)] >> (S::TokenOf(math.thread, i) - first_token) & 1)) {
      scores[i] = -INFINITY;
    }
  }
}

// Scores become relative to their references. Those of the warp's rows rise if a score asks for it.
// Returns whether one of a row with keys did; `factors` then has by what O has to be multiplied.
template <class M>
__device__ __forceinline__ bool FindReferences(const M& math, const BlockToScore<M>& block,
                                               Softmax<M>& softmax,
                                               float (&factors)[M::Config::kTileRows],
                                               typename M::Scores& scores) {
  using C = typename M::Config;
  using S = Softmax<M>;
#pragma unroll
  for (int i = 0; i < C::kAccumulators; ++i) {
    scores[i] = fmaf(scores[i], softmax.scale[S::RowOf(i)], -softmax.reference[S::RowOf(i)]);
  }
  const int tokens_left = math.item.tokens_left - block.idx * kBlockN;
  if (math.HidesTokens(block.key_mask, tokens_left)) {
    MaskScoresOfRows(math, block.key_mask, tokens_left, scores);
  }
  float top[S::kRows] = {scores[0], scores[2]};
#pragma unroll
  for (int i = 0; i < C::kAccumulators; ++i) {
    top[S::RowOf(i)] = fmaxf(top[S::RowOf(i)], scores[i]);
  }
  const bool exceeds = fmaxf(top[0], top[1]) > kCodesRescaleThreshold;
  const bool lacks_key = !softmax.has_key[0] || !softmax.has_key[1];
  if (!__any_sync(~0u, exceeds || lacks_key)) return false;
  float raise[S::kRows];
  bool rises = false;
#pragma unroll
  for (int r = 0; r < S::kRows; ++r) {
    top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
    top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
    const bool had_key = softmax.has_key[r];
    const RelativeRaise raised(RelativeRaise::Top(top[r]), had_key);
    raise[r] = raised.raise;
    softmax.reference[r] += raised.raise;
    softmax.sum[r] *= raised.factor;
    softmax.has_key[r] = raised.has_key;
    rises |= had_key && raised.raise != 0.0f;
    if (math.thread.lane % 4 == 0) factors[S::Row(math.thread, r)] = raised.factor;
  }
#pragma unroll
  for (int i = 0; i < C::kAccumulators; ++i) scores[i] -= raise[S::RowOf(i)];
  return __any_sync(~0u, rises);
}

}  // namespace jax_mla::decode::sm90::codes64
