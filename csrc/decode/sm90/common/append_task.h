// What a producer asks of the warp that appends (new_row.cuh), in shared memory.
#pragma once

#include <cstdint>

namespace jax_mla::decode::sm90 {

struct AppendTask {
  int32_t seq_idx;
  int32_t seq_len;  // clamped; 0: there are no more tasks
};

}  // namespace jax_mla::decode::sm90
