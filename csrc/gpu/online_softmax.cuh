// The scalar pieces of online softmax in base 2, which the decode kernels and the combine share;
// LseLog2 is sm80's.
//
// Convention: scores are multiplied by sm_scale * log2(e) once, so that exp(x) is Exp2 of the
// score. A row keeps a reference m (any number at or above its maximum minus kRescaleThreshold),
// the sum l = sum exp2(s - m) and the accumulator o = sum exp2(s - m) v. Results do not depend on
// m.
#pragma once

#include <cfloat>

#if defined(__CUDACC__)
#include "gpu/approx.cuh"
#endif

namespace jax_mla::gpu {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// The reference is only raised when a score exceeds it by more than this (log2 units): exp2 of the
// difference stays exact enough in bf16/f16 (at most 256) and rescaling o becomes rare.
inline constexpr float kRescaleThreshold = 8.0f;
inline constexpr float kMaxWeight = 1 << static_cast<int>(kRescaleThreshold);  // exp2 of that

// Reference of a row that has seen no key. Finite, so that a masked score of -inf gives exp2 = 0
// and not NaN, and below every finite score, so that the first visible key always raises it.
inline constexpr float kNoReference = -FLT_MAX;

#if defined(__CUDACC__)
__device__ __forceinline__ float NegativeInfinity() { return __int_as_float(0xff800000); }

// log2 of the sum of exp2(scores): -inf for a row without a visible key, NaN stays NaN.
__device__ __forceinline__ float LseLog2(float reference, float sum) {
  return sum == 0.0f ? NegativeInfinity() : reference + log2f(sum);
}

// Factor that normalises o; 0 for a row without a visible key, so that its output is 0.
__device__ __forceinline__ float InverseSum(float sum) {
  return sum == 0.0f ? 0.0f : Reciprocal(sum);
}
#endif

}  // namespace jax_mla::gpu
