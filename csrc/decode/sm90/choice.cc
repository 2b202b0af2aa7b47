// A model of what a call takes on each kernel:
//
//   start + merge * (CTAs with partial results / SMs + 1.5 * items of a CTA after its first)
//         + block * (blocks one CTA works through) + (parts of a sequence) / 128
//
// A tile of few rows is quick to start and to merge but every tile reads all blocks again; a tile
// of 64 rows is the other way round. How many blocks and items a CTA gets is the schedule's own
// answer for sequences as long as their table is wide. A block takes what one CTA needs for it, or
// what the memory needs to bring every busy SM one. Tiles that load the same blocks share them,
// though not perfectly: the square root.
//
// The constants are fitted to times on an H200 (bf16, 512 + 64 dims, 17 to 256 rows, batches of 1
// to 128, 512 to 16384 tokens) and put the model within 3 to 5 % of them; tools/fit_tilings.py says
// how and does it again. Only their ratios matter, and with 256 + 32 dims these are much the same:
// the choices lose 0.6 % in 329 calls, 15 % at worst (32 rows, 16 x 512).
#include "decode/sm90/choice.h"

#include <algorithm>
#include <cmath>

#include "decode/split/schedule.h"

namespace jax_mla::decode::sm90 {
namespace {

constexpr int32_t kWideRows = 64;

struct Cost {
  int32_t tile_rows;
  bool is_wide;
  float start_us;
  float merge_us;    // if every SM leaves partial results of full tiles
  float block_us;    // of 64 tokens
  float memory_us;   // the same, when every SM loads a block of its own
  int32_t seq_cost;  // as the kernel schedules
};

// The narrow kernel's tile of 32 rows is left out: two of 16 are faster where there is little work,
// half a wide one is within 4 % elsewhere, and with it the model chose worse in all.
constexpr Cost kCosts[] = {
    {8, false, 4.2f, 1.1f, 1.3f, 2.4f, 1},
    {16, false, 4.7f, 2.2f, 1.4f, 2.5f, 1},
    {kWideRows, true, 6.4f, 3.8f, 1.2f, 2.5f, 2},
};
constexpr float kItemMerges = 1.5f;
constexpr float kPairMerge = 0.5f;
constexpr float kPartUs = 1.0f / 128.0f;

float EstimateUs(const Cost& cost, const DecodeShape& shape, int32_t num_sms) {
  const int32_t rows = shape.q_len * shape.num_heads;
  const int32_t tiles = CeilDiv(rows, cost.tile_rows);
  const int32_t max_blocks =
      std::max(NumBlocks(shape.max_pages_per_seq * shape.page_size), 1);  // fits: CheckLimits
  const int32_t total_blocks = shape.batch * max_blocks;
  const int32_t num_workers = std::max(num_sms / tiles, 1);
  const int32_t tile_rows = CeilDiv(rows, tiles);
  ScheduleParams schedule{};
  schedule.batch = shape.batch;
  schedule.num_workers = std::min(num_workers, total_blocks);
  if (cost.is_wide && schedule.num_workers / shape.batch == 2) {  // as MakeSplitPlan
    schedule.num_workers -= schedule.num_workers % 2;
    schedule.seq_units = 2;
  }
  schedule.max_single_blocks = cost.is_wide ? WideMaxSingleBlocks(tiles) : kMaxSingleBlocks;
  schedule.seq_cost = cost.seq_cost;
  schedule.slack = cost.is_wide ? WideSlack(rows) : NarrowSlack(shape.batch, num_workers);
  schedule = AddQuotients(schedule);
  const SchedulePolicy policy = ChoosePolicy(schedule, total_blocks, max_blocks);
  const int32_t part_blocks = policy.blocks_per_worker,
                seq_blocks = policy.Cost(schedule, max_blocks);
  const int64_t all_blocks = int64_t{shape.batch} * seq_blocks;
  const float busy_share =
      static_cast<float>(std::min<int64_t>(schedule.num_workers, CeilDiv(all_blocks, part_blocks)) *
                         tiles) /
      static_cast<float>(num_sms);
  const bool splits = part_blocks % seq_blocks != 0, is_aligned = policy.aligned_unit > 0;
  // Of a CTA. A balanced one works on parts of as many sequences as it holds, and one more.
  const float seqs = static_cast<float>(part_blocks) / static_cast<float>(seq_blocks);
  const float more_items = !splits ? seqs - 1.0f : is_aligned ? 0.0f : seqs;
  const float blocks = splits ? std::min(part_blocks, total_blocks) : seqs * max_blocks;

  const float merge_share = !splits              ? 0.0f
                            : policy.is_paired() ? kPairMerge * busy_share
                                                 : busy_share;

  const float memory_us =
      cost.memory_us * std::min(busy_share, 1.0f) / std::sqrt(static_cast<float>(tiles));
  const float block_us = std::max(cost.block_us, memory_us);
  const float merge_us = cost.merge_us * tile_rows / cost.tile_rows;
  const float parts = splits ? static_cast<float>(max_blocks) / part_blocks : 0.0f;
  const int32_t waves = CeilDiv(tiles, num_sms);
  return waves * (cost.start_us + block_us * blocks) + kPartUs * parts +
         merge_us * (merge_share + kItemMerges * more_items);
}

}  // namespace

Tiling TilingByRows(int32_t rows) {
  for (int32_t tile_rows : {8, 16, 32}) {
    if (rows <= tile_rows) return {false, tile_rows};
  }
  return {true, kWideRows};
}

Tiling ChooseTiling(const DecodeShape& shape, int32_t num_sms) {
  const int32_t rows = shape.q_len * shape.num_heads;
  Tiling best{};
  float best_us = 0.0f;
  for (const Cost& cost : kCosts) {
    const float us = EstimateUs(cost, shape, num_sms);
    if (best.tile_rows == 0 || us < best_us) {
      best = {cost.is_wide, cost.tile_rows};
      best_us = us;
    }
    if (rows <= cost.tile_rows) break;  // a larger tile would only be emptier
  }
  return best;
}

Slack NarrowSlack(int32_t batch, int32_t num_workers) {
  // Equal parts gain nothing here: they are merged by another kernel just as unequal ones.
  const bool is_whole = 2 * batch > num_workers;
  return {.blocks = is_whole ? 6 : 1, .shift = 5};
}

int32_t WideMaxSingleBlocks(int32_t num_tiles) { return kMaxSingleBlocks / num_tiles; }

Slack WideSlack(int32_t num_rows) {
  if (num_rows > kWideRows) return {.blocks = 7, .shift = 7};
  return {.blocks = 5 + num_rows / 12, .shift = num_rows <= kWideRows / 2 ? 3 : 2};
}

}  // namespace jax_mla::decode::sm90
