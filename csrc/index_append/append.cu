// index_append: one warp a token. A lane has four values of the key from the load to the store, and
// the warp's row in shared memory is only for the pairs of a rotation, which may lie anywhere.
//
// The sums are added in the order of arithmetic.h, so that the bits are those of the CPU.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/divisor.h"
#include "core/index_page.h"
#include "core/ragged.h"
#include "core/transform.h"
#include "gpu/launch.h"
#include "gpu/ragged.cuh"
#include "gpu/round_fp8.cuh"
#include "index_append/append.h"
#include "index_append/arithmetic.h"

namespace jax_mla::index_append {
namespace {

constexpr int kWarpThreads = 32;
constexpr int kNumThreads = 256;
constexpr int kWarpsPerCta = kNumThreads / kWarpThreads;
constexpr int kValues = 4;  // of a lane
static_assert(kValues == kRun && kWarpThreads == kNumLanes && kWarpThreads * kValues == kCudaDim,
              "a lane has one of the sums of arithmetic.h, and a warp has the key");

template <DType kDType>
__device__ __forceinline__ float ToFloat(const void* row, int32_t i) {
  if constexpr (kDType == DType::kF32) return __ldg(static_cast<const float*>(row) + i);
  if constexpr (kDType == DType::kBf16) {
    return __bfloat162float(static_cast<const __nv_bfloat16*>(row)[i]);
  }
  if constexpr (kDType == DType::kF16) return __half2float(static_cast<const __half*>(row)[i]);
}

// The value rounded to the type of the keys, as a float.
template <DType kDType>
__device__ __forceinline__ float Rounded(float x) {
  if constexpr (kDType == DType::kBf16) return __bfloat162float(__float2bfloat16_rn(x));
  if constexpr (kDType == DType::kF16) return __half2float(__float2half_rn(x));
  return x;
}

template <DType kDType>
__device__ __forceinline__ void Store(float x, void* row, int32_t i) {
  if constexpr (kDType == DType::kF32) static_cast<float*>(row)[i] = x;
  if constexpr (kDType == DType::kBf16) {
    static_cast<__nv_bfloat16*>(row)[i] = __float2bfloat16_rn(x);
  }
  if constexpr (kDType == DType::kF16) static_cast<__half*>(row)[i] = __float2half_rn(x);
}

// The sum of all lanes' sums, in every lane.
__device__ __forceinline__ float WarpSum(float sum) {
#pragma unroll
  for (int half = kWarpThreads / 2; half > 0; half /= 2) {
    sum = Sum(sum, __shfl_down_sync(0xffffffffu, sum, half));
  }
  return __shfl_sync(0xffffffffu, sum, 0);
}

template <DType kDType>
__device__ __forceinline__ void Normalise(const IndexAppendParams& p, int lane,
                                          float (&x)[kValues]) {
  constexpr float kInverse = 1.0f / kCudaDim;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kValues; ++i) sum = Sum(sum, x[i]);
  const float mean = Product(WarpSum(sum), kInverse);
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    x[i] = Sum(x[i], -mean);
    squares = Sum(squares, Product(x[i], x[i]));
  }
  const float factor = NormFactor(WarpSum(squares), kInverse, p.norm_eps);
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int at = lane * kValues + i;
    const float bias = p.norm_bias == nullptr ? 0.0f : __ldg(p.norm_bias + at);
    x[i] = Rounded<kDType>(Normed(x[i], factor, __ldg(p.norm_weight + at), bias));
  }
}

// `row` has room for the key in shared memory.
template <DType kDType>
__device__ __forceinline__ void Rotate(const IndexAppendParams& p, int lane, int32_t position,
                                       float* row, float (&x)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) row[lane * kValues + i] = x[i];
  __syncwarp();
  const int32_t last = max(0, min(position, p.num_rope_positions - 1));
  const float* angles = p.rope_table + int64_t{last} * p.d_rope;
  const int32_t begin = p.rope_last ? kCudaDim - p.d_rope : 0, num_pairs = p.d_rope / 2;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int32_t at = lane * kValues + i - begin;
    if (at < 0 || at >= p.d_rope) continue;
    const int32_t pair = p.rope_interleaved ? at / 2 : at < num_pairs ? at : at - num_pairs;
    const PairPlace place = PlaceOfPair(pair, num_pairs, p.rope_interleaved);
    const ValuePair rotated = Rotated({row[begin + place.first], row[begin + place.second]},
                                      __ldg(angles + pair), __ldg(angles + num_pairs + pair));
    x[i] = Rounded<kDType>(at == place.first ? rotated.first : rotated.second);
  }
}

