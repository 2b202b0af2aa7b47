// The kernel behind CUTLASS's, in place of CUTLASS's own reduction: it merges the parts of a
// sequence, takes results out of padded arrays, and writes the rows of sequences without keys.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "decode/sm100/buffers.h"
#include "gpu/pack.cuh"

namespace jax_mla::decode::sm100 {

inline constexpr int kVectorDims = 4;  // of a thread
inline constexpr int kFinishThreads = kDCkv / kVectorDims;

// What a thread has of a row: four dims of the output, and lse, which all threads have.
struct RowResult {
  float4 out;
  float lse;
};

// The parts of a row, merged in order. A part's output is divided by its own sum.
__device__ inline RowResult MergeParts(const Buffers& b, int64_t entry, int32_t row,
                                       int32_t num_parts) {
  const float* part_lse = b.part_lse + entry * b.max_parts * kEntryRows + row;
  const float* part_out =
      b.part_out + (entry * kEntryRows + row) * b.max_parts * kDCkv + threadIdx.x * kVectorDims;
  float top = -INFINITY;
  for (int32_t i = 0; i < num_parts; ++i) top = fmaxf(top, part_lse[i * kEntryRows]);
  RowResult result{make_float4(0.0f, 0.0f, 0.0f, 0.0f), 0.0f};
  float sum = 0.0f;
  for (int32_t i = 0; i < num_parts; ++i) {
    const float weight = expf(part_lse[i * kEntryRows] - top);
    const float4 out = *reinterpret_cast<const float4*>(part_out + int64_t{i} * kDCkv);
    sum += weight;
    result.out.x += weight * out.x;
    result.out.y += weight * out.y;
    result.out.z += weight * out.z;
    result.out.w += weight * out.w;
  }
  const float scale = 1.0f / sum;
  result.out.x *= scale;
  result.out.y *= scale;
  result.out.z *= scale;
  result.out.w *= scale;
  result.lse = top + logf(sum);
  return result;
}

// Grid (num_heads, batch).
static __global__ void __launch_bounds__(kFinishThreads)
    Finish(const __grid_constant__ DecodeParams p, const __grid_constant__ CallPlan plan,
           const __grid_constant__ Buffers b) {
  const int32_t head = blockIdx.x, seq_idx = blockIdx.y;
  const int64_t entry = int64_t{seq_idx} * plan.entries_per_seq + head / kEntryRows;
  const int32_t row = head % kEntryRows;
  const int32_t num_parts = b.num_parts[entry];
  if (num_parts == 1 && !plan.pads_heads) return;  // CUTLASS's kernel has written the results

  const int64_t to = int64_t{seq_idx} * plan.num_heads + head;
  uint2* out = static_cast<uint2*>(p.out) + to * kFinishThreads + threadIdx.x;
  if (num_parts == 1) {
    const int64_t from = entry * kEntryRows + row;
    *out = static_cast<const uint2*>(b.out)[from * kFinishThreads + threadIdx.x];
    if (threadIdx.x == 0) p.lse[to] = b.lse[from];
    return;
  }
  RowResult result{make_float4(0.0f, 0.0f, 0.0f, 0.0f), -INFINITY};
  if (num_parts > 1) result = MergeParts(b, entry, row, num_parts);
  *out = make_uint2(gpu::Pack2<__nv_bfloat16>(result.out.x, result.out.y),
                    gpu::Pack2<__nv_bfloat16>(result.out.z, result.out.w));
  if (threadIdx.x == 0) p.lse[to] = result.lse;
}

}  // namespace jax_mla::decode::sm100
