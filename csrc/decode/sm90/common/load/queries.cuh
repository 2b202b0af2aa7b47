// What the producers of all Hopper kernels do alike when they copy operands.
#pragma once

#include <cstdint>

#include "decode/params.h"
#include "decode/sm90/common/new_row.cuh"
#include "decode/sm90/common/rotate_queries.cuh"
#include "decode/sm90/common/tensor_map.h"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90 {

// KV leaves L2 before what is read again: queries, code, tables. The row tiles of a worker read a
// block at about the same time, and still find it there.
inline constexpr uint64_t kKvCachePolicy = gpu::sm90::kCacheEvictFirst;

// The policy of a gather. Where a page table is a list of slots, as in sparse attention, several
// queries read a row, and it stays.
inline uint64_t GatherPolicy(const DecodeParams& params) {
  const bool may_share_rows = params.page_size == 1 && !params.causal;
  return may_share_rows ? gpu::sm90::kCacheEvictNormal : kKvCachePolicy;
}

// Where a row tile's queries go.
struct QueryTile {
  uint32_t nope, rope;  // their chunks in shared memory; rope only if rows have a rotary part
  uint32_t nope_bytes, rope_bytes;
};

// Where they come from: the box that begins with a row of a group, as the maps have groups.
struct QuerySource {
  const CUtensorMap *nope, *rope;
  int32_t row, group;
};

// Starts the copy of a row tile's queries, and arrives at their barriers. `has_blocks`: whether the
// item has any; the appending warp knows no others. Called by one thread.
template <class C>
__device__ __forceinline__ void LoadQueryTile(const QuerySource& source, const NewRows& rows,
                                              const QueryTile& tile, const QueryBarriers& barriers,
                                              bool has_blocks) {
  constexpr uint64_t kPolicy = gpu::sm90::kCacheEvictNormal;
  uint32_t rope_full = barriers.full, full_bytes = tile.nope_bytes + tile.rope_bytes;
  if (RotatesQueries<C>(rows)) {
    if (has_blocks) {
      rope_full = barriers.rope_full;
      full_bytes = tile.nope_bytes;
      gpu::sm90::MbarrierArriveExpectTx(rope_full, tile.rope_bytes);
    } else {
      gpu::sm90::MbarrierArrive(barriers.rope_full);
      gpu::sm90::MbarrierArrive(barriers.full);
    }
  }
  gpu::sm90::MbarrierArriveExpectTx(barriers.full, full_bytes);
  gpu::sm90::TmaLoad4d(source.nope, tile.nope, barriers.full, 0, source.row, 0, source.group,
                       kPolicy);
  if constexpr (C::kDKpe > 0) {
    gpu::sm90::TmaLoad4d(source.rope, tile.rope, rope_full, 0, source.row, 0, source.group,
                         kPolicy);
  }
}

}  // namespace jax_mla::decode::sm90
