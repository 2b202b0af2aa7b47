// Host side of the schedule: scratch size, the plan of a call, and the host twin for tests.
#include "decode/split/schedule.h"

#include <bit>
#include <limits>
#include <vector>

#include "decode/split/combine.h"
#include "decode/split/schedule_twin.h"

namespace jax_mla::decode {
namespace {

// Workers that the scratch has room for when a call's rows fit one tile of 64: more than any GPU of
// today has SMs (B300: 160, RTX PRO 6000: 188). A program lowered anywhere runs on any of them.
constexpr int32_t kMaxWorkers = 256;
// Parts a sequence with batch_invariant: fixed, because it may not follow the batch. More parts
// would be faster for a single long sequence, and multiply the scratch of a large batch.
constexpr int32_t kInvariantSplits = 8;
constexpr int32_t kMaxFixedSplits = 64;
constexpr int32_t kMinRowTile = 16;
constexpr int64_t kMinScratchBytes = 256;
constexpr int64_t kRegionAlignment = 128;

constexpr int64_t RoundUp(int64_t x, int64_t multiple) { return CeilDiv(x, multiple) * multiple; }

// Rows of one slot over all row tiles, for whatever power of two up to kMaxRowTile a backend takes
// as its tile.
int64_t PaddedRows(int32_t rows) {
  if (rows > kMaxRowTile) return RoundUp(rows, kMaxRowTile);
  return std::max<int64_t>(kMinRowTile, std::bit_ceil(static_cast<uint32_t>(rows)));
}

int64_t MaxBlocks(const DecodeShape& shape) {
  return CeilDiv(int64_t{shape.max_pages_per_seq} * shape.page_size, kScheduleBlock);
}

// Parts a sequence in fixed mode, 0 in automatic mode.
int32_t FixedSplits(const DecodeShape& shape) {
  if (shape.num_splits == 0 && !shape.batch_invariant) return 0;
  const int64_t wanted = shape.num_splits > 0 ? shape.num_splits : kInvariantSplits;
  const int64_t most = std::min<int64_t>(kMaxFixedSplits, std::max<int64_t>(MaxBlocks(shape), 1));
  return static_cast<int32_t>(std::min(wanted, most));
}

bool MaySplit(const DecodeShape& shape) { return MaxBlocks(shape) > 1 && FixedSplits(shape) != 1; }

int64_t SlotBytes(int64_t rows, int32_t d_ckv) {
  return rows * (d_ckv + 1) * static_cast<int64_t>(sizeof(float));
}

// Decides `spread` for sequences as long as they may be.
ScheduleParams WithSpread(ScheduleParams p, int64_t max_blocks) {
  const int64_t total = p.batch * std::max<int64_t>(max_blocks, 1);
  if (p.num_splits > 0 || p.seq_units > 1 || total > std::numeric_limits<int32_t>::max()) return p;
  const int32_t blocks = static_cast<int32_t>(total / p.batch);
  const SchedulePolicy policy = ChoosePolicy(p, static_cast<int32_t>(total), blocks);
  p.spread = HasIdleWorkers(p, policy, p.batch * policy.Cost(p, blocks)) ? 1 : 0;
  return p;
}

}  // namespace

int64_t DecodeScratchBytes(const DecodeShape& shape) {
  if (!MaySplit(shape)) return kMinScratchBytes;
  const int64_t rows = PaddedRows(shape.q_len * shape.num_heads);
  const int64_t workers = std::max<int64_t>(kMaxWorkers / CeilDiv(rows, kMaxRowTile), 1);
  const int32_t fixed_splits = FixedSplits(shape);
  const int64_t slots = fixed_splits > 0 ? int64_t{shape.batch} * fixed_splits
                                         : 2 * std::min(workers, shape.batch * MaxBlocks(shape));
  return std::max(kMinScratchBytes,
                  RoundUp(slots * SlotBytes(rows, shape.d_ckv), kRegionAlignment));
}

ScheduleParams AddQuotients(ScheduleParams p) {
  const int32_t workers = std::max(p.num_workers, 1), batch = std::max(p.batch, 1);
  const bool has_queue = batch > workers;  // some worker serves several sequences
  p.workers = Divisor(workers);
  p.splits = Divisor(std::max(p.num_splits, 1));
  p.sequences = Divisor(batch);
  p.seq_workers = Divisor(has_queue ? 1 : workers / batch);
  p.worker_units = has_queue ? CeilDiv(batch, workers) : 1;
  p.unit_cost = has_queue ? p.seq_cost : 0;
  p.aligned_slack = has_queue ? 0 : p.seq_units;
  p.slack.blocks = std::max(p.slack.blocks, p.aligned_slack);
  return p;
}

SplitPlan MakeSplitPlan(const DecodeParams& params, const SplitOptions& options) {
  const DecodeShape shape = ShapeOf(params);
  const int32_t rows = params.q_len * params.num_heads;
  const int32_t tiles = CeilDiv(rows, options.block_m);
  const int64_t slot_bytes = SlotBytes(int64_t{tiles} * options.block_m, params.d_ckv);
  const bool may_split = MaySplit(shape);
  const int32_t fixed_splits = FixedSplits(shape);

  int64_t workers = std::max(options.num_ctas / tiles, 1);
  if (fixed_splits > 0) {
    workers = std::min(workers, int64_t{params.batch} * fixed_splits);
  } else {
    workers = std::min(workers, params.batch * std::max<int64_t>(MaxBlocks(shape), 1));
    // One worker never writes a partial, so it needs no slot.
    if (may_split)
      workers = std::min(workers, std::max<int64_t>(params.scratch_bytes / (2 * slot_bytes), 1));
  }
  const bool pairs =
      options.can_pair && may_split && fixed_splits == 0 && workers / params.batch == 2;
  if (pairs) workers -= workers % 2;
  const int64_t slots = fixed_splits > 0 ? int64_t{params.batch} * fixed_splits : 2 * workers;
  const int64_t out_size = slots * tiles * options.block_m * params.d_ckv;
  float* out = static_cast<float*>(params.scratch);
  const ScheduleParams schedule = AddQuotients({.seq_lens = params.seq_lens,
                                                .batch = params.batch,
                                                .max_seq_len = params.max_seq_len,
                                                .num_workers = static_cast<int32_t>(workers),
                                                .num_splits = fixed_splits,
                                                .max_single_blocks = options.max_single_blocks,
                                                .seq_cost = options.seq_cost,
                                                .slack = options.slack,
                                                .seq_units = pairs ? 2 : 1});
  return {
      .schedule = WithSpread(schedule, MaxBlocks(shape)),
      .partials = {.out = out,
                   .lse_log2 = out + out_size,
                   .stats = reinterpret_cast<PartialStats*>(out + out_size / 2),
                   .num_row_tiles = tiles,
                   .block_m = options.block_m},
      .may_split = may_split && (fixed_splits > 0 || workers > 1),
  };
}

WorkIterator FindWorkHost(const ScheduleParams& p, int32_t worker_idx) {
  if (p.num_splits > 0) return {SchedulePolicy{}, worker_idx, worker_idx, 0};
  int32_t total = 0, longest = 0;
  for (int32_t seq = 0; seq < p.batch; ++seq) {
    const int32_t units = MaxI32(NumBlocks(ClampedLen(p, seq)), 1);
    total += units;
    longest = MaxI32(longest, units);
  }
  const SchedulePolicy policy = ChoosePolicy(p, total, longest);
  const int32_t range_end = (worker_idx + 1) * policy.blocks_per_worker;
  int32_t seq = -1, seq_end = 0;
  while (seq + 1 < p.batch && seq_end < range_end) {
    seq_end += policy.Cost(p, MaxI32(NumBlocks(ClampedLen(p, ++seq)), 1));
  }
  return {policy, worker_idx, seq, seq_end};
}

std::vector<TwinItem> ScheduleTwin(const DecodeShape& shape, const std::vector<int32_t>& seq_lens,
                                   const SplitOptions& options, int64_t scratch_bytes) {
  DecodeParams params{};
  params.seq_lens = seq_lens.data();
  params.scratch_bytes = scratch_bytes;
  params.batch = shape.batch;
  params.q_len = shape.q_len;
  params.num_heads = shape.num_heads;
  params.d_ckv = shape.d_ckv;
  params.d_kpe = shape.d_kpe;
  params.max_pages_per_seq = shape.max_pages_per_seq;
  params.page_size = shape.page_size;
  params.max_seq_len = shape.max_pages_per_seq * shape.page_size;
  params.num_splits = shape.num_splits;
  params.batch_invariant = shape.batch_invariant;
  const SplitPlan plan = MakeSplitPlan(params, options);

  std::vector<TwinItem> items;
  for (int32_t worker = 0; worker < plan.schedule.num_workers; ++worker) {
    WorkIterator work = FindWorkHost(plan.schedule, worker);
    WorkItem item;
    while (work.Next(plan.schedule, &item)) {
      TwinItem twin{
          .worker = worker,
          .seq_idx = item.seq_idx,
          .block_begin = item.block_begin,
          .block_end = item.block_end,
          .part_idx = item.part_idx,
          .num_parts = item.num_parts,
          .slot = item.is_final() ? -1 : item.slot(),
          .slot_end_bytes = 0,
          .merges = !item.is_final() && item.part_idx >= work.policy.first_merging_part()};
      if (twin.slot >= 0) {
        // Last byte that this slot's larger region offset implies: both regions must fit the
        // scratch.
        const auto& partials = plan.partials;
        const int64_t lse_begin = partials.lse_log2 - partials.out;
        twin.slot_end_bytes =
            (lse_begin + partials.RowIndex(twin.slot + 1, 0)) * static_cast<int64_t>(sizeof(float));
      }
      items.push_back(twin);
    }
  }
  return items;
}

}  // namespace jax_mla::decode
