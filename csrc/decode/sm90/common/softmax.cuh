// A row's step of the online softmax (gpu/online_softmax.cuh), for all of Hopper's kernels: by how
// much its reference rises, and what its sum and O are multiplied by.
#pragma once

#include "gpu/approx.cuh"
#include "gpu/online_softmax.cuh"

namespace jax_mla::decode::sm90 {

struct Raised {
  float reference;
  float factor;  // of sum and O
};

// To the largest score seen so far. Both are in log2 units, and gpu::kNoReference is before all.
__device__ __forceinline__ Raised Raise(float reference, float top) {
  const float raised = fmaxf(reference, top);
  return {raised, gpu::Exp2(reference - raised)};
}

// The same where scores are already relative to their reference, and a row without a key has 0. A
// NaN is a key, too, and counts as 0: otherwise its row would ask again and again.
struct RelativeRaise {
  float raise;  // is added to the reference
  float factor;
  bool has_key;

  __device__ __forceinline__ static float Top(float top) { return isnan(top) ? 0.0f : top; }
  __device__ __forceinline__ RelativeRaise(float top, bool had_key)
      : has_key(had_key || top > -INFINITY) {
    // The first reference may be any number, a later one only rises.
    raise = had_key ? fmaxf(top, 0.0f) : has_key ? top : 0.0f;
    factor = had_key ? gpu::Exp2(-raise) : 1.0f;  // without a key, sum and O are 0
  }
};

}  // namespace jax_mla::decode::sm90
