// The main loop of the kernel with pairs of blocks. With 64 rows the tensor cores and the softmax
// are what limits. So the two warpgroups take a pair of blocks at a time. Each computes scores and
// softmax of one block, with all dims, and multiplies both blocks' P with its own dims of V. Then
// no score is computed or exchanged twice, both warpgroups keep the tensor cores busy at the same
// time, and they wait for each other twice a pair. A pair is two blocks that follow each other
// without an empty one between them. A block without such a neighbour is warpgroup 0's; then all of
// warpgroup 1's scores are masked.
//
// References are common to both, because both P's are added to one O. Roles and barriers:
// kernel.cuh.
#pragma once

#include <cstdint>

#include "decode/sm90/common/softmax.cuh"
#include "decode/sm90/pairs/math.cuh"
#include "decode/sm90/tuning.h"
#include "decode/trace.cuh"
#include "gpu/sm90.cuh"
#include "gpu/sm90_wgmma.cuh"

namespace jax_mla::decode::sm90::pairs {

// Passes over empty blocks, which have one stage and no chunks (SendEmptyBlock). Returns the key
// mask of the block at `math.kv` then, 0 if there is none. Each warpgroup makes half of the
// arrivals that free the stage.
template <class M>
__device__ __forceinline__ uint64_t FindBlock(M& math, int& block) {
#pragma unroll 1
  while (true) {
    const uint64_t mask = math.KeyMaskOf(math.kv, block);
    if (mask != 0 || block >= math.item.num_blocks) return mask;
    math.SyncWarpgroup();  // all its warps have read the mask
    if (math.thread.warp < kWarpgroupWarps / 2 && math.thread.lane == 0) {
      hw::MbarrierArrive(hw::SharedAddress(&math.shared.kv_empty[math.kv.stage]));
    }
    math.kv.Advance(1);
    ++block;
  }
}

// Raises the references of all rows to their maxima over both blocks. `scores` are relative to the
// references. All math threads.
template <class M>
__device__ __forceinline__ void RaiseReferences(M& math, typename M::Scores& scores) {
  using C = typename M::Config;
  const Thread& thread = math.thread;
  float maxima[C::kThreadRows];
#pragma unroll
  for (int j = 0; j < C::kThreadRows; ++j) {
    maxima[j] = RelativeRaise::Top(M::MaxOfRow(scores, j));
  }
  math.StoreOverLanes(maxima, [](float a, float b) { return fmaxf(a, b); });
  hw::NamedBarrierSync(kBarrierMath, kTeamThreads);
  const uint32_t had_keys = math.rows_with_keys;
#pragma unroll
  for (int j = 0; j < C::kThreadRows; ++j) {
    const int row = thread.Row(j);
    float top = -INFINITY;
#pragma unroll
    for (int block = 0; block < kTeamWarpgroups; ++block) {
      top = fmaxf(top, MaxOfWarps(math.shared.row_stats[block][row]));
    }
    const bool had_key = had_keys >> j & 1;
    const RelativeRaise raised(top, had_key);
    const int i = M::AccumulatorOf(j);
    scores[i] -= raised.raise, scores[i + 2] -= raised.raise;
    if (thread.wg == 0 && thread.idx < 4) math.shared.softmax.reference[row] += raised.raise;
    if (raised.has_key) math.rows_with_keys |= 1u << j;
    if (!had_key) continue;  // sum and O are 0
    math.sum[j] *= raised.factor;
    math.ScaleOutRow(j, raised.factor);
  }
}

// Softmax of the own block: P, as [row][token], wgmma's B operand. All math threads, also those
// whose warpgroup has no block and scores of -inf.
template <class M>
__device__ __forceinline__ void StoreSoftmax(M& math, int block, uint64_t key_mask,
                                             typename M::Scores& scores) {
  using C = typename M::Config;
  constexpr uint32_t kAllRows = (1u << C::kThreadRows) - 1;
  const Thread& thread = math.thread;
  trace::Enter(Phase::kSoftmax);
#pragma unroll
  for (int i = 0; i < C::kAccumulators; i += 4) {
    const int row = thread.Row(M::RowOf(i));
    const float2 scale = *reinterpret_cast<const float2*>(&math.shared.softmax.score_scale[row]);
    const float2 reference = *reinterpret_cast<const float2*>(&math.shared.softmax.reference[row]);
    scores[i] = fmaf(scores[i], scale.x, -reference.x);
    scores[i + 1] = fmaf(scores[i + 1], scale.y, -reference.y);
    scores[i + 2] = fmaf(scores[i + 2], scale.x, -reference.x);
    scores[i + 3] = fmaf(scores[i + 3], scale.y, -reference.y);
  }
  const int tokens_left = math.item.tokens_left - block * kBlockN;
  if (math.HidesTokens(key_mask, tokens_left)) math.MaskScores(key_mask, tokens_left, scores);
  float top = scores[0];
#pragma unroll
  for (int i = 1; i < C::kAccumulators; ++i) top = fmaxf(top, scores[i]);
  const bool exceeds = top > kCodesRescaleThreshold || math.rows_with_keys != kAllRows;
  if (hw::NamedBarrierAny(kBarrierMath, kTeamThreads, exceeds)) RaiseReferences(math, scores);
  trace::Enter(Phase::kStoreP);
  const int row = thread.lane / 16 * 8 + thread.lane % 8;
  const int vector = thread.warp * 2 + thread.lane / 8 % 2;
  const uint32_t address = hw::SharedAddress(math.shared.p[thread.wg]) + VectorOffset(row, vector);
#pragma unroll
  for (int rows = 0; rows < C::kTileRows; rows += 16) {
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int first = rows / 2 + 2 * i;  // this accumulator and the next are neighbouring rows
      const float p0 = hw::Exp2(scores[first]), p1 = hw::Exp2(scores[first + 1]);
      math.sum[M::RowOf(first)] += p0;
      math.sum[M::RowOf(first + 1)] += p1;
      packed[i] = hw::Pack2<__half>(p0, p1);
    }
    hw::StoreMatrixX4Transposed(address + rows * kChunkRowBytes, packed[0], packed[1], packed[2],
                                packed[3]);
  }
}

