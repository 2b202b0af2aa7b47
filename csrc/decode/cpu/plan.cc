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
  const int32_t num_seqs = NumPresentSeqs(p.num_seqs, p.batch);
  TokenRanges ranges(p);
  tokens_ = {ranges.begin(), ranges.begin()};
  for (int32_t b = 0; b < num_seqs; ++b) {
    const TokenRange tokens = ranges.Next();
    tokens_.end = tokens.end;
    if (tokens.size() > 0 && p.num_heads > 0) Add(b, tokens);
  }
}

void Plan::Add(int32_t seq_idx, const TokenRange& tokens) {
  const int32_t seq_len = std::clamp(params_.seq_lens[seq_idx], 0, params_.max_seq_len);
  Sequence seq = {.seq_idx = seq_idx,
                  .seq_len = seq_len,
                  .tokens = tokens,
                  .first_token = WindowBegin(seq_len, tokens.size(), 0),
                  .first_task = num_tasks_,
                  .first_split_tile = num_split_tiles_,
                  .first_partial = num_partial_floats_};
  CutRows(seq);
  CutTokens(seq);
  num_tasks_ += int64_t{seq.num_parts} * seq.num_row_tiles;
  padded_rows_ = std::max(padded_rows_, PaddedTileRows(seq));
  if (seq.num_parts > 1) {
    num_split_tiles_ += seq.num_row_tiles;
    num_partial_floats_ +=
        int64_t{seq.num_parts} * seq.num_row_tiles * PartialFloats(PaddedTileRows(seq));
  }
  sequences_.push_back(seq);
}

// A multiple of kTileTokens before which query q_idx of a sequence sees no token.
int32_t Plan::WindowBegin(int32_t seq_len, int32_t q_len, int32_t q_idx) const {
  if (params_.sliding_window == kNoWindow) return 0;
  const int32_t begin = seq_len - q_len + q_idx + 1 - params_.sliding_window;
  return std::max(begin, 0) / kTileTokens * kTileTokens;
}

// Row tiles of equal size, as few as kMaxTaskRows allows.
void Plan::CutRows(Sequence& seq) const {
  const int64_t num_rows = int64_t{seq.tokens.size()} * params_.num_heads;
  const int64_t num_tiles = CeilDiv(num_rows, kMaxTaskRows);
  seq.tile_rows = static_cast<int32_t>(CeilDiv(num_rows, num_tiles));
  if (num_tiles > 1) seq.tile_rows = RoundUp(seq.tile_rows, row_lanes_);
  seq.num_row_tiles = static_cast<int32_t>(CeilDiv(num_rows, seq.tile_rows));
}

void Plan::CutTokens(Sequence& seq) const {
  const DecodeParams& p = params_;
  const int64_t num_rows = int64_t{seq.tokens.size()} * p.num_heads;
  const int64_t partial_bytes = num_rows * p.d_ckv * static_cast<int64_t>(sizeof(float));
  const int64_t token_bytes = int64_t{p.d_ckv} * ElementBytes(CkvType(p.kv_format, p.dtype)) +
                              int64_t{p.d_kpe} * ElementBytes(KpeType(p.kv_format, p.dtype));
  const int64_t balanced =
      kMinPartToPartialBytes * partial_bytes / std::max<int64_t>(token_bytes, 1);
  const int32_t min_part_tokens = RoundUp(
      static_cast<int32_t>(std::clamp(balanced, kMinPartTokens, kMaxPartTokens)), kTileTokens);

  const int64_t len = seq.seq_len - seq.first_token;
  int64_t num_parts = std::max<int64_t>(CeilDiv(len, min_part_tokens), 1);
  if (p.num_splits > 0) num_parts = std::min<int64_t>(num_parts, p.num_splits);
  const int64_t part_tokens =
      CeilDiv(std::max<int64_t>(CeilDiv(len, num_parts), 1), kTileTokens) * kTileTokens;
  seq.num_parts = static_cast<int32_t>(std::max<int64_t>(CeilDiv(len, part_tokens), 1));
  seq.part_tokens = static_cast<int32_t>(std::min<int64_t>(part_tokens, len));
}

Plan::Item Plan::At(int64_t task_idx) const {
  const auto next =
      std::upper_bound(sequences_.begin(), sequences_.end(), task_idx,
                       [](int64_t task, const Sequence& seq) { return task < seq.first_task; });
  const Sequence& seq = *(next - 1);
  const int64_t local = task_idx - seq.first_task;
  const int32_t row_tile_idx = static_cast<int32_t>(local % seq.num_row_tiles);
  const int64_t partial_floats = PartialFloats(PaddedTileRows(seq));

  Item item;
  item.part_idx = static_cast<int32_t>(local / seq.num_row_tiles);
  item.num_parts = seq.num_parts;
  item.first_partial = seq.first_partial + row_tile_idx * partial_floats;
  item.part_stride_floats = seq.num_row_tiles * partial_floats;
  item.split_tile_idx = seq.first_split_tile + row_tile_idx;
  const int32_t q_len = seq.tokens.size();
  const int32_t row_begin = row_tile_idx * seq.tile_rows;
  const int32_t num_rows = std::min(seq.tile_rows, q_len * params_.num_heads - row_begin);
  const int64_t part_begin = int64_t{seq.first_token} + int64_t{item.part_idx} * seq.part_tokens;
  // Nor does any row see what is before the window of its first row.
  const int32_t window_begin = WindowBegin(seq.seq_len, q_len, row_begin / params_.num_heads);
  // No row of the tile sees further than its last row. A part that begins there has no token.
  const int32_t last_q_idx = (row_begin + num_rows - 1) / params_.num_heads;
  const int64_t visible_end =
      params_.causal ? int64_t{seq.seq_len} - q_len + last_q_idx + 1 : seq.seq_len;
  item.task = {
      .seq_idx = seq.seq_idx,
      .seq_len = seq.seq_len,
      .q_len = q_len,
      .first_row = int64_t{seq.tokens.begin} * params_.num_heads + row_begin,
      .row_begin = row_begin,
      .num_rows = num_rows,
      .padded_rows = RoundUp(num_rows, row_lanes_),
      .token_begin = static_cast<int32_t>(std::max<int64_t>(part_begin, window_begin)),
      .token_end = static_cast<int32_t>(std::min(part_begin + seq.part_tokens, visible_end)),
      .has_queries = false,
  };
  return item;
}

int64_t Plan::PartialFloats(int32_t padded_rows) const {
  const int64_t d_padded = RoundUp(params_.d_ckv, kDimChunk);
  return CeilDiv((d_padded + 2) * padded_rows, kDimChunk) * kDimChunk;
}

Partial Plan::PartialAt(float* base, int32_t padded_rows) const {
  float* max_log2 = base + int64_t{RoundUp(params_.d_ckv, kDimChunk)} * padded_rows;
  return {.acc = base, .max_log2 = max_log2, .sum = max_log2 + padded_rows};
}

}  // namespace jax_mla::decode::cpu
