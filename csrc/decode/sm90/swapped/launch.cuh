// Launches one instance of a kernel with swapped operands. Only the launch.cuh of these kernels
// include it.
#pragma once

#include <string>

#include "decode/backend.h"
#include "decode/merge/combine.h"
#include "decode/sm90/combine.h"
#include "decode/sm90/common/load/queries.cuh"
#include "decode/sm90/common/tensor_map.h"
#include "decode/sm90/swapped/params.cuh"
#include "decode/sm90/tuning.h"
#include "gpu/launch.h"
#include "gpu/online_softmax.cuh"

namespace jax_mla::decode::sm90 {

// Shared memory of a Hopper SM, and what the system takes of it for every CTA. The combine kernel's
// CTAs that are resident beside one of these share the SM's memory with it.
inline constexpr int kSmSharedBytes = 228 * 1024;
inline constexpr int kSystemSharedBytes = 1024;

// Launches the kernel, and the combine kernel behind it.
template <template <class> class Kernel, class C>
cudaError_t LaunchKernels(const KernelParams& params, const typename C::Maps& maps, SplitPlan plan,
                          int num_sms, cudaStream_t stream) {
  using Shared = typename C::Shared;
  constexpr int kMerges = C::kBudget.resident_merges;
  static_assert(kMerges == 0 || sizeof(Shared) + kCombineSharedBytes <= kSmSharedBytes,
                "the combine kernel must fit beside this one: take fewer stages");
  static_assert((1 + kMerges) * kSystemSharedBytes <= kCombineSharedBytes,
                "the system's share of every resident CTA must fit too: raise kCombineSharedBytes");
  static_assert(sizeof(Shared) <= kSmSharedBytes - kSystemSharedBytes,
                "a CTA must fit an SM: take fewer stages");
  plan.resident_merges = kMerges * num_sms;
  const cudaError_t error = gpu::Launch<Kernel<C>::kFunction>(
      {.grid = dim3(plan.schedule.num_workers, plan.partials.num_row_tiles),
       .block = dim3(C::kThreads),
       .smem_bytes = sizeof(Shared),
       .stream = stream,
       .programmatic = true},
      params, maps);
  return error == cudaSuccess ? LaunchCombine(params.decode, plan, stream) : error;
}

template <template <class> class Kernel, class C>
std::string LaunchSwapped(const DecodeParams& params, const DecodeProblem& problem,
                          cudaStream_t stream) {
  static_assert(C::kTileRows <= kMaxRowTile, "the scratch is sized for tiles of kMaxRowTile rows");
  const int num_sms = problem.device.num_sms;
  SplitPlan plan = MakeSplitPlan(params, NarrowSplit(problem.shape, C::kTileRows, num_sms));
  plan.partials.order = C::kHasCodes ? PartialOrder::kPackedRows : PartialOrder::kTransposed;
  typename C::Maps maps{};
  CUresult map_error = MakeTensorMaps(params, C::kLoad, C::kTileRows, &maps);
  if constexpr (C::kHasTileScales && C::kLoad == KvLoad::kBoxes) {
    if (map_error == CUDA_SUCCESS) map_error = MakeTileScaleMap(params, &maps.tile_scales);
  }
  if (map_error != CUDA_SUCCESS) {
    return "cuTensorMapEncodeTiled failed with CUresult " + std::to_string(map_error);
  }
  const KernelParams kernel_params{.decode = params,
                                   .schedule = plan.schedule,
                                   .partials = plan.partials,
                                   .scale_log2 = params.sm_scale * gpu::kLog2E,
                                   .page_size = Divisor(params.page_size),
                                   .num_heads = Divisor(params.RowsPerToken()),
                                   .new_rows = MakeNewRows(problem.new_rows),
                                   .gather_policy = GatherPolicy(params)};
  cudaError_t error = cudaErrorNotSupported;
  if (params.units.units != nullptr) {
    if constexpr (C::kMayTakeUnits) {
      error =
          LaunchKernels<Kernel, typename C::WithUnits>(kernel_params, maps, plan, num_sms, stream);
    }
  } else if (problem.new_rows == nullptr) {
    error = LaunchKernels<Kernel, C>(kernel_params, maps, plan, num_sms, stream);
  } else if constexpr (C::kMayAppend) {
    error =
        LaunchKernels<Kernel, typename C::WithAppend>(kernel_params, maps, plan, num_sms, stream);
  }
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

}  // namespace jax_mla::decode::sm90
