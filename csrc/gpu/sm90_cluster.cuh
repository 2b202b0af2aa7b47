// Wrappers of instructions for thread-block clusters (sm90.cuh has the others and the conventions).
// Addresses of another CTA's shared memory come from PeerAddress.
//
// How two CTAs exchange data through each other's shared memory:
//   1. Each CTA initialises an mbarrier and calls MbarrierInitFence.
//   2. When no thread of a CTA reads the receiving buffer any more, its threads call ClusterArrive.
//   3. Threads call ClusterWait, then PeerStore16 and PeerStore8 to the other CTA's buffer and
//      mbarrier.
//   4. The receiver waits for its own mbarrier with PeerStoresWait and reads the buffer.
// What orders these steps:
//   - The mbarrier's initialisation precedes the peer's stores. MbarrierInitFence releases it to
//     the cluster, and ClusterWait acquires. PTX names this combination with a relaxed arrive.
//   - The last reads of the buffer precede the peer's stores, because a thread arrives only after
//     it has used what it read, or after wgmma.wait_group for operands of wgmma: those reads are
//     complete. PTX promises this order formally only with a releasing arrive. That also waits for
//     all of the thread's stores to global memory, and takes 400 cycles more.
//   - The peer's stores precede the reads of step 4. st.async completes on the mbarrier as a
//     release at cluster scope, and PeerStoresWait acquires at that scope.
// A CTA does not exit while its peer may still store to it, because it waits for all those stores.
#pragma once

#include <cstdint>

#include "gpu/codegen.cuh"
#include "gpu/sm90.cuh"

namespace jax_mla::gpu::sm90 {

using gpu::ThreadIndex;

// This CTA's place in its cluster.
__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The address, in the shared memory of CTA `rank` of the cluster, of what lies at `address` in this
// CTA's.
__device__ __forceinline__ uint32_t PeerAddress(uint32_t address, uint32_t rank) {
  uint32_t peer;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
  return peer;
}

// The cluster's barrier. It counts all threads of the cluster that have not exited. The arrive is
// relaxed: it makes none of the thread's writes visible.
__device__ __forceinline__ void ClusterArrive() {
  ChaosDelay();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void ClusterWait() {
  ChaosDelay();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Stores 16 or 8 bytes into the shared memory of a CTA of the cluster. When the bytes have landed,
// they count towards the bytes that the mbarrier `barrier` of that CTA expects.
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

// Waits until the phase of the given parity of this CTA's `barrier` has completed. What peers
// stored on it is then visible (MbarrierWait acquires at the scope of the CTA only).
__device__ __forceinline__ void PeerStoresWait(uint32_t barrier, uint32_t parity) {
  ChaosDelay();
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "peer_wait_loop:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra peer_wait_done;\n"
      "bra peer_wait_loop;\n"
      "peer_wait_done:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace jax_mla::gpu::sm90
