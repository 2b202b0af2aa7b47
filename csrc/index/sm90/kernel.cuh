// Hopper's score kernel: for each query of a slab and each token that it sees, the sum over index
// heads of weights * relu(q . k), as a key (key.cuh).
//
// Algorithm. A tile of 64 tokens is M of a wgmma and the heads of a window's queries are N, so that
// the sum over heads is a sum of a thread's own registers, and then of four threads. Keys go to
// registers once and serve all queries of the window: each token is read once from the pool for up
// to kMaxQueries queries. Three warpgroups take tiles in turn: while one adds up its products, the
// tensor cores work for another. With codes the heads of two chunks are one product where a window
// has them, since then what surrounds the sums is paid half as often.
//
// Roles. Warps 0-11 are the math warpgroups. Warp 12 copies keys (TMA), warp 13 queries and
// weights. Every role walks the CTA's windows by itself (slab_work.cuh).
//
// clang-format off
//
// Barrier           kind      arrivals       who arrives, when                    who waits, before what        protects                 fence
// keys_full[s]      mbarrier  1, tx          key warp: boxes of the tile loading  math: keys to registers       keys[s], scales[s],      tx (async)
//                                                                                                               boxes_present[s]
// keys_empty[s]     mbarrier  kGroupWarps    math: keys are in registers          key warp: refill              the same                 -
// queries_full[s]   mbarrier  2, tx          query warp: queries loading; weights math: window's first product  queries[s], weights[s]   tx (async)
//                                            stored
// queries_empty[s]  mbarrier  kNumMathWarps  math: window's last sum done         query warp: refill            the same                 -
// CTA, in FindWork  named 0   kNumThreads    barriers initialised, windows stored all: first use                barriers, work           mbarrier_init
//
// clang-format on
// Phases. mbarriers start at phase 0. The copying warps first wait on *_empty with parity 1, which
// passes at once. A math warpgroup waits for queries_full of every window of the CTA, whether it
// has a tile of it or not: so it arrives once in each phase of queries_empty.
//
// Registers: 128 a thread. Shared memory: SharedMemory<C>, 207 KB with codes, 178 KB with bf16.
#pragma once

#include "gpu/launch.h"
#include "index/sm90/math.cuh"
#include "index/sm90/producers.cuh"

namespace jax_mla::index::sm90 {

// Called by one thread.
template <class C>
__device__ __forceinline__ void InitBarriers() {
  constexpr int kOneWarp = 1, kQueriesAndWeights = 2;
  for (int stage = 0; stage < C::kStages; ++stage) {
    gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().keys_full[stage]), kOneWarp);
    gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().keys_empty[stage]), kGroupWarps);
  }
  for (int slot = 0; slot < kSlots; ++slot) {
    gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().queries_full[slot]), kQueriesAndWeights);
    gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().queries_empty[slot]), kNumMathWarps);
  }
  gpu::sm90::MbarrierInitFence();
}

// Grid: one CTA an SM, or fewer.
template <class C>
__global__ void __launch_bounds__(kNumThreads, 1)
    IndexScores(const __grid_constant__ KernelParams params,
                const __grid_constant__ TensorMaps maps) {
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarpThreads, 0);
  if (threadIdx.x == 0) InitBarriers<C>();
  gpu::PdlWait();
  gpu::PdlLaunchDependents();
  SlabWork& work = Shared<C>().work;
  const int32_t total = FindWork<kNumThreads>(params.call, params.slab, C::kMaxQueries, work);
  const Walk walk(work, params.slab.num_rows, total);
  if (warp < kNumMathWarps) {
    MathRole<C>(params, walk);
  } else if (warp == kKeyWarp) {
    KeyRole<C>(params, maps, walk);
  } else {
    QueryRole<C>(params, maps, walk);
  }
}

}  // namespace jax_mla::index::sm90
