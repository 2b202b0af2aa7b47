// Rounding to e4m3 on the device: the codes of FloatToE4m3 (core/fp8.h), by one instruction for two
// where the architecture has it.
#pragma once

#include <cstdint>

#include "core/fp8.h"

namespace jax_mla::gpu {

// The codes of four floats, the first in the lowest byte.
__device__ __forceinline__ uint32_t E4m3Codes(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
  uint32_t codes;
  asm("{\n\t"
      ".reg .b16 low, high;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\t"
      "mov.b32 %0, {low, high};\n\t"
      "}"
      : "=r"(codes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return WithoutNans(codes);  // the instruction makes a NaN of a NaN, and of nothing else
#else
  return FloatToE4m3(a) | uint32_t{FloatToE4m3(b)} << 8 | uint32_t{FloatToE4m3(c)} << 16 |
         uint32_t{FloatToE4m3(d)} << 24;
#endif
}

__device__ __forceinline__ uint8_t E4m3Code(float x) {
  return static_cast<uint8_t>(E4m3Codes(x, 0.0f, 0.0f, 0.0f));
}

}  // namespace jax_mla::gpu
