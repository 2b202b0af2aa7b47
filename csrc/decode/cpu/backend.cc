// CPU handler of "jax_mla_decode": runs the plan's tasks on XLA's thread pool. The thread that
// finishes the last part of a row tile merges the partial results of all its parts, in the order of
// the parts.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "core/call_counter.h"
#include "core/thread_pool.h"
#include "decode/backend_answers.h"
#include "decode/binding.h"
#include "decode/cpu/dispatch.h"
#include "decode/cpu/merge.h"
#include "decode/cpu/plan.h"

namespace jax_mla::decode {
namespace cpu {
namespace ffi = xla::ffi;

namespace {

constexpr size_t kCacheLineBytes = 64;

CallCounter calls("decode_cpu");

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
  DecodeCall(const DecodeParams& params, const Kernel& kernel)
      : params_(params),
        kernel_(kernel),
        plan_(params, kernel),
        scratch_floats_(ScratchFloats(params.d_ckv, params.d_kpe, plan_.padded_rows())),
        parts_done_(int64_t{params.batch} * plan_.num_row_tiles()) {}

  ffi::Error Run(ffi::ThreadPool& pool) {
    const int64_t num_tasks = plan_.num_tasks();
    if (num_tasks == 0) return ffi::Error::Success();
    const int64_t num_workers = std::clamp<int64_t>(pool.num_threads(), 1, num_tasks);
    // All memory of the call is allocated here, so that nothing on the pool's threads can fail.
    partials_ = Allocate(plan_.num_slots() * plan_.partial_floats());
    workers_memory_ = Allocate(num_workers * WorkerFloats());
    workers_.resize(num_workers);
    if (partials_ == nullptr || workers_memory_ == nullptr) {
      return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                        "jax_mla_decode: no memory for the partial results");
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
    float* base = is_whole ? scratch + scratch_floats_ : Slot(item.slot);
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
  float* Slot(int64_t slot) const { return partials_.get() + slot * plan_.partial_floats(); }

  void FinishPart(const Plan::Item& item) {
    const Task& task = item.task;
    auto& done = parts_done_[int64_t{task.seq_idx} * plan_.num_row_tiles() + item.row_tile_idx];
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < item.num_parts) return;
    const int64_t first_slot = item.slot - int64_t{item.part_idx} * plan_.num_row_tiles();
    const Partial first = plan_.PartialAt(Slot(first_slot), task.padded_rows);
    MergePartials(first, item.num_parts, plan_.num_row_tiles() * plan_.partial_floats(),
                  params_.d_ckv, task.padded_rows);
    WriteRows(params_, task, first);
  }

  const DecodeParams& params_;
  const Kernel& kernel_;
  const Plan plan_;
  const int64_t scratch_floats_;
  std::vector<std::atomic<int32_t>> parts_done_;  // [batch, num_row_tiles]
  std::vector<Worker> workers_;
  FloatArray workers_memory_;  // [num_workers, WorkerFloats()]: scratch, then a partial result
  FloatArray partials_;        // [num_slots, partial_floats]
};

ffi::Error Handle(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  DecodeAttrs attrs) {
  calls.Increment();
  const auto params = ParseDecode(args, rets, attrs);
  if (!params) return params.error();
  if (!attrs.backend.empty() && attrs.backend != "cpu") {
    return ffi::Error::InvalidArgument(
        "jax_mla_decode: backend: expected \"cpu\" on this platform, got \"" +
        std::string(attrs.backend) + "\"");
  }
  const Kernel* kernel = ChosenKernel();
  if (kernel == nullptr) return ffi::Error::InvalidArgument("jax_mla_decode: " + WhyNoKernel());
  return DecodeCall(*params, *kernel).Run(pool);
}

}  // namespace
}  // namespace cpu

// The CPU backend takes calls of every shape.
std::vector<BackendAnswer> CpuBackends(const DecodeShape&) {
  return {{.name = "cpu", .reason = cpu::WhyNoKernel()}};
}

}  // namespace jax_mla::decode

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMlaDecodeCpu, jax_mla::decode::cpu::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<jax_mla::decode::DecodeAttrs>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