// Writes the codes and the scale of a key to its page.
__device__ __forceinline__ void StoreCodes(const IndexAppendParams& p, int lane, char* page,
                                           int32_t page_row, const float (&x)[kValues]) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kValues; ++i) largest = fmaxf(largest, fabsf(x[i]));  // drops a NaN
#pragma unroll
  for (int half = kWarpThreads / 2; half > 0; half /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, half));
  }
  const float scale = ScaleOf(largest, p.power_of_two_scales);
  const float inverse = Quotient(1.0f, scale);
  const uint32_t codes = gpu::E4m3Codes(Product(x[0], inverse), Product(x[1], inverse),
                                        Product(x[2], inverse), Product(x[3], inverse));
  reinterpret_cast<uint32_t*>(page + IndexCodesOffset(page_row))[lane] = codes;
  if (lane == 0) {
    *reinterpret_cast<float*>(page + IndexScaleOffset(p.page_size, page_row)) = scale;
  }
}

template <DType kDType>
__global__ void __launch_bounds__(kNumThreads)
    IndexAppendKernel(const __grid_constant__ IndexAppendParams p) {
  __shared__ float rows[kWarpsPerCta][kCudaDim];
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  gpu::PdlWait();
  const int32_t token = blockIdx.x * kWarpsPerCta + warp;
  if (token >= p.num_tokens) return;
  const char* row =
      static_cast<const char*>(p.k) + int64_t{token} * kCudaDim * ElementBytes(kDType);
  float x[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) x[i] = ToFloat<kDType>(row, lane * kValues + i);
  const int32_t position = __ldg(p.positions + token), layer = __ldg(p.layer);
  const int32_t seq =
      p.cu_q_lens == nullptr ? token / p.q_len : gpu::FindSequence(p.cu_q_lens, p.batch, token);
  gpu::PdlLaunchDependents();
  if (seq == kNoSequence || position < 0 || layer < 0 || layer >= p.num_layers) return;
  const int32_t page_idx = position / p.page_size;
  if (page_idx >= p.max_pages_per_seq) return;
  const int32_t id = __ldg(p.page_table + int64_t{seq} * p.max_pages_per_seq + page_idx);
  const int64_t page = int64_t{id} - __ldg(p.page_begin);
  if (page < 0 || page >= p.num_pages) return;  // another device's page, or a wild id
  if (p.norm_weight != nullptr) Normalise<kDType>(p, lane, x);
  if (p.rope_table != nullptr) Rotate<kDType>(p, lane, position, rows[warp], x);
  char* to =
      static_cast<char*>(p.index_pages) +
      (int64_t{layer} * p.num_pages + page) * IndexPageBytes(p.key_dtype, kCudaDim, p.page_size);
  const int32_t page_row = position - page_idx * p.page_size;
  if (p.key_dtype == DType::kE4m3) {
    StoreCodes(p, lane, to, page_row, x);
    return;
  }
  to += int64_t{page_row} * kCudaDim * ElementBytes(kDType);
#pragma unroll
  for (int i = 0; i < kValues; ++i) Store<kDType>(x[i], to, lane * kValues + i);
}

template <DType kDType>
cudaError_t LaunchType(const IndexAppendParams& p, cudaStream_t stream) {
  const gpu::LaunchConfig config{
      .grid = dim3(static_cast<uint32_t>(CeilDiv(p.num_tokens, kWarpsPerCta))),
      .block = dim3(kNumThreads),
      .stream = stream,
      .programmatic = true,
  };
  return gpu::Launch<&IndexAppendKernel<kDType>>(config, p);
}

}  // namespace

cudaError_t LaunchIndexAppend(const IndexAppendParams& params, cudaStream_t stream) {
  if (params.num_tokens == 0) return cudaSuccess;
  switch (params.dtype) {
    case DType::kBf16:
      return LaunchType<DType::kBf16>(params, stream);
    case DType::kF16:
      return LaunchType<DType::kF16>(params, stream);
    case DType::kF32:
      return LaunchType<DType::kF32>(params, stream);
    case DType::kE4m3:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_mla::index_append
