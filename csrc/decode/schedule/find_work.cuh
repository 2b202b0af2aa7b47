// How a warp finds the first item of a worker (schedule.h): one pass over the lengths for the
// policy, a scan for the item. It is the path to a CTA's first load, and its code is fetched cold
// in every launch, at some ten cycles an instruction: few instructions count for more than few
// steps. FindFirst chooses: for up to 128 sequences, FindFirstPart does it in one go.
#pragma once

#include <cstdint>

#include "decode/schedule/schedule.h"

namespace jax_mla::decode {

inline constexpr int32_t kScheduleLanes = 32;

// Blocks of a lane's sequence of a group of 32; 0 past the batch.
__device__ __forceinline__ int32_t LaneBlocks(const ScheduleParams& p, int32_t group_begin) {
  const int32_t seq = group_begin + threadIdx.x % kScheduleLanes;
  return seq < p.batch ? CountedBlocks(ClampedLen(p, seq)) : 0;
}

// What one pass over the lengths finds out.
struct ScheduleTotals {
  int32_t total_blocks;
  int32_t max_blocks;
  int32_t lane_blocks;  // of the last group of 32, which for most calls is the only one
};

// Called by one whole warp. Reads seq_lens once, any batch, no shared memory.
__device__ __forceinline__ ScheduleTotals FindTotals(const ScheduleParams& p) {
  int32_t total = 0, longest = 1, blocks;
  if (p.batch > kScheduleLanes) [[unlikely]] {
    // Lane i loads the first length of cache line i: the loop below finds the lines there or on
    // their way, and one copy of its code will do.
    const int32_t first = threadIdx.x % kScheduleLanes * kScheduleLanes;
    longest = CountedBlocks(ClampedLen(p, first < p.batch ? first : 0));
  }
  int32_t base = 0;
#pragma unroll 1
  do {
    blocks = LaneBlocks(p, base);
    total += blocks;
    longest = MaxI32(longest, blocks);
    base += kScheduleLanes;
  } while (base < p.batch);
  return {__reduce_add_sync(0xffffffffu, total), __reduce_max_sync(0xffffffffu, longest), blocks};
}

// Workers 0 .. n - 1 have all the work.
__device__ __forceinline__ int32_t NumBusyWorkers(const ScheduleParams& p,
                                                  const SchedulePolicy& policy,
                                                  int32_t total_blocks) {
  return MinI32(CountParts(TotalCost(p, policy, total_blocks), policy.worker_cost), p.num_workers);
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
  // Skip whole groups of 32 sequences by their sum, then locate the last sequence that begins in
  // front of the range's end in its group by a scan.
  const int32_t line_end = (worker_idx + 1) * policy.worker_cost;
  int32_t range_end = line_end;  // from the group's begin on
  int32_t base = -kScheduleLanes, blocks = totals.lane_blocks, group_cost = 0, cost;
#pragma unroll 1
  do {
    base += kScheduleLanes;
    range_end -= group_cost;
    if (p.batch > kScheduleLanes) blocks = LaneBlocks(p, base);
    cost = policy.Cost(p, blocks);
    group_cost = __reduce_add_sync(kAllLanes, cost);
  } while (group_cost < range_end && base + kScheduleLanes < p.batch);
  int32_t end = cost;
#pragma unroll
  for (int32_t step = 1; step < kScheduleLanes; step *= 2) AddFromBelow(step, &end);
  const bool begins_before = blocks > 0 && end - cost < range_end;
  const int32_t lane = kScheduleLanes - 1 - __clz(__ballot_sync(kAllLanes, begins_before));
  return {policy, worker_idx, base + lane,
          line_end - range_end + __shfl_sync(kAllLanes, end, lane)};
}

// Where worker `worker_idx` starts with a fixed number of parts.
__device__ __forceinline__ WorkIterator FindFixedWork(int32_t worker_idx) {
  return {SchedulePolicy{}, worker_idx, worker_idx, 0};
}

// Where the worker starts that `pick_worker` takes (FindFirstOf). Called by one whole warp.
template <class PickWorker>
__device__ __forceinline__ WorkIterator FindAutomaticWork(const ScheduleParams& p,
                                                          PickWorker pick_worker) {
  const ScheduleTotals totals = FindTotals(p);
  const SchedulePolicy policy = ChoosePolicy(p, totals.total_blocks, totals.max_blocks);
  return FindFirstItem(p, totals, policy, pick_worker(policy, totals.total_blocks));
}

// Where worker `worker_idx` starts. Called by one whole warp.
__device__ __forceinline__ WorkIterator FindWork(const ScheduleParams& p, int32_t worker_idx) {
  if (p.num_splits > 0) [[unlikely]]
    return FindFixedWork(worker_idx);
  return FindAutomaticWork(p, [=](const SchedulePolicy&, int32_t) { return worker_idx; });
}

// What a worker begins with.
struct FirstPart {
  WorkIterator rest;  // finds what comes behind `item`
  WorkItem item;      // of length 0 if there is none
  bool has_item;
  int32_t blocks_behind;  // of the item's sequence, owned by later workers
  int32_t total_blocks;   // of the call, or kManyBlocks

  static constexpr int32_t kManyBlocks = INT32_MAX;

