// Append with transforms and formats. One warp a token writes its row; more warps rotate queries.
#include <algorithm>
#include <initializer_list>

#include "append/encode.h"
#include "append/encode_token.cuh"
#include "append/rotate_query.cuh"
#include "core/divisor.h"
#include "core/kv_format.h"
#include "gpu/launch.h"

namespace jax_mla::append {
namespace {

constexpr int kNumThreads = 256;
constexpr int kWarpsPerCta = kNumThreads / kWarpThreads;
// With few tokens the latency of a row counts: 64 registers leave room for 32 warps on an SM. With
// more tokens than kFewTokens, of 16-bit values, the number of warps counts: 40. Where values are
// loaded one by one, nvcc 13.0 spills with so few registers.
constexpr int kMaxRegisters = 64, kMaxRegistersOfMany = 48, kMaxScalarRegisters = 80;
constexpr int32_t kFewTokens = 2048;

struct EncodeParams {
  AppendParams call;
  float inverse_width;      // 1 / d_ckv
  int32_t num_row_ctas;     // the CTAs behind them rotate queries
  int32_t warps_per_token;  // of those
};

template <DType kDType, bool kIsVector, bool kIsMany = false>
__global__ void __maxnreg__(kIsMany     ? kMaxRegistersOfMany
                            : kIsVector ? kMaxRegisters
                                        : kMaxScalarRegisters)
    EncodeKernel(const __grid_constant__ EncodeParams p) {
  gpu::PdlWait();
  const int32_t warp_of_cta = threadIdx.x / kWarpThreads;
  const int32_t cta = blockIdx.x;
  if (cta < p.num_row_ctas) {
    const int32_t token = cta * kWarpsPerCta + warp_of_cta;
    if (token < p.call.num_tokens) {
      EncodeToken<kDType, kIsVector, /*kSavesRegisters=*/kIsMany>(p.call, p.inverse_width, token);
    }
    return;
  }
  if constexpr (kDType != DType::kE4m3) {
    const int32_t warp = (cta - p.num_row_ctas) * kWarpsPerCta + warp_of_cta;
    const int32_t token = warp / p.warps_per_token;
    if (token >= p.call.num_tokens) return;
    const int32_t first = (warp - token * p.warps_per_token) * kWarpThreads;
    RotateQueries<kDType, kIsVector>(p.call, token, first + threadIdx.x % kWarpThreads);
  }
}

constexpr int64_t kMaxVectorBytes = 16;

// Whether all addresses and sizes are multiples of the vectors into which chunks of `type` are cut.
bool IsAligned(DType type, std::initializer_list<const void*> addresses,
               std::initializer_list<int64_t> elements) {
  const int64_t vector_bytes = std::min(kMaxVectorBytes, int64_t{kChunk} * ElementBytes(type));
  int64_t bits = 0;
  for (const void* address : addresses) bits |= reinterpret_cast<int64_t>(address);
  for (int64_t count : elements) bits |= count * ElementBytes(type);
  return bits % vector_bytes == 0;
}

}  // namespace

bool IsVector(const AppendParams& p) {
  const MutableKvStream& pool = p.ckv_pages;
  if (p.d_ckv % kChunk != 0 || !IsAligned(p.dtype, {p.ckv}, {p.d_ckv}) ||
      !IsAligned(CkvType(p.kv_format, p.dtype), {pool.base},
                 {pool.layer_stride, pool.page_stride, pool.token_stride}) ||
      !IsAligned(DType::kF32, {p.norm_weight}, {})) {
    return false;
  }
  if (p.q_pe == nullptr) return true;
  return p.d_kpe % (2 * kChunk) == 0 && IsAligned(p.dtype, {p.q_pe, p.rotated_q_pe}, {p.d_kpe}) &&
         IsAligned(DType::kF32, {p.rope_table}, {});
}

namespace {

template <DType kDType>
cudaError_t LaunchType(const AppendParams& p, cudaStream_t stream) {
  const bool is_vector = IsVector(p);
  EncodeParams params{.call = p,
                      .inverse_width = 1.0f / static_cast<float>(p.d_ckv),
                      .num_row_ctas = CeilDiv(p.num_tokens, kWarpsPerCta)};
  int64_t num_ctas = params.num_row_ctas;
  if (p.q_pe != nullptr && p.num_heads > 0) {
    const int64_t lanes = int64_t{p.num_heads} * LanesPerHead(p.d_kpe, is_vector);
    params.warps_per_token = static_cast<int32_t>(CeilDiv(lanes, kWarpThreads));
    num_ctas += CeilDiv(int64_t{p.num_tokens} * params.warps_per_token, kWarpsPerCta);
  }
  const gpu::LaunchConfig config{
      .grid = dim3(static_cast<uint32_t>(num_ctas)),
      .block = dim3(kNumThreads),
      .stream = stream,
      .programmatic = true,
  };
  if constexpr (ElementBytes(kDType) == 2) {
    if (is_vector && p.num_tokens > kFewTokens) {
      return gpu::Launch<&EncodeKernel<kDType, true, true>>(config, params);
    }
  }
  return is_vector ? gpu::Launch<&EncodeKernel<kDType, true>>(config, params)
                   : gpu::Launch<&EncodeKernel<kDType, false>>(config, params);
}

}  // namespace

cudaError_t LaunchEncode(const AppendParams& params, cudaStream_t stream) {
  if (params.num_tokens == 0) return cudaSuccess;
  switch (params.dtype) {
    case DType::kBf16:
      return LaunchType<DType::kBf16>(params, stream);
    case DType::kF16:
      return LaunchType<DType::kF16>(params, stream);
    case DType::kF32:
      return LaunchType<DType::kF32>(params, stream);
    case DType::kE4m3:
      return LaunchType<DType::kE4m3>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_mla::append
