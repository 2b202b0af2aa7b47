// core/ragged.h for a whole warp.
#pragma once

#include <cstdint>

#include "core/ragged.h"

namespace jax_mla::gpu {

// SequenceOfToken, in num_present / 32 steps. All lanes get the result.
__device__ __forceinline__ int32_t FindSequence(const int32_t* cu_q_lens, int32_t num_present,
                                                int32_t token) {
  constexpr int kWarpThreads = 32;
  const int32_t lane = threadIdx.x % kWarpThreads;
#pragma unroll 1
  for (int32_t base = 0; base <= num_present; base += kWarpThreads) {
    const int32_t j = base + lane;
    const bool is_behind = j <= num_present && __ldg(cu_q_lens + j) > token;
    const uint32_t behind = __ballot_sync(0xffffffffu, is_behind);
    if (behind != 0) return base + __ffs(behind) - 2;
  }
  return kNoSequence;
}

}  // namespace jax_mla::gpu
