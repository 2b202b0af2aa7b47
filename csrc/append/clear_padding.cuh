// Clears the results of a token without a sequence, by one warp.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "append/append_token.cuh"
#include "append/params.h"

namespace jax_mla::append {

__device__ __forceinline__ void ClearPadding(const AppendParams& p, int32_t token) {
  constexpr int kVectorElements = sizeof(uint4) / 2;
  const int32_t lane = threadIdx.x % kWarpThreads;
  const int32_t num_heads = p.padding.num_heads;
  const int64_t first_row = int64_t{token} * num_heads;
  const int64_t num_vectors = int64_t{num_heads} * p.d_ckv / kVectorElements;
  uint4* out = static_cast<uint4*>(p.padding.out) + first_row * p.d_ckv / kVectorElements;
#pragma unroll 1
  for (int64_t i = lane; i < num_vectors; i += kWarpThreads) out[i] = uint4{};
#pragma unroll 1
  for (int32_t i = lane; i < num_heads; i += kWarpThreads) p.padding.lse[first_row + i] = -INFINITY;
}

}  // namespace jax_mla::append
