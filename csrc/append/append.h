// Launches the append kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "append/params.h"

namespace jax_mla::append {

// Enqueues the kernel that writes all new tokens to their pages, and rotates their queries if the
// call has some. For every element type, format and width.
cudaError_t LaunchAppend(const AppendParams& params, cudaStream_t stream);

}  // namespace jax_mla::append
