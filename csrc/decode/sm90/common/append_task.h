// What a producer asks of the warp that writes new rows (new_row.cuh).
#pragma once

#include <cstdint>

namespace jax_mla::decode::sm90 {

// An item of the producer's: 16 bytes, which one load takes from shared memory.
struct alignas(16) AppendTask {
  int32_t seq_idx;
  int32_t seq_len;  // clamped; kNoMoreTasks: the producer has no more items
  bool has_new_row;
  // Where the item's queries come, if they have to be rotated: the stage, and the parity of the
  // phase that their barrier completes.
  uint8_t query_stage, query_parity;
};
inline constexpr int32_t kNoMoreTasks = -1;

}  // namespace jax_mla::decode::sm90
