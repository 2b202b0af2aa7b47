// The combine kernel behind Hopper's kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "decode/params.h"
#include "decode/schedule/plan.h"

namespace jax_mla::decode::sm90 {

// As LaunchCombineRows (merge/combine.h), for all other orders. With kWgmma, that of the wide
// kernel, it starts late.
cudaError_t LaunchCombine(const DecodeParams& params, const SplitPlan& plan, cudaStream_t stream);

}  // namespace jax_mla::decode::sm90
