// Append: copies ckv and kpe of each new token to its page. One warp a token.
//
// Where a token goes is known only after two dependent loads (its position, then its page's id). A
// warp therefore loads the token's values first, and stores them when the place is known. Values
// are copied as vectors of bytes, of any element type.
#include <algorithm>

#include "append/append.h"
#include "core/divisor.h"
#include "core/kv_format.h"
#include "gpu/launch.h"

namespace jax_mla::append {
namespace {

constexpr int kWarpThreads = 32;
constexpr int kNumThreads = 256;
constexpr int kTokensPerCta = kNumThreads / kWarpThreads;
constexpr int kMaxRegisters =
    32;  // then 64 warps fit on an SM: 8192 tokens are one wave on 132 SMs
// Vectors of a token that a lane holds in registers: all, for 512 + 64 elements of 16 bits.
constexpr int kHeldCkv = 2, kHeldKpe = 1;

// ckv or kpe of the new tokens and of the pool; widths and strides in vectors of type V.
template <typename V>
struct Stream {
  const V* rows;  // [num_tokens, width]
  V* pool;
  int64_t layer_stride, page_stride, token_stride;
  int32_t width;
};

template <typename V>
struct KernelParams {
  Stream<V> ckv;
  Stream<V> kpe;
  AppendParams call;
};

template <int kHeld, typename V>
__device__ __forceinline__ void LoadRow(const Stream<V>& stream, int token, int lane,
                                        V (&held)[kHeld]) {
  const V* row = stream.rows + int64_t{token} * stream.width;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (lane + k * kWarpThreads < stream.width) held[k] = __ldg(row + lane + k * kWarpThreads);
  }
}

template <int kHeld, typename V>
__device__ __forceinline__ void StoreRow(const Stream<V>& stream, int token, int layer, int page,
                                         int page_row, int lane, const V (&held)[kHeld]) {
  V* target = stream.pool + layer * stream.layer_stride + page * stream.page_stride +
              page_row * stream.token_stride + lane;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    // __stcs (streaming) is 8 % faster than a plain store for 1024 tokens (H200), and as fast for
    // other numbers.
    if (lane + k * kWarpThreads < stream.width) __stcs(target + k * kWarpThreads, held[k]);
  }
  const V* row = stream.rows + int64_t{token} * stream.width + lane;
#pragma unroll 1
  for (int i = kHeld * kWarpThreads; lane + i < stream.width; i += kWarpThreads) {
    target[i] = __ldg(row + i);  // the rest of a wider token, which lanes do not hold
  }
}

template <typename V>
__global__ void __maxnreg__(kMaxRegisters) AppendKernel(const __grid_constant__ KernelParams<V> p) {
  gpu::PdlWait();
  const int token = blockIdx.x * kTokensPerCta + threadIdx.x / kWarpThreads;
  const int lane = threadIdx.x % kWarpThreads;
  if (token >= p.call.batch * p.call.q_len) return;

  const int32_t position = __ldg(p.call.positions + token);
  V held_ckv[kHeldCkv], held_kpe[kHeldKpe];
  LoadRow(p.ckv, token, lane, held_ckv);
  LoadRow(p.kpe, token, lane, held_kpe);

  gpu::PdlLaunchDependents();
  const int32_t layer = __ldg(p.call.layer);
  if (position < 0 || layer < 0 || layer >= p.call.num_layers) return;
  const int32_t page_idx = position / p.call.page_size;
  if (page_idx >= p.call.max_pages_per_seq) return;
  const int32_t* page_ids =
      p.call.page_table + int64_t{token / p.call.q_len} * p.call.max_pages_per_seq;
  const int64_t page = int64_t{__ldg(page_ids + page_idx)} - __ldg(p.call.page_begin);
  if (page < 0 || page >= p.call.num_pages) return;  // another device's page, or a wild id
  const int32_t page_row = position - page_idx * p.call.page_size;
  StoreRow(p.ckv, token, layer, static_cast<int>(page), page_row, lane, held_ckv);
  StoreRow(p.kpe, token, layer, static_cast<int>(page), page_row, lane, held_kpe);
}

// The largest power of two, up to 16 bytes, that divides every address and row length.
int64_t Alignment(const void* rows, const MutableKvStream& pool, int64_t width,
                  int64_t element_bytes) {
  constexpr int64_t kMaxVectorBytes = 16;
  int64_t bits =
      kMaxVectorBytes | reinterpret_cast<int64_t>(rows) | reinterpret_cast<int64_t>(pool.base);
  for (int64_t elements : {width, pool.layer_stride, pool.page_stride, pool.token_stride}) {
    bits |= elements * element_bytes;
  }
  return bits & -bits;
}

template <typename V>
Stream<V> MakeStream(const void* rows, const MutableKvStream& pool, int64_t width,
                     int64_t element_bytes) {
  const auto vectors = [&](int64_t elements) {
    return elements * element_bytes / static_cast<int64_t>(sizeof(V));
  };
  return {.rows = static_cast<const V*>(rows),
          .pool = static_cast<V*>(pool.base),
          .layer_stride = vectors(pool.layer_stride),
          .page_stride = vectors(pool.page_stride),
          .token_stride = vectors(pool.token_stride),
          .width = static_cast<int32_t>(vectors(width))};
}

template <typename V>
cudaError_t LaunchVectors(const AppendParams& p, const gpu::LaunchConfig& config) {
  const int64_t element_bytes = ElementBytes(p.dtype);
  const KernelParams<V> params{MakeStream<V>(p.ckv, p.ckv_pages, p.d_ckv, element_bytes),
                               MakeStream<V>(p.kpe, p.kpe_pages, p.d_kpe, element_bytes), p};
  return gpu::Launch<&AppendKernel<V>>(config, params);
}

}  // namespace

cudaError_t LaunchAppend(const AppendParams& params, cudaStream_t stream) {
  const int64_t num_tokens = int64_t{params.batch} * params.q_len;
  if (num_tokens == 0) return cudaSuccess;
  const gpu::LaunchConfig config{
      .grid = dim3(static_cast<uint32_t>(CeilDiv(num_tokens, kTokensPerCta))),
      .block = dim3(kNumThreads),
      .stream = stream,
      .programmatic = true,
  };
  const int64_t element_bytes = ElementBytes(params.dtype);
  const int64_t alignment =
      std::min(Alignment(params.ckv, params.ckv_pages, params.d_ckv, element_bytes),
               Alignment(params.kpe, params.kpe_pages, params.d_kpe, element_bytes));
  return alignment == sizeof(uint4) ? LaunchVectors<uint4>(params, config)
                                    : LaunchVectors<uint16_t>(params, config);
}

}  // namespace jax_mla::append
