#include "decode/cpu/run.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "decode/cpu/dispatch.h"
#include "decode/cpu/merge.h"
#include "decode/cpu/plan.h"

namespace jax_mla::decode::cpu {
namespace ffi = xla::ffi;

namespace {

constexpr size_t kCacheLineBytes = 64;

struct FreeDeleter {
  void operator()(float* p) const { std::free(p); }
};
using FloatArray = std::unique_ptr<float[], FreeDeleter>;

// Uninitialised memory, aligned to cache lines. Null if there is none.
FloatArray Allocate(int64_t num_floats) {
  const size_t bytes = std::max<int64_t>(num_floats, 1) * sizeof(float);
  const size_t rounded_bytes = (bytes + kCacheLineBytes - 1) / kCacheLineBytes * kCacheLineBytes;
  return FloatArray(static_cast<float*>(std::aligned_alloc(kCacheLineBytes, rounded_bytes)));
}

// One call. operator() runs one of its tasks.
class DecodeCall {
 public:
  DecodeCall(std::string_view target, const DecodeParams& params, const Kernel& kernel)
      : target_(target),
        params_(params),
        kernel_(kernel),
        plan_(params, kernel),
        scratch_floats_(ScratchFloats(params.d_ckv, params.d_kpe, plan_.padded_rows())),
        parts_done_(plan_.num_split_tiles()) {}

  ffi::Error Run(ffi::ThreadPool& pool) {
    ClearPadding();
    const int64_t num_tasks = plan_.num_tasks();
    if (num_tasks == 0) return ffi::Error::Success();
    const int64_t num_workers = std::clamp<int64_t>(pool.num_threads(), 1, num_tasks);
    // All memory of the call is allocated here, so that nothing on the pool's threads can fail.
    partials_ = Allocate(plan_.num_partial_floats());
    workers_memory_ = Allocate(num_workers * WorkerFloats());
    workers_.resize(num_workers);
    if (partials_ == nullptr || workers_memory_ == nullptr) {
      return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                        std::string(target_) + ": no memory for the partial results");
    }
    ParallelFor(pool, num_tasks, num_workers, *this);
    return ffi::Error::Success();
  }

  void operator()(int64_t worker_idx, int64_t task_idx) {
    Plan::Item item = plan_.At(task_idx);
    Task& task = item.task;
    Worker& worker = workers_[worker_idx];
    task.has_queries = worker.seq_idx == task.seq_idx && worker.row_begin == task.row_begin;
    worker = {.seq_idx = task.seq_idx, .row_begin = task.row_begin};

    float* scratch = workers_memory_.get() + worker_idx * WorkerFloats();
    const bool is_whole = item.num_parts == 1;
    float* base = is_whole ? scratch + scratch_floats_
                           : PartialOf(item) + item.part_idx * item.part_stride_floats;
    const Partial partial = plan_.PartialAt(base, task.padded_rows);
    kernel_.run(params_, task, scratch, partial);
    if (is_whole) {
      WriteRows(params_, task, partial);
    } else {
      FinishPart(item);
    }
  }

 private:
  // Which queries a worker's scratch holds.
  struct Worker {
    int32_t seq_idx = -1;
    int32_t row_begin = -1;
  };

  int64_t WorkerFloats() const { return scratch_floats_ + plan_.partial_floats(); }

  // The partial result of the first part of an item's row tile.
  float* PartialOf(const Plan::Item& item) const { return partials_.get() + item.first_partial; }

  // Tokens of no sequence have no task.
  void ClearPadding() {
    const TokenRange tokens = plan_.tokens();
    ClearRows({0, tokens.begin});
    ClearRows({tokens.end, params_.num_tokens});
  }

  void ClearRows(const TokenRange& tokens) {
    if (tokens.size() <= 0) return;
    const int64_t first_row = int64_t{tokens.begin} * params_.num_heads;
    const int64_t num_rows = int64_t{tokens.size()} * params_.num_heads;
    const int64_t row_bytes = int64_t{params_.d_ckv} * ElementBytes(params_.dtype);
    std::memset(static_cast<char*>(params_.out) + first_row * row_bytes, 0, num_rows * row_bytes);
    std::fill_n(params_.lse + first_row, num_rows, -std::numeric_limits<float>::infinity());
  }

  void FinishPart(const Plan::Item& item) {
    const Task& task = item.task;
    auto& done = parts_done_[item.split_tile_idx];
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < item.num_parts) return;
    const Partial first = plan_.PartialAt(PartialOf(item), task.padded_rows);
    MergePartials(first, item.num_parts, item.part_stride_floats, params_.d_ckv, task.padded_rows);
    WriteRows(params_, task, first);
  }

  const std::string_view target_;
  const DecodeParams& params_;
  const Kernel& kernel_;
  const Plan plan_;
  const int64_t scratch_floats_;
  std::vector<std::atomic<int32_t>> parts_done_;  // [num_split_tiles]
  std::vector<Worker> workers_;
  FloatArray workers_memory_;  // [num_workers, WorkerFloats()]: scratch, then a partial result
  FloatArray partials_;        // [num_partial_floats]
};

}  // namespace

ffi::ErrorOr<const Kernel*> FindKernel(std::string_view target, std::string_view backend) {
  const std::string name(target);
  if (!backend.empty() && backend != "cpu") {
    return ffi::Unexpected(
        ffi::Error::InvalidArgument(name + ": backend: expected \"cpu\" on this platform, got \"" +
                                    std::string(backend) + "\""));
  }
  const Kernel* kernel = ChosenKernel();
  if (kernel == nullptr) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(name + ": " + WhyNoKernel()));
  }
  return kernel;
}

ffi::Error Run(std::string_view target, const DecodeParams& params, const Kernel& kernel,
               ffi::ThreadPool& pool) {
  return DecodeCall(target, params, kernel).Run(pool);
}

}  // namespace jax_mla::decode::cpu
