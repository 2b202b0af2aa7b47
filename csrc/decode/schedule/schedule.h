// Split-KV schedule in closed form: from seq_lens alone every worker finds its own work, and
// everybody finds every sequence's partial results. There is no metadata tensor to keep in step,
// and what the host plans (plan.h) depends on shapes alone. Plain C++: the host runs the same code
// in property tests (host_schedule.cc). find_work.cuh has how a warp finds a worker's first item;
// tests/cuda/find_work.cu compares what the device finds with what the host finds.
//
// A *block* is kScheduleBlock tokens. A *worker* streams KV for one sequence after another; it is
// one CTA for each row tile, and all row tiles of a worker do the same items. A *part* is the piece
// of a sequence that one worker owns. A sequence of one part is written to `out`. Of a sequence of
// several, each part goes to a *slot* of the partial results, and the parts are merged.
//
// Automatic mode (num_splits == 0): put the sequences end to end on a line, each with a *cost* in
// blocks, and give worker p the range [p * W, (p + 1) * W), where W is the worker cost.
//   balanced   cost = max(blocks, 1) + seq_cost, W = ceil(total / num_workers). A worker's first
//              and last item may be cut, those between are whole. So a worker has at most two
//              partial results: slot 2p for the sequence that it continues, slot 2p + 1 for the one
//              that it begins.
//   aligned    where it costs little balance, as for lengths that are about equal: costs are
//              rounded up to a step, and W is a multiple of it. Either W is one step, so that no
//              worker serves two sequences; or, if there are more sequences than workers, a step
//              holds any sequence, so that every worker serves whole ones. This costs some balance
//              and saves partial results and items. The backend's Slack says how much balance it
//              may cost; where lengths differ more, 1/16.
//   clustered  aligned, where there are two workers a sequence and the backend runs the workers 2i
//              and 2i + 1 as a cluster, which merges without partial results: every sequence gets
//              such a cluster, also where one worker would do.
// Fixed mode (num_splits > 0, also for batch_invariant): every sequence is cut by its own length
// alone into at most num_splits parts; part s of sequence b has slot b * num_splits + s.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/divisor.h"
#include "decode/schedule/tuning.h"

namespace jax_mla::decode {

inline constexpr int32_t kScheduleBlock = 64;  // tokens

// How much balance the aligned mode may cost where lengths are about equal: `blocks`, and 2^-shift
// of a worker's blocks. The first term is what partial results and second items would cost. The
// second one is what fewer workers gain, since memory serves each of them faster.
struct Slack {
  int32_t blocks = 1;
  int32_t shift = 4;
};

// What the schedule depends on; the same in the decode and in the combine kernel of one call.
struct ScheduleParams {
  const int32_t* seq_lens;  // [batch], device pointer; unchecked, clamped on use
  int32_t batch;
  int32_t max_seq_len;  // tokens
  int32_t num_workers;
  int32_t num_splits;  // 0: automatic mode, else fixed mode with at most this many parts a sequence
  // Automatic mode: calls of up to this many blocks may have parts of a single one.
  int32_t max_single_blocks;
  int32_t seq_cost;  // balanced mode: fixed cost of a sequence, in blocks

  // What AddQuotients derives from these and from cluster_size.
  Divisor workers = {}, splits = {}, sequences = {};  // num_workers, num_splits, batch
  // Aligned mode: a step is ceil((longest sequence + step_cost) / seq_workers) blocks, and a worker
  // costs worker_steps of them.
  Divisor seq_workers = {};
  int32_t worker_steps = 1;
  int32_t step_cost = 0;
  int32_t aligned_slack = 0;  // lower bound of the slack, in blocks

  Slack slack = {};            // the backend's; AddQuotients raises slack.blocks to aligned_slack
  int32_t cluster_size = 1;    // 2: clustered, each sequence has two workers
  int32_t cta_interleave = 0;  // 1: see WorkerOf; MakeSchedule decides it, and the wide
                               // kernel's producer decides again (its launch only allows it)
};

// One part of one sequence. Half-open ranges. block_begin == block_end only for a sequence of
// length 0.
struct WorkItem {
  int32_t seq_idx;
  int32_t seq_len;      // clamped to [0, max_seq_len]
  int32_t block_begin;  // in blocks of kScheduleBlock tokens
  int32_t block_end;
  int32_t part_idx;   // this part, of
  int32_t num_parts;  // this many; 1 = final: write `out` and `lse`
  int32_t slot_base;  // fixed mode: slot of part 0; automatic mode: 2 * worker that owns part 0
  bool fixed;

