// What the producers of both Hopper kernels do alike when they copy operands.
#pragma once

#include <cstdint>

#include "decode/sm90/common/tensor_map.h"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90 {

// KV leaves L2 before what is read again: queries, code, tables. The row tiles of a worker read a
// block at about the same time, and still find it there.
inline constexpr uint64_t kKvCachePolicy = gpu::sm90::kCacheEvictFirst;

// Starts the copy of a row tile's queries. `q_nope`, `q_pe`: where their chunks go in shared
// memory. `full`: the mbarrier that counts the bytes. Called by one thread.
__device__ __forceinline__ void LoadQueryTile(const TensorMaps& maps, uint32_t q_nope,
                                              uint32_t q_pe, uint32_t full, int32_t row_begin,
                                              int32_t seq_idx) {
  constexpr uint64_t kPolicy = gpu::sm90::kCacheEvictNormal;
  gpu::sm90::TmaLoad4d(&maps.q_nope, q_nope, full, 0, row_begin, 0, seq_idx, kPolicy);
  gpu::sm90::TmaLoad4d(&maps.q_pe, q_pe, full, 0, row_begin, 0, seq_idx, kPolicy);
}

}  // namespace jax_mla::decode::sm90
