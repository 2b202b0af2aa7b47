// What the CTAs of a group tell each other of their choice, and where their results lie.
#pragma once

#include "index/choose_shared.cuh"
#include "index/cta_group.cuh"

namespace jax_mla::index {

struct GroupCounts {
  WordCounts of_cta;
  WordCounts of_lower;  // of the CTAs with lower ranks
  WordCounts of_all;
};

// Every thread of the group calls it. `cta_counts`: [kMaxGroupCtas] in shared memory.
__device__ __forceinline__ GroupCounts ExchangeCounts(const CtaGroup& group, WordCounts* cta_counts,
                                                      const WordCounts& of_cta) {
  GroupCounts counts{of_cta, {0, 0}, of_cta};
  if (group.size() == 1) return counts;
  if (threadIdx.x < group.size()) group.At(cta_counts, threadIdx.x)[group.rank()] = of_cta;
  group.Sync();
  const uint32_t cta = threadIdx.x % kWarpThreads;
  const WordCounts other = cta < group.size() ? cta_counts[cta] : WordCounts{0, 0};
  const bool is_lower = cta < group.rank();
  counts.of_all.winners = __reduce_add_sync(kAllLanes, other.winners);
  counts.of_all.ties = __reduce_add_sync(kAllLanes, other.ties);
  counts.of_lower.winners = __reduce_add_sync(kAllLanes, is_lower ? other.winners : 0);
  counts.of_lower.ties = __reduce_add_sync(kAllLanes, is_lower ? other.ties : 0);
  return counts;
}

// Where the results of a CTA lie in its query's row.
struct Output {
  int32_t begin;      // the CTA's first entry
  int32_t number;     // its entries
  int32_t num_total;  // of the query
};

// With the first `num_ties` ties of the query beside all winners.
__device__ __forceinline__ Output OutputOf(const GroupCounts& counts, uint32_t num_ties) {
  const WordCounts &own = counts.of_cta, &lower = counts.of_lower, &all = counts.of_all;
  const uint32_t begin = lower.winners + min(lower.ties, num_ties);
  const uint32_t end = lower.winners + own.winners + min(lower.ties + own.ties, num_ties);
  return {static_cast<int32_t>(begin), static_cast<int32_t>(end - begin),
          static_cast<int32_t>(all.winners + min(all.ties, num_ties))};
}

}  // namespace jax_mla::index