  MLA_HOST_DEVICE bool is_final() const { return num_parts == 1; }
  // Where part `part` of this sequence leaves its partial result.
  MLA_HOST_DEVICE int32_t slot_of(int32_t part) const {
    return fixed ? slot_base + part : slot_base + 2 * part + (part == 0 ? 1 : 0);
  }
  MLA_HOST_DEVICE int32_t slot() const { return slot_of(part_idx); }
};

MLA_HOST_DEVICE int32_t MinI32(int32_t a, int32_t b) { return a < b ? a : b; }
MLA_HOST_DEVICE int32_t MaxI32(int32_t a, int32_t b) { return a > b ? a : b; }

// Once all other members but cta_interleave are set. On the host or, in a call of units, where the
// units are made.
MLA_HOST_DEVICE ScheduleParams AddQuotients(ScheduleParams p) {
  const int32_t workers = MaxI32(p.num_workers, 1), batch = MaxI32(p.batch, 1);
  const bool has_queue = batch > workers;  // some worker serves several sequences
  p.workers = Divisor(workers);
  p.splits = Divisor(MaxI32(p.num_splits, 1));
  p.sequences = Divisor(batch);
  p.seq_workers = Divisor(has_queue ? 1 : workers / batch);
  p.worker_steps = has_queue ? CeilDiv(batch, workers) : 1;
  p.step_cost = has_queue ? p.seq_cost : 0;
  p.aligned_slack = has_queue ? 0 : p.cluster_size;
  p.slack.blocks = MaxI32(p.slack.blocks, p.aligned_slack);
  return p;
}

// ceil(a / b) below 2^18, such as a number of parts; a >= 0, b > 0. Every instruction here sits on
// the path to a CTA's first load, and an integer division would be ~100 of them: the estimate is
// never too large and at most one too small.
MLA_HOST_DEVICE int32_t CountParts(int32_t a, int32_t b) {
#if defined(__CUDA_ARCH__)
  constexpr float kBelowOne = 1.0f - 0x1p-20f;  // outweighs the error of the reciprocal
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(__int2float_ru(b)));
  const float estimate = __fmul_rz(__int2float_rz(a + b - 1), __fmul_rz(inverse, kBelowOne));
  const int32_t quotient = __float2int_rz(estimate);
  return quotient + (a > quotient * b ? 1 : 0);
#else
  return CeilDiv(a, b);
#endif
}
// floor(a / b) below 2^18 - 1, such as a CTA's slice.
MLA_HOST_DEVICE int32_t FloorDiv(int32_t a, int32_t b) { return CountParts(a + 1, b) - 1; }

// Which worker a CTA is, where it is free to choose. Neighbouring CTAs run on the two SMs of a TPC.
// If only the first workers have work, whole TPCs idle, and which ones differs from launch to
// launch, because the hardware begins with the next GPC each time. So neighbouring CTAs then serve
// workers half the line apart (H200, 200 x 4096 on 100 of 132 SMs: always 234 us, not 230 or 262).
MLA_HOST_DEVICE int32_t WorkerOf(const ScheduleParams& p, int32_t cta, int32_t interleave) {
  return (cta >> interleave) + (cta & interleave) * ((p.num_workers + 1) >> 1);
}
MLA_HOST_DEVICE int32_t WorkerOf(const ScheduleParams& p, int32_t cta) {
  return WorkerOf(p, cta, p.cta_interleave);
}

MLA_HOST_DEVICE int32_t ClampedLen(const ScheduleParams& p, int32_t seq_idx) {
#if defined(__CUDA_ARCH__)
  const int32_t len = __ldg(p.seq_lens + seq_idx);
#else
  const int32_t len = p.seq_lens[seq_idx];
#endif
  return MaxI32(0, MinI32(len, p.max_seq_len));
}
MLA_HOST_DEVICE int32_t NumBlocks(int32_t len) {  // len + 63 may only overflow as a signed number
  return static_cast<int32_t>((static_cast<uint32_t>(len) + (kScheduleBlock - 1)) / kScheduleBlock);
}

