#include "decode/cpu/plan.h"

#include <algorithm>

#include "core/divisor.h"

namespace jax_mla::decode::cpu {

namespace {

// The cache that a part reads has at least this many times the bytes of its partial results, so
// that all partial results of a call are small beside the cache it reads.
constexpr int64_t kMinPartToPartialBytes = 12;
constexpr int64_t kMinPartTokens = 6 * kTileTokens;
constexpr int64_t kMaxPartTokens = int64_t{1} << 24;

}  // namespace

Plan::Plan(const DecodeParams& p, const Kernel& kernel) : params_(p), row_lanes_(kernel.row_lanes) {
  // Row tiles of equal size, as few as kMaxTaskRows allows.
  const int64_t num_rows = int64_t{p.q_len} * p.num_heads;
  num_row_tiles_ = static_cast<int32_t>(CeilDiv(num_rows, kMaxTaskRows));
  tile_rows_ = num_row_tiles_ == 0 ? 0 : static_cast<int32_t>(CeilDiv(num_rows, num_row_tiles_));
  if (num_row_tiles_ > 1) tile_rows_ = RoundUp(tile_rows_, kernel.row_lanes);
  padded_rows_ = RoundUp(tile_rows_, kernel.row_lanes);
  if (num_row_tiles_ > 1) num_row_tiles_ = static_cast<int32_t>(CeilDiv(num_rows, tile_rows_));

  const int64_t d_padded = RoundUp(p.d_ckv, kDimChunk);
  partial_floats_ = CeilDiv((d_padded + 2) * padded_rows_, kDimChunk) * kDimChunk;

  const int64_t partial_bytes = num_rows * p.d_ckv * static_cast<int64_t>(sizeof(float));
  const int64_t token_bytes = (int64_t{p.d_ckv} + p.d_kpe) * ElementBytes(p.dtype);
  const int64_t balanced =
      kMinPartToPartialBytes * partial_bytes / std::max<int64_t>(token_bytes, 1);
  min_part_tokens_ = RoundUp(
      static_cast<int32_t>(std::clamp(balanced, kMinPartTokens, kMaxPartTokens)), kTileTokens);

  first_task_.reserve(p.batch + 1);
  first_task_.push_back(0);
  first_slot_.reserve(p.batch);
  for (int32_t b = 0; b < p.batch; ++b) {
    const int32_t num_parts = CutAt(LengthOf(b)).num_parts;
    first_slot_.push_back(num_parts > 1 ? num_slots_ : -1);
    if (num_parts > 1) num_slots_ += int64_t{num_parts} * num_row_tiles_;
    first_task_.push_back(first_task_.back() + int64_t{num_parts} * num_row_tiles_);
  }
}

int32_t Plan::LengthOf(int32_t seq_idx) const {
  return std::clamp(params_.seq_lens[seq_idx], 0, params_.max_seq_len);
}

Plan::Cut Plan::CutAt(int32_t len) const {
  int64_t num_parts = std::max<int64_t>(CeilDiv(len, min_part_tokens_), 1);
  if (params_.num_splits > 0) num_parts = std::min<int64_t>(num_parts, params_.num_splits);
  const int64_t part_tokens =
      CeilDiv(std::max<int64_t>(CeilDiv(len, num_parts), 1), kTileTokens) * kTileTokens;
  return {
      .num_parts = static_cast<int32_t>(std::max<int64_t>(CeilDiv(len, part_tokens), 1)),
      .part_tokens = static_cast<int32_t>(std::min<int64_t>(part_tokens, len)),
  };
}

Plan::Item Plan::At(int64_t task_idx) const {
  const auto next = std::upper_bound(first_task_.begin(), first_task_.end(), task_idx);
  const int32_t seq_idx = static_cast<int32_t>(next - first_task_.begin()) - 1;
  const int64_t local = task_idx - first_task_[seq_idx];
  const int32_t len = LengthOf(seq_idx);
  const Cut cut = CutAt(len);

  Item item;
  item.row_tile_idx = static_cast<int32_t>(local % num_row_tiles_);
  item.part_idx = static_cast<int32_t>(local / num_row_tiles_);
  item.num_parts = cut.num_parts;
  item.slot = first_slot_[seq_idx] < 0 ? -1 : first_slot_[seq_idx] + local;
  const int32_t row_begin = item.row_tile_idx * tile_rows_;
  const int32_t num_rows = std::min(tile_rows_, params_.q_len * params_.num_heads - row_begin);
  const int64_t token_begin = int64_t{item.part_idx} * cut.part_tokens;
  // No row of the tile sees further than its last row. A part that begins there has no token.
  const int32_t last_q_idx = (row_begin + num_rows - 1) / params_.num_heads;
  const int64_t visible_end = params_.causal ? int64_t{len} - params_.q_len + last_q_idx + 1 : len;
  item.task = {
      .seq_idx = seq_idx,
      .seq_len = len,
      .row_begin = row_begin,
      .num_rows = num_rows,
      .padded_rows = RoundUp(num_rows, row_lanes_),
      .token_begin = static_cast<int32_t>(token_begin),
      .token_end = static_cast<int32_t>(std::min(token_begin + cut.part_tokens, visible_end)),
      .has_queries = false,
  };
  return item;
}

Partial Plan::PartialAt(float* base, int32_t padded_rows) const {
  float* max_log2 = base + int64_t{RoundUp(params_.d_ckv, kDimChunk)} * padded_rows;
  return {.acc = base, .max_log2 = max_log2, .sum = max_log2 + padded_rows};
}

}  // namespace jax_mla::decode::cpu
