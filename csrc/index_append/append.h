// The launcher of index_append on CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include "index_append/params.h"

namespace jax_mla::index_append {

// Width of a key that the kernel takes.
inline constexpr int32_t kCudaDim = 128;

// Enqueues one kernel. The keys have kCudaDim values.
cudaError_t LaunchIndexAppend(const IndexAppendParams& params, cudaStream_t stream);

}  // namespace jax_mla::index_append
