#include "decode/cpu/dispatch.h"

#include <cstdlib>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace jax_mla::decode::cpu {

namespace {

#if defined(__x86_64__)
// Asks the processor itself, because not every compiler's __builtin_cpu_supports knows f16c.
bool HasF16c() {
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

std::vector<const Kernel*> FindSupported() {
  std::vector<const Kernel*> kernels;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    kernels.push_back(&kAvx512);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && HasF16c()) {
    kernels.push_back(&kAvx2);
  }
#endif
  kernels.push_back(&kBaseline);
  return kernels;
}

const Kernel* Choose() {
  const char* variable = std::getenv(kKernelVariable);
  const std::string_view name = variable == nullptr ? "" : variable;
  for (const Kernel* kernel : SupportedKernels()) {
    if (name.empty() || name == kernel->name) return kernel;
  }
  return nullptr;
}

}  // namespace

const std::vector<const Kernel*>& SupportedKernels() {
  static const std::vector<const Kernel*> kernels = FindSupported();
  return kernels;
}

const Kernel* ChosenKernel() {
  static const Kernel* const chosen = Choose();
  return chosen;
}

std::string WhyNoKernel() {
  if (ChosenKernel() != nullptr) return "";
  std::string names;
  for (const Kernel* kernel : SupportedKernels()) {
    names += std::string(names.empty() ? "" : ", ") + kernel->name;
  }
  const char* variable = std::getenv(kKernelVariable);
  return std::string(kKernelVariable) + ": expected one of " + names + ", got '" +
         (variable == nullptr ? "" : variable) + "'";
}

}  // namespace jax_mla::decode::cpu
