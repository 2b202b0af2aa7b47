// Device side of the stresses: random data, and a float32 reference that gathers through the
// same page table as the kernels. Caches may hold codes of e4m3.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "core/fp8.h"
#include "core/kv_format.h"
#include "decode/params.h"

namespace jax_mla::decode::stress {

inline constexpr float kMaxLse = 1e-4f;
// By how much a score may be off where products of codes are added up with 13 bits (the narrow
// kernel's warpgroup for the scores), as a multiple of the lengths of the two vectors.
inline constexpr float kMaxCodesScore = 5e-4f;

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

// Makes values such as codes of e4m3 stand for.
template <typename T>
__global__ void RoundToCodes(T* data, size_t size) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < size;
       i += size_t{gridDim.x} * blockDim.x) {
    data[i] = static_cast<T>(static_cast<float>(__nv_fp8_e4m3(static_cast<float>(data[i]))));
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

// A token of the cache, in any format. With codes T is bf16.
template <typename T>
struct CachedToken {
  KvFormat format;
  float ckv_scale = 1.0f, kpe_scale = 1.0f;
  void *ckv, *kpe;  // null: its page or its layer is not here

  __device__ CachedToken(const DecodeParams& p, int seq, int token)
      : format(p.kv_format),
        ckv(Find(p, p.ckv, HasCodes(), seq, token)),
        kpe(Find(p, p.kpe, format == KvFormat::kE4m3, seq, token)) {
    if (!HasScale(format)) return;
    ckv_scale = p.kv_scale[seq * p.kv_scale_stride];
    if (format == KvFormat::kE4m3) kpe_scale = p.kv_scale[seq * p.kv_scale_stride + 1];
  }

  __device__ bool exists() const { return ckv != nullptr; }
  __device__ bool HasCodes() const { return format != KvFormat::kPlain; }
  __device__ float Ckv(int d) const {
    const float scale = format == KvFormat::kDsMla ? TileScale(d) : ckv_scale;
    return scale * Load(ckv, HasCodes(), d);
  }
  __device__ float Kpe(int d) const { return kpe_scale * Load(kpe, format == KvFormat::kE4m3, d); }
  // Store what is then multiplied by the scale.
  __device__ void SetCkv(int d, float value) const { Store(ckv, HasCodes(), d, value); }
  __device__ void SetKpe(int d, float value) const {
    Store(kpe, format == KvFormat::kE4m3, d, value);
  }
  __device__ float& TileScale(int d) const {
    char* scales = static_cast<char*>(ckv) + DsMla::kScalesOffset;
    return reinterpret_cast<float*>(scales)[d / DsMla::kTileDims];
  }

 private:
  __device__ static void* Find(const DecodeParams& p, const KvStream& stream, bool has_codes,
                               int seq, int token) {
    if (has_codes) return TokenRow<uint8_t>(p, stream, seq, token);
    return TokenRow<T>(p, stream, seq, token);
  }
  __device__ static float Load(const void* row, bool has_codes, int d) {
    if (!has_codes) return static_cast<const T*>(row)[d];
    const auto code = static_cast<const __nv_fp8_storage_t*>(row)[d];
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
  }
  __device__ static void Store(void* row, bool has_codes, int d, float value) {
    if (has_codes) {
      static_cast<uint8_t*>(row)[d] = FloatToE4m3(value);
    } else {
      static_cast<T*>(row)[d] = T(value);
    }
  }
};

// A tile scale, such that scale times code is a bf16. A third of the tokens have much smaller ones.
__device__ inline float DrawTileScale(uint32_t token_hash, uint32_t hash, float magnitude) {
  const int token_log2 = token_hash % 3 == 0 ? -static_cast<int>(token_hash / 3 % 16) : 0;
  return ldexpf(hash / 4 % 2 == 0 ? magnitude : 1.5f * magnitude, token_log2 + hash % 4);
}

// Grid (tokens, batch): random keys times `magnitude`, only where keys are. Of codes, `magnitude`
// is in the scales.
template <typename T>
__global__ void FillKeys(DecodeParams p, uint64_t seed, float magnitude) {
  const int seq = blockIdx.y;
  const float ckv_factor = p.kv_format == KvFormat::kPlain ? magnitude : 1.0f;
  const float kpe_factor = p.kv_format == KvFormat::kE4m3 ? 1.0f : magnitude;
  for (int token = blockIdx.x; token < Length(p, seq); token += gridDim.x) {
    const CachedToken<T> cached(p, seq, token);
    if (!cached.exists()) continue;
    const uint64_t first = (seed << 40) + (uint64_t{blockIdx.y} << 26) + uint64_t(token) * 1024;
    for (int d = threadIdx.x; d < p.d_ckv; d += blockDim.x) {
      cached.SetCkv(d, ckv_factor * Gauss(first + d));
      if (p.kv_format == KvFormat::kDsMla && d % DsMla::kTileDims == 0) {
        cached.TileScale(d) = DrawTileScale(Hash(first + 900), Hash(first + d), magnitude);
      }
    }
    for (int d = threadIdx.x; d < p.d_kpe; d += blockDim.x) {
      cached.SetKpe(d, kpe_factor * Gauss(first + 600 + d));
    }
  }
}

// What is wrong with one sequence.
struct Verdict {
  double error, norm;  // squared
  float score_error;   // by how much a score may be off
  int bad;             // NaN, wrong -inf, non-zero empty rows, large LSE errors
};

// Grid (rows / stride, batch): rows of the reference, compared with the backend's: every stride-th
// one of a sequence, from any of its first ones on. `all_scores` has max_len for each CTA.
// `max_score`: kMaxCodesScore, or 0 where scores are summed in float32.
template <typename T>
__global__ void Compare(DecodeParams p, float* all_scores, int max_len, int stride,
                        Verdict* verdicts, float max_score = 0.0f) {
  const int rows = p.q_len * p.num_heads, seq = blockIdx.y;
  const int seq_row = blockIdx.x * stride + Hash(seq) % stride;
  if (seq_row >= rows) return;
  const int64_t row = int64_t{seq} * rows + seq_row;
  const int len = Length(p, seq), query = seq_row / p.num_heads;
  const int visible = p.causal ? max(len - p.q_len + query + 1, 0) : len;
  const T* q_nope = static_cast<const T*>(p.q_nope) + row * p.d_ckv;
  const T* q_pe = static_cast<const T*>(p.q_pe) + row * p.d_kpe;
  float* scores = all_scores + (int64_t{seq} * gridDim.x + blockIdx.x) * max_len;
  const float q_scale = p.q_scale == nullptr ? 1.0f : p.q_scale[seq * p.q_scale_stride];
  const float scale = p.sm_scale * q_scale;
  __shared__ int score_error;  // the bits of a float
  if (threadIdx.x == 0) score_error = 0;
  __syncthreads();
  for (int token = threadIdx.x; token < visible; token += blockDim.x) {
    const CachedToken<T> cached(p, seq, token);
    float score = -INFINITY;
    if (cached.exists()) {
      float q_norm = 0.0f, k_norm = 0.0f;
      score = 0.0f;
      const auto add = [&](float q, float k) {
        score += q * k, q_norm += q * q, k_norm += k * scale * k;
      };
      for (int d = 0; d < p.d_ckv; ++d) add(q_nope[d], cached.Ckv(d));
      for (int d = 0; d < p.d_kpe; ++d) add(q_pe[d], cached.Kpe(d));
      score *= scale;
      if (max_score > 0.0f) {
        const float lengths = sqrtf(q_norm) * sqrtf(fabsf(scale)) * sqrtf(fabsf(k_norm));
        atomicMax(&score_error, __float_as_int(max_score * lengths));
      }
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
      const CachedToken<T> cached(p, seq, token);
      if (cached.exists()) expected += scores[token] * cached.Ckv(d);
    }
    const float got = float(static_cast<const T*>(p.out)[row * p.d_ckv + d]);
    bad += !(got == got) || (sum == 0.0f && got != 0.0f);
    error += double(got - expected) * (got - expected);
    norm += double(expected) * expected;
  }
  if (threadIdx.x == 0) {
    const float got = p.lse[row], expected = sum > 0.0f ? top + logf(sum) : -INFINITY;
    const float max_error =
        __int_as_float(score_error) + kMaxLse * (1.0f + 0.05f * fabsf(expected));
    bad += sum > 0.0f ? !(fabsf(got - expected) <= max_error) : got != -INFINITY;
    atomicMax(reinterpret_cast<int*>(&verdicts[seq].score_error), score_error);
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
