// The scores of the narrow kernel where the cache holds codes of e4m3 (swapped/f16_codes.cuh).
// kpe's scores have accumulators of their own, since its scale may be another one than that of ckv.
// Rows without rotary part have none.
// With a scale for each token and latent chunk, so have the scores of a chunk, which are multiplied
// by the scales (tile_scales.cuh). Roles and barriers: kernel.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/kv_format.h"
#include "decode/sm90/narrow/config.h"
#include "decode/sm90/swapped/f16_codes.cuh"
#include "decode/trace.cuh"
#include "gpu/sm90.cuh"
#include "gpu/sm90_wgmma.cuh"

namespace jax_mla::decode::sm90::narrow {

template <bool kFirst, class First, class Second>
__device__ __forceinline__ auto& Select(First& first, Second& second) {
  if constexpr (kFirst) {
    return first;
  } else {
    return second;
  }
}

// scores = the warpgroup's part of S^T, without the scale of ckv where all of it has one. The first
// chunk has landed. The fragments of a batch are made while the products with those before run.
// There are two sets of registers for them.
template <class M>
__device__ __forceinline__ void PartialScoresOfCodes(const M& math, typename M::Scores& scores) {
  using C = typename M::Config;
  // Only the plain kernel of 8 rows has registers for four steps at once.
  constexpr bool kFewRegisters = C::kTileRows > 8 || C::kHasUnits || C::kAppends;
  constexpr int kFewSteps = C::kHasRope ? C::kOwnRopeSteps : 2;
  constexpr int kSteps = kFewRegisters ? kFewSteps : 4, kSets = 2;  // of a batch
  constexpr int kChunkBatches = C::kLatentChunkDims / kMmaK / kSteps;
  // With few registers kpe's fragments are in the last set, as if they were a batch before all
  // others.
  constexpr int kRopeBatches = C::kHasRope && kFewRegisters ? 1 : 0;
  const Thread& thread = math.thread;
  const auto& kv = math.shared.kv;
  trace::Enter(Phase::kQk);
  const uint64_t q = hw::SharedDescriptor(hw::SharedAddress(math.shared.q[math.query.stage]));
  typename M::Scores rope;
  KeyFragments<kSteps> keys[kSets];
  KeyFragments<kFewSteps> separate_set;
  if constexpr (C::kHasRope) {
    auto& rope_keys = Select<kFewRegisters>(keys[kSets - 1], separate_set);
    const int first_rope_step = thread.wg * C::kOwnRopeSteps;
    if (math.params.decode.kv_format != KvFormat::kE4m3) {
      rope_keys.Load(thread, kv[math.kv.stage], first_rope_step);
    } else {
      KeyCodes<C::kOwnRopeSteps> codes;
      codes.Load(thread, kv[math.kv.stage], first_rope_step);
      rope_keys.MakeBf16(codes);
    }
    hw::WgmmaFenceOperand(rope);
    rope_keys.template Multiply<__nv_bfloat16>(
        hw::AdvanceDescriptor(QueriesOf<C>(q, C::kCkvChunks, 0), first_rope_step * kMmaKBytes),
        rope, false);
  }
  typename M::Scores latent[C::kRuns];
#pragma unroll
  for (int chunk = 0; chunk < C::kRuns; ++chunk) hw::WgmmaFenceOperand(latent[chunk]);
#pragma unroll
  for (int batch = 0; batch < C::kOwnChunks * kChunkBatches; ++batch) {
    const int own = batch / kChunkBatches, first_step = batch % kChunkBatches * kSteps;
    const int scaled = C::kHasTileScales ? own : 0;
    const auto cursor = math.OwnChunk(own);
    if (first_step == 0) math.WaitChunk(cursor);
    KeyCodes<kSteps> codes;
    codes.Load(thread, kv[cursor.stage], first_step);
    // Products with the set's last contents.
    if (batch + kRopeBatches >= kSets) hw::WgmmaWait<kSets - 1>();
    auto& set = keys[batch % kSets];
    set.MakeF16(codes);
    set.template Multiply<__half>(QueriesOf<C>(q, own * kTeamWarpgroups + thread.wg, first_step),
                                  latent[scaled], C::kHasTileScales ? first_step > 0 : batch > 0);
  }
  trace::Enter(Phase::kWaitMma);
  typename M::OwnTileScales scales = {};
  if constexpr (C::kHasTileScales) math.LoadTileScales(scales);
  hw::WgmmaWait<0>();
  if constexpr (C::kHasRope) hw::WgmmaFenceOperand(rope);
#pragma unroll
  for (int chunk = 0; chunk < C::kRuns; ++chunk) hw::WgmmaFenceOperand(latent[chunk]);
#pragma unroll
  for (int i = 0; i < C::kAccumulators; ++i) {
    float score = latent[0][i];
    if constexpr (C::kHasTileScales) {
      score = 0.0f;
#pragma unroll
      for (int chunk = 0; chunk < C::kRuns; ++chunk) {
        score = fmaf(latent[chunk][i], scales[chunk][M::TokenOf(i)], score);
      }
    }
    const float scale = math.QueryScale(M::RowOf(i));
    if constexpr (C::kHasRope) {
      scores[i] = fmaf(score, scale, rope[i] * math.scales.kpe);
    } else {
      scores[i] = score * scale;
    }
  }
}

}  // namespace jax_mla::decode::sm90::narrow
