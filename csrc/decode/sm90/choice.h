// Which of Hopper's kernels, with how many rows a tile, a call runs on.
#pragma once

#include <cstdint>

#include "decode/params.h"
#include "decode/split/schedule.h"

namespace jax_mla::decode::sm90 {

struct Tiling {
  bool is_wide;
  int32_t tile_rows;  // of the narrow kernel: 8, 16 or 32
};

// By the number of rows alone: a result that may not depend on the batch needs a kernel that does
// not.
Tiling TilingByRows(int32_t rows);

// The kernel that takes least time by a model of both (choice.cc), from what the host knows: the
// batch, the width of the page table as a bound of the lengths, the rows, the number of SMs.
Tiling ChooseTiling(const DecodeShape& shape, int32_t num_sms);

// What whole sequences or equal parts may cost (schedule.h). Their CTAs have one item, and most of
// them nothing to merge; fewer of them also stream faster each, the less rows there are to multiply
// the less so.
Slack NarrowSlack(int32_t batch, int32_t num_workers);
Slack WideSlack(int32_t num_rows);

// Up to how many blocks a call of the wide kernel may have parts of one (schedule.h), which its
// follower idles through.
int32_t WideMaxSingleBlocks(int32_t num_tiles);

}  // namespace jax_mla::decode::sm90
