// Chooses the vector kernel that this processor runs best.
#pragma once

#include <string>
#include <vector>

#include "decode/cpu/kernel.h"

namespace jax_mla::decode::cpu {

// The kernel that tests ask for, by its name. Read once, by the first call that needs a kernel.
inline constexpr char kKernelVariable[] = "JAX_MLA_CPU_KERNEL";

// The kernels that this processor can run, best first. Never empty.
const std::vector<const Kernel*>& SupportedKernels();

// The kernel that all calls use: the one that kKernelVariable names, or the best one if it is not
// set or empty. Null if this processor can run no kernel of that name.
const Kernel* ChosenKernel();

// Why ChosenKernel is null; empty if it is not.
std::string WhyNoKernel();

}  // namespace jax_mla::decode::cpu
