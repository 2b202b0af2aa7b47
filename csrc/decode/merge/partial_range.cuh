// The range of partial results in float16.
//
// A partial result is rounded once more than the result of a whole sequence. Stored as bf16 it
// would add as much error as all other roundings together. Stored as float32 it would take twice
// the bytes, and writing and reading partial results is most of what a split costs. So rows are
// float16 of O * 2^-k. k is 0 for data of common size: O then lies between kMinPartial and
// kMaxPartial, where float16 has 11 bits. Rows outside are scaled by a power of two, and their
// statistics stand for the same part: reference + k and sum * 2^-k. Whoever merges does not see the
// difference. A row of zeros stays as it is: no k brings it into the range.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "decode/merge/partials.h"
#include "gpu/approx.cuh"

namespace jax_mla::decode {

using PartialElement = __half;

// Of the largest magnitude of a row. Below kMaxPartial nothing overflows. Above kMinPartial what is
// lost below float16's smallest normal number is 2^-15 of the row.
inline constexpr float kMaxPartial = 65504.0f;
inline constexpr float kMinPartial = 0x1p-10f;

// The larger magnitude of each half of two pairs of float16.
__device__ __forceinline__ uint32_t MaxMagnitude(uint32_t a, uint32_t b) {
  const __half2 max = __hmax2(__habs2(reinterpret_cast<const __half2&>(a)),
                              __habs2(reinterpret_cast<const __half2&>(b)));
  return reinterpret_cast<const uint32_t&>(max);
}
__device__ __forceinline__ float LargerHalf(uint32_t pair) {
  const float2 x = __half22float2(reinterpret_cast<const __half2&>(pair));
  return fmaxf(x.x, x.y);
}

// Whether a row fits whose largest magnitude is `top`.
__device__ __forceinline__ bool RowFits(float top) {
  const float rounded = __half2float(__float2half_rn(top));
  return rounded >= kMinPartial && rounded <= kMaxPartial;
}

// The largest magnitudes of two rows, from packed pairs of float16 whose larger half they are.
__device__ __forceinline__ uint32_t TopsOf(uint32_t top0, uint32_t top1) {
  return MaxMagnitude(__byte_perm(top0, top1, 0x5410), __byte_perm(top0, top1, 0x7632));
}

// Whether two rows fit, whose largest magnitudes TopsOf finds. A row without a key is 0.
__device__ __forceinline__ bool BothFit(uint32_t top0, uint32_t top1, bool has_key0,
                                        bool has_key1) {
  const uint32_t tops = TopsOf(top0, top1);
  const auto& x = reinterpret_cast<const __half2&>(tops);
  const __half2 least =
      __floats2half2_rn(has_key0 ? kMinPartial : 0.0f, has_key1 ? kMinPartial : 0.0f);
  return __hble2(x, __float2half2_rn(kMaxPartial)) && __hbge2(x, least);
}

// The same for many rows: whether all of them fit.
class RangeOfRows {
 public:
  __device__ __forceinline__ void Add(uint32_t top0, uint32_t top1, bool has_key0, bool has_key1) {
    const uint32_t tops = TopsOf(top0, top1);
    largest_ = MaxMagnitude(largest_, tops);
    const uint32_t counted = tops | (has_key0 ? 0 : kOne) | (has_key1 ? 0 : kOne << 16);
    const __half2 least = __hmin2(reinterpret_cast<const __half2&>(smallest_),
                                  reinterpret_cast<const __half2&>(counted));
    smallest_ = reinterpret_cast<const uint32_t&>(least);
  }
  __device__ __forceinline__ bool Fit() const {
    return __hble2(reinterpret_cast<const __half2&>(largest_), __float2half2_rn(kMaxPartial)) &&
           __hbge2(reinterpret_cast<const __half2&>(smallest_), __float2half2_rn(kMinPartial));
  }

 private:
  static constexpr uint32_t kOne = 0x3c00;  // in float16
  uint32_t largest_ = 0, smallest_ = kOne | kOne << 16;
};

__device__ __forceinline__ PartialStats ScaledStats(float reference, float sum, float scale_log2) {
  return {reference + scale_log2, sum * gpu::Exp2(-scale_log2)};
}

}  // namespace jax_mla::decode
