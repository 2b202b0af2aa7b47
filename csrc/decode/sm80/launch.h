// Entry points of the portable kernel, one for each row of instances.inc and masked/instances.inc.
#pragma once

#include <cuda_runtime_api.h>

#include "core/kv_format.h"
#include "decode/params.h"
#include "decode/schedule/plan.h"
#include "decode/sm80/config.h"
#include "gpu/launch.h"

namespace jax_mla::decode::sm80 {

// The split of a call into row tiles of block_m.
inline SplitPlan MakeTilePlan(const DecodeParams& params, const gpu::DeviceFacts& device,
                              int block_m) {
  return MakeSplitPlan(params,
                       {.block_m = block_m, .num_ctas = device.num_sms, .seq_cost = kSeqCost});
}

// Enqueues the decode and combine kernels, with the tiles of `smem`.
template <DType kDType, KvStorage kStorage, int kDCkv, int kDKpe, bool kHasMasks>
cudaError_t LaunchDecode(const DecodeParams& params, const gpu::DeviceFacts& device,
                         const SharedMemoryClass& smem, cudaStream_t stream);

// The architecture that the code on the current device was compiled for (gpu::CodeArchitecture).
template <DType kDType, KvStorage kStorage, int kDCkv, int kDKpe, bool kHasMasks>
int32_t DecodeArchitecture();

}  // namespace jax_mla::decode::sm80
