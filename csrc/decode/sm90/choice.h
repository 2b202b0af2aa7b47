// Which of Hopper's kernels, with how many rows a tile, a call runs on.
#pragma once

#include <cstdint>

#include "decode/params.h"

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

// ScheduleParams::slack_shift of the wide kernel: whole sequences, or equal parts, are worth up to
// half as many blocks again as balanced workers would have. Such CTAs have one item and most of
// them nothing to merge; fewer of them also stream faster each, unless tiles that share blocks are
// busy with MMA.
constexpr int32_t WideSlackShift(int32_t num_tiles) { return num_tiles == 1 ? 1 : 2; }

}  // namespace jax_mla::decode::sm90
