// The kernel in front of a ragged call's decode kernel: it appends the new rows, clears the results
// of padding, and cuts the query rows into units.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "append/params.h"
#include "decode/split/schedule.h"
#include "decode/split/unit_plan.h"

namespace jax_mla::decode::ragged {

struct PrologueParams {
  append::AppendParams append;  // without positions; says which tokens a sequence has
  void* out;
  float* lse;
  int32_t num_heads;

  ScheduleParams schedule;  // of the call of units
  int32_t unit_rows;
  int32_t max_units;
  UnitPlan plan;  // what is made
};

cudaError_t LaunchPrologue(const PrologueParams& params, cudaStream_t stream);

}  // namespace jax_mla::decode::ragged
