// cub::BlockReduce as far as ragged/plan_units.cuh needs it, on the threads of ../../cta.h.
#pragma once

#include <limits>

namespace cub {

template <class T, int kThreads>
struct BlockReduce : jax_mla::host::BlockOperation<T, kThreads> {
  using jax_mla::host::BlockOperation<T, kThreads>::BlockOperation;

  // Thread 0 gets the result, the others something else.
  template <class Op>
  T Reduce(T value, Op op) {
    this->Share(value);
    if (threadIdx.x != 0) return std::numeric_limits<T>::min();
    const T* values = this->storage.values;
    T result = values[0];
    for (int i = 1; i < kThreads; ++i) result = op(result, values[i]);
    return result;
  }
  T Sum(T value) {
    return Reduce(value, [](T a, T b) { return a + b; });
  }
};

}  // namespace cub
