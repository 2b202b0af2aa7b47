// The float32 arithmetic of what a row can go through before it is written, which is the same on
// every platform. The definitions are in jax_mla/ops/append/transforms.py.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/divisor.h"

namespace jax_mla {

// Products and sums that are rounded one by one. nvcc would fuse a product and a sum into one FMA.
// (On the host that depends on the compiler's flags; x86 without them has no FMA.)
MLA_HOST_DEVICE float Product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
MLA_HOST_DEVICE float Sum(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

// The squares of a row are added up in so many sums. Value i belongs to sum
// i / kSumRun % kNumSums. Then sum j takes sum j + 16, then sum j + 8, and so on to sum j + 1.
inline constexpr int32_t kNumSums = 32;
inline constexpr int32_t kSumRun = 8;

// What a row is multiplied by, so that its mean square becomes 1. `inverse_width` is 1 / its width.
MLA_HOST_DEVICE float NormFactor(float sum_of_squares, float inverse_width, float eps) {
  const float square = Sum(Product(sum_of_squares, inverse_width), eps);
#if defined(__CUDA_ARCH__)
  return __frcp_rn(__fsqrt_rn(square));
#else
  return 1.0f / std::sqrt(square);
#endif
}

// The two values of a pair.
struct ValuePair {
  float first;
  float second;
};

MLA_HOST_DEVICE ValuePair Rotated(ValuePair x, float cos, float sin) {
  return {Sum(Product(x.first, cos), -Product(x.second, sin)),
          Sum(Product(x.second, cos), Product(x.first, sin))};
}

// Where the values of pair `i` lie in a row with `num_pairs` pairs.
struct PairPlace {
  int32_t first;
  int32_t second;
};

MLA_HOST_DEVICE PairPlace PlaceOfPair(int32_t i, int32_t num_pairs, bool interleaved) {
  return interleaved ? PairPlace{2 * i, 2 * i + 1} : PairPlace{i, i + num_pairs};
}

}  // namespace jax_mla
