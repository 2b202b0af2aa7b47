// Queries as codes. Queries that are codes are multiplied once. A row of other queries is
// multiplied by a power of two, and each of its values becomes the sum of two codes: one of the
// first four bits, and one of the rest. Together they have a bf16's 8 bits, except for what is
// below 2^-16 of the row's largest value. Both are multiplied.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "core/kv_format.h"
#include "decode/sm90/codes64/config.h"
#include "decode/sm90/swapped/codes.cuh"
#include "decode/sm90/swapped/params.cuh"
#include "gpu/codegen.cuh"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::codes64 {

inline constexpr int kCodesMmaK = 32;  // depth of one wgmma of codes, and its bytes along a row
// A step of a query row: kCodesMmaK dims, which keep their place when they become codes. The first
// codes are in the first half of it, the second ones behind them.
inline constexpr int kStepBytes = kCodesMmaK * kElementBytes;
inline constexpr int kStepVectors = kStepBytes / kCopyBytes;
inline constexpr int kChunkSteps = kChunkRowBytes / kStepBytes;
// Exponent of the largest value of a row whose values are two codes. The largest code is 448.
inline constexpr int kMaxCodedExponent = 7;
inline constexpr uint32_t kInfinityBf16 = 0x7f80;  // the bits

// Codes of two pairs of bf16 whose values have no more bits than a code. The upper value of a pair
// is converted with the lower one behind it, which is much less than half of a code's last bit.
__device__ __forceinline__ uint32_t EncodePairs(uint32_t first, uint32_t second) {
  uint32_t codes;
  asm("{\n"
      ".reg .b32 first, second;\n"
      ".reg .b16 low, high;\n"
      "shl.b32 first, %1, 16;\n"
      "shl.b32 second, %2, 16;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %1, first;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %2, second;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(codes)
      : "r"(first), "r"(second));
  return codes;
}

// A pair of bf16 without the last four bits, for which a code has no room.
__device__ __forceinline__ uint32_t FirstBits(uint32_t pair) { return pair & 0xfff0fff0u; }

// What they leave of the pair.
__device__ __forceinline__ uint32_t RestOf(uint32_t pair, uint32_t first_bits) {
  const __nv_bfloat162 rest = __hsub2(reinterpret_cast<const __nv_bfloat162&>(pair),
                                      reinterpret_cast<const __nv_bfloat162&>(first_bits));
  return reinterpret_cast<const uint32_t&>(rest);
}

// A pair of bf16 times a power of two.
__device__ __forceinline__ uint32_t Scale(uint32_t pair, __nv_bfloat162 factor) {
  const __nv_bfloat162 scaled = __hmul2(reinterpret_cast<const __nv_bfloat162&>(pair), factor);
  return reinterpret_cast<const uint32_t&>(scaled);
}

// Encodes a step in place. If kParts is 2, its values are multiplied by a power of two, and become
// sums of two codes.
template <int kParts>
__device__ __forceinline__ void EncodeStep(uint4 (&step)[kStepVectors], __nv_bfloat162 factor) {
  constexpr int kWords = kStepVectors * 2;  // of codes
  auto& pairs = reinterpret_cast<uint32_t (&)[2 * kWords]>(step);
  uint32_t codes[kParts][kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    uint32_t first[2], rest[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t pair = pairs[2 * i + j];
      if constexpr (kParts == 2) {
        const uint32_t scaled = Scale(pair, factor);
        first[j] = FirstBits(scaled);
        rest[j] = RestOf(scaled, first[j]);
      } else {
        first[j] = pair;
      }
    }
    codes[0][i] = EncodePairs(first[0], first[1]);
    if constexpr (kParts == 2) codes[1][i] = EncodePairs(rest[0], rest[1]);
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) pairs[part * kWords + i] = codes[part][i];
  }
}

// The steps of a row of queries that a thread has: one in every second chunk, always at the same
// place. If it has one of q_pe, that is the last.
template <class C>
struct QuerySteps {
  static constexpr int kRowThreads = kTeamThreads / C::kTileRows;
  using Lanes = RowLanes<kRowThreads>;
  static constexpr int kStride = kRowThreads / kChunkSteps;  // chunks from one step to the next
  static constexpr int kLatentSteps = C::kCkvQueryChunks / kStride;
  static_assert(C::kCkvQueryChunks % kStride == 0 && (!C::kHasRope || C::kDKpe == kChunkDims),
                "q_pe, if there is one, is a chunk behind those of q_nope");

