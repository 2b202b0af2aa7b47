// How many CTAs the combine kernel has: `slices` of them a worker. L is the vector that it merges
// (partial_vector.cuh).
#pragma once

#include <algorithm>
#include <cstdint>

#include "decode/merge/combine.h"
#include "decode/params.h"
#include "decode/schedule/schedule.h"
#include "decode/schedule/tuning.h"

namespace jax_mla::decode {

// CTAs that start where those of the decode kernel end: as many slices a worker as merge all
// sequences in one round if these are cut alike. More start later still, fewer take more rounds.
template <class L>
int NumLateCtas(const DecodeParams& params, const SplitPlan& plan) {
  const ScheduleParams& schedule = plan.schedule;
  const int64_t vectors = int64_t{params.q_len * params.num_heads} * (params.d_ckv / L::kSize);
  const int parts = schedule.seq_workers.value();
  const int64_t lanes = params.batch * vectors * CeilDiv(parts, L::kLaneParts);
  const auto slices_for = [&](int64_t ctas) { return CeilDiv(ctas, schedule.num_workers); };
  const int64_t slices =
      std::min(slices_for(CeilDiv(lanes, kCombineThreads)), slices_for(kMaxLateCtas));
  return schedule.num_workers * static_cast<int>(slices);
}

template <class L>
int NumCombineCtas(const DecodeParams& params, const SplitPlan& plan) {
  const ScheduleParams& schedule = plan.schedule;
  const int rows = params.q_len * params.num_heads;
  if (schedule.num_splits > 0) {
    return schedule.num_workers * MinI32(1 + rows / kRowsPerSlice, kMaxSlices);
  }
  if constexpr (L::kStartsLate) {
    return NumLateCtas<L>(params, plan);
  } else {
    // CTAs that start with the decode kernel and wait beside it, if they do it in one round: a lane
    // has at most a vector of kLoads parts (H200, 64 rows, 1 x 1024: 8.9 us instead of 11.6).
    const int64_t vectors = int64_t{rows} * (params.d_ckv / L::kSize);
    const int64_t groups = MaxI32(params.batch, schedule.num_workers / L::kLoads);
    if (groups * vectors <= int64_t{plan.resident_merges} * kCombineThreads) {
      return plan.resident_merges;
    }
    // As many sequences as workers are hardly ever split.
    const bool is_split = params.batch <= schedule.num_workers * 3 / 4;
    const int split_slices = MinI32(kSlices + rows / kRowsPerSplitSlice, L::kMaxSplitSlices);
    const int num_ctas =
        MaxI32(schedule.num_workers, kMinWorkers) * (is_split ? split_slices : kSlices);
    const bool do_residents = !is_split && 2 * plan.resident_merges >= num_ctas;
    return do_residents ? plan.resident_merges : num_ctas;
  }
}

}  // namespace jax_mla::decode
