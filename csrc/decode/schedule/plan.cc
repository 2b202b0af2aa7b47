// Host side of the split: the plan of a call, and the size of its scratch.
#include "decode/schedule/plan.h"

#include <algorithm>
#include <bit>
#include <limits>

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
int64_t PaddedRows(int64_t rows) {
  if (rows > kMaxRowTile) return RoundUp(rows, kMaxRowTile);
  return std::max<int64_t>(kMinRowTile, std::bit_ceil(static_cast<uint64_t>(rows)));
}

int64_t MaxBlocks(const DecodeShape& shape) {
  return CeilDiv(int64_t{shape.max_seq_len}, kScheduleBlock);
}

// Decides cta_interleave for sequences as long as they may be.
ScheduleParams WithInterleave(ScheduleParams p, int64_t max_blocks) {
  const int64_t total = p.batch * std::max<int64_t>(max_blocks, 1);
  if (p.num_splits > 0 || p.cluster_size > 1 || total > std::numeric_limits<int32_t>::max())
    return p;
  const int32_t blocks = static_cast<int32_t>(total / p.batch);
  const SchedulePolicy policy = ChoosePolicy(p, static_cast<int32_t>(total), blocks);
  p.cta_interleave = HasIdleWorkers(p, policy, p.batch * policy.Cost(p, blocks)) ? 1 : 0;
  return p;
}

bool MaySplit(const DecodeShape& shape) { return MaxBlocks(shape) > 1 && FixedSplits(shape) != 1; }

}  // namespace

int32_t FixedSplits(const DecodeShape& shape) {
  if (shape.num_splits == 0 && !shape.batch_invariant) return 0;
  const int64_t wanted = shape.num_splits > 0 ? shape.num_splits : kInvariantSplits;
  // The bound of the lengths may be here though a batch-invariant result may not depend on it: with
  // at most n blocks, n parts and more cut a sequence alike.
  const int64_t most = std::min<int64_t>(kMaxFixedSplits, std::max<int64_t>(MaxBlocks(shape), 1));
  return static_cast<int32_t>(std::min(wanted, most));
}

int64_t DecodeScratchBytes(const DecodeShape& shape) {
  if (!MaySplit(shape)) return kMinScratchBytes;
  const int64_t rows = PaddedRows(int64_t{shape.q_len} * shape.num_heads);
  const int64_t workers = std::max<int64_t>(kMaxWorkers / CeilDiv(rows, kMaxRowTile), 1);
  const int32_t fixed_splits = FixedSplits(shape);
  const int64_t slots = fixed_splits > 0 ? int64_t{shape.batch} * fixed_splits
                                         : 2 * std::min(workers, shape.batch * MaxBlocks(shape));
  return std::max(kMinScratchBytes,
                  RoundUp(slots * SlotBytes(rows, shape.d_ckv), kRegionAlignment));
}

ScheduleParams MakeSchedule(const DecodeShape& shape, const SplitOptions& options,
                            int64_t max_workers) {
  const int32_t tiles = CeilDiv(shape.q_len * shape.num_heads, options.block_m);
  const int32_t fixed_splits = FixedSplits(shape);
  const int64_t max_parts =
      shape.batch * (fixed_splits > 0 ? fixed_splits : std::max<int64_t>(MaxBlocks(shape), 1));
  int64_t workers = std::min({int64_t{std::max(options.num_ctas / tiles, 1)}, max_parts,
                              std::max<int64_t>(max_workers, 1)});
  const bool is_clustered =
      options.can_cluster && MaySplit(shape) && fixed_splits == 0 && workers / shape.batch == 2;
  if (is_clustered) workers -= workers % 2;
  const ScheduleParams schedule = AddQuotients({.seq_lens = nullptr,
                                                .batch = shape.batch,
                                                .max_seq_len = shape.max_seq_len,
                                                .num_workers = static_cast<int32_t>(workers),
                                                .num_splits = fixed_splits,
                                                .max_single_blocks = options.max_single_blocks,
                                                .seq_cost = options.seq_cost,
                                                .slack = options.slack,
                                                .cluster_size = is_clustered ? 2 : 1});
  return WithInterleave(schedule, MaxBlocks(shape));
}

SplitPlan MakeSplitPlan(const DecodeParams& params, const SplitOptions& options) {
  const DecodeShape shape = ShapeOf(params);
  const int64_t tiles = CeilDiv(params.q_len * params.num_heads, options.block_m);
  const int64_t slot_rows = tiles * options.block_m;
  const bool is_fixed = FixedSplits(shape) > 0, may_split = MaySplit(shape);
  // Two slots a worker; one worker alone never writes a partial, so it needs none.
  const bool needs_slots = may_split && !is_fixed;
  const int64_t max_workers =
      needs_slots ? params.scratch_bytes / (2 * SlotBytes(slot_rows, params.d_ckv)) : INT32_MAX;
  ScheduleParams schedule = MakeSchedule(shape, options, max_workers);
  schedule.seq_lens = params.seq_lens;
  const int64_t slots =
      is_fixed ? int64_t{params.batch} * schedule.num_splits : 2 * int64_t{schedule.num_workers};
  const int64_t out_size = slots * slot_rows * params.d_ckv;
  float* out = static_cast<float*>(params.scratch);
  return {
      .schedule = schedule,
      .partials = {.out = out,
                   .lse_log2 = out + out_size,
                   .stats = reinterpret_cast<PartialStats*>(out + out_size / 4 * 3),
                   .num_row_tiles = static_cast<int32_t>(tiles),
                   .block_m = options.block_m},
      .may_split = may_split && (is_fixed || schedule.num_workers > 1),
  };
}

}  // namespace jax_mla::decode
