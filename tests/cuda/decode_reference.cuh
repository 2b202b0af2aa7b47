// Device side of the stresses: random data, and a float32 reference that gathers through the
// same page table as the kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "decode/params.h"

namespace jax_mla::decode::stress {

inline constexpr float kMaxLse = 1e-4f;

__device__ inline uint32_t Hash(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdull;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ull;
  return static_cast<uint32_t>(x ^ (x >> 33));
}
__device__ inline float Gauss(uint64_t i) {
  const float u = (Hash(2 * i + 1) + 1.0f) * 2.3283064e-10f, v = Hash(2 * i) * 2.3283064e-10f;
  return sqrtf(-2.0f * logf(u)) * cospif(2.0f * v);
}

template <typename T>
__global__ void FillGauss(T* data, size_t size, uint64_t seed, float magnitude = 1.0f) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < size;
       i += size_t{gridDim.x} * blockDim.x) {
    data[i] = static_cast<T>(magnitude * Gauss(i + (seed << 32)));
  }
}
__global__ void FillWords(uint32_t* data, size_t size, uint32_t word) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < size;
       i += size_t{gridDim.x} * blockDim.x) {
    data[i] = word;
  }
}

// Address of a token's row in a stream, or null if its page or its layer is not here. Page ids and
// page_begin are any 32-bit numbers: their difference has 64.
template <typename T>
__device__ T* TokenRow(const DecodeParams& p, const KvStream& stream, int seq, int token) {
  const int64_t id = p.page_table[int64_t{seq} * p.max_pages_per_seq + token / p.page_size];
  const int64_t page = id - *p.page_begin;
  if (page < 0 || page >= p.num_pages || *p.layer < 0 || *p.layer >= p.num_layers) return nullptr;
  return static_cast<T*>(const_cast<void*>(stream.base)) + *p.layer * stream.layer_stride +
         page * stream.page_stride + token % p.page_size * stream.token_stride;
}
__device__ inline int Length(const DecodeParams& p, int seq) {
  return min(max(p.seq_lens[seq], 0), p.max_seq_len);
}

// Grid (tokens, batch): random keys times `magnitude`, only where keys are.
template <typename T>
__global__ void FillKeys(DecodeParams p, uint64_t seed, float magnitude) {
  const int seq = blockIdx.y;
  for (int token = blockIdx.x; token < Length(p, seq); token += gridDim.x) {
    T* ckv = TokenRow<T>(p, p.ckv, seq, token);
    T* kpe = TokenRow<T>(p, p.kpe, seq, token);
    if (ckv == nullptr) continue;
    const uint64_t first = (seed << 40) + (uint64_t{blockIdx.y} << 26) + uint64_t(token) * 1024;
    for (int d = threadIdx.x; d < p.d_ckv; d += blockDim.x)
      ckv[d] = T(magnitude * Gauss(first + d));
    for (int d = threadIdx.x; d < p.d_kpe; d += blockDim.x)
      kpe[d] = T(magnitude * Gauss(first + 600 + d));
  }
}

// What is wrong with one sequence.
struct Verdict {
  double error, norm;  // squared
  int bad;             // NaN, wrong -inf, non-zero empty rows, large LSE errors
};

// Grid (rows / stride, batch): rows of the reference, compared with the backend's: every stride-th
// one of a sequence, from any of its first ones on. `all_scores` has max_len for each CTA.
template <typename T>
__global__ void Compare(DecodeParams p, float* all_scores, int max_len, int stride,
                        Verdict* verdicts) {
  const int rows = p.q_len * p.num_heads, seq = blockIdx.y;
  const int seq_row = blockIdx.x * stride + Hash(seq) % stride;
  if (seq_row >= rows) return;
  const int64_t row = int64_t{seq} * rows + seq_row;
  const int len = Length(p, seq), query = seq_row / p.num_heads;
  const int visible = p.causal ? max(len - p.q_len + query + 1, 0) : len;
  const T* q_nope = static_cast<const T*>(p.q_nope) + row * p.d_ckv;
  const T* q_pe = static_cast<const T*>(p.q_pe) + row * p.d_kpe;
  float* scores = all_scores + (int64_t{seq} * gridDim.x + blockIdx.x) * max_len;
  for (int token = threadIdx.x; token < visible; token += blockDim.x) {
    const T* ckv = TokenRow<T>(p, p.ckv, seq, token);
    const T* kpe = TokenRow<T>(p, p.kpe, seq, token);
    float score = -INFINITY;
    if (ckv != nullptr) {
      score = 0.0f;
      for (int d = 0; d < p.d_ckv; ++d) score += float(q_nope[d]) * float(ckv[d]);
      for (int d = 0; d < p.d_kpe; ++d) score += float(q_pe[d]) * float(kpe[d]);
      score *= p.sm_scale;
    }
    scores[token] = score;
  }
  __syncthreads();
  float top = -INFINITY, sum = 0.0f;
  for (int token = 0; token < visible; ++token) top = fmaxf(top, scores[token]);
  for (int token = 0; token < visible; ++token) {
    sum += top == -INFINITY ? 0.0f : expf(scores[token] - top);
  }
  __syncthreads();
  for (int token = threadIdx.x; token < visible; token += blockDim.x) {
    scores[token] = sum > 0.0f ? expf(scores[token] - top) / sum : 0.0f;
  }
  __syncthreads();
  double error = 0.0, norm = 0.0;
  int bad = 0;
  for (int d = threadIdx.x; d < p.d_ckv; d += blockDim.x) {
    float expected = 0.0f;
    for (int token = 0; token < visible && sum > 0.0f; ++token) {
      const T* ckv = TokenRow<T>(p, p.ckv, seq, token);
      if (ckv != nullptr) expected += scores[token] * float(ckv[d]);
    }
    const float got = float(static_cast<const T*>(p.out)[row * p.d_ckv + d]);
    bad += !(got == got) || (sum == 0.0f && got != 0.0f);
    error += double(got - expected) * (got - expected);
    norm += double(expected) * expected;
  }
  if (threadIdx.x == 0) {
    const float got = p.lse[row], expected = sum > 0.0f ? top + logf(sum) : -INFINITY;
    bad += sum > 0.0f ? !(fabsf(got - expected) <= kMaxLse * (1.0f + 0.05f * fabsf(expected)))
                      : got != -INFINITY;
  }
  atomicAdd(&verdicts[seq].error, error);
  atomicAdd(&verdicts[seq].norm, norm);
  if (bad != 0) atomicAdd(&verdicts[seq].bad, bad);
}

__global__ void CountDifferentWords(const uint32_t* a, const uint32_t* b, size_t size, int* count) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < size;
       i += size_t{gridDim.x} * blockDim.x) {
    if (a[i] != b[i]) atomicAdd(count, 1);
  }
}

}  // namespace jax_mla::decode::stress
