// The combine kernel behind Hopper's kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "decode/params.h"
#include "decode/schedule/plan.h"

namespace jax_mla::decode::sm90 {

// As LaunchCombineRows (merge/combine.h), for all other orders. It starts late behind the wide
// kernel (kWgmma), and where no CTA of it fits beside the decode kernel.
cudaError_t LaunchCombine(const DecodeParams& params, const SplitPlan& plan, cudaStream_t stream);

}  // namespace jax_mla::decode::sm90
