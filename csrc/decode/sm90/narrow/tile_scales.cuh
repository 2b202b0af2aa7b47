// The scales of tiles in the narrow kernel (CacheCodes::kTileScales). A chunk's scores are
// multiplied by them, and P is stored once for each own chunk, times its scales. These may be of
// any magnitude, but float16 has a small range. So a power of two is taken out of a token's scales
// (PowerOf), and its logarithm is added to the token's scores. References are found then, so they
// belong to P times that power: P is of common size for the tokens that count most for O. Where P
// is added to the sums, it is divided by the power.
#pragma once

#include "decode/sm90/swapped/shape.h"

namespace jax_mla::decode::sm90::narrow {

// 2^(biased - 127).
struct PowerOfTwo {
  static constexpr int kBias = 127;
  int biased;

  __device__ __forceinline__ float Log2() const { return static_cast<float>(biased - kBias); }
  __device__ __forceinline__ float Inverse() const {
    return __int_as_float((2 * kBias - biased) << 23);
  }
};

// What is taken out of a token's tile scales: the largest power of two that is not larger than the
// largest of them. It is limited so that sums of P times its inverse stay finite.
__device__ __forceinline__ PowerOfTwo PowerOf(const TokenScales& scales) {
  constexpr int kBias = PowerOfTwo::kBias, kMaxExponent = 96;
  static_assert(sizeof(scales) == sizeof(float4));
  const float4 tiles = *reinterpret_cast<const float4*>(scales.tiles);
  const float top =
      fmaxf(fmaxf(fabsf(tiles.x), fabsf(tiles.y)), fmaxf(fabsf(tiles.z), fabsf(tiles.w)));
  return {min(max(__float_as_int(top) >> 23, kBias - kMaxExponent), kBias + kMaxExponent)};
}

}  // namespace jax_mla::decode::sm90::narrow
