// Host entry of the wide kernel. instances.inc lists the dtypes and dims that are compiled.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "decode/backend.h"
#include "decode/sm90/wide/config.h"

namespace jax_mla::decode::sm90::wide {

// Enqueues the kernels of one call whose dtype, dims and way to load KV are C's. Returns "" or what
// went wrong.
template <class C>
std::string Launch(const DecodeParams& params, const DecodeProblem& problem, cudaStream_t stream);

}  // namespace jax_mla::decode::sm90::wide
