// A model of what a call takes on each kernel:
//
//   start + merge * (CTAs with partial results / SMs) + block * (blocks one CTA works through)
//
// A tile of few rows is quick to start and to merge but every tile reads all blocks again; a tile
// of 64 rows is the other way round. How many blocks a CTA gets is the schedule's own answer for
// sequences as long as their table is wide. A block takes what one CTA needs for it, or what the
// memory needs to bring every SM one. Tiles that load the same blocks share them, though not
// perfectly: the square root.
//
// The constants are fitted to times on an H200 (bf16, 512 + 64 dims, 40 to 256 rows, batches of 1
// to 32, 512 to 32768 tokens) and put the model within 4 to 5 % of them; tools/fit_tilings.py says
// how and does it again. Only their ratios matter.
#include "decode/sm90/choice.h"

#include <algorithm>
#include <cmath>

#include "decode/schedule.h"

namespace jax_mla::decode::sm90 {
namespace {

struct Cost {
  int32_t tile_rows;
  bool is_wide;
  float start_us;
  float merge_us;                // if every SM leaves partial results
  float block_us;                // of 64 tokens
  float memory_us;               // the same, when every SM loads a block of its own
  int32_t seq_cost, min_blocks;  // as the kernel schedules
};

constexpr Cost kCosts[] = {
    {8, false, 5.6f, 0.8f, 1.25f, 2.3f, 1, 1},
    {16, false, 5.7f, 2.3f, 1.45f, 2.3f, 1, 1},
    {32, false, 7.3f, 3.6f, 1.8f, 2.3f, 1, 1},
    {64, true, 7.0f, 3.9f, 1.6f, 2.6f, 2, 2},
};
constexpr float kFittedDims = 512 + 64;

float EstimateUs(const Cost& cost, const DecodeShape& shape, int32_t num_sms) {
  const int32_t rows = shape.q_len * shape.num_heads;
  const int32_t tiles = CeilDiv(rows, cost.tile_rows);
  const int32_t max_blocks =
      std::max(NumBlocks(shape.max_pages_per_seq * shape.page_size), 1);  // fits: CheckLimits
  const int32_t total_blocks = shape.batch * max_blocks;
  ScheduleParams schedule{};
  schedule.batch = shape.batch;
  schedule.num_workers = std::min(std::max(num_sms / tiles, 1), total_blocks);
  schedule.min_blocks = cost.min_blocks;
  schedule.seq_cost = cost.seq_cost;
  if (cost.is_wide) schedule.slack_shift = WideSlackShift(tiles);
  schedule = AddQuotients(schedule);
  const SchedulePolicy policy = ChoosePolicy(schedule, total_blocks, max_blocks);
  const int32_t part_blocks = policy.blocks_per_worker,
                seq_blocks = policy.Cost(schedule, max_blocks);
  const bool splits = part_blocks % seq_blocks != 0;
  const int64_t parts = (int64_t{shape.batch} * seq_blocks + part_blocks - 1) / part_blocks;
  const int64_t partial_ctas = splits ? std::min<int64_t>(schedule.num_workers, parts) * tiles : 0;
  const int32_t waves = CeilDiv(tiles, num_sms);

  const float dims = (shape.d_ckv + shape.d_kpe) / kFittedDims;
  const float memory_us = cost.memory_us / std::sqrt(static_cast<float>(tiles));
  const float block_us = std::max(cost.block_us, memory_us) * dims;
  const float merge_us = cost.merge_us * dims * partial_ctas / num_sms;
  return waves * (cost.start_us + block_us * std::min(part_blocks, total_blocks)) + merge_us;
}

}  // namespace

Tiling TilingByRows(int32_t rows) {
  for (const Cost& cost : kCosts) {
    if (rows <= cost.tile_rows || cost.is_wide) return {cost.is_wide, cost.tile_rows};
  }
  return {};
}

Tiling ChooseTiling(const DecodeShape& shape, int32_t num_sms) {
  const int32_t rows = shape.q_len * shape.num_heads;
  Tiling best{};
  float best_us = 0.0f;
  for (const Cost& cost : kCosts) {
    if (cost.is_wide && rows <= cost.tile_rows / 2) continue;
    const float us = EstimateUs(cost, shape, num_sms);
    if (best.tile_rows == 0 || us < best_us) {
      best = {cost.is_wide, cost.tile_rows};
      best_us = us;
    }
    if (rows <= cost.tile_rows) break;  // a larger tile would only be emptier
  }
  return best;
}

}  // namespace jax_mla::decode::sm90
