// Wrappers of instructions for thread-block clusters (sm90.cuh has the others and the
// conventions). Addresses of another CTA's shared memory come from PeerAddress.
#pragma once

#include <cstdint>

#include "gpu/sm90.cuh"

namespace jax_mla::gpu::sm90 {

// threadIdx.x, read anew: no register keeps it until here.
__device__ __forceinline__ uint32_t ThreadIndex() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// This CTA's place in its cluster.
__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// What lies at `address` of this CTA's shared memory, in that of another CTA of the cluster.
__device__ __forceinline__ uint32_t PeerAddress(uint32_t address, uint32_t rank) {
  uint32_t peer;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
  return peer;
}

// The cluster's barrier, of all its threads that have not exited. It says that a thread has come
// this far; what it has written is not made visible (which takes 400 cycles more).
__device__ __forceinline__ void ClusterArrive() {
  ChaosDelay();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void ClusterWait() {
  ChaosDelay();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Stores into the shared memory of a CTA of the cluster and completes on its mbarrier with the
// bytes; who waits for that sees them.
__device__ __forceinline__ void PeerStore16(uint32_t address, const uint4& v, uint32_t barrier) {
  ChaosDelay();
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void PeerStore8(uint32_t address, float2 v, uint32_t barrier) {
  ChaosDelay();
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, "
      "[%3];" ::"r"(address),
      "f"(v.x), "f"(v.y), "r"(barrier)
      : "memory");
}

}  // namespace jax_mla::gpu::sm90
