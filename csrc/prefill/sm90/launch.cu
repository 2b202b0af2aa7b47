#include <algorithm>

#include "gpu/tensor_map.h"
#include "prefill/sm90/kernel.cuh"
#include "prefill/sm90/launch.h"

namespace jax_mla::prefill::sm90 {
namespace {

// Most keys and values of a group of heads: L2 (50 MB) holds them beside what else passes through.
constexpr int64_t kMaxGroupBytes = int64_t{36} << 20;

// Groups of equal size: a small last one would leave SMs idle at the end.
int32_t HeadsPerGroup(const PrefillParams& call) {
  const int64_t head_bytes = int64_t{call.num_keys} * (kDNope + kDV) * ElementBytes(call.dtype);
  const int64_t most = std::clamp<int64_t>(kMaxGroupBytes / head_bytes, 1, call.num_heads);
  const int64_t num_groups = (call.num_heads + most - 1) / most;
  return static_cast<int32_t>((call.num_heads + num_groups - 1) / num_groups);
}

// Maps [rows, heads, width] as [width / 64, rows, heads, 64]. A box is all of `width` for 128 rows
// of one head, and lands as chunks. Coordinates, fastest first: element (0), head, row, chunk (0).
CUresult MakeRowMap(const PrefillParams& call, const void* base, int32_t num_rows,
                    int32_t num_heads, int width, CUtensorMap* map) {
  const auto chunks = static_cast<cuuint32_t>(width / kChunkDims);
  const cuuint64_t head_bytes = static_cast<cuuint64_t>(width) * ElementBytes(call.dtype);
  return gpu::MakeTensorMap(
      {.dtype = call.dtype,
       .base = base,
       .dims = {kChunkDims, static_cast<cuuint64_t>(num_heads), static_cast<cuuint64_t>(num_rows),
                chunks},
       .stride_bytes = {head_bytes, head_bytes * num_heads, gpu::kBoxRowBytes},
       .box = {kChunkDims, 1, kChunkRows, chunks}},
      map);
}

CUresult MakeTensorMaps(const PrefillParams& call, TensorMaps* maps) {
  struct Tensor {
    const void* base;
    int32_t num_rows, num_heads;
    int width;
    CUtensorMap* map;
  };
  const Tensor tensors[] = {
      {call.q_nope, call.num_queries, call.num_heads, kDNope, &maps->q_nope},
      {call.q_pe, call.num_queries, call.num_heads, kDKpe, &maps->q_pe},
      {call.k_nope, call.num_keys, call.num_heads, kDNope, &maps->k_nope},
      {call.kpe, call.num_keys, 1, kDKpe, &maps->kpe},
      {call.v, call.num_keys, call.num_heads, kDV, &maps->v},
  };
  for (const Tensor& t : tensors) {
    const CUresult error = MakeRowMap(call, t.base, t.num_rows, t.num_heads, t.width, t.map);
    if (error != CUDA_SUCCESS) return error;
  }
  return CUDA_SUCCESS;
}

template <class C>
std::string LaunchKernel(const PrefillParams& call, const gpu::DeviceFacts& device,
                         cudaStream_t stream) {
  TensorMaps maps{};
  if (const CUresult error = MakeTensorMaps(call, &maps); error != CUDA_SUCCESS) {
    return "cuTensorMapEncodeTiled failed with CUresult " + std::to_string(error);
  }
  const int64_t max_items = (int64_t{call.num_queries} / kBlockM + call.num_seqs) * call.num_heads;
  const auto num_ctas = static_cast<unsigned>(std::min<int64_t>(device.num_sms, max_items));
  cudaError_t error = cudaMemsetAsync(call.next_item, 0, sizeof(int32_t), stream);
  if (error == cudaSuccess) {
    error = gpu::Launch<PrefillAttention<C>>({.grid = dim3(num_ctas),
                                              .block = dim3(kNumThreads),
                                              .smem_bytes = sizeof(SharedMemory),
                                              .stream = stream},
                                             KernelParams{call, HeadsPerGroup(call)}, maps);
  }
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

}  // namespace

std::string Launch(const PrefillParams& call, const gpu::DeviceFacts& device, cudaStream_t stream) {
  return call.dtype == DType::kF16 ? LaunchKernel<Config<DType::kF16>>(call, device, stream)
                                   : LaunchKernel<Config<DType::kBf16>>(call, device, stream);
}

}  // namespace jax_mla::prefill::sm90
