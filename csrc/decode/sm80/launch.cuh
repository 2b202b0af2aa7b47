// The host side of the portable kernel: it picks the tile, divides shared memory into stages, and
// launches the decode and combine kernels. Only the files that the build makes from the rows of
// instances.inc include it.
#pragma once

#include "decode/merge/combine.h"
#include "decode/sm80/kernel.cuh"
#include "decode/sm80/launch.h"

namespace jax_mla::decode::sm80 {

template <class C>
cudaError_t LaunchTile(const DecodeParams& params, const gpu::DeviceFacts& device,
                       const SharedMemoryClass& smem, cudaStream_t stream) {
  static_assert(C::kBlockM <= kMaxRowTile,
                "scratch is sized for tiles of at most kMaxRowTile rows");
  constexpr int kFixedBytes = static_cast<int>(sizeof(SharedMemoryPlan<C>));
  const auto stages_in = [](int bytes) {
    return std::min((bytes - kFixedBytes) / C::kStageBytes, kMaxStages);
  };
  // The combine kernel should fit beside this one, but two stages are worth more than that.
  const int with_combine = stages_in(smem.bytes - kCombineSharedBytes);
  const int num_stages = with_combine >= kMinStages ? with_combine : stages_in(smem.bytes);
  if (num_stages < kMinStages) return cudaErrorInvalidConfiguration;

  const SplitPlan plan = MakeTilePlan(params, device, C::kBlockM);
  const gpu::LaunchConfig config{
      .grid = dim3(plan.partials.num_row_tiles, plan.schedule.num_workers),
      .block = dim3(kNumThreads),
      .smem_bytes = kFixedBytes + num_stages * C::kStageBytes,
      .stream = stream,
      .programmatic = true,
  };
  const cudaError_t error = gpu::Launch<&DecodeKernel<C>>(config, params, plan, num_stages);
  return error != cudaSuccess ? error : LaunchCombineRows(params, plan, stream);
}

template <DType kDType, KvStorage kStorage, int kDCkv, int kDKpe, bool kHasMasks>
cudaError_t LaunchDecode(const DecodeParams& params, const gpu::DeviceFacts& device,
                         const SharedMemoryClass& smem, cudaStream_t stream) {
  const int block_m = BlockM(smem, kDCkv, params.q_len * params.num_heads);
  const auto launch = [&]<int kBlockM, int kBlockN>() {
    using C = Config<kDType, kStorage, kDCkv, kDKpe, kBlockM, kBlockN, kHasMasks>;
    return LaunchTile<C>(params, device, smem, stream);
  };
  if constexpr (!HasAllTiles(kDCkv)) {
    return block_m == 16 ? launch.template operator()<16, RareBlockN(kDCkv)>()
                         : launch.template operator()<kRareMaxBlockM, RareBlockN(kDCkv)>();
  } else {
    const bool large_stage = BlockN(smem, kDCkv, block_m) == kLargeBlockN;
    switch (block_m) {
      case 16:
        return large_stage ? launch.template operator()<16, kLargeBlockN>()
                           : launch.template operator()<16, kSmallBlockN>();
      case 32:
        return launch.template operator()<32, kSmallBlockN>();
      default:
        return large_stage ? launch.template operator()<64, kLargeBlockN>()
                           : launch.template operator()<64, kSmallBlockN>();
    }
  }
}

template <DType kDType, KvStorage kStorage, int kDCkv, int kDKpe, bool kHasMasks>
int32_t DecodeArchitecture() {
  // A kernel that every build has.
  constexpr int kBlockN = HasAllTiles(kDCkv) ? kSmallBlockN : RareBlockN(kDCkv);
  using C = Config<kDType, kStorage, kDCkv, kDKpe, 16, kBlockN, kHasMasks>;
  return gpu::CodeArchitecture<&DecodeKernel<C>>();
}

}  // namespace jax_mla::decode::sm80

// What the build compiles for a row of instances.inc, in a source file of its own.
#define MLA_INSTANCE(dtype, storage, d_ckv, d_kpe)                                              \
  namespace jax_mla::decode::sm80 {                                                             \
  template cudaError_t LaunchDecode<DType::dtype, KvStorage::storage, d_ckv, d_kpe, false>(     \
      const DecodeParams&, const gpu::DeviceFacts&, const SharedMemoryClass&, cudaStream_t);    \
  template int32_t DecodeArchitecture<DType::dtype, KvStorage::storage, d_ckv, d_kpe, false>(); \
  }
