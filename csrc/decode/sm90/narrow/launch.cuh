// Launch of one instance of the narrow kernel. Only the files that the build makes from the rows of
// instances.inc include it.
#pragma once

#include <string>

#include "append/encode.h"
#include "decode/sm90/common/tensor_map.h"
#include "decode/sm90/narrow/kernel.cuh"
#include "decode/sm90/narrow/launch.h"
#include "decode/sm90/tuning.h"
#include "decode/split/combine.h"
#include "gpu/launch.h"
#include "gpu/online_softmax.cuh"

namespace jax_mla::decode::sm90::narrow {

// The Config of the kernel that takes units.
template <class C>
using UnitConfig = Config<C::kDType, C::kDCkv, C::kDKpe, C::kBlockM, C::kStorage, C::kLoad,
                          C::kTeams, C::kQueries, true>;
// The Config of the kernel that writes new rows.
template <class C>
using AppendConfig = Config<C::kDType, C::kDCkv, C::kDKpe, C::kBlockM, C::kStorage, C::kLoad,
                            C::kTeams, C::kQueries, false, true>;

// Launches the kernel, and the combine kernel behind it.
template <class C>
cudaError_t LaunchKernels(const KernelParams& params, const typename C::Maps& maps, SplitPlan plan,
                          int num_sms, cudaStream_t stream) {
  static_assert(
      C::kResidentMerges == 0 || sizeof(SharedMemory<C>) + kCombineSharedBytes <= kSmSharedBytes,
      "the combine kernel must fit beside this one: take fewer stages");
  static_assert((1 + C::kResidentMerges) * kSystemSharedBytes <= kCombineSharedBytes,
                "the system's share of every resident CTA must fit too: raise kCombineSharedBytes");
  static_assert(sizeof(SharedMemory<C>) <= kSmSharedBytes - kSystemSharedBytes,
                "a CTA must fit an SM: take fewer stages");
  plan.resident_merges = C::kResidentMerges * num_sms;
  const cudaError_t error = gpu::Launch<NarrowDecode<C>>(
      {.grid = dim3(plan.schedule.num_workers, plan.partials.num_row_tiles),
       .block = dim3(C::kThreads),
       .smem_bytes = sizeof(SharedMemory<C>),
       .stream = stream,
       .programmatic = true},
      params, maps);
  return error == cudaSuccess ? LaunchCombine(params.decode, plan, stream) : error;
}

template <class C>
std::string Launch(const DecodeParams& params, const DecodeProblem& problem, cudaStream_t stream) {
  static_assert(C::kBlockM <= kMaxRowTile, "the scratch is sized for tiles of kMaxRowTile rows");
  const int num_sms = problem.device.num_sms;
  SplitPlan plan = MakeSplitPlan(params, NarrowSplit(problem.shape, C::kBlockM, num_sms));
  plan.partials.order = C::kIsFp8 ? PartialOrder::kPackedRows : PartialOrder::kTransposed;
  typename C::Maps maps{};
  CUresult map_error = MakeTensorMaps(params, C::kLoad, C::kBlockM, &maps);
  if constexpr (C::kHasTileScales && C::kLoad == KvLoad::kBoxes) {
    if (map_error == CUDA_SUCCESS) {
      map_error = MakeTileScaleMap(params, &maps.tile_scales);
    }
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
      error = LaunchKernels<UnitConfig<C>>(kernel_params, maps, plan, num_sms, stream);
    }
  } else if (problem.new_rows == nullptr) {
    error = LaunchKernels<C>(kernel_params, maps, plan, num_sms, stream);
  } else if constexpr (C::kMayAppend) {
    error = LaunchKernels<AppendConfig<C>>(kernel_params, maps, plan, num_sms, stream);
  }
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

}  // namespace jax_mla::decode::sm90::narrow

// What the build compiles in a source file of its own for each row of instances.inc.
#define MLA_INSTANCE(dtype, d_ckv, d_kpe, tile_rows, storage, load, teams, queries) \
  template std::string                                                              \
  jax_mla::decode::sm90::narrow::Launch<jax_mla::decode::sm90::narrow::Config<      \
      jax_mla::DType::dtype, d_ckv, d_kpe, tile_rows, jax_mla::KvStorage::storage,  \
      jax_mla::decode::sm90::KvLoad::load, teams,                                   \
      jax_mla::decode::sm90::narrow::QueryStorage::queries>>(                       \
      const jax_mla::decode::DecodeParams&, const jax_mla::decode::DecodeProblem&, cudaStream_t);
