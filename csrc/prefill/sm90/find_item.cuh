// Which row tile of which head of which sequence an item is.
//
// Items are ordered by groups of heads, whose keys and values fit into L2 together, and in a group
// by sequences and their row tiles, the last first: where attention is causal those are the longest
// items, and short ones at the end even out the SMs' loads. The heads of a row tile are neighbours.
#pragma once

#include <cstdint>

#include "prefill/params.h"
#include "prefill/sm90/config.h"

namespace jax_mla::prefill::sm90 {

inline constexpr uint32_t kAllLanes = 0xffffffffu;

// A range of rows inside [0, num_rows], whatever the device's values are.
struct Range {
  int32_t begin, size;

  __device__ Range(int32_t first, int32_t last, int32_t num_rows)
      : begin(min(max(first, 0), num_rows)), size(max(min(max(last, 0), num_rows) - begin, 0)) {}
};

__device__ __forceinline__ Range QueriesOf(const PrefillParams& p, int32_t seq_idx) {
  return {p.q_begin[seq_idx], p.q_end[seq_idx], p.num_queries};
}

__device__ __forceinline__ int32_t TilesOf(const PrefillParams& p, int32_t seq_idx) {
  return seq_idx < p.num_seqs ? (QueriesOf(p, seq_idx).size + kBlockM - 1) / kBlockM : 0;
}

// The sum over the warp's lanes, up to and including this one.
__device__ __forceinline__ int32_t InclusiveSum(int32_t value, int lane) {
#pragma unroll
  for (int distance = 1; distance < kWarpThreads; distance *= 2) {
    const int32_t other = __shfl_up_sync(kAllLanes, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

// The row tiles of all sequences, at most as many as ranges that do not overlap can have. Called by
// a warp.
__device__ __forceinline__ int32_t CountTiles(const PrefillParams& p, int lane) {
  int32_t num_tiles = 0;
  for (int32_t first = 0; first < p.num_seqs; first += kWarpThreads) {
    num_tiles += TilesOf(p, first + lane);
  }
  return min(__reduce_add_sync(kAllLanes, num_tiles), p.num_queries / kBlockM + p.num_seqs);
}

// The item of this index; num_rows is 0 if there is none. Called by a warp.
template <class C>
__device__ __forceinline__ Item FindItem(const PrefillParams& p, int32_t heads_per_group,
                                         int32_t num_tiles, int32_t item_idx, int lane) {
  Item item{};
  if (item_idx >= num_tiles * p.num_heads) return item;
  const int32_t first_head = item_idx / (num_tiles * heads_per_group) * heads_per_group;
  const int32_t idx_in_group = item_idx - num_tiles * first_head;
  const int32_t num_heads = min(heads_per_group, p.num_heads - first_head);
  item.head = first_head + idx_in_group % num_heads;
  int32_t tile = idx_in_group / num_heads;
  for (int32_t first = 0;; first += kWarpThreads) {
    const int32_t tiles = TilesOf(p, first + lane);
    const int32_t end = InclusiveSum(tiles, lane);
    const uint32_t found = __ballot_sync(kAllLanes, tile < end);
    if (found == 0) {
      tile -= __shfl_sync(kAllLanes, end, kWarpThreads - 1);
      continue;
    }
    const int owner = __ffs(found) - 1;
    const int32_t seq_idx = first + owner;
    const Range queries = QueriesOf(p, seq_idx);
    const Range keys(p.k_begin[seq_idx], p.k_end[seq_idx], p.num_keys);
    // Counted from the sequence's end.
    const int32_t row_tile = __shfl_sync(kAllLanes, end, owner) - 1 - tile;
    item.place = row_tile * kBlockM;
    item.q_row = queries.begin + item.place;
    item.num_rows = min(queries.size - item.place, kBlockM);
    item.k_row = keys.begin;
    item.num_keys = keys.size;
    const int32_t visible = p.causal ? min(keys.size, item.place + item.num_rows) : keys.size;
    item.num_blocks = (visible + C::kBlockN - 1) / C::kBlockN;
    return item;
  }
}

}  // namespace jax_mla::prefill::sm90
