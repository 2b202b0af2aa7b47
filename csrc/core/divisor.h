// Integer division: on the host, and on the GPU by a divisor that the host knows.
#pragma once

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define MLA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MLA_HOST_DEVICE inline
#endif

namespace jax_mla {

// A division: on the GPU only where its time does not count. a >= 0, b > 0.
template <typename A, typename B>
constexpr auto CeilDiv(A a, B b) {
  return (a + b - 1) / b;
}

// Division by d > 0 as a multiplication and a shift, because a GPU has no instruction for division.
// The result is exact for 0 <= a < 2^31: with 2^bits >= d and m = ceil(2^(31 + bits) / d), a * m is
// larger than a * 2^(31 + bits) / d by less than a, so by less than 2^31. The next quotient is at
// least 2^(31 + bits) / d >= 2^31 away.
struct Divisor {
  uint32_t multiplier = uint32_t{1} << 31;
  int32_t shift = 31;
  int32_t below = 0;  // d - 1

  Divisor() = default;
  MLA_HOST_DEVICE explicit Divisor(int32_t d) {
    const int bits = std::bit_width(static_cast<uint32_t>(d) - 1);
    shift = 31 + bits;
    below = d - 1;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << shift) + static_cast<uint64_t>(d) - 1) / d);
  }

  MLA_HOST_DEVICE int32_t Floor(int32_t a) const {
    return static_cast<int32_t>(uint64_t{static_cast<uint32_t>(a)} * multiplier >> shift);
  }
  MLA_HOST_DEVICE int32_t value() const { return below + 1; }
  // Rounded up. a + d must stay below 2^31.
  MLA_HOST_DEVICE int32_t Ceil(int32_t a) const { return Floor(a + below); }
};

}  // namespace jax_mla
