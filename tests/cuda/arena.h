// Device memory for one random case after the other.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace jax_mla::decode::stress {

inline constexpr size_t kArenaBytes = size_t{2} << 30;

inline void Check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA error: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

// An exact arena allocates each array by itself: slow, but then compute-sanitizer knows where each
// of them ends.
class Arena {
 public:
  explicit Arena(size_t bytes = kArenaBytes, bool is_exact = false)
      : bytes_(bytes), is_exact_(is_exact) {
    if (!is_exact) Check(cudaMalloc(&base_, bytes));
  }
  Arena(const Arena&) = delete;
  ~Arena() {
    Reset();
    cudaFree(base_);
  }
  void Reset() {
    used_ = 0;
    for (void* array : arrays_) Check(cudaFree(array));
    arrays_.clear();
  }
  template <typename T>
  T* Take(size_t size) {
    if (is_exact_) {
      void* array = nullptr;
      Check(cudaMalloc(&array, std::max<size_t>(size, 1) * sizeof(T)));
      arrays_.push_back(array);
      return static_cast<T*>(array);
    }
    T* result = reinterpret_cast<T*>(base_ + used_);
    used_ += (size * sizeof(T) + 511) / 256 * 256;
    if (used_ > bytes_) {
      std::fprintf(stderr, "the arena is too small\n");
      std::abort();
    }
    return result;
  }
  template <typename T>
  T* Copy(const std::vector<T>& values) {
    T* result = Take<T>(values.size());
    Check(cudaMemcpy(result, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return result;
  }

 private:
  char* base_ = nullptr;
  size_t used_ = 0;
  const size_t bytes_;
  const bool is_exact_;
  std::vector<void*> arrays_;  // of an exact arena
};

}  // namespace jax_mla::decode::stress
