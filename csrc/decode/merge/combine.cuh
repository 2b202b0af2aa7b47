// The combine kernel: merges the partial results of split sequences, behind a decode kernel.
//
// Its CTAs are dealt out evenly to the workers that have work, `slices` to each. CTA `slice` of
// worker w walks w's items. Of every split sequence of which w holds a part, it merges share
// (part_idx, slice) of num_parts * slices. So every vector has one owner, the work follows the
// partial results, and a long sequence is merged by as many CTAs as computed it: all of them, or
// all but the first (FirstMergingPart).
//
// A warp merges a *run* of neighbouring vectors of a row at a time. Where there are many parts, a
// run has fewer vectors than the warp has lanes. Each of several lanes then takes every n-th part
// of a vector. Their number depends on the number of parts alone, and so does the order of the sum:
// it is repeatable and independent of the batch. Warps share nothing and never wait for each other,
// because instructions behind the wait for the partial results are time of the call, and most of
// them are fetched cold.
#pragma once

#include <bit>
#include <cstdint>

#include "decode/merge/combine.h"
#include "decode/merge/combine_grid.h"
#include "decode/merge/partial_vector.cuh"
#include "decode/schedule/find_work.cuh"
#include "decode/schedule/load_units.cuh"
#include "decode/trace.cuh"
#include "gpu/element.h"
#include "gpu/launch.h"
#include "gpu/online_softmax.cuh"
#include "gpu/pack.cuh"

namespace jax_mla::decode::merge {

inline constexpr int kWarpThreads = 32;
inline constexpr int kNumWarps = kCombineThreads / kWarpThreads;
inline constexpr int kMinLaneBits = 1;  // least vectors of a run, log2: a sector of L2

// Weighted sum of a vector of some parts.
template <class L>
struct Merged {
  float out[L::kSize] = {};       // sum of weight * partial
  float max = gpu::kNoReference;  // reference of the weights, log2 units
  float sum = 0.0f;               // sum of weight * the parts' sums

