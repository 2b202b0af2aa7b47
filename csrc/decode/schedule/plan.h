// The plan of one call's split: schedule, partial results, scratch. Made on the host.
#pragma once

#include <cstdint>

#include "decode/merge/partials.h"
#include "decode/params.h"
#include "decode/schedule/schedule.h"

namespace jax_mla::decode {

// Everything a backend needs to split one call: pass it to the decode kernel by value.
struct SplitPlan {
  ScheduleParams schedule;
  PartialBuffers partials;
  // False if no sequence of this shape can ever be split: then no combine is launched.
  bool may_split;
  // CTAs of the combine kernel that are resident while the decode kernel runs; 0: none.
  int32_t resident_merges = 0;
};

// What a backend chooses about the split.
struct SplitOptions {
  int32_t block_m;   // rows a tile, up to kMaxRowTile
  int32_t num_ctas;  // CTAs that run at once (all row tiles together), e.g. the SM count
  int32_t seq_cost;  // see ScheduleParams
  int32_t max_single_blocks = kMaxSingleBlocks;  // see ScheduleParams
  bool can_cluster = false;                      // see "clustered" in schedule.h
  Slack slack = {};
};

// Parts a sequence in fixed mode; 0 in automatic mode.
int32_t FixedSplits(const DecodeShape& shape);

// Bytes of a partial result of so many rows.
constexpr int64_t SlotBytes(int64_t rows, int32_t d_ckv) {
  return rows * (d_ckv + 1) * static_cast<int64_t>(sizeof(float));
}

// The schedule of a call with this shape, without its lengths. Workers = num_ctas / row tiles, at
// most max_workers.
ScheduleParams MakeSchedule(const DecodeShape& shape, const SplitOptions& options,
                            int64_t max_workers);

// The plan of one call: MakeSchedule with as many workers as the scratch holds slots for.
SplitPlan MakeSplitPlan(const DecodeParams& params, const SplitOptions& options);

// Bytes of scratch a call may need, whatever backend and GPU run it: decided when the call is
// lowered, possibly on a machine without a GPU. The single place that sizes it, but for backends
// that size their own (DecodeBackend::scratch_bytes).
int64_t DecodeScratchBytes(const DecodeShape& shape);

}  // namespace jax_mla::decode
