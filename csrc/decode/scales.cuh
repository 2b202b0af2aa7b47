// The scales of one sequence in a call with an FP8 cache, as kernels apply them.
//
// Kernels multiply codes, which bf16 holds exactly. So scores and output have to be multiplied by a
// scale once each, and only a scale that changes from tile to tile goes into the values themselves.
// Both parts of a score share one factor. So one of them is first multiplied by the quotient of the
// two scales, or by its reciprocal, in float32.
#pragma once

#include "core/kv_format.h"
#include "decode/params.h"

namespace jax_mla::decode {

struct Scales {
  float score;  // of a product of query and row
  float value;  // of the output
  float kpe;    // of kpe's part of a score, before `score`; 1 where both have the same scale
};

__device__ __forceinline__ Scales ScalesOf(const DecodeParams& p, int32_t seq_idx) {
  const float q_scale =
      p.q_scale == nullptr ? 1.0f : __ldg(p.q_scale + int64_t{seq_idx} * p.q_scale_stride);
  if (p.kv_scale == nullptr) return {q_scale, 1.0f, 1.0f};
  const float* kv_scale = p.kv_scale + int64_t{seq_idx} * p.kv_scale_stride;
  const float ckv = __ldg(kv_scale);
  const float kpe = p.kv_format == KvFormat::kE4m3 ? __ldg(kv_scale + 1) : 1.0f;
  return {q_scale * ckv, ckv, kpe / ckv};
}

}  // namespace jax_mla::decode
