// Host entry of the kernel with query codes; instances.inc lists the Configs that are compiled.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "decode/backend.h"
#include "decode/sm90/codes64/config.h"

namespace jax_mla::decode::sm90::codes64 {

// Enqueues decode and combine of one call whose shape fits C. "" or what went wrong.
template <class C>
std::string Launch(const DecodeParams& params, const DecodeProblem& problem, cudaStream_t stream);

}  // namespace jax_mla::decode::sm90::codes64
