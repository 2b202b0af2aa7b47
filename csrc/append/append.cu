// Append: copies ckv and kpe of each new token to its page. One warp a token. Rows that are not
// written as they came are in encode.cu.
#include <algorithm>

#include "append/append.h"
#include "append/append_token.cuh"
#include "append/encode.h"
#include "core/divisor.h"
#include "core/kv_format.h"
#include "gpu/launch.h"

namespace jax_mla::append {
namespace {

constexpr int kNumThreads = 256;
constexpr int kTokensPerCta = kNumThreads / kWarpThreads;
// Then 64 warps fit on an SM: 8192 tokens are one wave on 132 SMs.
constexpr int kMaxRegisters = 32;
// With kFindsPlace. A warp then holds its sequence while it loads the token's row, and with 32
// registers nvcc 13.0 spills for sm_80. With 40, 48 warps fit.
constexpr int kMaxFindingRegisters = 40;

// kFindsPlace: where a token belongs follows from cu_q_lens or seq_lens. Otherwise every sequence
// has q_len tokens, and their positions are given.
template <typename V, bool kFindsPlace>
__global__ void __maxnreg__(kFindsPlace ? kMaxFindingRegisters : kMaxRegisters)
    AppendKernel(const __grid_constant__ KernelParams<V> p) {
  gpu::PdlWait();
  const int32_t token = blockIdx.x * kTokensPerCta + threadIdx.x / kWarpThreads;
  if constexpr (kFindsPlace) {
    if (token >= p.call.num_tokens) return;
    const int32_t seq = SequenceOf(p.call, token);
    if (seq == kNoSequence) return;
    AppendToken(p, token, [=] { return seq; }, PositionOf(p.call, token, seq));
  } else {
    if (token >= p.call.batch * p.call.q_len) return;
    AppendToken(p, token, [&] { return token / p.call.q_len; }, __ldg(p.call.positions + token));
  }
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
cudaError_t LaunchVectors(const AppendParams& p, const gpu::LaunchConfig& config) {
  const bool finds_place =
      p.positions == nullptr || p.cu_q_lens != nullptr || p.num_seqs != nullptr;
  return finds_place ? gpu::Launch<&AppendKernel<V, true>>(config, MakeKernelParams<V>(p))
                     : gpu::Launch<&AppendKernel<V, false>>(config, MakeKernelParams<V>(p));
}

}  // namespace

cudaError_t LaunchAppend(const AppendParams& params, cudaStream_t stream) {
  const int32_t num_tokens = params.num_tokens;
  if (num_tokens == 0) return cudaSuccess;
  if (HasEncoding(params)) return LaunchEncode(params, stream);
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
