// Hopper's score kernel: for each query of a slab and each token that it sees, the sum over index
// heads of weights * relu(q . k), as a key (key.cuh).
//
// Algorithm. A tile of 64 tokens is M of a wgmma and the heads of a window's queries are N, so that
// the sum over heads is a sum of a thread's own registers, and then of four threads. Keys go to
// registers once and serve all queries of the window: each token is read once from the pool for up
// to kMaxQueries queries. Four warpgroups take tiles in turn: while one adds up its products, the
// tensor cores work for another.
//
// Roles. Warps 0-15 are the math warpgroups. Warp 16 copies keys (TMA), warp 17 queries and
// weights. Warps 18 and 19 give their registers to the math warpgroups. Every role walks the CTA's
// windows by itself (slab_work.cuh).
//
// clang-format off
//
// Barrier           kind      arrivals       who arrives, when                    who waits, before what        protects          fence
// keys_full[s]      mbarrier  1, tx          key warp: boxes of the tile loading  math: keys to registers       keys[s], scales[s], boxes_present[s]   tx (async)
// keys_empty[s]     mbarrier  kGroupWarps    math: keys are in registers          key warp: refill              the same          -
// queries_full[s]   mbarrier  2, tx          query warp: queries loading; weights math: window's first product  queries[s], weights[s]  tx (async)
//                                            stored
// queries_empty[s]  mbarrier  kNumMathWarps  math: window's last sum done         query warp: refill            the same          -
//
// clang-format on
// Phases. mbarriers start at phase 0. The copying warps first wait on *_empty with parity 1, which
// passes at once. A math warpgroup waits for queries_full of every window of the CTA, whether it
// has a tile of it or not: so it arrives once in each phase of queries_empty.
//
// Registers: 112 a math thread, 40 of the others (setmaxnreg). Shared memory: SharedMemory<C>, 215
// KB with codes, 226 KB with bf16.
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
  FindWork<kNumThreads>(params.call, params.slab, C::kMaxQueries, work);
  if (warp < kNumMathWarps) {
    gpu::sm90::SetMaxRegistersUp<kMathRegisters>();
    MathLoop<C>(params).Run();
  } else {
    gpu::sm90::SetMaxRegistersDown<kCopyRegisters>();
    if (warp == kKeyWarp) KeyRole<C>(params, maps);
    if (warp == kQueryWarp) QueryRole<C>(params, maps);
  }
}

}  // namespace jax_mla::index::sm90
