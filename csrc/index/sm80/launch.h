// Launches the portable score kernel, for every GPU from sm_80 on.
#pragma once

#include <cuda_runtime_api.h>

#include "gpu/launch.h"
#include "index/launch.h"

namespace jax_mla::index::sm80 {

// Enqueues the kernel that writes the keys of a slab. Serves every call.
cudaError_t LaunchScores(const TopkParams& p, const Slab& slab, const gpu::DeviceFacts& device,
                         cudaStream_t stream);

}  // namespace jax_mla::index::sm80
