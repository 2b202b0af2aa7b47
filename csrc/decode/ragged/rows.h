// The kernel in front of the decode kernel of a call of units whose new rows are written as they
// came: it copies them, and clears the results of padding.
#pragma once

#include <cuda_runtime_api.h>

#include "append/params.h"

namespace jax_mla::decode::ragged {

// `params` has places and padding.
cudaError_t LaunchRows(const append::AppendParams& params, cudaStream_t stream);

}  // namespace jax_mla::decode::ragged
