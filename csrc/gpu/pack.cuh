// Pairs of 16-bit elements in a register.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace jax_mla::gpu {

// Two floats rounded to T (bf16 or f16), the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t Pack2(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// The two elements as floats, the low half first.
template <typename T>
__device__ __forceinline__ float2 Unpack2(uint32_t packed) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
  } else {
    return __half22float2(reinterpret_cast<const __half2&>(packed));
  }
}

}  // namespace jax_mla::gpu
