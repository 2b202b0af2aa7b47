// A call of units (schedule/units.h) on CUDA: its plan, and the call itself, by any backend.
//
// The plan depends on the lengths of a step, not on its values. It is an FFI call of its own, so
// that XLA makes it once for all layers of a step, as it does with any equal computations.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "append/params.h"
#include "decode/backend.h"
#include "decode/params.h"
#include "decode/ragged/plan.h"

namespace jax_mla::decode::ragged {

// Both take a step for which HasUnits is true: `problem` is the step's, and `backend` takes it.
// They return what went wrong, or "".

// Enqueues the kernel that makes the plan in `plan`, of UnitPlanBytes.
std::string MakePlan(const StepTokens& tokens, void* plan, const DecodeProblem& problem,
                     const DecodeBackend& backend, cudaStream_t stream);

// Enqueues all kernels of the call. `step` has batch sequences; its tokens are those of `append`.
std::string Launch(append::AppendParams append, const DecodeParams& step, void* plan,
                   const DecodeProblem& problem, const DecodeBackend& backend, cudaStream_t stream);

}  // namespace jax_mla::decode::ragged
