// Integer division: on the host, and on the GPU by a number that the host knows.
#pragma once

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define MLA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MLA_HOST_DEVICE inline
#endif

namespace jax_mla {

// On the host; a >= 0, b > 0.
template <typename A, typename B>
constexpr auto CeilDiv(A a, B b) {
  return (a + b - 1) / b;
}

// A divisor d > 0 as a multiplication and a shift: a GPU has no instruction for a division.
// Exact for 0 <= a < 2^31: with 2^bits >= d, m = ceil(2^(31 + bits) / d) is too large by less than
// one part in 2^31 of 2^bits / d, so a * m stays below the next multiple.
struct Divisor {
  uint32_t multiplier = uint32_t{1} << 31;
  int32_t shift = 31;
  int32_t below = 0;  // d - 1

  Divisor() = default;
  explicit Divisor(int32_t d) {
    const int bits = std::bit_width(static_cast<uint32_t>(d) - 1);
    shift = 31 + bits;
    below = d - 1;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << shift) + static_cast<uint64_t>(d) - 1) / d);
  }

  MLA_HOST_DEVICE int32_t Floor(int32_t a) const {
    return static_cast<int32_t>(uint64_t{static_cast<uint32_t>(a)} * multiplier >> shift);
  }
  MLA_HOST_DEVICE int32_t value() const { return below + 1; }
  // The same, rounded up; a + d stays below 2^31.
  MLA_HOST_DEVICE int32_t Ceil(int32_t a) const { return Floor(a + below); }
};

}  // namespace jax_mla
