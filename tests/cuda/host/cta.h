// A CTA as threads of the host, for kernels that need no more than barriers, atomics and cub's
// block operations (cub/block beside this). A thread that misses a barrier then hangs here and not
// on a GPU, and -fsanitize=thread finds a barrier that is missing. Included before everything else.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

namespace jax_mla::host {

inline std::barrier<>* barrier;      // of all threads of the CTA
inline std::atomic<int> votes[2];    // calls of __syncthreads_count use them in turn
inline thread_local int vote = 0;    // which one is next
inline thread_local uint3 thread{};  // threadIdx

// Runs `kernel` on so many threads, one CTA at a time.
template <class Kernel>
void RunCta(int num_threads, Kernel kernel) {
  std::barrier<> all(num_threads);
  barrier = &all;
  votes[0] = votes[1] = 0;
  std::vector<std::jthread> threads;
  for (unsigned i = 0; i < static_cast<unsigned>(num_threads); ++i) {
    threads.emplace_back([i, &kernel] {
      thread = {i, 0, 0};
      kernel();
    });
  }
}

}  // namespace jax_mla::host

#define threadIdx (jax_mla::host::thread)

inline void __syncthreads() { jax_mla::host::barrier->arrive_and_wait(); }

inline int __syncthreads_count(int predicate) {
  std::atomic<int>& votes = jax_mla::host::votes[jax_mla::host::vote];
  jax_mla::host::vote ^= 1;
  if (predicate != 0) ++votes;
  __syncthreads();
  const int count = votes;
  __syncthreads();
  if (threadIdx.x == 0) votes = 0;
  return count;
}

inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }

inline int atomicAdd(int* address, int value) {
  return std::atomic_ref<int>(*address).fetch_add(value);
}

inline int atomicMin(int* address, int value) {
  std::atomic_ref<int> target(*address);
  int old = target;
  while (value < old && !target.compare_exchange_weak(old, value)) {
  }
  return old;
}

using std::min;

namespace jax_mla::host {

// What cub's block operations have in common. As with cub, the caller waits before it uses the
// storage again.
template <class T, int kThreads>
struct BlockOperation {
  struct TempStorage {
    T values[kThreads];
  };
  TempStorage& storage;

  explicit BlockOperation(TempStorage& shared) : storage(shared) {}

  // Lets all threads see each other's value.
  void Share(T value) {
    storage.values[threadIdx.x] = value;
    __syncthreads();
  }
};

}  // namespace jax_mla::host