  uint32_t row, row_thread;
  uint8_t* first[kStepVectors];

  __device__ __forceinline__ explicit QuerySteps(uint8_t* q) {
    const uint32_t thread = gpu::ThreadIndex(), lane = thread % kWarpThreads;
    row = thread / kWarpThreads * Lanes::kRows + Lanes::Row(lane);
    row_thread = Lanes::Part(lane);
#pragma unroll
    for (int i = 0; i < kStepVectors; ++i) {
      first[i] = q + row_thread / kChunkSteps * C::kQueryChunkBytes +
                 VectorOffset(row, row_thread % kChunkSteps * kStepVectors + i);
    }
  }
  __device__ __forceinline__ bool IsFirstOfRow() const { return row_thread == 0; }
  __device__ __forceinline__ bool HasRope() const {
    return C::kHasRope && row_thread < kChunkSteps;
  }
  __device__ __forceinline__ uint4& Vector(int step, int i) const {
    return *reinterpret_cast<uint4*>(first[i] + step * kStride * C::kQueryChunkBytes);
  }
};

// Queries come as bf16 and become codes, step by step; q_pe stays bf16 where kpe is. Leaves in
// SharedMemory::query_scale by what a row's scores have to be multiplied. The value warpgroups do
// it: they have the registers, and are twice as many threads as the warpgroup for the scores, which
// waits for it.
template <class M>
__device__ __forceinline__ void PackQueries(const M& math) {
  using C = typename M::Config;
  using Steps = QuerySteps<C>;
  constexpr int kParts = C::kQueryParts;
  // Computed for every item: kept, the places would take registers of the main loop.
  const Steps steps(math.shared.q[math.query.stage]);
  const int all_steps = Steps::kLatentSteps + (steps.HasRope() ? 1 : 0);
  __nv_bfloat162 factor{};
  float scale = 1.0f;
  if constexpr (kParts == 2) {
    uint32_t tops[2] = {};
#pragma unroll 1
    for (int step = 0; step < all_steps; ++step) {
#pragma unroll
      for (int i = 0; i < kStepVectors; ++i) {
        tops[i % 2] = LargerMagnitudes(tops[i % 2], LargerMagnitudes(steps.Vector(step, i)));
      }
    }
    const uint32_t magnitude =
        Steps::Lanes::Max(LargestMagnitude(LargerMagnitudes(tops[0], tops[1])));
    // 2^exponent <= the largest magnitude < 2^(exponent + 1), but for what is tiny or not finite.
    const int biased = min(max(static_cast<int>(magnitude >> 7), kMaxCodedExponent + 1), 254);
    factor = __float2bfloat162_rn(__int_as_float((2 * 127 + kMaxCodedExponent - biased) << 23));
    scale = __int_as_float((biased - kMaxCodedExponent) << 23);
    if (magnitude >= kInfinityBf16) scale = NAN;  // there is no code of infinity
  }
  if (steps.IsFirstOfRow()) math.shared.query_scale[steps.row] = scale;
  const bool has_rope_codes = math.params.decode.kv_format == KvFormat::kE4m3;
  const int coded_steps = has_rope_codes ? all_steps : Steps::kLatentSteps;
#pragma unroll 1
  for (int step = 0; step < coded_steps; ++step) {
    uint4 vectors[kStepVectors];
#pragma unroll
    for (int i = 0; i < kStepVectors; ++i) vectors[i] = steps.Vector(step, i);
    EncodeStep<kParts>(vectors, factor);
#pragma unroll
    for (int i = 0; i < kStepVectors / 2 * kParts; ++i) steps.Vector(step, i) = vectors[i];
  }
  if (kParts == 2 && !has_rope_codes && steps.HasRope()) {
#pragma unroll
    for (int i = 0; i < kStepVectors; ++i) {
      uint4& v = steps.Vector(Steps::kLatentSteps, i);
      v = {Scale(v.x, factor), Scale(v.y, factor), Scale(v.z, factor), Scale(v.w, factor)};
    }
  }
  hw::FenceProxyAsyncShared();
}

}  // namespace jax_mla::decode::sm90::codes64
