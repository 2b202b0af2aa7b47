// Partial results that the wide kernel merges itself, and how rows are written.
#pragma once

#include <cstdint>

#include "decode/merge/partial_range.cuh"
#include "decode/schedule/plan.h"
#include "decode/sm90/wide/params.cuh"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::wide {

// Partial results that this kernel merges itself have the vectors and the statistics of
// PartialOrder::kWgmma, but the vectors lie as a warp holds them: [slot][row tile][band][32
// dims][lane][8]. Such a fragment of 512 bytes is what a warp stores or loads at once. Lane
// 4 r + q has of row r the dims 2 q + {0, 1, 8, 9, 16, 17, 24, 25}.
template <class C>
struct PartialFragments {
  static constexpr int kVector = 8;  // elements
  static constexpr int kFragmentDims = 32;
  static constexpr int kFragmentElements = kVector * kWarpThreads;
  static constexpr int kHalfFragments = C::kHalfDims / kFragmentDims;  // of a band's half

  // This thread's vector of a half's first fragment; the next ones lie kFragmentElements apart.
  static __device__ __forceinline__ PartialElement* Of(const PartialBuffers& partials,
                                                       int64_t first_row, int band, int half,
                                                       int lane) {
    return reinterpret_cast<PartialElement*>(partials.out) + first_row * C::kDCkv +
           (band * 2 + half) * kHalfFragments * kFragmentElements + lane * kVector;
  }
};

// The lanes of a quad hold 2 of every 8 columns, v[k] those of the k-th 8. Neighbours exchange half
// of them: each has 4 neighbouring columns then, from SwappedColumn() on in v[0] and v[1], 16
// further on in v[2] and v[3]. What a quad stores of either is a sector of L2.
__device__ __forceinline__ void SwapColumns(uint32_t (&v)[4]) {
  const bool odd = threadIdx.x & 1;
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, odd ? v[k] : v[k + 1], 1);
    (odd ? v[k] : v[k + 1]) = other;
  }
}
__device__ __forceinline__ int SwappedColumn() {
  const uint32_t thread = RecomputeHere(threadIdx.x);
  return thread % 2 * 8 + thread % 4 / 2 * 4;
}
// Stores them to where SwappedColumn() of a row is.
template <class T>
__device__ __forceinline__ void StoreSwapped(T* target, const uint32_t (&v)[4]) {
  *reinterpret_cast<uint2*>(target) = make_uint2(v[0], v[1]);
  *reinterpret_cast<uint2*>(target + 16) = make_uint2(v[2], v[3]);
}

}  // namespace jax_mla::decode::sm90::wide
