#include "decode/ragged/plan.h"
#include "decode/ragged/plan_units.cuh"
#include "gpu/launch.h"

namespace jax_mla::decode::ragged {
namespace {

__global__ void __launch_bounds__(kThreads, 1) Plan(const __grid_constant__ PlanParams p) {
  __shared__ SharedMemory shared;
  gpu::PdlWait();
  gpu::PdlLaunchDependents();
  PlanUnits(p, shared);
}

}  // namespace

cudaError_t LaunchPlan(const PlanParams& params, cudaStream_t stream) {
  const gpu::LaunchConfig config{
      .grid = dim3(1), .block = dim3(kThreads), .stream = stream, .programmatic = true};
  return gpu::Launch<&Plan>(config, params);
}

}  // namespace jax_mla::decode::ragged
