// e4m3 codes as pairs of bf16, which holds every code exactly. Plain integer and bf16 instructions,
// for every GPU from sm_80 on.
//
// A code is s eeee mmm. Moved to bits 15 and 10 to 4 of a 16-bit half it is a bf16 number, whose
// exponent is biased by 127 and not by 7. So a product with 2^120 gives the code's value. That also
// holds for subnormal codes, since the product of a subnormal bf16 is exact. The two codes of NaN
// become +-480.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "gpu/pack.cuh"

namespace jax_mla::gpu {

// a * b + c of two bf16, rounded once.
__device__ __forceinline__ uint32_t FmaBf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}
__device__ __forceinline__ uint32_t MulBf16x2(uint32_t a, uint32_t b) {
  constexpr uint32_t kMinusZero = 0x80008000u;
  return FmaBf16x2(a, b, kMinusZero);
}

// Four codes, in the order of memory, as two pairs of bf16. Each pair is multiplied by 2^-120 and
// by `factor`, a pair of bf16. The bytes of both pairs are made at once, and then put in place.
__device__ __forceinline__ uint2 ScaleE4m3(uint32_t codes, uint32_t factor) {
  const uint32_t lower = (codes << 4) & 0xf0f0f0f0u;                            // emmm 0000
  const uint32_t upper = ((codes >> 4) & 0x07070707u) | (codes & 0x80808080u);  // s000 0eee
  return {MulBf16x2(__byte_perm(lower, upper, 0x5140), factor),
          MulBf16x2(__byte_perm(lower, upper, 0x7362), factor)};
}
// The same without a factor.
__device__ __forceinline__ uint2 DecodeE4m3(uint32_t codes) {
  constexpr uint32_t kTwoTo120 = 0x7b807b80u;
  return ScaleE4m3(codes, kTwoTo120);
}

// A float32 scale as a sum of two bf16, both twice. So a product with it is rounded once.
struct SplitScale {
  uint32_t high, low;

  __device__ __forceinline__ explicit SplitScale(float scale) {
    const uint32_t top = __float_as_uint(scale) & 0xffff0000u;
    high = __byte_perm(top, top, 0x3232);
    const float rest = scale - __uint_as_float(top);
    low = Pack2<__nv_bfloat16>(rest, rest);
  }
  // Exact for a power of two.
  __device__ __forceinline__ uint32_t Times(uint32_t pair) const {
    return FmaBf16x2(pair, high, MulBf16x2(pair, low));
  }
};

}  // namespace jax_mla::gpu
