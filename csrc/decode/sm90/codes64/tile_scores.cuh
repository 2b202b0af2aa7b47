// The warpgroup for the scores, where the cache has tile scales (Config::kScalesValues).
//
// A latent chunk's scores have to be multiplied by the token's scale of that chunk before those of
// another chunk are added. There are registers for two sets of scores, and each adds up two chunks:
// what a set has is multiplied by the quotient of their scales, and then the second chunk's
// products are added to it. While one set is multiplied, the tensor cores have the other's
// products.
//
// The value warpgroups multiply V by the scales. V and P are bf16 then, which has room for all
// scales.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "decode/sm90/codes64/config.h"
#include "decode/sm90/codes64/scores.cuh"
#include "decode/sm90/swapped/params.cuh"
#include "decode/trace.cuh"
#include "gpu/codegen.cuh"
#include "gpu/sm90.cuh"
#include "gpu/sm90_wgmma.cuh"

namespace jax_mla::decode::sm90::codes64 {

// Rows of ScaleTable::scores. Set 0 has chunks 0 and 1, set 1 has chunks 2 and 3.
__device__ constexpr int QuotientRow(int set) { return 2 * set; }
__device__ constexpr int BaseRow(int set) { return 2 * set + 1; }

// Makes the table of the block whose tile scales have landed. The base of a set is the scale of its
// second chunk. Where that is 2^64 times smaller than the other one, its scores do not count, and
// the base is raised, so that the quotient is finite.
template <class M>
__device__ __forceinline__ void MakeScaleTable(const M& math, uint64_t key_mask) {
  constexpr float kLeastPart = 0x1p-64f, kLeastBase = 0x1p-100f;
  constexpr float kValueFactor = 0x1p120f / kTileValueScale;  // see ScaleE4m3
  static_assert(ScaleTable::kTiles * kBlockN == 2 * kWarpgroupThreads, "a thread has two scales");
  const int thread = static_cast<int>(gpu::ThreadIndex()) % kWarpgroupThreads;
  const int token = thread % kBlockN, set = thread / kBlockN;
  const float* tiles = math.shared.tile_scales.blocks[math.tile_scale_idx][token].tiles;
  const float2 scales = *reinterpret_cast<const float2*>(tiles + 2 * set);
  ScaleTable& table = math.shared.scale_tables.tables[math.tile_scale_idx];
  const int place = ScaleTable::Index(token);
  const float least_base = fmaxf(fabsf(scales.x) * kLeastPart, kLeastBase);
  const float base = fabsf(scales.y) < least_base ? least_base : scales.y;  // a NaN stays
  table.scores[QuotientRow(set)][place] = __fdividef(scales.x, base);
  table.scores[BaseRow(set)][place] = base;
  uint32_t values = 0;
  if (key_mask >> token & 1) {
    values = hw::Pack2<__nv_bfloat16>(scales.x * kValueFactor, scales.y * kValueFactor);
  }
  table.values[2 * set][place] = static_cast<uint16_t>(values);
  table.values[2 * set + 1][place] = static_cast<uint16_t>(values >> 16);
  SyncScores();
}

// A row of the table, for the tokens of which the thread has scores. It is loaded before the wait
// for what it multiplies: beside products that lie in shared memory, loads take long.
struct TokenFactors {
  float4 steps[kBlockN / 16];

