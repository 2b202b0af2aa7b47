// The schedule run on the host, for property tests through the Python module.
#pragma once

#include <cstdint>
#include <vector>

#include "decode/params.h"
#include "decode/schedule/plan.h"

namespace jax_mla::decode {

struct TwinItem {
  int32_t worker;
  int32_t seq_idx;
  int32_t block_begin;
  int32_t block_end;
  int32_t part_idx;
  int32_t num_parts;
  int32_t slot;            // -1: final
  int64_t slot_end_bytes;  // scratch needed up to this slot's last row; 0 if final
  bool merges;             // the worker merges a share of this sequence
};

// Same result as FindWork on the device, by a serial walk.
WorkIterator FindWorkHost(const ScheduleParams& params, int32_t worker_idx);

// Every item of every worker, in order, as a decode kernel with these options would run it.
std::vector<TwinItem> ScheduleTwin(const DecodeShape& shape, const std::vector<int32_t>& seq_lens,
                                   const SplitOptions& options, int64_t scratch_bytes);

}  // namespace jax_mla::decode
