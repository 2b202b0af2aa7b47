#include "decode/schedule/host_schedule.h"

namespace jax_mla::decode {

WorkIterator FindWorkHost(const ScheduleParams& p, int32_t worker_idx) {
  if (p.num_splits > 0) return {SchedulePolicy{}, worker_idx, worker_idx, 0};
  int32_t total = 0, longest = 0;
  for (int32_t seq = 0; seq < p.batch; ++seq) {
    const int32_t blocks = CountedBlocks(ClampedLen(p, seq));
    total += blocks;
    longest = MaxI32(longest, blocks);
  }
  const SchedulePolicy policy = ChoosePolicy(p, total, longest);
  const int32_t range_end = (worker_idx + 1) * policy.worker_cost;
  int32_t seq = -1, seq_end = 0;
  while (seq + 1 < p.batch && seq_end < range_end) {
    seq_end += policy.Cost(p, CountedBlocks(ClampedLen(p, ++seq)));
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
  params.max_seq_len = shape.max_seq_len;
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
        // The end of this slot's statistics, which lie behind the outputs of all slots.
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
