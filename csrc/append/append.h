// Launches the append kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "append/params.h"

namespace jax_mla::append {

// Enqueues the copy of all new tokens to their pages, for every element type and width.
cudaError_t LaunchAppend(const AppendParams& params, cudaStream_t stream);

}  // namespace jax_mla::append
