// Runs one call on the CPU. The handlers of both targets use it.
#pragma once

#include <string_view>

#include "decode/cpu/kernel.h"
#include "decode/params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla::decode::cpu {

// The kernel for a call with this `backend=`. `target` is for messages.
xla::ffi::ErrorOr<const Kernel*> FindKernel(std::string_view target, std::string_view backend);

// Runs the plan's tasks on XLA's thread pool. The thread that finishes the last part of a row tile
// merges the partial results of all its parts, in the order of the parts.
xla::ffi::Error Run(std::string_view target, const DecodeParams& params, const Kernel& kernel,
                    xla::ffi::ThreadPool& pool);

}  // namespace jax_mla::decode::cpu
