// The kernel that plans a call of units: it cuts the query rows of a step into units, and finds
// where the workers start.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "decode/schedule/schedule.h"
#include "decode/schedule/unit_plan.h"

namespace jax_mla::decode::ragged {

// Which tokens of a step belong to which sequence (core/ragged.h). Device pointers.
struct StepTokens {
  const int32_t* seq_lens;   // [batch], the new tokens included
  const int32_t* cu_q_lens;  // [batch + 1]; null: q_len tokens a sequence
  const int32_t* num_seqs;   // [1], sequences beyond it are absent; null: all are present
  int32_t batch;
  int32_t q_len;
  int32_t num_tokens;
};

struct PlanParams {
  StepTokens tokens;
  int32_t num_heads;
  ScheduleParams schedule;  // of the call of units
  int32_t unit_rows;
  int32_t max_units;
  UnitPlan plan;  // what is made
};

// The same of a step with a sliding window.
struct WindowPlanParams : PlanParams {
  int32_t sliding_window;
  int32_t page_size;
  int32_t max_seq_len;  // of the step; the schedule has that of the units
};

cudaError_t LaunchPlan(const PlanParams& params, cudaStream_t stream);
cudaError_t LaunchPlan(const WindowPlanParams& params, cudaStream_t stream);

}  // namespace jax_mla::decode::ragged
