// What tests/cuda/plan_units.cu needs to run on the host: the kernel's launch, and device memory.
#include "decode/ragged/plan_units.cuh"

#include <cstdlib>
#include <cstring>

#include "decode/ragged/plan.h"

namespace jax_mla::decode::ragged {

template <class Params>
cudaError_t RunOnHost(const Params& params) {
  static SharedMemory shared;
  std::memset(&shared, 0x5a, sizeof(shared));
  host::RunCta(kThreads, [&] { PlanUnits(params, shared); });
  return cudaSuccess;
}

cudaError_t LaunchPlan(const PlanParams& params, cudaStream_t) { return RunOnHost(params); }
cudaError_t LaunchPlan(const WindowPlanParams& params, cudaStream_t) { return RunOnHost(params); }

}  // namespace jax_mla::decode::ragged

extern "C" {

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = std::malloc(bytes);
  return *memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "out of memory"; }

}  // extern "C"
