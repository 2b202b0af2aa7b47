// The float32 arithmetic of an index key on its way into the pool, the same on every platform. The
// definitions are in jax_mla/ops/index_append/transforms.py and jax_mla/ops/_index.py.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "core/transform.h"

namespace jax_mla::index_append {

// The values of a key are added up in so many sums: value i belongs to sum i / kRun % kNumLanes.
// Then sum j takes sum j + 16, then sum j + 8, and so on to sum j + 1. (On CUDA a lane has a sum.)
inline constexpr int32_t kNumLanes = 32;
inline constexpr int32_t kRun = 4;

// A value minus the mean, times `factor`, times its weight, plus its bias.
MLA_HOST_DEVICE float Normed(float centred, float factor, float weight, float bias) {
  return Sum(Product(Product(centred, factor), weight), bias);
}

inline constexpr float kMaxE4m3 = 448.0f;
inline constexpr float kMinMagnitude = 1e-4f;

MLA_HOST_DEVICE float Quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// The scale of a key by its largest magnitude, which is no NaN.
MLA_HOST_DEVICE float ScaleOf(float largest, bool is_power_of_two) {
  constexpr float kMax = std::numeric_limits<float>::max();
  const float clamped = largest < kMinMagnitude ? kMinMagnitude : largest > kMax ? kMax : largest;
  const float scale = Quotient(clamped, kMaxE4m3);
  if (!is_power_of_two) return scale;
  // The next power of two: a significand above 1 carries into the exponent.
  const uint32_t bits = std::bit_cast<uint32_t>(scale);
  return std::bit_cast<float>((bits + 0x7fffffu) & 0xff800000u);
}

}  // namespace jax_mla::index_append
