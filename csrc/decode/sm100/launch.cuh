// The launches of a call: Prepare, CUTLASS's kernel, Finish. None is programmatic, because
// CUTLASS's kernel does not wait for the kernels before it. Only the files that the build makes
// from the rows of instances.inc include it.
#pragma once

#include "decode/sm100/arguments.cuh"
#include "decode/sm100/finish.cuh"
#include "decode/sm100/launch.h"
#include "decode/sm100/prepare.cuh"
#include "gpu/launch.h"

namespace jax_mla::decode::sm100 {

// Prepare, what `launch_mla` launches, Finish.
template <class LaunchMla>
cudaError_t LaunchAround(const DecodeParams& p, const CallPlan& plan, const Buffers& b,
                         cudaStream_t stream, LaunchMla launch_mla) {
  const gpu::LaunchConfig prepare{
      .grid = dim3(plan.batch, kPrepareCtas), .block = dim3(kPrepareThreads), .stream = stream};
  cudaError_t error = gpu::Launch<&Prepare>(prepare, p, plan, b);
  if (error == cudaSuccess && plan.max_tiles > 0) {
    const MlaKernel::Params params = MakeKernelParams(p, plan, b);
    error = HasDescriptors(params) ? launch_mla(params) : cudaErrorInvalidValue;
  }
  if (error != cudaSuccess) return error;
  const gpu::LaunchConfig finish{
      .grid = dim3(plan.num_heads, plan.batch), .block = dim3(kFinishThreads), .stream = stream};
  return gpu::Launch<&Finish>(finish, p, plan, b);
}

template <DType kDType>
cudaError_t LaunchDecode(const DecodeParams& p, const CallPlan& plan, const Buffers& b,
                         cudaStream_t stream) {
  static_assert(kDType == DType::kBf16, "arguments.cuh and finish.cuh have bf16");
  return LaunchAround(p, plan, b, stream, [&](const MlaKernel::Params& params) {
    return gpu::Launch<&cutlass::device_kernel<MlaKernel>>(
        {.grid = MlaKernel::get_grid_shape(params),
         .block = MlaKernel::get_block_shape(),
         .smem_bytes = MlaKernel::SharedStorageSize,
         .stream = stream,
         .cluster = dim3(cute::size<0>(MlaKernel::ClusterShape{}))},
        params);
  });
}

}  // namespace jax_mla::decode::sm100

// What the build compiles for a row of instances.inc, in a source file of its own.
#define MLA_INSTANCE(dtype)                                                             \
  namespace jax_mla::decode::sm100 {                                                    \
  template cudaError_t LaunchDecode<DType::dtype>(const DecodeParams&, const CallPlan&, \
                                                  const Buffers&, cudaStream_t);        \
  }
