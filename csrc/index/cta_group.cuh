// The CTAs that serve one query: a cluster, or one CTA alone, which every GPU has.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

namespace jax_mla::index {

class CtaGroup {
 public:
#if __CUDA_ARCH__ >= 900
  __device__ __forceinline__ CtaGroup()
      : is_alone_(cooperative_groups::this_cluster().num_blocks() == 1) {}
  // Read where they are needed: registers are scarce.
  __device__ __forceinline__ uint32_t size() const {
    uint32_t size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return is_alone_ ? 1 : size;
  }
  __device__ __forceinline__ uint32_t rank() const {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return is_alone_ ? 0 : rank;
  }
  __device__ __forceinline__ bool is_alone() const { return is_alone_; }

  // This CTA goes on alone.
  __device__ __forceinline__ void Leave() { is_alone_ = true; }

  // All threads of all CTAs. What they have written to shared memory is visible behind it.
  __device__ __forceinline__ void Sync() const {
    if (is_alone_) {
      __syncthreads();
    } else {
      cooperative_groups::this_cluster().sync();
    }
  }
  // The same in two parts, of which a CTA alone needs only the first.
  __device__ __forceinline__ void Arrive() const {
    if (!is_alone_) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    __syncthreads();
  }
  __device__ __forceinline__ void Wait() const {
    if (!is_alone_) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  }

  // The same variable in the shared memory of CTA `rank`.
  template <class T>
  __device__ __forceinline__ T* At(T* own, uint32_t rank) const {
    return is_alone_ ? own : cooperative_groups::this_cluster().map_shared_rank(own, rank);
  }

 private:
  bool is_alone_;
#else
  __device__ __forceinline__ uint32_t size() const { return 1; }
  __device__ __forceinline__ uint32_t rank() const { return 0; }
  __device__ __forceinline__ bool is_alone() const { return true; }
  __device__ __forceinline__ void Leave() {}
  __device__ __forceinline__ void Sync() const { __syncthreads(); }
  __device__ __forceinline__ void Arrive() const { __syncthreads(); }
  __device__ __forceinline__ void Wait() const {}
  template <class T>
  __device__ __forceinline__ T* At(T* own, uint32_t) const {
    return own;
  }
#endif
};

}  // namespace jax_mla::index
