// Launches one instance of the wide kernel. Only the source files that the build makes from the
// rows of instances.inc include this file.
#pragma once

#include <string>

#include "decode/sm90/combine.h"
#include "decode/sm90/common/tensor_map.h"
#include "decode/sm90/tuning.h"
#include "decode/sm90/wide/kernel.cuh"
#include "decode/sm90/wide/launch.h"
#include "gpu/launch.h"

namespace jax_mla::decode::sm90::wide {

// The Config of the kernel for calls of units.
template <class C>
using UnitConfig = Config<C::kDType, C::kDCkv, C::kDKpe, C::kLoad, C::kMerge, true>;
// The Config of the kernel whose partial results the combine kernel merges.
template <class C>
using CombineConfig = Config<C::kDType, C::kDCkv, C::kDKpe, C::kLoad, Merge::kCombine>;
// The Config of the kernel that writes new rows.
template <class C>
using AppendConfig = Config<C::kDType, C::kDCkv, C::kDKpe, C::kLoad, C::kMerge, false, true>;

template <class C>
cudaError_t LaunchKernel(const WideParams& params, const typename C::Maps& maps,
                         cudaStream_t stream) {
  const bool may_merge = C::kMerge == Merge::kInside && params.plan.may_split;
  return gpu::Launch<WideDecode<C>>(
      {.grid = dim3(params.plan.partials.num_row_tiles, params.plan.schedule.num_workers),
       .block = dim3(C::kNumThreads),
       .smem_bytes = sizeof(SharedMemory<C>),
       .stream = stream,
       .programmatic = true,
       .cooperative = may_merge,
       .cluster = dim3(1, params.plan.schedule.cluster_size)},
      params, maps);
}

// Whether this kernel can merge where the call has units: the gather's producer would spill.
template <class C>
inline constexpr bool kUnitsMayMerge = C::kLoad != KvLoad::kGather;

// The same for any call; the kernel writes its new rows, if it has any.
template <class C>
cudaError_t LaunchAny(const WideParams& params, const UnitTensorMaps& maps, cudaStream_t stream) {
  if (params.decode.units.units != nullptr) {
    if constexpr (C::kMayTakeUnits && (C::kMerge == Merge::kCombine || kUnitsMayMerge<C>)) {
      return LaunchKernel<UnitConfig<C>>(params, maps, stream);
    }
    return cudaErrorNotSupported;
  }
  if (params.new_rows.call.ckv == nullptr) return LaunchKernel<C>(params, maps, stream);
  if constexpr (C::kMayAppend) {
    return LaunchKernel<AppendConfig<C>>(params, maps, stream);
  }
  return cudaErrorNotSupported;
}

template <class C>
std::string Launch(const DecodeParams& params, const DecodeProblem& problem, cudaStream_t stream) {
  static_assert(kTileRows <= kMaxRowTile, "scratch is sized for tiles of at most kMaxRowTile rows");
  const int num_clusters =
      gpu::MaxActiveClusters<WideDecode<C>>(C::kNumThreads, sizeof(SharedMemory<C>));
  const int num_sms = problem.device.num_sms;
  const bool has_units = params.units.units != nullptr;
  SplitPlan plan = MakeSplitPlan(
      params, has_units ? UnitSplit(problem.shape, num_sms)
                        : WideSplit(problem.shape, num_sms, 2 * num_clusters >= num_sms));
  const int num_tiles = plan.partials.num_row_tiles;
  plan.partials.order = PartialOrder::kWgmma;
  // The device decides whether CTAs interleave (BeginProducer), where neighbouring CTAs need not be
  // neighbouring workers: with several row tiles they are the tiles of one worker, and in a cluster
  // they share a sequence.
  const bool may_interleave =
      num_tiles == 1 && plan.schedule.num_splits == 0 && plan.schedule.cluster_size == 1;
  plan.schedule.cta_interleave = may_interleave ? 1 : 0;
  UnitTensorMaps maps{};
  CUresult map_error = MakeTensorMaps(params, C::kLoad, kTileRows, &maps);
  if (has_units && map_error == CUDA_SUCCESS) map_error = MakeTokenMaps(params, kTileRows, &maps);
  if (map_error != CUDA_SUCCESS) {
    return "cuTensorMapEncodeTiled failed with CUresult " + std::to_string(map_error);
  }
  const int num_ctas = plan.schedule.num_workers * plan.partials.num_row_tiles;
  const WideParams wide_params{.decode = params,
                               .plan = plan,
                               .rows_per_tile = plan.partials.block_m,
                               .page_size = Divisor(params.page_size),
                               .num_heads = Divisor(params.RowsPerToken()),
                               .new_rows = MakeNewRows(problem.new_rows),
                               .gather_policy = GatherPolicy(params)};
  // Merging inside the kernel needs all CTAs to run at once and at most kMaxMergeParts parts a
  // sequence. With a fixed number of parts neither is certain, and a worker may have more than two.
  // The combine kernel starts late, but it is faster with many parts (MinCombineParts).
  const bool fits =
      !plan.may_split || (num_ctas <= num_sms && plan.schedule.num_workers <= kMaxMergeParts);
  const bool has_many_parts = plan.schedule.seq_workers.value() >= MinCombineParts(num_tiles);
  const bool merges_inside =
      plan.schedule.num_splits == 0 && fits && !has_many_parts && (!has_units || kUnitsMayMerge<C>);
  cudaError_t error;
  if (merges_inside) {
    error = LaunchAny<C>(wide_params, maps, stream);
  } else {
    error = LaunchAny<CombineConfig<C>>(wide_params, maps, stream);
    if (error == cudaSuccess) error = LaunchCombine(params, plan, stream);
  }
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

}  // namespace jax_mla::decode::sm90::wide

// What the build compiles in a source file of its own for each row of instances.inc.
#define MLA_INSTANCE(dtype, d_ckv, d_kpe, load)                                                 \
  template std::string jax_mla::decode::sm90::wide::Launch<jax_mla::decode::sm90::wide::Config< \
      jax_mla::DType::dtype, d_ckv, d_kpe, jax_mla::decode::sm90::KvLoad::load>>(               \
      const jax_mla::decode::DecodeParams&, const jax_mla::decode::DecodeProblem&, cudaStream_t);
