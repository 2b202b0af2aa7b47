// Hopper's prefill kernel, for whoever launches it.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "gpu/launch.h"
#include "prefill/params.h"

namespace jax_mla::prefill::sm90 {

// Whether there is a kernel of these sizes.
bool HasKernel(int d_nope, int d_kpe, int d_v);

// Enqueues the attention of one call. Returns what went wrong, or an empty string.
std::string Launch(const PrefillParams& params, const gpu::DeviceFacts& device,
                   cudaStream_t stream);

}  // namespace jax_mla::prefill::sm90
