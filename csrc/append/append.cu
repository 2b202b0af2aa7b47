// Append: copies each new token's ckv and kpe rows to its page. One warp a token.
//
// The slot is known only after two dependent loads (position, page id), so a warp issues its row
// loads first and stores when the slot arrives. Bytes are copied, whatever the element type.
#include <algorithm>

#include "append/append.h"
#include "core/kv_format.h"
#include "gpu/launch.h"

namespace jax_mla::append {
namespace {

constexpr int kWarpThreads = 32;
constexpr int kNumThreads = 256;
constexpr int kTokensPerCta = kNumThreads / kWarpThreads;
constexpr int kMaxVectors = 4;  // a lane holds at a time; 512 + 64 elements of 16 bits need 3

// One stream's row in vectors of V: source and destination.
template <typename V>
struct Row {
  const V* source;
  V* target;
  int num_vectors;
};

template <typename V>
__device__ __forceinline__ Row<V> MakeRow(const void* source, const MutableKvStream& pool,
                                          int64_t token, int64_t width, int64_t pool_offset,
                                          int element_bytes) {
  return {
      reinterpret_cast<const V*>(static_cast<const char*>(source) + token * width * element_bytes),
      reinterpret_cast<V*>(static_cast<char*>(pool.base) + pool_offset * element_bytes),
      static_cast<int>(width * element_bytes / sizeof(V))};
}

template <typename V>
__global__ void __launch_bounds__(kNumThreads)
    AppendKernel(const __grid_constant__ AppendParams p, const int element_bytes) {
  gpu::PdlWait();
  gpu::PdlLaunchDependents();
  const int64_t token =
      static_cast<int64_t>(blockIdx.x) * kTokensPerCta + threadIdx.x / kWarpThreads;
  const int lane = threadIdx.x % kWarpThreads;
  if (token >= static_cast<int64_t>(p.batch) * p.q_len) return;

  const int32_t position = __ldg(p.positions + token);
  const int32_t layer = __ldg(p.layer);
  const int32_t page_begin = __ldg(p.page_begin);
  // Row loads do not depend on the slot: in flight while the slot is looked up.
  const Row<V> ckv = MakeRow<V>(p.ckv, p.ckv_pages, token, p.d_ckv, 0, element_bytes);
  const Row<V> kpe = MakeRow<V>(p.kpe, p.kpe_pages, token, p.d_kpe, 0, element_bytes);
  const int num_vectors = ckv.num_vectors + kpe.num_vectors;
  const auto source = [&](int i) {
    return i < ckv.num_vectors ? ckv.source + i : kpe.source + (i - ckv.num_vectors);
  };
  V values[kMaxVectors];
#pragma unroll
  for (int i = 0; i < kMaxVectors; ++i) {
    if (lane + i * kWarpThreads < num_vectors) values[i] = __ldg(source(lane + i * kWarpThreads));
  }

  if (position < 0 || layer < 0 || layer >= p.num_layers) return;
  const int32_t page_idx = position / p.page_size;
  if (page_idx >= p.max_pages_per_seq) return;
  const int64_t seq_idx = token / p.q_len;
  const int64_t page =
      int64_t{__ldg(p.page_table + seq_idx * p.max_pages_per_seq + page_idx)} - page_begin;
  if (page < 0 || page >= p.num_pages) return;  // another shard's page, or a wild id
  const int64_t slot = position - page_idx * p.page_size;
  const auto offset = [&](const MutableKvStream& pool) {
    return layer * pool.layer_stride + page * pool.page_stride + slot * pool.token_stride;
  };
  V* ckv_target =
      MakeRow<V>(p.ckv, p.ckv_pages, token, p.d_ckv, offset(p.ckv_pages), element_bytes).target;
  V* kpe_target =
      MakeRow<V>(p.kpe, p.kpe_pages, token, p.d_kpe, offset(p.kpe_pages), element_bytes).target;
  const auto store = [&](int i, const V& value) {
    *(i < ckv.num_vectors ? ckv_target + i : kpe_target + (i - ckv.num_vectors)) = value;
  };
#pragma unroll
  for (int i = 0; i < kMaxVectors; ++i) {
    if (lane + i * kWarpThreads < num_vectors) store(lane + i * kWarpThreads, values[i]);
  }
  for (int i = lane + kMaxVectors * kWarpThreads; i < num_vectors; i += kWarpThreads) {
    store(i, __ldg(source(i)));  // rows wider than a lane holds at a time
  }
}

// Largest power of two, up to 16, that divides every address and row length of the call.
int64_t CommonAlignment(const AppendParams& p) {
  constexpr int64_t kMaxVectorBytes = 16;
  const int64_t element_bytes = ElementBytes(p.dtype);
  int64_t bits = kMaxVectorBytes;
  for (const void* base : {p.ckv, p.kpe, static_cast<const void*>(p.ckv_pages.base),
                           static_cast<const void*>(p.kpe_pages.base)}) {
    bits |= reinterpret_cast<int64_t>(base);
  }
  for (int64_t elements :
       {int64_t{p.d_ckv}, int64_t{p.d_kpe}, p.ckv_pages.token_stride, p.kpe_pages.token_stride,
        p.ckv_pages.page_stride, p.kpe_pages.page_stride, p.ckv_pages.layer_stride,
        p.kpe_pages.layer_stride}) {
    bits |= elements * element_bytes;
  }
  return bits & -bits;
}

}  // namespace

cudaError_t LaunchAppend(const AppendParams& params, cudaStream_t stream) {
  const int64_t num_tokens = int64_t{params.batch} * params.q_len;
  if (num_tokens == 0) return cudaSuccess;
  const gpu::LaunchConfig config{
      .grid = dim3(static_cast<uint32_t>((num_tokens + kTokensPerCta - 1) / kTokensPerCta)),
      .block = dim3(kNumThreads),
      .stream = stream,
      .programmatic = true,
  };
  const int element_bytes = ElementBytes(params.dtype);
  return CommonAlignment(params) == sizeof(uint4)
             ? gpu::Launch<&AppendKernel<uint4>>(config, params, element_bytes)
             : gpu::Launch<&AppendKernel<uint16_t>>(config, params, element_bytes);
}

}  // namespace jax_mla::append
