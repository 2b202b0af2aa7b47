#include <algorithm>

#include "gpu/tensor_map.h"
#include "prefill/sm90/kernel.cuh"
#include "prefill/sm90/launch.h"

namespace jax_mla::prefill::sm90 {
namespace {

static_assert(kChunkRowBytes == gpu::kBoxRowBytes, "a row of a chunk is a row of a TMA box");

// Most keys and values of a group of heads: L2 (50 MB) holds them beside what else passes through.
// docs/kernels/prefill_sm90.md has the times of other sizes.
constexpr int64_t kMaxGroupBytes = int64_t{36} << 20;

// Groups of equal size: a small last one would leave SMs idle at the end.
template <class C>
int32_t HeadsPerGroup(const PrefillParams& call) {
  const int64_t head_bytes = int64_t{call.num_keys} * (C::kDNope + C::kDV) * kElementBytes;
  const int64_t most = std::clamp<int64_t>(kMaxGroupBytes / head_bytes, 1, call.num_heads);
  const int64_t num_groups = (call.num_heads + most - 1) / most;
  return static_cast<int32_t>((call.num_heads + num_groups - 1) / num_groups);
}

// Maps [rows, heads, width] as [width / 64, rows, heads, 64]. A box is all of `width` for some rows
// of one head, and lands as chunks. Coordinates, fastest first: element (0), head, row, chunk (0).
struct RowMap {
  const void* base;
  int32_t num_rows;
  int32_t num_heads;
  int width;
  int box_rows;
  CUtensorMap* map;
};

CUresult MakeRowMap(DType dtype, const RowMap& row_map) {
  const auto chunks = static_cast<cuuint32_t>(NumChunks(row_map.width));
  const cuuint64_t head_bytes = static_cast<cuuint64_t>(row_map.width) * kElementBytes;
  const auto num_heads = static_cast<cuuint64_t>(row_map.num_heads);
  return gpu::MakeTensorMap(
      {.dtype = dtype,
       .base = row_map.base,
       .dims = {static_cast<cuuint64_t>(std::min(row_map.width, kChunkDims)), num_heads,
                static_cast<cuuint64_t>(row_map.num_rows), chunks},
       .stride_bytes = {head_bytes, head_bytes * num_heads, kChunkRowBytes},
       .box = {kChunkDims, 1, static_cast<cuuint32_t>(row_map.box_rows), chunks}},
      row_map.map);
}

template <class C>
CUresult MakeTensorMaps(const PrefillParams& call, TensorMaps* maps) {
  const int32_t heads = call.num_heads;
  for (const RowMap& row_map : {
           RowMap{call.q_nope, call.num_queries, heads, C::kDNope, kBlockM, &maps->q_nope},
           RowMap{call.q_pe, call.num_queries, heads, C::kDKpe, kBlockM, &maps->q_pe},
           RowMap{call.k_nope, call.num_keys, heads, C::kDNope, C::kBlockN, &maps->k_nope},
           RowMap{call.kpe, call.num_keys, 1, C::kDKpe, C::kBlockN, &maps->kpe},
           RowMap{call.v, call.num_keys, heads, C::kDV, C::kBlockN, &maps->v},
       }) {
    const CUresult error = MakeRowMap(C::kDType, row_map);
    if (error != CUDA_SUCCESS) return error;
  }
  return CUDA_SUCCESS;
}

template <class C>
std::string LaunchKernel(const PrefillParams& call, const gpu::DeviceFacts& device,
                         cudaStream_t stream) {
  static_assert(sizeof(SharedMemory<C>) <= gpu::kHopperSharedBytes,
                "shorten the ring or its blocks");
  TensorMaps maps{};
  if (const CUresult error = MakeTensorMaps<C>(call, &maps); error != CUDA_SUCCESS) {
    return "cuTensorMapEncodeTiled failed with CUresult " + std::to_string(error);
  }
  const int64_t max_items = (int64_t{call.num_queries} / kBlockM + call.num_seqs) * call.num_heads;
  const auto num_ctas = static_cast<unsigned>(std::clamp<int64_t>(max_items, 1, device.num_sms));
  cudaError_t error = cudaMemsetAsync(call.next_item, 0, sizeof(int32_t), stream);
  if (error == cudaSuccess) {
    error = gpu::Launch<PrefillAttention<C>>({.grid = dim3(num_ctas),
                                              .block = dim3(kNumThreads),
                                              .smem_bytes = sizeof(SharedMemory<C>),
                                              .stream = stream},
                                             KernelParams{call, HeadsPerGroup<C>(call)}, maps);
  }
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

// Calls `use` with a Config (a value of that type) of these sizes. Returns whether there is one.
template <DType kDType, class Use>
bool WithConfig(int d_nope, int d_kpe, int d_v, Use use) {
  const auto use_if = [&]<class C>(C config) {
    if (C::kDNope != d_nope || C::kDKpe != d_kpe || C::kDV != d_v) return false;
    use(config);
    return true;
  };
  return use_if(Config<kDType, 128, 64, 128, 128>{}) ||  // DeepSeek, Kimi
         use_if(Config<kDType, 192, 64, 256, 64>{}) ||   // GLM
         use_if(Config<kDType, 64, 64, 128, 128>{}) ||   // Mistral
         use_if(Config<kDType, 64, 32, 64, 128>{});      // MiniCPM3
}

}  // namespace

bool HasKernel(int d_nope, int d_kpe, int d_v) {
  return WithConfig<DType::kBf16>(d_nope, d_kpe, d_v, [](auto) {});
}

std::string Launch(const PrefillParams& call, const gpu::DeviceFacts& device, cudaStream_t stream) {
  std::string problem = "no kernel of these sizes";
  const auto launch = [&]<class C>(C) { problem = LaunchKernel<C>(call, device, stream); };
  if (call.dtype == DType::kF16) {
    WithConfig<DType::kF16>(call.d_nope, call.d_kpe, call.d_v, launch);
  } else {
    WithConfig<DType::kBf16>(call.d_nope, call.d_kpe, call.d_v, launch);
  }
  return problem;
}

}  // namespace jax_mla::prefill::sm90
