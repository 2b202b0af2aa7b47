// Arrays between guards: words that no kernel may change.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "arena.h"
#include "decode_reference.cuh"

namespace jax_mla::decode::stress {

inline constexpr size_t kGuardWords = 256;
inline constexpr uint32_t kGuardWord = 0xa5c3965au;

__global__ void CountOtherWords(const uint32_t* data, size_t size, uint32_t word, int* count) {
  for (size_t i = threadIdx.x; i < size; i += blockDim.x) {
    if (data[i] != word) atomicAdd(count, 1);
  }
}

class GuardedArena {
 public:
  explicit GuardedArena(Arena& arena) : arena_(arena) {}

  // The array has a whole number of words.
  template <typename T>
  T* Take(size_t size) {
    const size_t words = size * sizeof(T) / sizeof(uint32_t);
    uint32_t* before = arena_.Take<uint32_t>(words + 2 * kGuardWords);
    uint32_t* data = before + kGuardWords;
    for (uint32_t* guard : {before, data + words}) {
      FillWords<<<1, kGuardWords>>>(guard, kGuardWords, kGuardWord);
      guards_.push_back(guard);
    }
    return reinterpret_cast<T*>(data);
  }

  // Adds the number of words that have changed.
  void CountChanges(int* count) const {
    for (const uint32_t* guard : guards_) {
      CountOtherWords<<<1, kGuardWords>>>(guard, kGuardWords, kGuardWord, count);
    }
  }

 private:
  Arena& arena_;
  std::vector<uint32_t*> guards_;
};

}  // namespace jax_mla::decode::stress
