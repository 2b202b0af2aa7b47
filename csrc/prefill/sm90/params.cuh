// What the roles of the prefill kernel share: parameters, shared memory, a thread's place.
#pragma once

#include <cuda.h>

#include <cfloat>
#include <cstdint>

#include "gpu/online_softmax.cuh"
#include "gpu/sm90.cuh"
#include "gpu/sm90_wgmma.cuh"
#include "prefill/params.h"
#include "prefill/sm90/config.h"
#include "prefill/sm90/find_item.cuh"

namespace jax_mla::prefill::sm90 {

using gpu::sm90::SharedAddress;

// Ids of named barriers, explained in kernel.cuh. The last two have one for each math warpgroup.
inline constexpr int kSyncThreads = 0, kTurn = 1, kGroup = kTurn + kNumMathGroups;

struct TensorMaps {
  CUtensorMap q_nope, q_pe, k_nope, kpe, v;
};

// What the host passes to one launch, besides the tensor maps.
struct KernelParams {
  PrefillParams call;
  int32_t heads_per_group;
};

// The CTA's shared memory, at an address that the compiler knows.
template <class C>
__device__ __forceinline__ SharedMemory<C>& Shared() {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  return *reinterpret_cast<SharedMemory<C>*>(shared_bytes);
}

// A place in the ring of blocks, and the parity of its barriers' phase.
struct RingPlace {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void Next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// A thread's place in its math warpgroup. In wgmma's accumulator layout it owns the rows `row` and
// row + 8 of the item, and of every 8 columns the two that begin with 2 * quad.
struct Thread {
  int group, idx, row, quad;

  __device__ Thread()
      : group(__shfl_sync(kAllLanes, threadIdx.x / kGroupThreads, 0)),
        idx(threadIdx.x % kGroupThreads),
        row(group * kRowsPerGroup + idx / kWarpThreads * 16 + idx % kWarpThreads / 4),
        quad(idx % 4) {}
};

}  // namespace jax_mla::prefill::sm90
