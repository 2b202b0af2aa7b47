// The grid barrier of the merge inside the wide kernel. Each math warpgroup arrives once it has no
// more partial result to write, and only who merges waits.
#pragma once

#include <cstdint>

#include "decode/sm90/wide/params.cuh"
#include "decode/trace.cuh"
#include "gpu/grid_barrier.cuh"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::wide {

// One thread arrives for some of its CTA's math warpgroups. The lead is among them in CTA 0's first
// call.
__device__ __forceinline__ uint32_t ArriveFor(uint32_t num_warpgroups, bool has_lead) {
  return gpu::grid_barrier::Arrive(num_warpgroups, kNumMathWarpgroups * gridDim.x * gridDim.y,
                                   blockIdx.x + blockIdx.y == 0 && has_lead);
}

// The calling math warpgroup. Recomputed here: otherwise it would be kept in registers, and
// spilled, from a worker's first item on.
__device__ __forceinline__ int ThisHalf() { return RecomputeHere(threadIdx.x) / kWarpgroupThreads; }
__device__ __forceinline__ bool IsFirstOfHalf() {
  return RecomputeHere(threadIdx.x) % kWarpgroupThreads == 0;
}

// All threads of a math warpgroup.
__device__ __forceinline__ void SyncHalf() {
  gpu::sm90::NamedBarrierSync(kLeadTail + ThisHalf(), kWarpgroupThreads);
}
template <class C>
__device__ __forceinline__ void ArriveAtGrid() {
  SyncHalf();
  if (!IsFirstOfHalf()) return;
  const int half = ThisHalf();
  Shared<C>().grid_arrivals[half] = ArriveFor(1, /*has_lead=*/half == kLead);
}
template <class C>
__device__ __forceinline__ void WaitGrid() {
  trace::Enter(Phase::kWaitPartial);
  if (IsFirstOfHalf()) gpu::grid_barrier::Wait(Shared<C>().grid_arrivals[ThisHalf()]);
  SyncHalf();
}

}  // namespace jax_mla::decode::sm90::wide
