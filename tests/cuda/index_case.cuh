// A call of index_topk on the device: its random keys, and its scores in double precision.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "core/index_page.h"
#include "decode_reference.cuh"
#include "index/params.h"

namespace jax_mla::index::check {

using decode::stress::Gauss;
using decode::stress::Hash;

// What operands are drawn from. Small whole numbers give exact scores and thousands of ties.
enum class Values { kGauss, kWhole, kNegative };

__device__ inline float DrawValue(Values values, uint64_t i) {
  if (values == Values::kGauss) return Gauss(i);
  const int whole = static_cast<int>(Hash(i) % 5) - 2;
  return static_cast<float>(values == Values::kNegative ? 0 : whole);
}

__device__ inline float LoadElement(const void* data, DType dtype, int64_t i) {
  if (dtype == DType::kBf16) return static_cast<const __nv_bfloat16*>(data)[i];
  const auto code = static_cast<const __nv_fp8_storage_t*>(data)[i];
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}
__device__ inline void StoreElement(void* data, DType dtype, int64_t i, float value) {
  if (dtype == DType::kBf16) {
    static_cast<__nv_bfloat16*>(data)[i] = value;
  } else {
    static_cast<__nv_fp8_storage_t*>(data)[i] =
        __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
  }
}

__global__ void FillElements(void* data, DType dtype, int64_t size, Values values, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * blockDim.x) {
    // Queries of a negative product: all are 1, keys are -1.
    const float value = values == Values::kNegative ? 1.0f : DrawValue(values, i + (seed << 34));
    StoreElement(data, dtype, i, value);
  }
}
__global__ void FillWeights(float* data, int64_t size, Values values, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * blockDim.x) {
    data[i] = values == Values::kNegative
                  ? Gauss(i + (seed << 34))
                  : DrawValue(values, i + (seed << 34)) * (values == Values::kWhole ? 0.5f : 1.0f);
  }
}

// A token's key. No page: it is not in the pool.
struct KeyPlace {
  uint8_t* page = nullptr;
  int row = 0;

  __device__ KeyPlace(const TopkParams& p, int seq, int position) {
    const int64_t id = p.page_table[int64_t{seq} * p.max_pages_per_seq + position / p.page_size];
    const int64_t local = id - *p.page_begin;
    if (local < 0 || local >= p.num_pages || *p.layer < 0 || *p.layer >= p.num_layers) return;
    page =
        static_cast<uint8_t*>(const_cast<void*>(p.index_pages)) +
        (int64_t{*p.layer} * p.num_pages + local) * IndexPageBytes(p.key_dtype, kDim, p.page_size);
    row = position % p.page_size;
  }
  __device__ float* Scale(const TopkParams& p) const {
    return reinterpret_cast<float*>(page + p.page_size * kDim) + row;
  }
};

// Grid (any, batch). One key of `one_in_nan` has a NaN; 0: none has.
__global__ void FillKeys(TopkParams p, Values values, uint64_t seed, int one_in_nan) {
  const int seq = blockIdx.y;
  const int length = min(max(p.seq_lens[seq], 0), p.max_seq_len);
  for (int position = blockIdx.x; position < length; position += gridDim.x) {
    const KeyPlace key(p, seq, position);
    if (key.page == nullptr) continue;
    const uint64_t token = (uint64_t(seq) << 24) + position;
    const uint32_t hash = Hash(token + (seed << 40));
    for (int i = threadIdx.x; i < kDim; i += blockDim.x) {
      const float value =
          values == Values::kNegative ? -1.0f : DrawValue(values, token * kDim + i + (seed << 36));
      StoreElement(key.page, p.key_dtype, int64_t{key.row} * kDim + i, value);
    }
    __syncthreads();
    if (threadIdx.x != 0) continue;
    if (p.key_dtype == DType::kE4m3) {
      *key.Scale(p) = values == Values::kGauss ? 0.5f + (hash % 1024) / 1024.0f
                                               : ldexpf(1.0f, static_cast<int>(hash % 2));
    }
    if (one_in_nan != 0 && (hash >> 8) % one_in_nan == 0) {
      const int64_t element = int64_t{key.row} * kDim + hash % kDim;
      if (p.key_dtype == DType::kE4m3) {
        key.page[element] = 0x7f;
      } else {
        reinterpret_cast<uint16_t*>(key.page)[element] = 0x7fc0;
      }
    }
  }
}

struct ReferenceScore {
  double score;  // NaN is one
  double error;  // bound of a kernel's error
  bool is_present;
};

// Grid (any, num_tokens): scores[token, position] of the first num_visible[token] positions.
__global__ void ReferenceScores(TopkParams p, const int* seq_of, const int* num_visible,
                                int64_t stride, ReferenceScore* scores) {
  const int token = blockIdx.y;
  const int position = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (seq_of[token] < 0 || position >= num_visible[token]) return;
  const KeyPlace key(p, seq_of[token], position);
  ReferenceScore result{0.0, 0.0, key.page != nullptr};
  if (result.is_present) {
    const double scale = p.key_dtype == DType::kE4m3 ? *key.Scale(p) : 1.0;
    float own[4];
    for (int i = 0; i < 4; ++i) {
      own[i] =
          LoadElement(key.page, p.key_dtype, int64_t{key.row} * kDim + threadIdx.x % 32 + 32 * i);
    }
    for (int head = 0; head < p.num_heads; ++head) {
      double product = 0.0, square_q = 0.0, square_k = 0.0;
      for (int i = 0; i < 4; ++i) {
        const double q =
            LoadElement(p.q, p.q_dtype,
                        (int64_t{token} * p.num_heads + head) * kDim + threadIdx.x % 32 + 32 * i);
        product += q * own[i];
        square_q += q * q;
        square_k += double{own[i]} * own[i];
      }
      for (int distance = 16; distance > 0; distance /= 2) {
        product += __shfl_xor_sync(~0u, product, distance);
        square_q += __shfl_xor_sync(~0u, square_q, distance);
        square_k += __shfl_xor_sync(~0u, square_k, distance);
      }
      const double weight = p.weights[int64_t{token} * p.num_heads + head];
      const double lengths = fabs(weight) * sqrt(square_q * square_k) * scale;
      result.score += weight * (product > 0.0 || product != product ? product : 0.0) * scale;
      result.error += lengths * (p.key_dtype == DType::kE4m3 && p.q_dtype == DType::kE4m3
                                     ? decode::stress::kMaxCodesScore
                                     : 2e-6);
    }
  }
  if (threadIdx.x % 32 == 0) scores[token * stride + position] = result;
}

}  // namespace jax_mla::index::check
