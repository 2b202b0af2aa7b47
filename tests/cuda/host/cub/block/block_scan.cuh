// cub::BlockScan as far as ragged/plan_units.cuh needs it, on the threads of ../../cta.h.
#pragma once

namespace cub {

template <class T, int kThreads>
struct BlockScan : jax_mla::host::BlockOperation<T, kThreads> {
  using jax_mla::host::BlockOperation<T, kThreads>::BlockOperation;

  template <class Op>
  void ExclusiveScan(T value, T& before, T initial, Op op, T& total) {
    this->Share(value);
    const T* values = this->storage.values;
    before = initial;
    for (unsigned i = 0; i < threadIdx.x; ++i) before = op(before, values[i]);
    total = values[0];
    for (int i = 1; i < kThreads; ++i) total = op(total, values[i]);
  }
};

}  // namespace cub
