#include "decode/cpu_dispatch.h"

#include <atomic>

namespace jax_mla::decode {

namespace {

std::vector<const CpuKernel*> FindSupported() {
  std::vector<const CpuKernel*> kernels;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    kernels.push_back(&kCpuAvx512);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
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
