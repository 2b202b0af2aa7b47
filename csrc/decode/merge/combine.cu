// The combine kernel for partial results in rows of float32 (PartialOrder::kRows).
#include "decode/merge/combine.cuh"
#include "decode/merge/combine.h"

namespace jax_mla::decode {

cudaError_t LaunchCombineRows(const DecodeParams& params, const SplitPlan& plan,
                              cudaStream_t stream) {
  return params.dtype == DType::kBf16
             ? merge::LaunchMerge<FloatVector<DType::kBf16>>(params, plan, stream)
             : merge::LaunchMerge<FloatVector<DType::kF16>>(params, plan, stream);
}

}  // namespace jax_mla::decode
