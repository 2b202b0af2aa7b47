// Wrappers of instructions for thread-block clusters (sm90.cuh has the others and the conventions).
// Addresses of another CTA's shared memory come from PeerAddress.
//
// How two CTAs exchange data through each other's shared memory:
//   1. Each CTA initialises an mbarrier and calls MbarrierInitFence.
//   2. When a thread no longer reads the receiving buffer, it calls ClusterArrive.
//   3. It calls ClusterWait, then PeerStore16 and PeerStore8 to the other CTA's buffer and
//   mbarrier.
//   4. It waits for its own CTA's mbarrier and reads its own CTA's buffer.
// What orders these steps:
//   - A CTA's mbarrier is initialised before its peer's stores reach it: MbarrierInitFence releases
//     it to the cluster, and the peer's ClusterWait acquires it. PTX names this fence for use with
//     a relaxed arrive.
//   - A CTA's last reads of the buffer come before its peer's stores. A thread arrives only when it
//     has used what it read, or after wgmma.wait_group for operands of wgmma, so the reads are
//     complete. PTX's memory model promises this order only with a releasing arrive, which also
//     makes the thread's writes visible and takes 400 cycles more.
//   - The peer's stores come before the reads in step 4. st.async completes on the mbarrier with
//     release semantics at cluster scope. MbarrierWait acquires, by PTX's default, at the scope of
//     the CTA, while the memory model asks for the cluster's. With `.acquire.cluster` the machine
//     code differs by an invalidation of L1 (CCTL.IVALL), which holds no shared memory.
// A CTA exits only after the wait in step 4. Its peer has no more stores on their way to it then.
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

}  // namespace jax_mla::gpu::sm90
