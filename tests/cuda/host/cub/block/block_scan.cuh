// cub::BlockScan as far as ragged/plan_units.cuh needs it, on the threads of ../../cta.h. As there,
// the caller waits before it uses the storage again.
#pragma once

namespace cub {

template <class T, int kThreads>
struct BlockScan {
  struct TempStorage {
    T values[kThreads];
  };
  TempStorage& storage;

  explicit BlockScan(TempStorage& shared) : storage(shared) {}

  template <class Op>
  void ExclusiveScan(T value, T& before, T initial, Op op, T& total) {
    storage.values[threadIdx.x] = value;
    __syncthreads();
    before = initial;
    for (unsigned i = 0; i < threadIdx.x; ++i) before = op(before, storage.values[i]);
    total = storage.values[0];
    for (int i = 1; i < kThreads; ++i) total = op(total, storage.values[i]);
  }
};

}  // namespace cub
