// Parallel loops on XLA's CPU thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jax_mla {

// Calls work(worker, i) once for every i in [0, num_items), from at most `num_workers` threads, and
// returns when all calls have returned. `worker`, in [0, num_workers), is the same for all calls
// from one thread and differs between threads, so it can choose the thread's scratch. Items start
// in order.
//
// The calling thread does items itself. At the end it waits only for items that a running thread
// has claimed, never for a task that is still queued. So many handlers can occupy the pool's
// threads at once (one handler for each virtual device) without a deadlock. A task that starts
// after all items are claimed touches only `State`.
template <typename Work>
void ParallelFor(xla::ffi::ThreadPool& pool, int64_t num_items, int64_t num_workers, Work& work) {
  struct State {
    std::atomic<int64_t> next_item{0};
    std::atomic<int64_t> num_done{0};
    std::atomic<int64_t> next_worker{0};
  };
  auto state = std::make_shared<State>();
  const auto run = [state, num_items, &work] {
    const int64_t worker = state->next_worker.fetch_add(1);
    for (int64_t i = state->next_item.fetch_add(1); i < num_items;
         i = state->next_item.fetch_add(1)) {
      work(worker, i);
      if (state->num_done.fetch_add(1) + 1 == num_items) state->num_done.notify_all();
    }
  };
  const int64_t num_helpers = std::min(num_workers, num_items) - 1;
  for (int64_t i = 0; i < num_helpers; ++i) pool.Schedule(std::decay_t<decltype(run)>(run));
  run();
  for (int64_t done = state->num_done.load(); done < num_items; done = state->num_done.load()) {
    state->num_done.wait(done);
  }
}

}  // namespace jax_mla
