#include "decode/ragged/plan.h"
#include "decode/ragged/plan_units.cuh"
#include "gpu/launch.h"

namespace jax_mla::decode::ragged {
namespace {

template <class Params>
__global__ void __launch_bounds__(kThreads, 1) Plan(const __grid_constant__ Params p) {
  __shared__ SharedMemory shared;
  gpu::PdlWait();
  gpu::PdlLaunchDependents();
  PlanUnits(p, shared);
}

template <class Params>
cudaError_t LaunchPlanOf(const Params& params, cudaStream_t stream) {
  const gpu::LaunchConfig config{
      .grid = dim3(1), .block = dim3(kThreads), .stream = stream, .programmatic = true};
  return gpu::Launch<&Plan<Params>>(config, params);
}

}  // namespace

cudaError_t LaunchPlan(const PlanParams& params, cudaStream_t stream) {
  return LaunchPlanOf(params, stream);
}
cudaError_t LaunchPlan(const WindowPlanParams& params, cudaStream_t stream) {
  return LaunchPlanOf(params, stream);
}

}  // namespace jax_mla::decode::ragged
