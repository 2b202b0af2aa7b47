// How the CPU handler cuts a batch into tasks.
//
// How a sequence is cut depends only on its own length and the static shapes. Its result is
// therefore the same, bit for bit, for any other sequences in the batch and any number of threads:
// the CPU backend is always batch invariant.
#pragma once

#include <cstdint>
#include <vector>

#include "decode/cpu/kernel.h"
#include "decode/params.h"

namespace jax_mla::decode::cpu {

class Plan {
 public:
  Plan(const DecodeParams& params, const Kernel& kernel);

  struct Item {
    Task task;
    int32_t row_tile_idx;  // in [0, num_row_tiles)
    int32_t part_idx;      // in [0, num_parts)
    int32_t num_parts;     // of the sequence
    int64_t slot;          // where the partial result goes; -1 if the sequence has one part
  };

  // Tasks are ordered by sequence, then part, then row tile.
  int64_t num_tasks() const { return first_task_.back(); }
  Item At(int64_t task_idx) const;

  int32_t num_row_tiles() const { return num_row_tiles_; }
  int32_t padded_rows() const { return padded_rows_; }  // the most of any task
  int64_t num_slots() const { return num_slots_; }      // partial results of all split sequences

  // A partial result lies in memory as acc, max_log2 and sum, one after the other.
  int64_t partial_floats() const { return partial_floats_; }
  Partial PartialAt(float* base, int32_t padded_rows) const;

 private:
  // How a sequence of `len` tokens is cut into parts.
  struct Cut {
    int32_t num_parts;
    int32_t part_tokens;  // of every part but the last, which may be shorter
  };
  Cut CutAt(int32_t len) const;
  int32_t LengthOf(int32_t seq_idx) const;

  const DecodeParams& params_;
  const int32_t row_lanes_;
  int32_t num_row_tiles_;
  int32_t tile_rows_;
  int32_t padded_rows_;
  int32_t min_part_tokens_;
  int64_t partial_floats_;
  int64_t num_slots_ = 0;
  std::vector<int64_t> first_task_;  // [batch + 1]
  std::vector<int64_t> first_slot_;  // [batch]; -1 for a sequence of one part
};

}  // namespace jax_mla::decode::cpu
