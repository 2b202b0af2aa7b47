// Device side of ragged_stress.cu, besides decode_reference.cuh: what a step must leave in the
// pool, and checks of every row. Parameters have each token of the step as a sequence of its own,
// which is as long as what the token sees. So its own row is the last one.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "decode/params.h"
#include "decode_reference.cuh"

namespace jax_mla::decode::stress {

// Grid (tokens): what the step has to write.
template <typename T>
__global__ void WriteRows(DecodeParams p, const T* ckv, const T* kpe, const bool* is_written) {
  const int token = blockIdx.x;
  if (!is_written[token]) return;
  const int place = p.seq_lens[token] - 1;
  T* ckv_row = TokenRow<T>(p, p.ckv, token, place);
  T* kpe_row = TokenRow<T>(p, p.kpe, token, place);
  if (ckv_row == nullptr) return;
  for (int d = threadIdx.x; d < p.d_ckv; d += blockDim.x) {
    ckv_row[d] = ckv[int64_t{token} * p.d_ckv + d];
  }
  for (int d = threadIdx.x; d < p.d_kpe; d += blockDim.x) {
    kpe_row[d] = kpe[int64_t{token} * p.d_kpe + d];
  }
}

// Grid (tokens): of every row, what needs no reference: no NaN, and nothing in a row without keys.
template <typename T>
__global__ void CheckRows(DecodeParams p, int* num_bad) {
  const int token = blockIdx.x;
  const bool is_empty = p.seq_lens[token] == 0;
  const int64_t first_row = int64_t{token} * p.num_heads;
  const T* out = static_cast<const T*>(p.out) + first_row * p.d_ckv;
  int bad = 0;
  for (int i = threadIdx.x; i < p.num_heads * p.d_ckv; i += blockDim.x) {
    const float got = float(out[i]);
    bad += !(got == got) || (is_empty && got != 0.0f);
  }
  for (int i = threadIdx.x; i < p.num_heads; i += blockDim.x) {
    const float got = p.lse[first_row + i];
    bad += !(got == got) || (is_empty && got != -INFINITY);
  }
  if (bad != 0) atomicAdd(num_bad, bad);
}

}  // namespace jax_mla::decode::stress
