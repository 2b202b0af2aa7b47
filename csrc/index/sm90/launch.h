// Launches Hopper's score kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "gpu/launch.h"
#include "index/launch.h"

namespace jax_mla::index::sm90 {

// Why the kernel cannot serve pages of this size; empty if it can.
std::string WhyNotPageSize(int32_t page_size);

// Enqueues the kernel that writes the keys of a slab. Returns what went wrong; empty if nothing.
std::string LaunchScores(const TopkParams& p, const Slab& slab, const gpu::DeviceFacts& device,
                         cudaStream_t stream);

}  // namespace jax_mla::index::sm90
