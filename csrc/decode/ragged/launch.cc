#include "decode/ragged/launch.h"

#include "append/append.h"
#include "append/encode.h"
#include "decode/ragged/rows.h"
#include "decode/schedule/plan.h"
#include "decode/schedule/unit_plan.h"

namespace jax_mla::decode::ragged {
namespace {

// The shape of the call of units becomes that of `params`.
void SetShape(const DecodeShape& shape, DecodeParams& params) {
  params.batch = shape.batch;
  params.q_len = shape.q_len;
  params.num_heads = shape.num_heads;
  params.num_splits = shape.num_splits;
  params.batch_invariant = shape.batch_invariant;
  params.max_seq_len = shape.max_seq_len;
  // The shape's, not the buffer's: it decides how many workers the schedule has.
  params.scratch_bytes = DecodeScratchBytes(shape);
}

// What decides the schedule of a call of units: its shape alone.
DecodeParams ShapeParams(const DecodeShape& shape) {
  DecodeParams params{};
  params.dtype = shape.dtype;
  params.kv_format = shape.kv_format;
  params.d_ckv = shape.d_ckv;
  params.d_kpe = shape.d_kpe;
  params.page_size = shape.page_size;
  params.max_pages_per_seq = shape.max_pages_per_seq;
  SetShape(shape, params);
  return params;
}

// The parameters of the call of units that a step becomes.
DecodeParams UnitParams(const DecodeParams& step, const DecodeShape& shape, int32_t num_tokens,
                        const UnitPlan& plan) {
  DecodeParams params = step;
  SetShape(shape, params);
  params.seq_lens = plan.unit_lens;
  params.units = {.units = plan.units,
                  .starts = plan.starts,
                  .num_busy = plan.num_busy,
                  .num_rows = num_tokens * step.num_heads,
                  .heads_per_token = step.num_heads};
  return params;
}

}  // namespace

std::string MakePlan(const StepTokens& tokens, void* plan, const DecodeProblem& problem,
                     const DecodeBackend& backend, cudaStream_t stream) {
  const DecodeShape shape = UnitCallShape(problem.shape, tokens.num_tokens);
  const UnitPlan unit_plan = MakeUnitPlan(problem.shape, tokens.num_tokens, plan);
  ScheduleParams schedule =
      backend.plan_units(ShapeParams(shape), {problem.device, shape, problem.variant}).schedule;
  if (schedule.num_workers > kMaxUnitWorkers) {
    return "needs at most " + std::to_string(kMaxUnitWorkers) + " SMs, got " +
           std::to_string(schedule.num_workers);
  }
  schedule.seq_lens = unit_plan.unit_lens;
  const PlanParams params{.tokens = tokens,
                          .num_heads = problem.shape.num_heads,
                          .schedule = schedule,
                          .unit_rows = shape.num_heads,
                          .max_units = shape.batch,
                          .plan = unit_plan};
  const auto launch = [&] {
    const DecodeShape& step = problem.shape;
    if (step.sliding_window == kNoWindow) return LaunchPlan(params, stream);
    return LaunchPlan(
        WindowPlanParams{params, step.sliding_window, step.page_size, step.max_seq_len}, stream);
  };
  const cudaError_t error = launch();
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

std::string Launch(append::AppendParams append, const DecodeParams& step, void* plan,
                   const DecodeProblem& problem, const DecodeBackend& backend,
                   cudaStream_t stream) {
  const DecodeShape shape = UnitCallShape(problem.shape, append.num_tokens);
  const UnitPlan unit_plan = MakeUnitPlan(problem.shape, append.num_tokens, plan);
  append.places = unit_plan.places;
  append.padding = {.out = step.out, .lse = step.lse, .num_heads = step.num_heads};
  // Either kernel waits for all before it, and only then lets the decode kernel start.
  const cudaError_t error = append::HasEncoding(append) ? append::LaunchAppend(append, stream)
                                                        : LaunchRows(append, stream);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  return backend.launch(UnitParams(step, shape, append.num_tokens, unit_plan),
                        {problem.device, shape, problem.variant}, stream);
}

}  // namespace jax_mla::decode::ragged