  // Left to the caller: what has to be loaded does not depend on it.
  __device__ __forceinline__ void NumberItemParts() {
    NumberParts(rest.policy, rest.worker_idx, blocks_behind, &item);
  }
};

inline constexpr int32_t kMaxSeqsPerLane = 4;

// In automatic mode, for up to 32 * kSeqs sequences. Every lane looks at kSeqs of them, and the
// first one with a part of the worker's range tells the others: from the lengths to the item there
// is no branch, no load and no loop. NumberItemParts is left to the caller.
template <int32_t kSeqs, class PickWorker>
__device__ __forceinline__ FirstPart FindFirstPart(const ScheduleParams& p,
                                                   PickWorker pick_worker) {
  constexpr uint32_t kAllLanes = 0xffffffffu;
  const int32_t first_seq = threadIdx.x % kScheduleLanes * kSeqs;
  int32_t len[kSeqs], blocks[kSeqs], total = 0, longest = 0;
#pragma unroll
  for (int32_t i = 0; i < kSeqs; ++i) {
    len[i] = __ldg(p.seq_lens + (first_seq + i < p.batch ? first_seq + i : 0));
  }
#pragma unroll
  for (int32_t i = 0; i < kSeqs; ++i) {
    len[i] = MaxI32(MinI32(len[i], p.max_seq_len), 0);
    blocks[i] = first_seq + i < p.batch ? CountedBlocks(len[i]) : 0;
    total += blocks[i];
    longest = MaxI32(longest, blocks[i]);
  }
  const int32_t total_blocks = __reduce_add_sync(kAllLanes, total);
  const int32_t max_blocks = __reduce_max_sync(kAllLanes, longest);
  const SchedulePolicy policy = ChoosePolicy(p, total_blocks, max_blocks);
  const int32_t worker_idx = pick_worker(policy, total_blocks);
  int32_t cost[kSeqs], lane_cost = 0;
#pragma unroll
  for (int32_t i = 0; i < kSeqs; ++i) {
    cost[i] = policy.Cost(p, blocks[i]);
    lane_cost += cost[i];
  }
  int32_t seq_end = lane_cost;
#pragma unroll
  for (int32_t step = 1; step < kScheduleLanes; step *= 2) AddFromBelow(step, &seq_end);
  // The lane's last sequence with a part in the range.
  const int32_t range_begin = worker_idx * policy.worker_cost;
  int32_t own_seq = 0, own_len = 0, own_begin = 0, own_end = 0, own_seq_begin = 0, own_behind = 0;
#pragma unroll
  for (int32_t i = kSeqs - 1; i >= 0; --i) {
    seq_end -= cost[i];  // now its begin
    const auto [begin, end] = BlocksInRange(policy, range_begin - seq_end, blocks[i]);
    if (i == kSeqs - 1 || own_begin >= own_end) {
      own_seq = first_seq + i, own_len = len[i], own_begin = begin, own_end = end;
      own_seq_begin = seq_end, own_behind = blocks[i] - end;
    }
  }
  const uint32_t owners = __ballot_sync(kAllLanes, own_begin < own_end);
  const int32_t owner = kScheduleLanes - 1 - __clz(owners);
  FirstPart first;
  first.has_item = owners != 0;
  first.total_blocks = total_blocks;
  WorkItem& item = first.item;
  item.seq_idx = kSeqs == 1 ? owner : __shfl_sync(kAllLanes, own_seq, owner);
  const int32_t item_len = __shfl_sync(kAllLanes, own_len, owner);
  item.seq_len = first.has_item ? item_len : 0;
  item.block_begin = __shfl_sync(kAllLanes, own_begin, owner);
  item.block_end = MinI32(__shfl_sync(kAllLanes, own_end, owner), NumBlocks(item_len));
  first.blocks_behind = __shfl_sync(kAllLanes, own_behind, owner);
  first.rest = {policy, worker_idx, first.has_item ? item.seq_idx - 1 : -1,
                __shfl_sync(kAllLanes, own_seq_begin, owner)};
  return first;
}

// What a worker begins with, any batch. `pick_worker` says which, from the policy and the number of
// blocks; with a fixed number of parts from an empty policy. `look_up` gets the item, or one of
// length 0, as soon as what has to be loaded is known: its page ids are on their way while its
// parts are counted. kMayBeFixed: also with num_splits > 0. Called by one whole warp.
template <bool kMayBeFixed, class PickWorker, class LookUp>
__device__ __forceinline__ FirstPart FindFirstOf(const ScheduleParams& p, PickWorker pick_worker,
                                                 LookUp look_up) {
  const bool is_automatic = !kMayBeFixed || p.num_splits == 0;
  FirstPart first;
  if (is_automatic && p.batch <= kScheduleLanes) [[likely]] {
    first = FindFirstPart<1>(p, pick_worker);
    look_up(first.item);
    if (first.has_item) first.NumberItemParts();
  } else if (is_automatic && p.batch <= kMaxSeqsPerLane * kScheduleLanes) {
    first = FindFirstPart<kMaxSeqsPerLane>(p, pick_worker);
    look_up(first.item);
    if (first.has_item) first.NumberItemParts();
  } else {
    first.total_blocks = FirstPart::kManyBlocks;
    first.item = {};  // looked up in any case
    first.rest = is_automatic ? FindAutomaticWork(p, pick_worker)
                              : FindFixedWork(pick_worker(SchedulePolicy{}, 0));
    first.has_item =
        kMayBeFixed ? first.rest.Next(p, &first.item) : first.rest.NextAutomatic(p, &first.item);
    look_up(first.item);
  }
  return first;
}

// The same of a worker that is known, also with a fixed number of parts.
template <class LookUp>
__device__ __forceinline__ FirstPart FindFirst(const ScheduleParams& p, int32_t worker_idx,
                                               LookUp look_up) {
  const auto pick_worker = [=](const SchedulePolicy&, int32_t) { return worker_idx; };
  return FindFirstOf</*kMayBeFixed=*/true>(p, pick_worker, look_up);
}

}  // namespace jax_mla::decode
