#include "decode/schedule/unit_plan.h"

#include <algorithm>

#include "core/divisor.h"
#include "decode/schedule/plan.h"
#include "decode/schedule/tuning.h"

namespace jax_mla::decode {
namespace {

constexpr int64_t kAlignment = 128;
// With a fixed number of parts every unit has slots of its own: so many bytes of them, at most.
// With more units, each has fewer parts.
constexpr int64_t kMaxFixedBytes = int64_t{512} << 20;

// Deals out memory, one array behind the other.
class Arena {
 public:
  explicit Arena(void* base) : base_(reinterpret_cast<uintptr_t>(base)) {}

  template <class T>
  T* Take(int64_t count) {
    const uintptr_t taken = base_ + static_cast<uintptr_t>(bytes_);
    bytes_ += CeilDiv(count * static_cast<int64_t>(sizeof(T)), kAlignment) * kAlignment;
    return reinterpret_cast<T*>(taken);
  }
  int64_t bytes() const { return bytes_; }

 private:
  uintptr_t base_;
  int64_t bytes_ = 0;
};

}  // namespace

bool HasUnits(const DecodeShape& step) {
  if (step.q_len == 0) return true;
  // Hopper has no kernels for units of float16.
  return step.dtype != DType::kF16 && step.num_splits == 0 && !step.batch_invariant &&
         step.q_len >= kMinUnitQLen;
}

DecodeShape UnitCallShape(const DecodeShape& step, int32_t num_tokens) {
  const UnitShape unit = MakeUnitShape(num_tokens, step.batch, step.num_heads);
  DecodeShape shape = step;
  shape.batch = std::max(unit.max_units, 1);
  shape.q_len = 1;
  shape.num_heads = unit.rows;
  if (step.sliding_window != kNoWindow) {  // a unit is as long as what its queries see, and a page
    const int64_t queries = CeilDiv(unit.rows, std::max(step.num_heads, 1)) + 1;
    const int64_t longest = int64_t{step.sliding_window} + queries - 1 + step.page_size - 1;
    shape.max_seq_len = static_cast<int32_t>(std::min<int64_t>(longest, step.max_seq_len));
  }
  if (const int32_t splits = FixedSplits(shape); splits > 0) {
    const int64_t slots = kMaxFixedBytes / SlotBytes(unit.rows, step.d_ckv) / shape.batch;
    shape.num_splits = static_cast<int32_t>(std::clamp<int64_t>(slots, 1, splits));
    shape.batch_invariant = false;
  }
  return shape;
}

UnitPlan MakeUnitPlan(const DecodeShape& step, int32_t num_tokens, void* base) {
  const DecodeShape call = UnitCallShape(step, num_tokens);
  Arena arena(base);
  UnitPlan plan{};
  plan.units = arena.Take<Unit>(call.batch);
  plan.unit_lens = arena.Take<int32_t>(call.batch);
  plan.starts = arena.Take<WorkStart>(kMaxUnitWorkers);
  plan.num_busy = arena.Take<int32_t>(1);
  plan.places = arena.Take<TokenPlace>(num_tokens);
  plan.sequences = arena.Take<PlannedSequence>(step.batch);
  plan.cost_ends = arena.Take<int32_t>(call.batch);
  plan.ranked = arena.Take<int32_t>(call.batch);
  plan.num_bytes = arena.bytes();
  return plan;
}

int64_t UnitPlanBytes(const DecodeShape& step, int32_t num_tokens) {
  return HasUnits(step) ? MakeUnitPlan(step, num_tokens, nullptr).num_bytes : 0;
}

int64_t RaggedScratchBytes(const DecodeShape& step, int32_t num_tokens) {
  return DecodeScratchBytes(HasUnits(step) ? UnitCallShape(step, num_tokens) : step);
}

int64_t RotatedQueryBytes(const DecodeShape& step, int32_t num_tokens) {
  const int64_t bytes =
      int64_t{num_tokens} * step.num_heads * step.d_kpe * ElementBytes(step.dtype);
  return CeilDiv(bytes, kAlignment) * kAlignment;
}

}  // namespace jax_mla::decode
