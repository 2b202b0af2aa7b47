// The CTAs that serve one query: a cluster, or one CTA alone, which every GPU has.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

namespace jax_mla::index {

class CtaGroup {
 public:
#if __CUDA_ARCH__ >= 900
  __device__ __forceinline__ CtaGroup()
      : size_(cooperative_groups::this_cluster().num_blocks()),
        rank_(cooperative_groups::this_cluster().block_rank()) {}
  __device__ __forceinline__ uint32_t size() const { return size_; }
  __device__ __forceinline__ uint32_t rank() const { return rank_; }

  // This CTA goes on alone.
  __device__ __forceinline__ void Leave() { size_ = 1, rank_ = 0; }

  // All threads of all CTAs. What they have written to shared memory is visible behind it.
  __device__ __forceinline__ void Sync() const {
    if (size_ == 1) {
      __syncthreads();
    } else {
      cooperative_groups::this_cluster().sync();
    }
  }
  // The same in two parts, of which a CTA alone needs only the first.
  __device__ __forceinline__ void Arrive() const {
    if (size_ == 1) {
      __syncthreads();
    } else {
      asm volatile("barrier.cluster.arrive.release;" ::: "memory");
      __syncthreads();
    }
  }
  __device__ __forceinline__ void Wait() const {
    if (size_ > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  }

  // The same variable in the shared memory of CTA `rank`.
  template <class T>
  __device__ __forceinline__ T* At(T* own, uint32_t rank) const {
    return size_ == 1 ? own : cooperative_groups::this_cluster().map_shared_rank(own, rank);
  }

 private:
  uint32_t size_, rank_;
#else
  __device__ __forceinline__ uint32_t size() const { return 1; }
  __device__ __forceinline__ uint32_t rank() const { return 0; }
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