  __device__ __forceinline__ void Load(const ScaleTable& table, const Thread& thread, int row) {
#pragma unroll
    for (int i = 0; i < kBlockN / 16; ++i) {
      steps[i] = *reinterpret_cast<const float4*>(&table.scores[row][i * 16 + thread.lane % 4 * 4]);
    }
  }
  // For accumulator i.
  __device__ __forceinline__ float Of(int i) const {
    const float4& step = steps[i / 8];
    const float values[4] = {step.x, step.y, step.z, step.w};
    return values[i / 4 % 2 * 2 + i % 2];
  }
};

// Waits for the products of a set of scores, while kPending others may be under way, and multiplies
// it.
template <int kPending, int kSize>
__device__ __forceinline__ void ScaleSet(float (&scores)[kSize], const TokenFactors& factors) {
  hw::WgmmaWait<kPending>();
  hw::WgmmaFenceOperand(scores);
#pragma unroll
  for (int i = 0; i < kSize; ++i) scores[i] *= factors.Of(i);
}

// Issues the scores of a latent chunk.
template <class M>
__device__ __forceinline__ void IssueChunk(const M& math, const typename M::Cursor& block,
                                           int chunk, bool accumulates,
                                           typename M::Scores& scores) {
  using C = typename M::Config;
  hw::WgmmaFenceOperand(scores);
#pragma unroll
  for (int part = 0; part < C::kQueryParts; ++part) {
    IssueProduct(math, block, part * kPartProducts<C> + 1 + chunk, accumulates || part > 0, scores);
  }
}

// ScoreBlocks, with tile scales. The next block's first products run beside the softmax.
template <class M>
__device__ __forceinline__ BlockToScore<M> ScoreTileBlocks(M& math, ScoredCursor& place,
                                                           Softmax<M>& softmax) {
  using C = typename M::Config;
  constexpr int kOtherSet = C::kQueryParts;  // products of the other set that may be under way
  BlockToScore<M> block = FindBlockToScore(math, math.kv, 0);
  typename M::Scores sets[2];
  PackedP<M> p;
#pragma unroll 1
  while (block.key_mask != 0) {
    IssueChunk(math, block.place, 0, false, sets[0]);
    // This block, and those that follow each other behind it without an empty one between them.
#pragma unroll 1
    while (true) {
      trace::Enter(Phase::kQk);
      IssueChunk(math, block.place, 2, false, sets[1]);
      MakeScaleTable(math, block.key_mask);
      const ScaleTable& table = math.shared.scale_tables.tables[math.tile_scale_idx];
      TokenFactors factors;
      factors.Load(table, math.thread, QuotientRow(0));
      trace::Enter(Phase::kWaitMma);
      ScaleSet<kOtherSet>(sets[0], factors);
      IssueChunk(math, block.place, 1, true, sets[0]);
      factors.Load(table, math.thread, QuotientRow(1));
      ScaleSet<kOtherSet>(sets[1], factors);
      IssueChunk(math, block.place, 3, true, sets[1]);
      factors.Load(table, math.thread, BaseRow(0));
      ScaleSet<kOtherSet>(sets[0], factors);
      hw::WgmmaFenceOperand(sets[0]);
      IssueRopeInBf16(math, block.place, sets[0]);
      factors.Load(table, math.thread, BaseRow(1));
      WaitScores(sets[0]);
      hw::WgmmaFenceOperand(sets[1]);
#pragma unroll
      for (int i = 0; i < C::kAccumulators; ++i) {
        sets[1][i] = fmaf(sets[1][i], factors.Of(i), sets[0][i]);
      }
      math.tile_scale_idx = NextTileScaleBlock<C>(math.tile_scale_idx);
      const auto next = block.place.Ahead(C::kChunks);
      const uint64_t next_mask = math.KeyMaskOf(next, block.idx + 1);
      const auto finish = [&] {
        const bool raises = MakeP(math, block, place, softmax, sets[1], p);
        trace::Enter(Phase::kStoreP);
        StoreP(math, place, p);
        hw::FenceProxyAsyncShared();
        SendScored(math, place, block.key_mask, block.empty_blocks, raises);
      };
      // Two copies of `finish`: ptxas serialises wgmma if only one of two ways to it issues
      // products.
      if (next_mask == 0) {
        finish();
        break;
      }
      IssueChunk(math, next, 0, false, sets[0]);
      finish();
      block = {next, block.idx + 1, 0, next_mask};
    }
    block = FindBlockToScore(math, block.place.Ahead(C::kChunks), block.idx + 1);
  }
  return block;
}

}  // namespace jax_mla::decode::sm90::codes64
