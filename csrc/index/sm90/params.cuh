// What the roles of the score kernel share.
#pragma once

#include <cuda.h>

#include "gpu/sm90.cuh"
#include "index/sm90/config.h"

namespace jax_mla::index::sm90 {

using gpu::sm90::SharedAddress;

struct TensorMaps {
  CUtensorMap keys;     // [pages of all layers, halves, page_size, 128 bytes]
  CUtensorMap queries;  // [num_tokens, halves, num_heads, 128 bytes]
};

// What the host passes to a launch, besides the tensor maps.
struct KernelParams {
  TopkParams call;
  Slab slab;
  int32_t box_tokens;  // min(page_size, 64)
  int32_t box_tokens_log2;
  uint64_t key_policy;  // of L2
};

// The CTA's shared memory, at an address that the compiler knows.
template <class C>
__device__ __forceinline__ SharedMemory<C>& Shared() {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  return *reinterpret_cast<SharedMemory<C>*>(shared_bytes);
}

// A place in a ring, and the parity of its barriers' phase.
template <int kSize>
struct RingPlace {
  int idx = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void Next() {
    if (++idx == kSize) idx = 0, phase ^= 1;
  }
  // At most kSize steps.
  __device__ __forceinline__ void Skip(int steps) {
    idx += steps;
    if (idx >= kSize) idx -= kSize, phase ^= 1;
  }
};

}  // namespace jax_mla::index::sm90
