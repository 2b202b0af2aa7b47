#include "decode/cpu/dispatch.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace jax_mla::decode {

namespace {

#if defined(__x86_64__)
// Not every compiler's __builtin_cpu_supports knows the name.
bool HasF16c() {
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

std::vector<const CpuKernel*> FindSupported() {
  std::vector<const CpuKernel*> kernels;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    kernels.push_back(&kCpuAvx512);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && HasF16c()) {
    kernels.push_back(&kCpuAvx2);
  }
#endif
  kernels.push_back(&kCpuBaseline);
  return kernels;
}

std::atomic<const CpuKernel*>& Active() {
  static std::atomic<const CpuKernel*> active = SupportedCpuKernels().front();
  return active;
}

}  // namespace

const std::vector<const CpuKernel*>& SupportedCpuKernels() {
  static const std::vector<const CpuKernel*> kernels = FindSupported();
  return kernels;
}

const CpuKernel& ActiveCpuKernel() { return *Active().load(); }

bool UseCpuKernel(std::string_view name) {
  for (const CpuKernel* kernel : SupportedCpuKernels()) {
    if (kernel->name == name) {
      Active().store(kernel);
      return true;
    }
  }
  return false;
}

}  // namespace jax_mla::decode
