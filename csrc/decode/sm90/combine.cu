// The combine kernel for partial results in the orders of Hopper's kernels.
#include "decode/merge/combine.cuh"
#include "decode/sm90/combine.h"

namespace jax_mla::decode::sm90 {
namespace {

// Behind kernels that leave no room for CTAs that wait beside them, a lane takes as many parts at
// once as suit this number: that of the parts of a sequence, or `fixed` if the order of sums has to
// be that of any other batch.
int PartsToExpect(const SplitPlan& plan, int fixed) {
  return plan.schedule.num_splits == 0 ? plan.schedule.seq_workers.value() : fixed;
}
template <DType kDType>
cudaError_t LaunchWgmmaOrder(const DecodeParams& params, const SplitPlan& plan,
                             cudaStream_t stream) {
  constexpr int kFewParts = 8, kManyParts = 16;
  return PartsToExpect(plan, kFewParts) > kManyParts
             ? merge::LaunchMerge<WgmmaVector<kDType, kManyParts>>(params, plan, stream)
             : merge::LaunchMerge<WgmmaVector<kDType, kFewParts>>(params, plan, stream);
}
template <DType kDType>
cudaError_t LaunchLatePackedRows(const DecodeParams& params, const SplitPlan& plan,
                                 cudaStream_t stream) {
  const int parts = PartsToExpect(plan, kMaxLateParts);
  if (parts <= kMaxFewLateParts) {
    return merge::LaunchMerge<LatePackedRowVector<kDType, 8, 4>>(params, plan, stream);
  }
  return parts <= kMaxLateParts
             ? merge::LaunchMerge<LatePackedRowVector<kDType, 8, 8>>(params, plan, stream)
             : merge::LaunchMerge<LatePackedRowVector<kDType, 8, 16>>(params, plan, stream);
}

template <DType kDType>
cudaError_t LaunchOrder(const DecodeParams& params, const SplitPlan& plan, cudaStream_t stream) {
  switch (plan.partials.order) {
    case PartialOrder::kRows:  // of the portable kernel: LaunchCombineRows
      break;
    case PartialOrder::kWgmma:
      return LaunchWgmmaOrder<kDType>(params, plan, stream);
    case PartialOrder::kTransposed:
      return params.d_ckv == 512
                 ? merge::LaunchMerge<TransposedVector<kDType, 8>>(params, plan, stream)
                 : merge::LaunchMerge<TransposedVector<kDType, 4>>(params, plan, stream);
    case PartialOrder::kPackedRows:
      if (params.d_ckv != 512) {
        return merge::LaunchMerge<PackedRowVector<kDType, 4>>(params, plan, stream);
      }
      return plan.resident_merges > 0
                 ? merge::LaunchMerge<PackedRowVector<kDType, 8>>(params, plan, stream)
                 : LaunchLatePackedRows<kDType>(params, plan, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t LaunchCombine(const DecodeParams& params, const SplitPlan& plan, cudaStream_t stream) {
  return params.dtype == DType::kBf16 ? LaunchOrder<DType::kBf16>(params, plan, stream)
                                      : LaunchOrder<DType::kF16>(params, plan, stream);
}

}  // namespace jax_mla::decode::sm90
