// What was measured on an H200 and decides how Hopper's kernels split a call and which of them
// runs. Each constant names the table that gave it; "log" is docs/kernels/decode_sm90_log.md, the
// other sections are of docs/kernels/decode_sm90.md. The constants of the schedule and of the
// combine kernel, which all architectures share, are in decode/schedule/tuning.h.
#pragma once

#include <cstdint>

#include "decode/merge/partials.h"
#include "decode/params.h"
#include "decode/schedule/plan.h"
#include "decode/sm90/common/sizes.h"
#include "decode/sm90/kernel_key.h"

namespace jax_mla::decode::sm90 {

inline constexpr int32_t kWideTileRows = 64;   // wgmma's M
inline constexpr int32_t kMaxNarrowRows = 16;  // of a tile of narrow/

// What a call takes on a kernel, in a model of its time (choice.cc). From "Which kernel": 413 calls
// of 17 to 256 rows, batch 1 to 128, 512 to 16,384 tokens; tools/fit_tilings.py fits them. With
// 256 + 32 dims everything is shorter in about the same proportion: there the choices lose 0.6 % in
// 329 calls, 15 % at worst (32 rows, 16 x 512).
struct KernelCost {
  int32_t tile_rows;
  KernelKind kernel;
  float start_us;
  float merge_us;   // if every SM leaves partial results of full tiles
  float block_us;   // of 64 tokens
  float memory_us;  // the same, when every SM loads a block of its own
};
inline constexpr KernelCost kKernelCosts[] = {
    {.tile_rows = 8,
     .kernel = KernelKind::kNarrow,
     .start_us = 4.2f,
     .merge_us = 1.1f,
     .block_us = 1.3f,
     .memory_us = 2.4f},
    {.tile_rows = 16,
     .kernel = KernelKind::kNarrow,
     .start_us = 4.7f,
     .merge_us = 2.2f,
     .block_us = 1.4f,
     .memory_us = 2.5f},
    {.tile_rows = kWideTileRows,
     .kernel = KernelKind::kWide,
     .start_us = 6.4f,
     .merge_us = 3.8f,
     .block_us = 1.2f,
     .memory_us = 2.5f},
};
// Of the same fit: what a further item of a CTA and the merge in a cluster cost, as multiples of
// merge_us, and the microseconds that each part of a sequence adds.
inline constexpr float kItemMerges = 1.5f;
inline constexpr float kExchangeMerges = 0.5f;
inline constexpr float kPartUs = 1.0f / 128.0f;
// Up to which ratio two estimates are equal. 24 heads, 12 x 900, are 11.06 and 11.13 us by the
// model, and 12.5 in tiles of 16 rows and 11.0 in the wide kernel by the clock.
inline constexpr float kEqualUs = 1.01f;

// By how much, in log2 units, a score must exceed its row's reference to raise it
// (online_softmax.cuh). In the narrow kernel an exact maximum costs nothing. In the wide one every
// raise delays both warpgroups: 0 costs 7 to 14 % at 128 heads and large batches (log, "What an
// exact maximum costs").
inline constexpr float kNarrowRescaleThreshold = 0.0f, kWideRescaleThreshold = 2.0f;
// With codes P is float16 (bf16 in codes64 with tile scales), which loses nothing by it, and time
// counts: 8 instead of 0 takes 108 us instead of 121 (16 heads, 128 x 4096), 32.4 instead
// of 37.2 at batch 32.
inline constexpr float kCodesRescaleThreshold = 8.0f;

// From so many blocks an SM on, codes of 9 to 16 rows go to the narrow kernel with two teams. A
// block takes less there, but the end of an item more. 16 heads, one team and two, us: 8 x 4096
// (3.9 blocks an SM) 12.9, 12.8; 32 x 1024 (3.9) 12.7, 12.8; 12 x 4096 (5.8) 16.9, 15.2; 24 x 2048
// (5.8) 18.0, 16.5; 128 x 4096 106.8, 91.9 (log, "Room for two merging CTAs", "Two teams").
inline constexpr int64_t kMinTeamBlocks = 5;
// So many blocks of a sequence count at most: a table is often much wider than the lengths. With
// little work two teams lose 1 to 1.8 us a call.
inline constexpr int32_t kMaxTeamSeqBlocks = 128;

// Codes. Up to so many blocks an SM, tiles of kSmallTileRows rows are the fastest if sequences are
// split. Tiles of 8 and 16 rows, us, 16 heads: 1 x 1024 5.9, 6.6; 1 x 8192 8.7, 9.9; 8 x 1024 8.4,
// 9.3; 8 x 2048 10.9, 10.1; 128 x 64 7.5, 6.2; 64 heads, 1 x 512 5.9, 6.7; 4 x 512 7.8, 8.1. They
// are not where each block is alone on its SM and a sequence has many of them: 16 heads, 1 x 4096
// 8.1, 7.4; 32 heads, 1 x 2048 7.3, 7.2 (log, "Little work with codes"). 256 dims were not
// measured.
inline constexpr int32_t kSmallTileRows = 8, kSmallTilesDCkv = 512;
inline constexpr int64_t kMaxSmallTileBlocks = 2, kManyPartsOfBlocks = 32;

// Codes of more than kMaxNarrowRows rows. Up to so many blocks an SM, tiles of kMaxNarrowRows rows
// are repeated. 16-row tiles and query codes, queries in bf16 (in e4m3), us: 64 heads, 1 x 8192 and
// 8 x 1024 (3.9 blocks of 16-row tiles an SM) 12.5, 13.0 (11.5); 11.9, 12.3 (10.8); 12 x 1024 (5.8)
// 17.7, 13.2 (11.6); 1 x 4096 (1.9) 9.5, 11.1 (9.9).
inline constexpr int64_t kMaxRepeatedBlocks = 4, kMaxRepeatedCodesBlocks = 2;

// Fixed cost of a sequence in the schedule, in blocks. Narrow: 0 and 1 measure alike, 2 loses up to
// 1.9 us. Wide: 1, 3 and 4 lose 1.8 to 2.6 % (log).
inline constexpr int32_t kNarrowSeqCost = 1, kWideSeqCost = 2;

// Up to how many blocks a call may have parts of one block. The wide kernel's follower idles
// through such a part, and with several row tiles that many followers do, so the limit is divided
// by their number ("Tables wider than the lengths").
inline int32_t WideMaxSingleBlocks(int32_t num_tiles) { return kMaxSingleBlocks / num_tiles; }

// What whole sequences, or equal parts, may cost in balance ("Whole sequences or cut ones"). Their
// CTAs have one item and little to merge. Fewer CTAs also stream faster each, where memory is the
// limit: that counts with few rows.
inline Slack NarrowSlack(int32_t batch, int32_t num_workers) {
  // Equal parts gain nothing here: the combine kernel merges them just as unequal ones.
  const bool is_whole = 2 * batch > num_workers;
  return {.blocks = is_whole ? 6 : 1, .shift = 5};
}
inline Slack WideSlack(int32_t num_rows) {
  if (num_rows > kWideTileRows) return {.blocks = 7, .shift = 7};
  return {.blocks = 5 + num_rows / 12, .shift = num_rows <= kWideTileRows / 2 ? 3 : 2};
}

// From this many parts a sequence on, if all are equally long, the combine kernel merges for the
// wide one: 4 to 7 % faster at batch 8. With 4 and 5 parts it is 0 to 3 % faster where lengths are
// equal, and the wide kernel's own merge 5 to 10 % where they differ ("Merging").
constexpr int32_t MinCombineParts(int32_t num_row_tiles) { return num_row_tiles == 1 ? 6 : 5; }

// From this many rows on, the second of two parts stays in registers and adds the first one: then
// only the warps that have its rows merge, where otherwise all warps share twice the bytes. 64
// lengths that differ: 24 rows +4 %, 40 rows +1 %, 48 and more -4 to -6 % ("Two parts").
inline constexpr int32_t kMinKeptRows = 48;

// How the kernels split a call.
inline SplitOptions NarrowSplit(const DecodeShape& shape, int32_t tile_rows, int32_t num_sms) {
  const int32_t rows = shape.q_len * shape.num_heads;
  const int32_t num_tiles = CeilDiv(rows, tile_rows);
  return {.block_m = num_tiles > 1 ? tile_rows : CeilDiv(rows, kBandRows) * kBandRows,
          .num_ctas = num_sms,
          .seq_cost = kNarrowSeqCost,
          .slack = NarrowSlack(shape.batch, num_sms / num_tiles)};
}
inline SplitOptions WideSplit(const DecodeShape& shape, int32_t num_sms, bool can_cluster) {
  // Balanced tiles of whole bands: 80 rows are 2 x 40, not 64 + 16.
  const int32_t rows = shape.q_len * shape.num_heads;
  const int32_t num_tiles = CeilDiv(rows, kWideTileRows);
  return {.block_m = CeilDiv(rows, num_tiles * kBandRows) * kBandRows,
          .num_ctas = num_sms,
          .seq_cost = kWideSeqCost,
          .max_single_blocks = WideMaxSingleBlocks(num_tiles),
          .can_cluster = can_cluster,
          .slack = WideSlack(rows)};
}

// The wide kernel in a call of units. Chunks of prompts are limited by the tensor cores, so fewer
// workers do not stream faster.
inline SplitOptions UnitSplit(const DecodeShape& shape, int32_t num_sms) {
  SplitOptions options = WideSplit(shape, num_sms, /*can_cluster=*/false);
  options.slack = {.blocks = 7, .shift = 7};
  return options;
}

}  // namespace jax_mla::decode::sm90
