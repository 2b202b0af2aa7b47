#include <algorithm>
#include <bit>

#include "gpu/tensor_map.h"
#include "index/sm90/kernel.cuh"
#include "index/sm90/launch.h"

namespace jax_mla::index::sm90 {
namespace {

static_assert(kRowBytes == gpu::kBoxRowBytes, "a row of a tile is a row of a TMA box");

// TMA copies boxes of 8 rows or more, since the swizzle repeats after 8. A box is a page, or 64
// tokens of one.
constexpr int32_t kMinBoxTokens = 8;

// Coordinates, fastest first: element of a half, row, half, page or query.
template <class C>
CUresult MakeTensorMaps(const TopkParams& p, int32_t box_tokens, TensorMaps* maps) {
  constexpr auto kRowElements = static_cast<cuuint64_t>(kRowBytes / C::kElementBytes);
  constexpr auto kTokenBytes = static_cast<cuuint64_t>(kDim * C::kElementBytes);
  const auto page_bytes = static_cast<cuuint64_t>(IndexPageBytes(C::kKeyType, kDim, p.page_size));
  const auto num_heads = static_cast<cuuint64_t>(p.num_heads);
  const CUresult error =
      gpu::MakeTensorMap({.dtype = C::kKeyType,
                          .base = p.index_pages,
                          .dims = {kRowElements, static_cast<cuuint64_t>(p.page_size), C::kHalves,
                                   static_cast<cuuint64_t>(p.num_layers) * p.num_pages},
                          .stride_bytes = {kTokenBytes, kRowBytes, page_bytes},
                          .box = {kRowElements, static_cast<cuuint32_t>(box_tokens), 1, 1}},
                         &maps->keys);
  if (error != CUDA_SUCCESS) return error;
  return gpu::MakeTensorMap(
      {.dtype = C::kKeyType,
       .base = p.q,
       .dims = {kRowElements, num_heads, C::kHalves, static_cast<cuuint64_t>(p.num_tokens)},
       .stride_bytes = {kTokenBytes, kRowBytes, num_heads * kTokenBytes},
       .box = {kRowElements, C::kHeads, 1, 1}},
      &maps->queries);
}

template <class C>
std::string LaunchKernel(const TopkParams& p, const Slab& slab, const gpu::DeviceFacts& device,
                         cudaStream_t stream) {
  static_assert(sizeof(SharedMemory<C>) <= gpu::kHopperSharedBytes, "shorten the ring of keys");
  const int32_t box_tokens = std::min(p.page_size, kTileTokens);
  TensorMaps maps{};
  if (const CUresult error = MakeTensorMaps<C>(p, box_tokens, &maps); error != CUDA_SUCCESS) {
    return "cuTensorMapEncodeTiled failed with CUresult " + std::to_string(error);
  }
  const int64_t max_tiles =
      int64_t{slab.num_rows} * ((int64_t{p.max_seq_len} + kTileTokens - 1) / kTileTokens);
  const auto num_ctas = static_cast<unsigned>(std::clamp<int64_t>(max_tiles, 1, device.num_sms));
  // Keys of few queries are read once or twice; those of a prompt by many CTAs.
  const bool is_read_once = int64_t{p.num_tokens} <= int64_t{2 * C::kMaxQueries} * p.batch;
  const KernelParams params{
      .call = p,
      .slab = slab,
      .box_tokens = box_tokens,
      .box_tokens_log2 = std::countr_zero(static_cast<uint32_t>(box_tokens)),
      .key_policy = is_read_once ? gpu::sm90::kCacheEvictFirst : gpu::sm90::kCacheEvictNormal};
  const cudaError_t error = gpu::Launch<&IndexScores<C>>({.grid = dim3(num_ctas),
                                                          .block = dim3(kNumThreads),
                                                          .smem_bytes = sizeof(SharedMemory<C>),
                                                          .stream = stream,
                                                          .programmatic = true},
                                                         params, maps);
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

}  // namespace

std::string WhyNotPageSize(int32_t page_size) {
  const bool has_boxes =
      page_size % kTileTokens == 0 || (page_size >= kMinBoxTokens && kTileTokens % page_size == 0);
  if (has_boxes) return "";
  return "needs a page_size of 8, 16, 32 or a multiple of 64, got " + std::to_string(page_size);
}

std::string LaunchScores(const TopkParams& p, const Slab& slab, const gpu::DeviceFacts& device,
                         cudaStream_t stream) {
  const bool has_codes = p.key_dtype == DType::kE4m3;
  if (p.num_heads > 32) {
    return has_codes ? LaunchKernel<Config<DType::kE4m3, 64>>(p, slab, device, stream)
                     : LaunchKernel<Config<DType::kBf16, 64>>(p, slab, device, stream);
  }
  return has_codes ? LaunchKernel<Config<DType::kE4m3, 32>>(p, slab, device, stream)
                   : LaunchKernel<Config<DType::kBf16, 32>>(p, slab, device, stream);
}

}  // namespace jax_mla::index::sm90