// The blocks by which a sequence counts: an empty one has an item too, which writes zeros.
MLA_HOST_DEVICE int32_t CountedBlocks(int32_t len) { return MaxI32(NumBlocks(len), 1); }

// The automatic mode's decision, the same for all workers of a call.
struct SchedulePolicy {
  int32_t worker_cost;  // W
  int32_t cost_step;    // costs are multiples of it; 0: balanced
  bool may_cut = true;  // false: every sequence of the call is one part

  // Of a sequence with so many counted blocks. Without a branch.
  MLA_HOST_DEVICE int32_t Cost(const ScheduleParams& p, int32_t blocks) const {
    const int32_t steps = CountParts(blocks, MaxI32(cost_step, 1));
    return cost_step > 0 ? steps * cost_step : blocks + p.seq_cost;
  }
  // The first part whose worker merges. In balanced mode a worker may have the last part of one
  // sequence and the first part of the next; nobody is to merge both, so first parts' workers do
  // not merge.
  MLA_HOST_DEVICE int32_t first_merging_part() const { return cost_step == 0 ? 1 : 0; }
  // Whether the two parts of a cut sequence belong to the workers 2i and 2i + 1.
  MLA_HOST_DEVICE bool is_clustered() const { return cost_step > worker_cost; }
};

// The blocks of a sequence that lie in a worker's range. `range_begin` is where the range begins,
// counted from where the sequence begins on the line; it may be negative.
struct BlockRange {
  int32_t begin, end;  // begin >= end: none
};
MLA_HOST_DEVICE BlockRange BlocksInRange(const SchedulePolicy& policy, int32_t range_begin,
                                         int32_t blocks) {
  return {MaxI32(range_begin, 0), MinI32(range_begin + policy.worker_cost, blocks)};
}

// No part is smaller, if its sequence is long enough.
MLA_HOST_DEVICE int32_t MinPartBlocks(const ScheduleParams& p, int32_t total_blocks) {
  return total_blocks <= p.max_single_blocks ? 1 : 2;
}
inline constexpr int32_t kFixedMinBlocks = 2;  // the same in fixed mode

// total_blocks and max_blocks: sum and maximum of CountedBlocks over the batch.
MLA_HOST_DEVICE SchedulePolicy ChoosePolicy(const ScheduleParams& p, int32_t total_blocks,
                                            int32_t max_blocks) {
  const int32_t min_blocks = MinPartBlocks(p, total_blocks);
  const int32_t step = MaxI32(p.seq_workers.Ceil(max_blocks + p.step_cost), min_blocks);
  const int32_t even_blocks = step * p.worker_steps;
  const int32_t ideal_blocks = p.workers.Ceil(total_blocks + p.batch * p.step_cost);
  const bool about_equal = int64_t{max_blocks} * p.batch <= total_blocks + total_blocks / 8;
  const int32_t slack = about_equal ? p.slack.blocks + (ideal_blocks >> p.slack.shift)
                                    : MaxI32(p.aligned_slack, ideal_blocks >> kUnequalShift);
  const int32_t balanced_blocks =
      MaxI32(p.workers.Ceil(total_blocks + p.batch * p.seq_cost), p.seq_cost + min_blocks);
  // Without a branch: what comes next need not wait for the decision to be fetched.
  const bool is_aligned = even_blocks <= ideal_blocks + slack;
  return {is_aligned ? even_blocks : balanced_blocks, is_aligned ? step * p.cluster_size : 0,
          !is_aligned || max_blocks > step};
}

// What all sequences cost together, from the sum of their blocks. Exact in balanced mode and where
// none is cut; otherwise an upper bound.
MLA_HOST_DEVICE int32_t TotalCost(const ScheduleParams& p, const SchedulePolicy& policy,
                                  int32_t total_blocks) {
  if (!policy.may_cut) return p.batch * policy.cost_step;
  const int32_t seq_cost = policy.cost_step > 0 ? policy.cost_step - 1 : p.seq_cost;
  return total_blocks + p.batch * seq_cost;
}

