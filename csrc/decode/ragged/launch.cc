#include "decode/ragged/launch.h"

#include "decode/ragged/prologue.h"
#include "decode/split/plan.h"
#include "decode/split/unit_plan.h"

namespace jax_mla::decode::ragged {
namespace {

// The parameters of the call of units that a step becomes.
DecodeParams UnitParams(const DecodeParams& step, const DecodeShape& shape, int32_t num_tokens,
                        const UnitPlan& plan) {
  DecodeParams params = step;
  params.batch = shape.batch;
  params.q_len = shape.q_len;
  params.num_heads = shape.num_heads;
  params.num_splits = shape.num_splits;
  params.batch_invariant = shape.batch_invariant;
  params.seq_lens = plan.unit_lens;
  params.scratch_bytes = plan.partial_bytes;
  params.units = {.units = plan.units,
                  .starts = plan.starts,
                  .num_busy = plan.num_busy,
                  .num_rows = num_tokens * step.num_heads,
                  .heads_per_token = step.num_heads};
  return params;
}

}  // namespace

std::string Launch(const append::AppendParams& append, const DecodeParams& step,
                   const DecodeProblem& problem, const DecodeBackend& backend,
                   cudaStream_t stream) {
  const UnitPlan plan = MakeUnitPlan(problem.shape, append.num_tokens, step.scratch);
  const DecodeShape shape = UnitCallShape(problem.shape, append.num_tokens);
  const DecodeParams params = UnitParams(step, shape, append.num_tokens, plan);
  const DecodeProblem unit_problem{problem.device, shape, problem.variant};
  const ScheduleParams schedule = backend.plan_units(params, unit_problem).schedule;
  if (schedule.num_workers > kMaxUnitWorkers) {
    return "needs at most " + std::to_string(kMaxUnitWorkers) + " SMs, got " +
           std::to_string(schedule.num_workers);
  }
  const PrologueParams prologue{.append = append,
                                .out = step.out,
                                .lse = step.lse,
                                .num_heads = step.num_heads,
                                .schedule = schedule,
                                .unit_rows = shape.num_heads,
                                .max_units = shape.batch,
                                .plan = plan};
  if (const cudaError_t error = LaunchPrologue(prologue, stream); error != cudaSuccess) {
    return cudaGetErrorString(error);
  }
  return backend.launch(params, unit_problem, stream);
}

}  // namespace jax_mla::decode::ragged
