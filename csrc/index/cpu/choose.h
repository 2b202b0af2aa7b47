// The choice of the k best keys of one query.
#pragma once

#include <bit>
#include <cstdint>

namespace jax_mla::index::cpu {

// A number by which scores are compared: the larger the score, the larger it is. -0 is 0, and a NaN
// is below everything.
constexpr uint32_t OrderOf(float score) {
  if (score != score) return 0;
  const uint32_t bits = std::bit_cast<uint32_t>(score == 0.0f ? 0.0f : score);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

// Moves the k candidates with the largest scores to the front, by ascending position; of equal ones
// those with the lower position. `positions` are `count` candidates, ascending; scores[position] is
// that of a position. There are more than k.
void ChooseBest(int32_t* positions, int64_t count, int64_t k, const float* scores);

}  // namespace jax_mla::index::cpu
