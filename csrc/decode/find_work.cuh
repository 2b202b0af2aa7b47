// How a warp finds the first item of a worker (schedule.h): one pass over the lengths for the
// policy, a scan for the item. It is the path to a CTA's first load, and its code is fetched cold
// in every launch, at some ten cycles an instruction: few instructions count for more than few
// steps. For up to 32 sequences, FindFirstPart does it in one go.
#pragma once

#include <cstdint>

#include "decode/schedule.h"

namespace jax_mla::decode {

inline constexpr int32_t kScheduleLanes = 32;

// Length, unchecked, of a lane's sequence of the first 32; anything past the batch.
__device__ __forceinline__ int32_t LoadLaneLength(const ScheduleParams& p) {
  const int32_t seq = threadIdx.x % kScheduleLanes;
  return __ldg(p.seq_lens + (seq < p.batch ? seq : 0));
}

// Blocks of a lane's sequence of a group of 32; 0 past the batch.
__device__ __forceinline__ int32_t LaneUnits(const ScheduleParams& p, int32_t group_begin) {
  const int32_t seq = group_begin + threadIdx.x % kScheduleLanes;
  return seq < p.batch ? MaxI32(NumBlocks(ClampedLen(p, seq)), 1) : 0;
}

// What one pass over the lengths finds out.
struct ScheduleTotals {
  int32_t total_blocks;
  int32_t max_blocks;
  int32_t lane_units;  // of the last group of 32, which for most calls is the only one
};

// Called by one whole warp. Reads seq_lens once, any batch, no shared memory.
__device__ __forceinline__ ScheduleTotals FindTotals(const ScheduleParams& p) {
  int32_t total = 0, longest = 1, units;
  if (p.batch > kScheduleLanes) [[unlikely]] {
    // Lane i loads the first length of cache line i: the loop below finds the lines there or on
    // their way, and one copy of its code will do.
    const int32_t first = threadIdx.x % kScheduleLanes * kScheduleLanes;
    longest = MaxI32(NumBlocks(ClampedLen(p, first < p.batch ? first : 0)), 1);
  }
  int32_t base = 0;
#pragma unroll 1
  do {
    units = LaneUnits(p, base);
    total += units;
    longest = MaxI32(longest, units);
    base += kScheduleLanes;
  } while (base < p.batch);
  return {__reduce_add_sync(0xffffffffu, total), __reduce_max_sync(0xffffffffu, longest), units};
}

// Workers 0 .. n - 1 have all the work; n is exact in balanced mode, else rarely a little high.
__device__ __forceinline__ int32_t NumBusyWorkers(const ScheduleParams& p,
                                                  const SchedulePolicy& policy,
                                                  int32_t total_blocks) {
  const int32_t seq_cost = policy.aligned_unit > 0 ? policy.aligned_unit - 1 : p.seq_cost;
  return MinI32(CountParts(total_blocks + p.batch * seq_cost, policy.blocks_per_worker),
                p.num_workers);
}

// Adds the value of the lane `step` below, where there is one.
__device__ __forceinline__ void AddFromBelow(int32_t step, int32_t* value) {
  asm volatile(
      "{\n"
      ".reg .pred exists;\n"
      ".reg .s32 below;\n"
      "shfl.sync.up.b32 below|exists, %0, %1, 0, 0xffffffff;\n"
      "@exists add.s32 %0, %0, below;\n"
      "}"
      : "+r"(*value)
      : "r"(step));
}

// Finds the first item of worker `worker_idx` in automatic mode. Called by one whole warp; every
// lane gets the same result.
__device__ __forceinline__ WorkIterator FindFirstItem(const ScheduleParams& p,
                                                      const ScheduleTotals& totals,
                                                      const SchedulePolicy& policy,
                                                      int32_t worker_idx) {
  constexpr uint32_t kAllLanes = 0xffffffffu;
  // Skip whole groups of 32 sequences by their sum, then locate the sequence in its group by a
  // scan. Lanes past the batch count as sequences, which nobody can tell from an end.
  int32_t range_begin = worker_idx * policy.blocks_per_worker;  // from the group's begin on
  int32_t base = -kScheduleLanes, units = totals.lane_units, group_cost = 0, cost;
#pragma unroll 1
  do {
    base += kScheduleLanes;
    range_begin -= group_cost;
    if (p.batch > kScheduleLanes) units = LaneUnits(p, base);
    cost = policy.Cost(p, units);
    group_cost = __reduce_add_sync(kAllLanes, cost);
  } while (group_cost <= range_begin && base + kScheduleLanes < p.batch);
  int32_t end = cost;
#pragma unroll
  for (int32_t step = 1; step < kScheduleLanes; step *= 2) AddFromBelow(step, &end);
  const bool is_before = end <= range_begin;
  const int32_t seq_begin = __reduce_max_sync(kAllLanes, is_before ? end : 0);
  return {policy, worker_idx, base + __popc(__ballot_sync(kAllLanes, is_before)),
          worker_idx * policy.blocks_per_worker - range_begin + seq_begin};
}

// Where worker `worker_idx` starts. Called by one whole warp.
__device__ __forceinline__ WorkIterator FindAutomaticWork(const ScheduleParams& p,
                                                          int32_t worker_idx) {
  const ScheduleTotals totals = FindTotals(p);
  return FindFirstItem(p, totals, ChoosePolicy(p, totals.total_blocks, totals.max_blocks),
                       worker_idx);
}
__device__ __forceinline__ WorkIterator FindWork(const ScheduleParams& p, int32_t worker_idx) {
  if (p.num_splits > 0) [[unlikely]]
    return {SchedulePolicy{}, worker_idx, worker_idx, 0};
  return FindAutomaticWork(p, worker_idx);
}

// What a worker begins with.
struct FirstPart {
  WorkIterator rest;  // finds what comes behind `item`
  WorkItem item;      // of length 0 if there is none
  bool has_item;
  int32_t blocks_behind = kCounted;  // of the item's sequence, owned by later workers

