// Rounding to e4m3, in plain C++20, for every platform. jax_mla/_quantization.py is the
// specification.
#pragma once

#include <bit>
#include <cstdint>

namespace jax_mla {

// Rounds to nearest even. What is larger than 448, infinity too, becomes 448; a NaN becomes 0. So
// the two codes of NaN are never made.
constexpr uint8_t FloatToE4m3(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0;                                    // NaN
  if (magnitude >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);  // 448 and more
  if (magnitude < 0x3c800000u) {
    // Below 2^-6 codes are multiples of 2^-9, the last bit of a number that begins with 2^14. So
    // the addition does the rounding.
    const float aligned = std::bit_cast<float>(magnitude) + 0x1p14f;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(aligned) - 0x46800000u));
  }
  const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return static_cast<uint8_t>(sign | ((rounded - 0x3c000000u) >> 20));
}

// The value of a code; a NaN for the two codes of NaN.
constexpr float E4m3ToFloat(uint8_t code) {
  const uint32_t sign = uint32_t{code & 0x80u} << 24;
  const uint32_t magnitude = code & 0x7fu;
  if (magnitude == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude < 8) {  // a denormal: a multiple of 2^-9
    const float value = static_cast<float>(magnitude) * 0x1p-9f;
    return sign != 0 ? -value : value;
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + 0x3c000000u));
}

// An e4m3 code that another program made, without the codes of NaN.
constexpr uint8_t WithoutNan(uint8_t code) { return (code & 0x7fu) == 0x7fu ? 0 : code; }

// The same of four codes.
constexpr uint32_t WithoutNans(uint32_t codes) {
  const uint32_t is_nan =
      ((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;  // each byte's top bit
  return codes & ~(is_nan | (is_nan - (is_nan >> 7)));
}
static_assert(WithoutNans(0xff7f7e80u) == 0x00007e80u && WithoutNans(0xfe007fffu) == 0xfe000000u,
              "a byte must not change its neighbours");

// The scale of a tile of DsMla by its largest magnitude: the smallest power of two for which no
// code has to be more than 448. It is at least 2^-100, so that its reciprocal is finite, and at
// most 2^119, so that no value is infinite.
constexpr float DsMlaScale(float max_magnitude) {
  // 448 = 1.75 * 2^8. A significand of more than 1.75 carries into the exponent.
  constexpr uint32_t kMin = 127 - 100, kMax = 127 + 119;
  const uint32_t exponent = (std::bit_cast<uint32_t>(max_magnitude) + 0x1fffffu) >> 23;
  const uint32_t scaled = exponent < kMin + 8 ? kMin : exponent > kMax + 8 ? kMax : exponent - 8;
  return std::bit_cast<float>(scaled << 23);
}

// Its reciprocal, which is exact.
constexpr float DsMlaInverse(float scale) {
  return std::bit_cast<float>((uint32_t{254} << 23) - std::bit_cast<uint32_t>(scale));
}

}  // namespace jax_mla
