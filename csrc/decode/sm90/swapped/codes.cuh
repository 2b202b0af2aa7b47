// Codes of e4m3 as operands of the kernels with swapped operands. wgmma's A operand may lie in
// registers, and in these kernels A is the cache. So codes never become 16-bit values in shared
// memory: a thread loads its fragment's codes, and float16 holds each of them exactly. One
// instruction makes two values of two codes. V^T is always made so; K only in some kernels
// (f16_codes.cuh).
#pragma once

#include <algorithm>
#include <cstdint>

#include "decode/sm90/swapped/params.cuh"
#include "gpu/codegen.cuh"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90 {

// Two codes, in the lower or the upper half of a register, as a pair of float16.
__device__ __forceinline__ uint32_t DecodeLow(uint32_t codes) {
  uint32_t pair;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "}"
      : "=r"(pair)
      : "r"(codes));
  return pair;
}
__device__ __forceinline__ uint32_t DecodeHigh(uint32_t codes) {
  uint32_t pair;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 %0, high;\n"
      "}"
      : "=r"(pair)
      : "r"(codes));
  return pair;
}
// Four codes as two such pairs.
__device__ __forceinline__ uint2 DecodeWord(uint32_t codes) {
  return {DecodeLow(codes), DecodeHigh(codes)};
}

inline constexpr int kSwizzleRows = 8;  // the swizzle's period

// Where vector v of a row of 128 swizzled bytes lies.
__device__ __forceinline__ uint32_t VectorOffset(int row, int vector) {
  return row * kChunkRowBytes + (vector ^ row % kSwizzleRows) * kCopyBytes;
}

// Which of a warp's rows of queries a lane has, and which part of it: kRowThreads lanes share a
// row. Shared memory serves the vectors of eight lanes at once. Parts of a row may lie in the same
// banks, while eight rows do not. So eight lanes have as many rows as the warp has, up to eight.
template <int kRowThreads>
struct RowLanes {
  static constexpr uint32_t kRows = kWarpThreads / kRowThreads;
  // Of a row, in eight lanes.
  static constexpr uint32_t kParts = std::max(uint32_t{kSwizzleRows} / kRows, 1u);

  static __device__ __forceinline__ uint32_t Row(uint32_t lane) { return lane / kParts % kRows; }
  static __device__ __forceinline__ uint32_t Part(uint32_t lane) {
    return lane / (kParts * kRows) * kParts + lane % kParts;
  }
  // The largest value of the row's lanes.
  static __device__ __forceinline__ uint32_t Max(uint32_t value) {
#pragma unroll
    for (uint32_t lanes = 1; lanes < kWarpThreads; lanes *= 2) {
      if (lanes >= kParts && lanes < kParts * kRows) continue;
      value = max(value, __shfl_xor_sync(~0u, value, lanes));
    }
    return value;
  }
};

// The larger magnitude of each half of two pairs of bf16; NaN if one is. Its sign means nothing.
__device__ __forceinline__ uint32_t LargerMagnitudes(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}
__device__ __forceinline__ uint32_t LargerMagnitudes(const uint4& v) {
  return LargerMagnitudes(LargerMagnitudes(v.x, v.y), LargerMagnitudes(v.z, v.w));
}
// The larger one of the two halves, as the bits of a bf16.
__device__ __forceinline__ uint32_t LargestMagnitude(uint32_t magnitudes) {
  const uint32_t pair = magnitudes & 0x7fff7fffu;
  return max(pair & 0xffffu, pair >> 16);
}

// A thread has kRunDims neighbouring dims of O^T, from this one on: rows lane / 4 and lane / 4 + 8
// of each tile are two of them. The warps of a warpgroup follow each other in its chunks. Where an
// own chunk has its own P, every warp has such a run in each (C::kRuns), since a tile of O^T has
// one P.
template <class C>
inline constexpr int kRunTiles = C::kOwnTiles / C::kRuns;
template <class C>
inline constexpr int kRunDims = 2 * kRunTiles<C>;
template <class C>
inline constexpr int kChunkWarps = C::kLatentChunkDims / (kRunTiles<C> * kMmaK);
template <class C>
__device__ __forceinline__ int FirstDimOfCodes(const Thread& thread, int run) {
  constexpr int kWarpDims = kRunTiles<C> * kMmaK;
  const int own = thread.warp / kChunkWarps<C> + run;
  const int chunk = own * kTeamWarpgroups + thread.wg;
  // Recomputed: kept, it would be spilled.
  const int lane = static_cast<int>(gpu::RecomputeHere(threadIdx.x) % kWarpThreads);
  return chunk * C::kLatentChunkDims + thread.warp % kChunkWarps<C> * kWarpDims +
         lane / 4 * kRunDims<C>;
}

}  // namespace jax_mla::decode::sm90
