// How the CPU handlers cut a batch into tasks.
//
// How a sequence is cut depends only on its own numbers of tokens and the static shapes. Its result
// is therefore the same, bit for bit, for any other sequences in the batch and any number of
// threads: the CPU backend is always batch invariant.
#pragma once

#include <cstdint>
#include <vector>

#include "core/ragged.h"
#include "decode/cpu/kernel.h"
#include "decode/params.h"

namespace jax_mla::decode::cpu {

class Plan {
 public:
  Plan(const DecodeParams& params, const Kernel& kernel);

  // One task. A sequence of several parts leaves partial results, which lie one after another,
  // ordered by part, then row tile.
  struct Item {
    Task task;
    int32_t part_idx;            // in [0, num_parts)
    int32_t num_parts;           // of the sequence
    int64_t first_partial;       // floats before the partial result of the row tile's first part
    int64_t part_stride_floats;  // from one part's partial result to that of the next
    int64_t split_tile_idx;      // number of the row tile among those of all split sequences
  };

  // Tasks are ordered by sequence, then part, then row tile.
  int64_t num_tasks() const { return num_tasks_; }
  Item At(int64_t task_idx) const;

  // The tokens that belong to no sequence are those outside this range.
  TokenRange tokens() const { return tokens_; }

  int64_t num_split_tiles() const { return num_split_tiles_; }
  int64_t num_partial_floats() const { return num_partial_floats_; }  // of all split sequences

  // The most of any task.
  int32_t padded_rows() const { return padded_rows_; }
  int64_t partial_floats() const { return PartialFloats(padded_rows_); }

  // A partial result lies in memory as acc, max_log2 and sum, one after the other.
  Partial PartialAt(float* base, int32_t padded_rows) const;

 private:
  struct Sequence {
    int32_t seq_idx;
    int32_t seq_len;  // clamped
    TokenRange tokens;
    int32_t first_token;  // of its window: multiple of kTileTokens
    int32_t num_row_tiles = 0;
    int32_t tile_rows = 0;
    int32_t num_parts = 0;
    int32_t part_tokens = 0;  // of every part but the last, which may be shorter
    int64_t first_task;
    int64_t first_split_tile;
    int64_t first_partial;  // floats before the partial results of the sequence
  };

  void Add(int32_t seq_idx, const TokenRange& tokens);
  void CutRows(Sequence& seq) const;
  void CutTokens(Sequence& seq) const;
  int32_t WindowBegin(int32_t seq_len, int32_t q_len, int32_t q_idx) const;
  int32_t PaddedTileRows(const Sequence& seq) const { return RoundUp(seq.tile_rows, row_lanes_); }
  int64_t PartialFloats(int32_t padded_rows) const;

  const DecodeParams& params_;
  const int32_t row_lanes_;
  TokenRange tokens_;
  int32_t padded_rows_ = 0;
  int64_t num_tasks_ = 0;
  int64_t num_split_tiles_ = 0;
  int64_t num_partial_floats_ = 0;
  std::vector<Sequence> sequences_;  // those that have tasks
};

}  // namespace jax_mla::decode::cpu
