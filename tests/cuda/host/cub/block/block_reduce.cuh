// cub::BlockReduce as far as ragged/plan_units.cuh needs it, on the threads of ../../cta.h.
#pragma once

#include <limits>

namespace cub {

template <class T, int kThreads>
struct BlockReduce {
  struct TempStorage {
    T values[kThreads];
  };
  TempStorage& storage;

  explicit BlockReduce(TempStorage& shared) : storage(shared) {}

  // Thread 0 gets the result, the others something else.
  template <class Op>
  T Reduce(T value, Op op) {
    storage.values[threadIdx.x] = value;
    __syncthreads();
    if (threadIdx.x != 0) return std::numeric_limits<T>::min();
    T result = storage.values[0];
    for (int i = 1; i < kThreads; ++i) result = op(result, storage.values[i]);
    return result;
  }
  T Sum(T value) {
    return Reduce(value, [](T a, T b) { return a + b; });
  }
};

}  // namespace cub
