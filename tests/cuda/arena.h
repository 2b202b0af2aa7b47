// Device memory for one random case after the other.
#pragma once

#include <cuda_runtime_api.h>

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

class Arena {
 public:
  Arena() { Check(cudaMalloc(&base_, kArenaBytes)); }
  void Reset() { used_ = 0; }
  template <typename T>
  T* Take(size_t size) {
    T* result = reinterpret_cast<T*>(base_ + used_);
    used_ += (size * sizeof(T) + 511) / 256 * 256;
    if (used_ > kArenaBytes) std::abort();
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
};

}  // namespace jax_mla::decode::stress
