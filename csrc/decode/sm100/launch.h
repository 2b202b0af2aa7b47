// Entry point of CUTLASS's kernel and the two around it, one for each element type (instances.inc).
#pragma once

#include <cuda_runtime_api.h>

#include "core/kv_format.h"
#include "decode/params.h"
#include "decode/sm100/buffers.h"

namespace jax_mla::decode::sm100 {

template <DType kDType>
cudaError_t LaunchDecode(const DecodeParams& params, const CallPlan& plan, const Buffers& buffers,
                         cudaStream_t stream);

}  // namespace jax_mla::decode::sm100