  static constexpr int32_t kCounted = -1;

  // Which part of how many the item is: not needed to load it.
  __device__ __forceinline__ void CountItemParts() {
    if (blocks_behind == kCounted) return;
    item.part_idx = CountParts(item.block_begin, rest.policy.blocks_per_worker);
    item.num_parts = item.part_idx + 1 + CountParts(blocks_behind, rest.policy.blocks_per_worker);
    item.slot_base = 2 * (rest.worker_idx - item.part_idx);
    item.fixed = false;
  }
};

// In automatic mode, for up to 32 sequences, from LoadLaneLength. Every lane looks at its own
// sequence, and the first one with a part of the worker's range tells the others: from the lengths
// to the item there is no branch, no load and no loop. CountItemParts is left to the caller.
__device__ __forceinline__ FirstPart FindFirstPart(const ScheduleParams& p, int32_t loaded_len,
                                                   int32_t worker_idx) {
  constexpr uint32_t kAllLanes = 0xffffffffu;
  const bool is_seq = static_cast<int32_t>(threadIdx.x % kScheduleLanes) < p.batch;
  const int32_t lane_len = MaxI32(MinI32(loaded_len, p.max_seq_len), 0);
  const int32_t units = is_seq ? MaxI32(NumBlocks(lane_len), 1) : 0;
  const SchedulePolicy policy =
      ChoosePolicy(p, __reduce_add_sync(kAllLanes, units), __reduce_max_sync(kAllLanes, units));
  // policy.Cost(p, units) without a branch.
  const int32_t whole_units = CountParts(units, MaxI32(policy.aligned_unit, 1));
  const int32_t cost =
      policy.aligned_unit > 0 ? whole_units * policy.aligned_unit : units + p.seq_cost;
  int32_t cost_end = cost;
#pragma unroll
  for (int32_t step = 1; step < kScheduleLanes; step *= 2) AddFromBelow(step, &cost_end);
  const int32_t to_worker = worker_idx * policy.blocks_per_worker - (cost_end - cost);
  const int32_t begin = MaxI32(to_worker, 0);
  const int32_t end = MinI32(to_worker + policy.blocks_per_worker, units);
  const uint32_t owners = __ballot_sync(kAllLanes, begin < end);
  const int32_t seq = __ffs(owners) - 1;
  FirstPart first;
  first.has_item = owners != 0;
  const int32_t len = __shfl_sync(kAllLanes, lane_len, seq);
  const int32_t part_begin = __shfl_sync(kAllLanes, begin, seq);
  const int32_t part_end = __shfl_sync(kAllLanes, end, seq);
  const int32_t seq_end = __shfl_sync(kAllLanes, cost_end, seq);
  first.blocks_behind = __shfl_sync(kAllLanes, units - end, seq);
  WorkItem& item = first.item;
  item.seq_idx = seq;
  item.seq_len = first.has_item ? len : 0;
  item.block_begin = part_begin;
  item.block_end = MinI32(part_end, NumBlocks(len));
  first.rest = {policy, worker_idx, first.has_item ? seq + 1 : p.batch, seq_end};
  return first;
}

}  // namespace jax_mla::decode
