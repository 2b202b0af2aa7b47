// Which kernels run a call of index_topk on a GPU, without FFI types.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <string_view>

#include "gpu/launch.h"
#include "index/params.h"

namespace jax_mla::index {

// Enqueues all kernels of the call. `backend` is "sm90" or "sm80", or empty: the best. Returns what
// is wrong; empty if nothing is.
std::string RunCuda(const TopkParams& p, std::string_view backend, const gpu::DeviceFacts& device,
                    cudaStream_t stream);

}  // namespace jax_mla::index
