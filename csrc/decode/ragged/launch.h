// A ragged call on CUDA: append, and attention over units (split/units.h) by any backend.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "append/params.h"
#include "decode/backend.h"
#include "decode/params.h"

namespace jax_mla::decode::ragged {

// Enqueues all kernels of a call for which HasUnits is true. `step` has batch sequences; its tokens
// are those of `append`. `backend` takes the step, and `problem` is the step's. Returns what went
// wrong, or "".
std::string Launch(const append::AppendParams& append, const DecodeParams& step,
                   const DecodeProblem& problem, const DecodeBackend& backend, cudaStream_t stream);

}  // namespace jax_mla::decode::ragged