  // The reference has to be the same in all lanes that own the vector.
  __device__ __forceinline__ void Raise(float new_max) {
    const float scale = gpu::Exp2(max - new_max);
#pragma unroll
    for (int i = 0; i < L::kSize; ++i) out[i] *= scale;
    sum *= scale;
    max = new_max;
  }
  __device__ __forceinline__ void Add(const PartialStats& stats, const typename L::Raw& raw) {
    float x[L::kSize];
    L::Unpack(raw, x);
    const float weight = gpu::Exp2(stats.reference - max);
#pragma unroll
    for (int i = 0; i < L::kSize; ++i) out[i] += weight * x[i];
    sum += weight * stats.sum;
  }
};

__device__ __forceinline__ float ShuffleXor(float x, int offset) {
  return __shfl_xor_sync(~0u, x, offset);
}

// Vectors of a run, log2: so few that no lane has more than L::kLaneParts parts, where possible.
template <class L>
__device__ __forceinline__ int LaneBits(int num_parts) {
  const int group_bits = kWarpThreads - __clz((num_parts - 1) / L::kLaneParts);
  return MaxI32(5 - group_bits, kMinLaneBits);
}

// All lanes of the warp.
template <class L>
__device__ __forceinline__ void StoreMerged(const Target<L>& target, const Merged<L>& merged) {
  using T = gpu::Element<L::kDType>;
  const float scale = gpu::InverseSum(merged.sum);
  uint32_t pairs[L::kSize / 2];
#pragma unroll
  for (int i = 0; i < L::kSize / 2; ++i) {
    pairs[i] = gpu::Pack2<T>(merged.out[2 * i] * scale, merged.out[2 * i + 1] * scale);
  }
  __builtin_assume(__isGlobal(target.out) && __isGlobal(target.lse));
  L::Store(target.out, pairs);
  if (target.lse != nullptr) {
    const float lse_log2 =
        merged.sum == 0.0f ? gpu::NegativeInfinity() : merged.max + gpu::Log2(merged.sum);
    *target.lse = lse_log2 * gpu::kLn2;
  }
}

// Merges a run of `lanes` vectors. This lane has vector `vector` of row `row` of the sequence, or
// of the unit that begins with row `unit_row` of the call. Places are found before the wait for the
// partials: instructions behind it are time of the call.
template <class L, bool kHasUnits>
__device__ __forceinline__ void MergeRun(const DecodeParams& p, const PartialBuffers& partials,
                                         const WorkItem& item, int unit_row, int row, int vector,
                                         int lanes) {
  const int lane = threadIdx.x % kWarpThreads;
  const int step = kWarpThreads / lanes, first = lane / lanes;
  PartPlaces<L> places(partials, item, p.d_ckv, row, vector, first, step);
  const int64_t first_row =
      kHasUnits ? unit_row : static_cast<int64_t>(item.seq_idx) * (p.q_len * p.num_heads);
  Target<L> target(p, first_row + row, vector, first == 0);
  places.Pin();
  target.Pin();
  trace::Enter(Phase::kWaitPartial);
  gpu::PdlWait();
  gpu::PdlLaunchDependents();
  trace::Enter(Phase::kMerge);
  Merged<L> merged;
  int left = item.num_parts - first;  // parts that lie ahead of this lane's first one, and it
#pragma unroll 1
  for (int pass_end = L::kLoads * step;; pass_end += L::kLoads * step) {
    PartialStats stats[L::kLoads];
    typename L::Raw raw[L::kLoads];
#pragma unroll
    for (int i = 0; i < L::kLoads; ++i) {
      stats[i] = {gpu::NegativeInfinity(), 0.0f};
      raw[i] = {};
      if (left <= i * step) continue;
      // The compiler forgets that these are global where they are pinned.
      __builtin_assume(__isGlobal(places.stats[i]) && __isGlobal(places.raw[i]));
      stats[i] = L::Unpack(*places.stats[i]);
      raw[i] = *places.raw[i];
    }
    float max = merged.max;
#pragma unroll
    for (int i = 0; i < L::kLoads; ++i) max = fmaxf(max, stats[i].reference);
#pragma unroll 1
    for (int offset = lanes; offset < kWarpThreads; offset *= 2) {
      max = fmaxf(max, ShuffleXor(max, offset));
    }
    merged.Raise(max);
#pragma unroll
    for (int i = 0; i < L::kLoads; ++i) merged.Add(stats[i], raw[i]);
    if (pass_end >= item.num_parts) break;
    left -= L::kLoads * step;
    places.NextPass();
  }
#pragma unroll 1
  for (int offset = lanes; offset < kWarpThreads; offset *= 2) {
#pragma unroll
    for (int i = 0; i < L::kSize; ++i) merged.out[i] += ShuffleXor(merged.out[i], offset);
    merged.sum += ShuffleXor(merged.sum, offset);
  }
  StoreMerged(target, merged);
}

// The first part whose worker merges (SchedulePolicy::first_merging_part). Where a sequence has two
// parts both merge: the second part's worker alone would take longer than a worker with two shares.
__device__ __forceinline__ int FirstMergingPart(const ScheduleParams& schedule,
                                                const SchedulePolicy& policy, int num_parts) {
  return schedule.num_splits == 0 && num_parts > 2 ? policy.first_merging_part() : 0;
}

// The worker whose items a CTA merges, and its slice of them.
struct CtaWork {
  FirstPart first;  // without an item if the search for it is left to `rest`
  int slice, num_slices;
};

// The workers that have work are dealt the CTAs.
__device__ __forceinline__ CtaWork FindBusyWork(const ScheduleParams& schedule) {
  SchedulePolicy policy{};
  ScheduleTotals totals{};
  int num_busy = schedule.num_workers;
  if (schedule.num_splits == 0) {
    totals = FindTotals(schedule);
    policy = ChoosePolicy(schedule, totals.total_blocks, totals.max_blocks);
    num_busy = NumBusyWorkers(schedule, policy, totals.total_blocks);
  }
  CtaWork work;
  work.num_slices = FloorDiv(gridDim.x, num_busy);
  work.slice = FloorDiv(blockIdx.x, num_busy);
  const int worker = work.slice < work.num_slices ? blockIdx.x - work.slice * num_busy : num_busy;
  work.first.rest = schedule.num_splits > 0 ? FindFixedWork(worker)
                                            : FindFirstItem(schedule, totals, policy, worker);
  work.first.has_item = false;
  return work;
}

// The same in a call of units.
__device__ __forceinline__ CtaWork LoadBusyWork(const ScheduleParams& schedule,
                                                const UnitTable& units) {
  const int num_busy = schedule.num_splits > 0 ? schedule.num_workers : __ldcg(units.num_busy);
  CtaWork work;
  work.first.has_item = false;
  work.num_slices = work.slice = 0;
  if (num_busy == 0) return work;
  work.num_slices = FloorDiv(gridDim.x, num_busy);
  work.slice = FloorDiv(blockIdx.x, num_busy);
  const int worker = blockIdx.x - work.slice * num_busy;
  if (work.slice < work.num_slices) {
    work.first.rest =
        schedule.num_splits > 0 ? FindFixedWork(worker) : LoadStart(units, worker).work;
  }
  return work;
}

// The same in one pass: where CTAs start late, every instruction up to the first load of a partial
// is time of the call.
__device__ __forceinline__ CtaWork FindWorkLate(const ScheduleParams& schedule) {
  CtaWork work;
  const auto pick_worker = [&](const SchedulePolicy& policy, int32_t total_blocks) {
    const int num_busy = schedule.num_splits > 0 ? schedule.num_workers
                                                 : NumBusyWorkers(schedule, policy, total_blocks);
    work.num_slices = FloorDiv(gridDim.x, num_busy);
    work.slice = FloorDiv(blockIdx.x, num_busy);
    return static_cast<int32_t>(blockIdx.x) - work.slice * num_busy;
  };
  work.first = FindFirstOf</*kMayBeFixed=*/true>(schedule, pick_worker, [](const WorkItem&) {});
  return work;
}

// Where a CTA has units to look up, it needs some registers more.
template <class L, bool kHasUnits>
inline constexpr int kMinCtasPerSm = kHasUnits && L::kMinCtasPerSm > 6 ? 6 : L::kMinCtasPerSm;

template <class L, bool kHasUnits>
__global__ void __launch_bounds__(kCombineThreads, kMinCtasPerSm<L, kHasUnits>)
    CombineKernel(const __grid_constant__ DecodeParams params,
                  const __grid_constant__ SplitPlan plan) {
  trace::Begin(params, TraceRole::kCombine, trace::kMerge);
  const ScheduleParams& schedule = plan.schedule;
  // seq_lens, or the units, is older than the decode kernel, which waited for it: it may be read
  // before PdlWait.
  const CtaWork work = kHasUnits        ? LoadBusyWork(schedule, params.units)
                       : L::kStartsLate ? FindWorkLate(schedule)
                                        : FindBusyWork(schedule);
  const int num_slices = work.num_slices, my_slice = work.slice;
  WorkIterator rest = work.first.rest;
  WorkItem item = work.first.item;
  bool has_item = work.first.has_item;
  const int row_bits = __ffs(params.d_ckv / L::kSize) - 1;  // log2 of a row's vectors
  const int seq_vectors = (params.q_len * params.num_heads) << row_bits;
  while (my_slice < num_slices && (has_item || rest.Next(schedule, &item))) {
    has_item = false;
    const int first_part = FirstMergingPart(schedule, rest.policy, item.num_parts);
    if (item.is_final() || item.part_idx < first_part) continue;
    Unit unit{};
    if constexpr (kHasUnits) unit = LoadUnit(params, item.seq_idx);
    const int num_vectors = kHasUnits ? unit.num_rows << row_bits : seq_vectors;
    int lane_bits = LaneBits<L>(item.num_parts);
    const int num_shares = (item.num_parts - first_part) * num_slices;
    const int share = (item.part_idx - first_part) * num_slices + my_slice;
    const int warp = threadIdx.x / kWarpThreads;
#pragma unroll 1
    for (int run = warp * num_shares + share; run << lane_bits < num_vectors;
         run += kNumWarps * num_shares) {
      // What depends on these is computed anew for every run: kept, it would take registers.
      asm volatile("" : "+r"(item.slot_base), "+r"(lane_bits));
      const int vector = (run << lane_bits) + (threadIdx.x & ((1 << lane_bits) - 1));
      const int row = vector >> row_bits;
      MergeRun<L, kHasUnits>(params, plan.partials, item, unit.row_begin, row,
                             vector - (row << row_bits), 1 << lane_bits);
    }
  }
  // Also without work: this grid must not end before the decode kernel has, or what follows in the
  // stream could start too early.
  trace::Enter(Phase::kWaitPartial);
  gpu::PdlWait();
  trace::End();
}

template <class L>
cudaError_t LaunchMerge(const DecodeParams& params, const SplitPlan& plan, cudaStream_t stream) {
  if (!plan.may_split) return cudaSuccess;
  if (!std::has_single_bit(static_cast<uint32_t>(params.d_ckv))) return cudaErrorInvalidValue;
  const gpu::LaunchConfig config{
      .grid = dim3(NumCombineCtas<L>(params, plan)),
      .block = dim3(kCombineThreads),
      .stream = stream,
      .programmatic = true,
  };
  return params.units.units != nullptr
             ? gpu::Launch<&CombineKernel<L, true>>(config, params, plan)
             : gpu::Launch<&CombineKernel<L, false>>(config, params, plan);
}

}  // namespace jax_mla::decode::merge
