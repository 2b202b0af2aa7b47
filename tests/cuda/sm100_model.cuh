// A model of CUTLASS's Blackwell MLA decode kernel: the same parameters, read and written at the
// same places (docs/kernels/decode_sm100.md), by plain loops.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "decode/sm100/arguments.cuh"

namespace jax_mla::decode::sm100 {

using T = __nv_bfloat16;
using KernelParams = MlaKernel::Params;

inline constexpr int kModelThreads = 128;
inline constexpr int kCtaRows = kEntryRows / 2;  // the CTAs of a cluster share an entry's rows
inline constexpr int kMaxTokens = 2048;          // of a part

static __device__ int num_model_errors;

// A row of a page, or of an entry's queries: `stride` is of (row, dim, page or entry).
__device__ inline const T* PageRow(const MlaKernel::Element* base,
                                   const MlaKernel::TensorStride& stride, int page, int row) {
  return reinterpret_cast<const T*>(base) + page * cute::get<2>(stride) +
         row * cute::get<0>(stride);
}

// The tiles of a part of an entry.
struct PartTiles {
  int begin, count, num_parts;

  __device__ PartTiles(const KernelParams& p, int entry, int part) : begin(0), count(0) {
    const int allowed = p.ptr_split_kv[entry];
    num_parts = 0;
    if (allowed <= part) return;
    const int tiles = (p.mainloop.ptr_seq[entry] + kTileTokens - 1) / kTileTokens;
    const int per_part = (tiles + allowed - 1) / allowed;
    begin = part * per_part;
    count = max(0, min(tiles, begin + per_part) - begin);
    num_parts = per_part == 0 ? 0 : (tiles + per_part - 1) / per_part;
    // Of what would be wrong: an empty part, or one that the merge does not know.
    if (threadIdx.x == 0 && (count == 0 || num_parts != allowed)) atomicAdd(&num_model_errors, 1);
  }
};

__device__ inline int PageOf(const KernelParams& p, int entry, int tile) {
  const int id =
      p.mainloop.ptr_page_table[int64_t{entry} * cute::get<1>(p.mainloop.stride_page_table) + tile];
  if (id < 0 || id >= p.mainloop.page_count) {
    atomicAdd(&num_model_errors, 1);
    return 0;
  }
  return id;
}

// One row of a part: scores into `scores`, then output and lse.
__device__ inline void ModelRow(const KernelParams& p, int entry, int part, const PartTiles& tiles,
                                int row, float* scores) {
  const auto& in = p.mainloop;
  const auto query = [&](const MlaKernel::Element* base, const MlaKernel::TensorStride& stride) {
    return reinterpret_cast<const T*>(base) + entry * cute::get<2>(stride) +
           row * cute::get<0>(stride);
  };
  const T* q_nope = query(in.ptr_q_latent, in.stride_q_latent);
  const T* q_pe = query(in.ptr_q_rope, in.stride_q_rope);
  const int tokens = tiles.count * kTileTokens, len = in.ptr_seq[entry];
  for (int i = threadIdx.x; i < tokens; i += kModelThreads) {
    const int page = PageOf(p, entry, tiles.begin + i / kTileTokens), page_row = i % kTileTokens;
    const T* ckv = PageRow(in.ptr_c_latent, in.stride_c_latent, page, page_row);
    const T* kpe = PageRow(in.ptr_k_rope, in.stride_k_rope, page, page_row);
    float score = 0.0f;
    for (int d = 0; d < kDCkv; ++d) score += float(q_nope[d]) * float(ckv[d]);
    for (int d = 0; d < kDKpe; ++d) score += float(q_pe[d]) * float(kpe[d]);
    scores[i] = tiles.begin * kTileTokens + i < len ? score : -INFINITY;
  }
  __syncthreads();
  float top = -INFINITY, sum = 0.0f;
  for (int i = 0; i < tokens; ++i) top = fmaxf(top, scores[i]);
  for (int i = 0; i < tokens; ++i) sum += expf(in.softmax_scale * (scores[i] - top));
  const auto& to = p.epilogue;
  for (int d = threadIdx.x; d < kDCkv; d += kModelThreads) {
    float out = 0.0f;
    for (int i = 0; i < tokens; ++i) {
      const int page = PageOf(p, entry, tiles.begin + i / kTileTokens);
      const T* ckv = PageRow(in.ptr_c_latent, in.stride_c_latent, page, i % kTileTokens);
      out += expf(in.softmax_scale * (scores[i] - top)) * float(ckv[d]);  // 0 * NaN is NaN
    }
    out = out * to.output_scale / sum;
    if (tiles.num_parts > 1) {
      to.ptr_o_acc[part * kDCkv + entry * cute::get<2>(to.stride_o_acc) +
                   row * cute::get<0>(to.stride_o_acc) + d] = out;
    } else {
      reinterpret_cast<T*>(
          to.ptr_o)[entry * cute::get<2>(to.stride_o) + row * cute::get<0>(to.stride_o) + d] =
          T(out);
    }
  }
  if (threadIdx.x == 0) {
    const float lse = logf(sum) + in.softmax_scale * top;
    if (tiles.num_parts > 1) {
      to.ptr_lse_acc[kEntryRows * part + int64_t{entry} * cute::get<1>(to.stride_lse_acc) + row] =
          lse;
    } else {
      to.ptr_lse[int64_t{entry} * cute::get<1>(to.stride_lse) + row] = lse;
    }
  }
  __syncthreads();
}

// The grid of CUTLASS's kernel: (half of an entry's rows, entry, part).
__global__ void __launch_bounds__(kModelThreads) Model(const __grid_constant__ KernelParams p) {
  __shared__ float scores[kMaxTokens];
  const int entry = blockIdx.y, part = blockIdx.z;
  const PartTiles tiles(p, entry, part);
  for (int row = 0; row < kCtaRows && tiles.count > 0; ++row) {
    ModelRow(p, entry, part, tiles, blockIdx.x * kCtaRows + row, scores);
  }
}

}  // namespace jax_mla::decode::sm100