// O^T += V^T P^T for a pair's blocks, kBlocks of which are there, from `math.kv` on. Frees them.
template <int kBlocks, class M>
__device__ __forceinline__ void AddValues(M& math, const uint64_t (&key_masks)[2]) {
  using C = typename M::Config;
  trace::Enter(Phase::kPv);
  bool has_zeroed = false;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const auto place = math.kv.Ahead(block * C::kChunks);
#pragma unroll
    for (int own = 0; own < C::kOwnChunks; ++own) math.WaitChunk(math.OwnChunk(place, own));
    if (key_masks[block] == ~uint64_t{0}) continue;
    math.ZeroAbsentTokens(place, key_masks[block]);
    has_zeroed = true;
  }
  if (has_zeroed) math.SyncWarpgroup();
  auto place = math.kv;
  const auto wait_p = [&] {
    hw::FenceProxyAsyncShared();
    hw::NamedBarrierSync(kBarrierMath, kTeamThreads);
    // All have scored the rope chunks and know the key masks.
    if (math.thread.wg == 0 && math.thread.lane < kBlocks) {
      const auto first_chunk = math.kv.Ahead(math.thread.lane * C::kChunks);
      hw::MbarrierArrive(hw::SharedAddress(&math.shared.kv_empty[first_chunk.stage]));
    }
  };
  AccumulateCodes<kBlocks>(math, 0, wait_p, [&] {
    math.ReleaseOwnChunks(place);
    place.Advance(C::kChunks);
  });
  math.WaitValues();
  math.kv = place;
}

// All blocks of an item. The queries are given back.
template <class M>
__device__ __forceinline__ void ProcessBlockPairs(M& math) {
  using C = typename M::Config;
  const int wg = math.thread.wg;
  if (wg == 0 && math.thread.idx < C::kTileRows) {
    const int row = math.thread.idx;
    math.shared.softmax.reference[row] = 0.0f;
    // Rows that are not the unit's get scores of 0, which never ask for a higher reference.
    if (C::kHasUnits && row >= math.RowsLeft()) math.shared.softmax.score_scale[row] = 0.0f;
  }
  math.rows_with_keys = 0;
  math.SyncMath();
  int block = 0;
#pragma unroll 1
  while (true) {
    uint64_t key_masks[2];
    key_masks[0] = FindBlock(math, block);
    if (key_masks[0] == 0) break;
    key_masks[1] = math.KeyMaskOf(math.kv.Ahead(C::kChunks), block + 1);
    const bool has_second = key_masks[1] != 0;
    // Without a second block, warpgroup 1 scores the first one too, and all its scores are masked.
    const uint64_t own_mask = wg == 0 ? key_masks[0] : key_masks[1];
    typename M::Scores scores;
    ScoresOfBlock(math, math.kv.Ahead(has_second ? wg * C::kChunks : 0), scores);
    StoreSoftmax(math, block + wg, own_mask, scores);
    if (has_second) {
      AddValues<2>(math, key_masks);
      block += 2;
    } else {
      AddValues<1>(math, key_masks);
      block += 1;
    }
  }
  math.ReleaseItem();
}

}  // namespace jax_mla::decode::sm90::pairs
