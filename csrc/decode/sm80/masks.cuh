// What a call with a sliding window or a soft cap does to its scores (Config::kHasMasks).
#pragma once

#include <cstdint>

#include "decode/params.h"
#include "decode/schedule/units.h"
#include "gpu/approx.cuh"
#include "gpu/online_softmax.cuh"

namespace jax_mla::decode::sm80 {

// How many tokens a query sees at most.
__device__ __forceinline__ int32_t WindowOf(const DecodeParams& p) {
  return p.sliding_window == kNoWindow ? kMaxWindow : p.sliding_window;
}

// The first token that any row of a unit may see; it may be negative.
__device__ __forceinline__ int32_t WindowBegin(const DecodeParams& p, const Unit& unit) {
  return unit.first_limit - WindowOf(p);
}

// A score in log2 units becomes cap * tanh(score / cap), in log2 units. (A quotient for each score:
// a factor would take a register for the whole kernel.)
__device__ __forceinline__ float CapScore(const DecodeParams& p, float score) {
  if (p.soft_cap == 0.0f) return score;
  const float cap_log2 = p.soft_cap * gpu::kLog2E;
  return cap_log2 * tanhf(__fdividef(score, cap_log2));
}

}  // namespace jax_mla::decode::sm80