// Whether so many workers have nothing to do that CTAs should interleave (WorkerOf).
MLA_HOST_DEVICE bool HasIdleWorkers(const ScheduleParams& p, const SchedulePolicy& policy,
                                    int32_t total_cost) {
  return total_cost <= (p.num_workers * 7 >> 3) * policy.worker_cost;
}

// Numbers the parts of the item's sequence, given how many blocks of it lie behind the item.
MLA_HOST_DEVICE void NumberParts(const SchedulePolicy& policy, int32_t worker_idx,
                                 int32_t blocks_behind, WorkItem* item) {
  item->part_idx = CountParts(item->block_begin, policy.worker_cost);
  item->num_parts = item->part_idx + 1 + CountParts(blocks_behind, policy.worker_cost);
  item->slot_base = 2 * (worker_idx - item->part_idx);
  item->fixed = false;
}

// Walks the items of one worker, in automatic mode from the line's end: a worker begins with the
// sequence that the next worker continues, and ends with the one that it continues itself. When it
// ends, that sequence's other part has long been written, and its own is still in registers (wide
// kernel). Cheap to copy; every thread may run it redundantly. Made by FindWork (find_work.cuh) or
// FindWorkHost (host_schedule.cc).
struct WorkIterator {
  SchedulePolicy policy;
  int32_t worker_idx;
  int32_t cursor;   // automatic: next sequence, down to 0; fixed: next (part, sequence) pair,
                    // part-major
  int32_t seq_end;  // automatic: where that sequence ends on the line of costs

  MLA_HOST_DEVICE bool Next(const ScheduleParams& p, WorkItem* item) {
    if (p.num_splits > 0) [[unlikely]]
      return NextFixed(p, item);
    return NextAutomatic(p, item);
  }

  MLA_HOST_DEVICE bool NextAutomatic(const ScheduleParams& p, WorkItem* item) {
    const int32_t range_begin = worker_idx * policy.worker_cost;
    while (cursor >= 0 && seq_end > range_begin) {
      if (TakeSequence(p, ClampedLen(p, cursor), item)) return true;
    }
    return false;
  }

  // Takes the sequence at the cursor, whose length is `len`. False if the worker's range has
  // nothing but what was added to the sequence's cost.
  MLA_HOST_DEVICE bool TakeSequence(const ScheduleParams& p, int32_t len, WorkItem* item) {
    const int32_t range_begin = worker_idx * policy.worker_cost;
    const int32_t seq_idx = cursor;
    const int32_t blocks = NumBlocks(len), counted_blocks = MaxI32(blocks, 1);
    --cursor;
    seq_end -= policy.Cost(p, counted_blocks);  // now where the sequence begins
    const auto [begin, end] = BlocksInRange(policy, range_begin - seq_end, counted_blocks);
    if (begin >= end) return false;
    item->seq_idx = seq_idx;
    item->seq_len = len;
    item->block_begin = MinI32(begin, blocks);
    item->block_end = MinI32(end, blocks);
    NumberParts(policy, worker_idx, counted_blocks - end, item);
    return true;
  }

  // Automatic: back to before `item`, which is empty and was the last taken.
  MLA_HOST_DEVICE void StepBack(const ScheduleParams& p, const WorkItem& item) {
    cursor = item.seq_idx;
    seq_end += policy.Cost(p, 1);
  }

  MLA_HOST_DEVICE bool NextFixed(const ScheduleParams& p, WorkItem* item) {
    const int32_t num_parts_total = p.batch * p.num_splits;
    while (cursor < num_parts_total) {
      const int32_t part = p.sequences.Floor(cursor), seq = cursor - part * p.batch;
      cursor += p.num_workers;
      const int32_t len = ClampedLen(p, seq);
      const int32_t blocks = NumBlocks(len);
      const int32_t part_blocks = MaxI32(p.splits.Ceil(blocks), kFixedMinBlocks);
      const int32_t num_parts = MaxI32(CountParts(blocks, part_blocks), 1);
      if (part >= num_parts) continue;
      *item = {seq,  len,       part * part_blocks, MinI32((part + 1) * part_blocks, blocks),
               part, num_parts, seq * p.num_splits, true};
      return true;
    }
    return false;
  }
};

}  // namespace jax_mla::decode
