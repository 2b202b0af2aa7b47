// A model of what a call takes on each kernel:
//
//   waves * (start + block * (blocks that one CTA works through))
//         + merge * (CTAs with partial results / SMs + kItemMerges * items of a CTA after its
//         first)
//         + kPartUs * (parts of a sequence)
//
// `waves` is 1 unless there are more tiles than SMs. Where clusters merge, the CTAs with partial
// results count kExchangeMerges times.
//
// A tile of few rows starts and merges fast, but every tile reads all blocks again; a tile of 64
// rows is the other way round. How many blocks and items a CTA gets is asked of the schedule
// itself, for sequences that are as long as they may be. A block takes what one CTA needs
// for it, or what the memory needs to bring one to every busy SM. Tiles that load the same blocks
// share them, though not perfectly: hence the square root.
//
// The constants are in tuning.h. They put the model within 3 to 5 % of the times it was fitted to.
#include "decode/sm90/choice.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "decode/sm90/common/kv_load.h"
#include "decode/sm90/tuning.h"

namespace jax_mla::decode::sm90 {
namespace {

float EstimateUs(const KernelCost& cost, const DecodeShape& shape, int32_t num_sms) {
  const int32_t rows = shape.q_len * shape.num_heads;
  const int32_t tiles = CeilDiv(rows, cost.tile_rows);
  const int32_t tile_rows = CeilDiv(rows, tiles);
  const int32_t seq_blocks = std::max(NumBlocks(shape.max_seq_len), 1);
  const int32_t total_blocks = shape.batch * seq_blocks;
  const SplitOptions options = cost.kernel == KernelKind::kWide
                                   ? WideSplit(shape, num_sms, /*can_cluster=*/true)
                                   : NarrowSplit(shape, cost.tile_rows, num_sms);
  const ScheduleParams schedule = MakeSchedule(shape, options, /*max_workers=*/num_sms);
  const SchedulePolicy policy = ChoosePolicy(schedule, total_blocks, seq_blocks);
  const int32_t seq_cost = policy.Cost(schedule, seq_blocks);
  const bool splits = policy.worker_cost % seq_cost != 0;

  const int64_t num_shares = CeilDiv(int64_t{shape.batch} * seq_cost, policy.worker_cost);
  const float busy_ctas = std::min<int64_t>(schedule.num_workers, num_shares) * tiles;
  const float busy_share = busy_ctas / num_sms;
  // Of a CTA. A balanced one works on parts of as many sequences as it holds, and one more.
  const float seqs = static_cast<float>(policy.worker_cost) / seq_cost;
  const float more_items = !splits ? seqs - 1.0f : policy.cost_step > 0 ? 0.0f : seqs;
  const float blocks =
      splits ? std::min(policy.worker_cost, total_blocks) : seqs * static_cast<float>(seq_blocks);

  const float merge_share = !splits                 ? 0.0f
                            : policy.is_clustered() ? kExchangeMerges * busy_share
                                                    : busy_share;
  const float merge_us = cost.merge_us * tile_rows / cost.tile_rows;
  const float memory_us =
      cost.memory_us * std::min(busy_share, 1.0f) / std::sqrt(static_cast<float>(tiles));
  const float block_us = std::max(cost.block_us, memory_us);
  const float parts = splits ? static_cast<float>(seq_blocks) / policy.worker_cost : 0.0f;
  const int32_t waves = CeilDiv(tiles, num_sms);
  return waves * (cost.start_us + block_us * blocks) + kPartUs * parts +
         merge_us * (merge_share + kItemMerges * more_items);
}

bool HasBoxes(const DecodeShape& shape) { return LoadOf(shape.page_size) == KvLoad::kBoxes; }

// Whether codes go to tiles of kSmallTileRows rows, of which the call has `num_blocks` blocks.
bool TakesSmallTiles(const DecodeShape& shape, int64_t seq_blocks, int64_t num_blocks,
                     int32_t num_sms) {
  const bool is_small = num_blocks <= kMaxSmallTileBlocks * num_sms && 2 * shape.batch <= num_sms;
  // Tiles twice as large then take half of the SMs, and merges of many parts are cheaper for it.
  const bool has_block_an_sm = num_blocks <= num_sms && 4 * num_blocks > 3 * num_sms;
  return shape.d_ckv == kSmallTilesDCkv && HasBoxes(shape) && is_small &&
         !(has_block_an_sm && seq_blocks >= kManyPartsOfBlocks);
}

}  // namespace

Tiling TilingByRows(int32_t rows) {
  for (const KernelCost& cost : kKernelCosts) {
    if (rows <= cost.tile_rows) return {cost.kernel, cost.tile_rows};
  }
  return {.kernel = KernelKind::kWide, .tile_rows = kWideTileRows};
}

bool HasTeams(const DecodeShape& shape, bool has_units) {
  return shape.kv_format != KvFormat::kPlain && shape.d_ckv == kTeamsDCkv && HasBoxes(shape) &&
         (!has_units || TeamsTakeUnits(shape.kv_format == KvFormat::kDsMla));
}

int32_t ChooseNumTeams(const DecodeShape& shape, bool has_units, int32_t num_sms) {
  const int32_t rows = shape.q_len * shape.num_heads;
  if (TilingByRows(rows).tile_rows != kMaxNarrowRows || !HasTeams(shape, has_units)) return 1;
  const int32_t seq_blocks = CeilDiv(shape.max_seq_len, kScheduleBlock);
  const int64_t blocks = int64_t{shape.batch} * std::min(seq_blocks, kMaxTeamSeqBlocks);
  return blocks >= kMinTeamBlocks * num_sms ? 2 : 1;
}

bool HasQueryCodes(const DecodeShape& shape) {
  return shape.d_ckv == kQueryCodesDCkv && shape.kv_format != KvFormat::kPlain;
}

Tiling CodesTilingByRows(const DecodeShape& shape) {
  const Tiling tiling = TilingByRows(shape.q_len * shape.num_heads);
  const bool is_large = tiling.kernel == KernelKind::kWide;
  if (is_large && HasQueryCodes(shape)) return {KernelKind::kCodes64, kLargeTileRows};
  // Where codes are gathered there are no block pairs, and no tiles of 8 rows.
  if (!HasBoxes(shape)) return {KernelKind::kNarrow, kMaxNarrowRows};
  return is_large ? Tiling{KernelKind::kPairs, kLargeTileRows} : tiling;
}

Tiling ChooseCodesTiling(const DecodeShape& shape, int32_t num_sms) {
  const int32_t rows = shape.q_len * shape.num_heads;
  const Tiling by_rows = CodesTilingByRows(shape);
  const int64_t seq_blocks = CeilDiv(shape.max_seq_len, kScheduleBlock);
  const auto blocks = [&](int32_t tile_rows) {
    return CeilDiv(rows, tile_rows) * shape.batch * seq_blocks;
  };
  if (TakesSmallTiles(shape, seq_blocks, blocks(kSmallTileRows), num_sms)) {
    return {.kernel = KernelKind::kNarrow, .tile_rows = kSmallTileRows};
  }
  if (rows <= kMaxNarrowRows) {
    return {.kernel = KernelKind::kNarrow,
            .tile_rows = by_rows.tile_rows,
            .num_teams = ChooseNumTeams(shape, /*has_units=*/false, num_sms)};
  }
  const int64_t max_repeated_blocks =
      HasQueryCodes(shape) && shape.has_query_codes ? kMaxRepeatedCodesBlocks : kMaxRepeatedBlocks;
  if (blocks(kMaxNarrowRows) <= max_repeated_blocks * num_sms) {
    return {.kernel = KernelKind::kNarrow, .tile_rows = kMaxNarrowRows};
  }
  return by_rows;
}

Tiling ChooseTiling(const DecodeShape& shape, int32_t num_sms) {
  const int32_t rows = shape.q_len * shape.num_heads;
  Tiling best{};
  float best_us = 0.0f;
  for (const KernelCost& cost : kKernelCosts) {
    const float us = EstimateUs(cost, shape, num_sms);
    // The wide kernel where it takes as long: it reads each block once, whatever the lengths.
    const float limit_us = cost.kernel == KernelKind::kWide ? kEqualUs * best_us : best_us;
    if (best.tile_rows == 0 || us < limit_us) {
      best = {cost.kernel, cost.tile_rows};
      best_us = us;
    }
    if (rows <= cost.tile_rows) break;  // a larger tile would only be emptier
  }
  return best;
}

namespace {

constexpr Variant kVariants[] = {
    {"narrow", KernelKind::kNarrow, 0, 1},
    {"narrow8", KernelKind::kNarrow, 8, 1},
    {"narrow16", KernelKind::kNarrow, 16, 1},
    {"narrow16x2", KernelKind::kNarrow, 16, 2},
    {"scores", KernelKind::kCodes64, kLargeTileRows, 1},
    {"wide", KernelKind::kWide, kWideTileRows, 1},
};

Tiling TilingOf(const DecodeShape& shape, const Variant* variant, bool has_units, int32_t num_sms) {
  // Then the result may not depend on the batch, and the rows alone decide.
  const bool is_fixed = shape.num_splits != 0 || shape.batch_invariant;
  if (variant != nullptr && variant->tile_rows > 0) {
    // Which team takes a block depends on what the CTA has done before, and so on the batch.
    const bool has_teams = variant->num_teams > 1 && !is_fixed && HasTeams(shape, has_units);
    return {variant->kernel, variant->tile_rows, has_teams ? variant->num_teams : 1};
  }
  const bool has_codes = shape.kv_format != KvFormat::kPlain;
  Tiling by_rows =
      has_codes ? CodesTilingByRows(shape) : TilingByRows(shape.q_len * shape.num_heads);
  if (variant != nullptr) {
    if (by_rows.kernel == KernelKind::kWide) return {KernelKind::kNarrow, kMaxNarrowRows};
    return by_rows;
  }
  if (is_fixed) return by_rows;
  if (has_units) {  // of which only the device knows how many there are and how long
    by_rows.num_teams = ChooseNumTeams(shape, has_units, num_sms);
    return by_rows;
  }
  return has_codes ? ChooseCodesTiling(shape, num_sms) : ChooseTiling(shape, num_sms);
}

}  // namespace

const Variant* FindVariant(std::string_view name) {
  const auto found = std::ranges::find(kVariants, name, &Variant::name);
  return found == std::end(kVariants) ? nullptr : &*found;
}

KernelKey ChooseKernel(const DecodeShape& shape, const Variant* variant, bool has_units,
                       int32_t num_sms) {
  const Tiling tiling = TilingOf(shape, variant, has_units, num_sms);
  const QueryOperand codes = shape.has_query_codes ? QueryOperand::kCodes : QueryOperand::kTwoCodes;
  return {.dtype = shape.dtype,
          .d_ckv = shape.d_ckv,
          .d_kpe = shape.d_kpe,
          .kernel = tiling.kernel,
          .tile_rows = tiling.tile_rows,
          .codes = CodesOf(shape.kv_format),
          .load = LoadOf(shape.page_size),
          .num_teams = tiling.num_teams,
          .queries = tiling.kernel == KernelKind::kCodes64 ? codes : QueryOperand::k16Bit};
}

}  // namespace jax_mla::decode::sm90
