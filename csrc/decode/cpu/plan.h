// How the CPU handler cuts a batch into tasks.
//
// The cut of a sequence depends on its own length and the static shapes alone, so that its results
// are the same bits whatever the batch mates and the number of threads: the CPU backend is always
// batch invariant.
#pragma once

#include <cstdint>
#include <vector>

#include "decode/cpu/kernel.h"
#include "decode/params.h"

namespace jax_mla::decode {

class CpuPlan {
 public:
  CpuPlan(const DecodeParams& params, const CpuKernel& kernel);

  struct Item {
    CpuTask task;
    int32_t group_idx;  // of the sequence's row groups
    int32_t part_idx;   // of the sequence's KV parts
    int32_t num_parts;
    int64_t slot;  // where the partial goes; -1 if there is nothing to merge it with
  };

  // Tasks are ordered by sequence, then part, then row group.
  int64_t num_tasks() const { return first_task_.back(); }
  Item At(int64_t task_idx) const;

  int32_t num_groups() const { return num_groups_; }
  int32_t padded_rows() const { return padded_rows_; }  // most rows of a task
  int64_t num_slots() const { return num_slots_; }      // all partials that are merged

  // A partial: acc, max_log2 and sum, one after the other.
  int64_t partial_floats() const { return partial_floats_; }
  CpuPartial PartialAt(float* base, int32_t padded_rows) const;

 private:
  // How a sequence of `len` tokens is cut along its keys.
  struct Cut {
    int32_t num_parts;
    int32_t part_tokens;  // of each but the last
  };
  Cut CutAt(int32_t len) const;
  int32_t LengthOf(int32_t seq_idx) const;

  const DecodeParams& params_;
  const int32_t row_lanes_;
  int32_t num_groups_;
  int32_t group_rows_;
  int32_t padded_rows_;
  int32_t min_part_tokens_;
  int64_t partial_floats_;
  int64_t num_slots_ = 0;
  std::vector<int64_t> first_task_;  // [batch + 1]
  std::vector<int64_t> first_slot_;  // [batch], -1 for a sequence of one part
};

}  // namespace jax_mla::decode
