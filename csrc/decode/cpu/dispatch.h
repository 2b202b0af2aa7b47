// Chooses the vector kernel that this processor runs best.
#pragma once

#include <string_view>
#include <vector>

#include "decode/cpu/kernel.h"

namespace jax_mla::decode {

// The kernels this processor can run, best first. Never empty.
const std::vector<const CpuKernel*>& SupportedCpuKernels();

// The kernel that calls use: the best one, unless a test chose another.
const CpuKernel& ActiveCpuKernel();

// Makes all later calls use the named kernel; false if this processor cannot run it.
bool UseCpuKernel(std::string_view name);

}  // namespace jax_mla::decode
