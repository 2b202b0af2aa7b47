// Codes of KV rows become bf16 in shared memory, in the layout that wgmma reads. For the warps that
// make bf16 of what TMA copied (converter.cuh) and for those that gather (fp8_gather_producer.cuh).
//
// A copy group of latent chunks is 128 dims: two chunks of 64. Its codes are rows of 128 bytes, as
// long as the rows of a chunk and in the same swizzle, and TMA copies them to the place of the
// second chunk. So a token's codes lie where a half of its bf16 goes, and only the four lanes that
// have this token must have read all its codes before one of them writes.
//
// A warp works on eight tokens at a time, four lanes each. Of the eight vectors of a row (16 codes)
// a lane has two. The lanes of an odd row take them in the other order: the rows of a quarter-warp
// then never ask for the same banks, neither when they read nor when they write.
#pragma once

#include <cstdint>

#include "decode/sm90/common/sizes.h"
#include "gpu/codegen.cuh"
#include "gpu/fp8.cuh"
#include "gpu/sm80.cuh"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::wide {

inline constexpr int kVectorBytes = 16;
inline constexpr int kRowLanes = 4;  // that share a token's row
inline constexpr int kWarpTokens = kWarpThreads / kRowLanes;
inline constexpr int kLaneVectors = 2;  // of a row's codes
inline constexpr int kSwizzledRowBytes = 128;

// A lane's place among the eight tokens. It is found where it is needed: kept, it would be spilled.
struct RowLane {
  uint32_t row, column;  // column: of the four lanes

  __device__ __forceinline__ RowLane() {
    const uint32_t thread = gpu::ThreadIndex();
    row = thread % kWarpThreads / kRowLanes, column = thread % kRowLanes;
  }

  // The lane's vector i of a row of codes.
  __device__ __forceinline__ uint32_t CodeVector(int i) const {
    return column + kRowLanes * (i ^ (row & 1));
  }
  // Where vector v of this lane's row lies, in bytes from the first of the eight rows.
  __device__ __forceinline__ uint32_t Offset(uint32_t vector) const {
    return row * kSwizzledRowBytes + (vector ^ row) * kVectorBytes;
  }
};

// Half of a vector of codes as a vector of bf16, each pair changed by `scale`.
template <class Scale>
__device__ __forceinline__ uint4 DecodeVector(uint32_t codes0, uint32_t codes1, Scale scale) {
  const uint2 low = gpu::DecodeE4m3(codes0), high = gpu::DecodeE4m3(codes1);
  return {scale(low.x), scale(low.y), scale(high.x), scale(high.y)};
}

// A vector of bf16 times `scale`.
__device__ __forceinline__ uint4 ScaleVector(const uint4& v, float scale) {
  return {gpu::ScaleBf16x2(v.x, scale), gpu::ScaleBf16x2(v.y, scale), gpu::ScaleBf16x2(v.z, scale),
          gpu::ScaleBf16x2(v.w, scale)};
}

// Writes the lane's two vectors of codes of a latent copy group as bf16. `chunks`: where the eight
// rows begin in the group's first chunk and in the second one.
template <class Scale>
__device__ __forceinline__ void StoreLatent(const RowLane& lane, const uint32_t (&chunks)[2],
                                            const uint4 (&codes)[kLaneVectors], Scale scale) {
#pragma unroll
  for (int i = 0; i < kLaneVectors; ++i) {
    const uint32_t chunk = (i ^ (lane.row & 1)) == 0 ? chunks[0] : chunks[1];
    gpu::StoreShared128(chunk + lane.Offset(2 * lane.column),
                        DecodeVector(codes[i].x, codes[i].y, scale));
    gpu::StoreShared128(chunk + lane.Offset(2 * lane.column + 1),
                        DecodeVector(codes[i].z, codes[i].w, scale));
  }
}

// Makes bf16 of the codes of a warp's rows of a block. Units says which: its kCount units, of which
// it has those with Has(k), begin Token(k) tokens into the block.
template <class Units>
struct RowDecoder {
  // A latent copy group. `chunks`: its two chunks. `tile_scales`: of this lane's token of each
  // unit; used if `has_scales`.
  static __device__ __forceinline__ void DecodeLatent(const uint32_t (&chunks)[2], bool has_scales,
                                                      const float (&tile_scales)[Units::kCount]) {
    const Units units;
    const RowLane lane;
    // All codes are on their way before the first is needed.
    uint4 codes[Units::kCount][kLaneVectors];
#pragma unroll
    for (int k = 0; k < Units::kCount; ++k) {
      if (!units.Has(k)) continue;
#pragma unroll
      for (int i = 0; i < kLaneVectors; ++i) {
        codes[k][i] = gpu::LoadShared128(chunks[1] + units.Token(k) * kSwizzledRowBytes +
                                         lane.Offset(lane.CodeVector(i)));
      }
    }
    __syncwarp();
    if (has_scales) {
      StoreUnits<true>(units, lane, chunks, codes, tile_scales);
    } else {
      StoreUnits<false>(units, lane, chunks, codes, tile_scales);
    }
  }
  template <bool kHasScales>
  static __device__ __forceinline__ void StoreUnits(
      const Units& units, const RowLane& lane, const uint32_t (&chunks)[2],
      const uint4 (&codes)[Units::kCount][kLaneVectors],
      const float (&tile_scales)[Units::kCount]) {
#pragma unroll
    for (int k = 0; k < Units::kCount; ++k) {
      if (!units.Has(k)) continue;
      const uint32_t offset = units.Token(k) * kSwizzledRowBytes;
      const uint32_t rows[2] = {chunks[0] + offset, chunks[1] + offset};
      if constexpr (kHasScales) {
        const gpu::SplitScale scale(tile_scales[k]);
        StoreLatent(lane, rows, codes[k], [&](uint32_t pair) { return scale.Times(pair); });
      } else {
        StoreLatent(lane, rows, codes[k], [](uint32_t pair) { return pair; });
      }
    }
  }

  // The rope chunk, times `scale`. It holds codes, at most four vectors a row, or bf16.
  static __device__ __forceinline__ void DecodeRope(uint32_t chunk, bool has_codes, float scale) {
    const Units units;
    const RowLane lane;
    if (!has_codes && scale == 1.0f) return;
    const auto times = [&](uint32_t pair) { return gpu::ScaleBf16x2(pair, scale); };
#pragma unroll 1
    for (int k = 0; k < Units::kCount && units.Has(k); ++k) {
      const uint32_t rows = chunk + units.Token(k) * kSwizzledRowBytes;
      if (!has_codes) {
#pragma unroll
        for (int i = 0; i < kLaneVectors; ++i) {
          const uint32_t vector = rows + lane.Offset(lane.CodeVector(i));
          gpu::StoreShared128(vector, ScaleVector(gpu::LoadShared128(vector), scale));
        }
        continue;
      }
      const uint4 codes = gpu::LoadShared128(rows + lane.Offset(lane.column));
      __syncwarp();
      gpu::StoreShared128(rows + lane.Offset(2 * lane.column),
                          DecodeVector(codes.x, codes.y, times));
      gpu::StoreShared128(rows + lane.Offset(2 * lane.column + 1),
                          DecodeVector(codes.z, codes.w, times));
    }
  }
};

}  // namespace jax_mla::decode::sm90::wide
