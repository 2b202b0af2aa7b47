// The kernel that merges the partial results of split sequences (combine.cuh). Shared by all CUDA
// backends; sm90/combine.cu has the instances for the orders of Hopper's kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "decode/params.h"
#include "decode/schedule/plan.h"

namespace jax_mla::decode {

// Merges the partials of all split sequences, in PartialOrder::kRows, into params.out and
// params.lse. Launched with programmatic dependent launch: the decode kernel must execute
// griddepcontrol.wait before griddepcontrol.launch_dependents (gpu/launch.h), and the merge
// overlaps its tail. To be resident beside the decode kernel it needs kCombineSharedBytes of shared
// memory and, for each CTA, kCombineThreads threads with their registers.
cudaError_t LaunchCombineRows(const DecodeParams& params, const SplitPlan& plan,
                              cudaStream_t stream);

// Of at most 64 registers with kRows, 80 beside a decode kernel (kTransposed, kPackedRows), and 168
// where it starts late.
inline constexpr int32_t kCombineThreads = 128;
// What a decode kernel that fills an SM has to leave free. The combine kernel has no shared memory
// of its own: this is the 1 KiB of system use of every CTA, the decode kernel's included, so that
// up to three CTAs of it fit.
inline constexpr int32_t kCombineSharedBytes = 4096;

}  // namespace jax_mla::decode
