// The scalar parts of online softmax in base 2, for the CUDA kernels that attend or merge (not
// sm100's).
//
// Scores are multiplied by sm_scale * log2(e) once, so that exp2 gives the weights. A row keeps a
// reference m, the sum l = sum exp2(s - m) and the accumulator o = sum exp2(s - m) v. The reference
// is a number of at least the row's maximum minus a kernel's rescale threshold: it is raised, and o
// rescaled, only when a score exceeds it by more than the threshold, in log2 units. A threshold of
// up to 8 lets bf16 and f16 hold the weights. With 0 the largest weight of a row is exactly 1. With
// more it lies anywhere up to exp2(threshold) and is rounded, which is most of P's error if few
// tokens dominate a row.
#pragma once

#include <cfloat>

#if defined(__CUDACC__)
#include "gpu/approx.cuh"
#endif

namespace jax_mla::gpu {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// The reference of a row that has seen no token. It is finite, so that a masked score of -inf gives
// the weight 0 and not NaN. It is below every finite score, so that the first visible token raises
// it.
inline constexpr float kNoReference = -FLT_MAX;

#if defined(__CUDACC__)
__device__ __forceinline__ float NegativeInfinity() { return __int_as_float(0xff800000); }

// log2 of the sum of exp2(scores): -inf for a row that sees no token. NaN stays NaN.
__device__ __forceinline__ float LseLog2(float reference, float sum) {
  return sum == 0.0f ? NegativeInfinity() : reference + log2f(sum);
}

// The same by an approximate logarithm, natural.
__device__ __forceinline__ float ApproxLse(float reference, float sum) {
  return sum == 0.0f ? NegativeInfinity() : (reference + Log2(sum)) * kLn2;
}

// The factor that normalises o. It is 0 for a row that sees no token, so that its output is 0.
__device__ __forceinline__ float InverseSum(float sum) {
  return sum == 0.0f ? 0.0f : Reciprocal(sum);
}
#endif

}  // namespace jax_mla::gpu
