// Scores as keys: unsigned numbers that are ordered as the scores are.
#pragma once

#include <cstdint>

namespace jax_mla::index {

// A token that is no candidate: its page is not in the pool.
inline constexpr uint32_t kAbsentKey = 0;
// NaN is below -inf, whose key is 0x007fffff.
inline constexpr uint32_t kNanKey = 1;

// max(x, 0), but NaN stays NaN, which then becomes kNanKey.
__device__ __forceinline__ float Relu(float x) {
  float result;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(x));
  return result;
}

// -0.0 is 0.0.
__device__ __forceinline__ uint32_t KeyOfScore(float score) {
  const float value = score + 0.0f;
  const auto bits = static_cast<int32_t>(__float_as_uint(value));
  const uint32_t key =
      static_cast<uint32_t>(bits) ^ (static_cast<uint32_t>(bits >> 31) | (1u << 31));
  return value == value ? key : kNanKey;
}

__device__ __forceinline__ float ScoreOfKey(uint32_t key) {
  if (key <= kNanKey) return __uint_as_float(0x7fffffffu);
  return __uint_as_float(key >> 31 ? key ^ (1u << 31) : ~key);
}

}  // namespace jax_mla::index
