// Counts how often each handler runs, so that tests can prove which code ran.
#pragma once

#include <atomic>
#include <cstdint>

namespace jax_mla {

// One counter for each handler, a global of the file that defines the handler. While the module is
// loaded, the counters link themselves into a list, which module.cc reads.
class CallCounter {
 public:
  explicit CallCounter(const char* name) : name_(name), next_(head_) { head_ = this; }
  CallCounter(const CallCounter&) = delete;
  CallCounter& operator=(const CallCounter&) = delete;

  void Increment() { count_.fetch_add(1, std::memory_order_relaxed); }

  const char* name() const { return name_; }
  int64_t count() const { return count_.load(std::memory_order_relaxed); }
  const CallCounter* next() const { return next_; }
  static const CallCounter* first() { return head_; }

 private:
  static inline CallCounter* head_ = nullptr;

  const char* name_;
  CallCounter* next_;
  std::atomic<int64_t> count_{0};
};

}  // namespace jax_mla
