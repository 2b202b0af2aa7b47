// Merge of split sequences inside the wide kernel, behind a grid barrier.
//
// For sequences of few parts: the combine kernel starts late after this one, since nothing fits
// beside a CTA that takes the whole SM, and would cost as much again where little or nothing is
// split. So the kernel is launched cooperatively (all CTAs run at once, the driver provides
// the barrier's memory), and after its last item every CTA merges as much as it has computed: of a
// sequence of which it holds part i of n, share i of n of its row tile. A warp fetches what it will
// add up itself, into the KV buffers and q, which are idle by then: no warp waits for another one's
// copies or weights. What depends on the schedule alone is computed before the wait for the other
// CTAs.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>
#include <utility>

#include "decode/sm90/wide/merge_parts.cuh"
#include "decode/sm90/wide/params.cuh"
#include "decode/sm90/wide/partials.cuh"
#include "decode/trace.cuh"
#include "gpu/sm80.cuh"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::wide {

__device__ __forceinline__ void JoinMath() { gpu::sm90::NamedBarrierSync(kMerge, kNumMathThreads); }

// Adds a part's vector to `sum`.
template <class T>
__device__ __forceinline__ void AddVector(float weight, const uint4& vector, float (&sum)[8]) {
  const uint32_t pairs[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float2 x = gpu::sm90::Unpack2<T>(pairs[k]);
    sum[2 * k] += weight * x.x;
    sum[2 * k + 1] += weight * x.y;
  }
}

// Sums of the other warps of a group, in their order, into those of its first warp. Returns the
// total of this thread's row.
template <class C>
__device__ __forceinline__ RowTotal AddGroup(int num_warps, int split_idx, float (&sum)[8]) {
  using Scratch = MergeScratch<C>;
  const Scratch scratch;
  auto* sums = reinterpret_cast<float4*>(scratch.vectors + Scratch::kNumVectors * kNumMathThreads);
  const float2* totals = scratch.totals(split_idx) + threadIdx.x % kWarpThreads / 4;
  sums[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  sums[kNumMathThreads] = make_float4(sum[4], sum[5], sum[6], sum[7]);
  JoinMath();
  RowTotal own = {totals->x, totals->y};
#pragma unroll 1
  for (int i = 1; i < num_warps; ++i) {
    const float2 total = totals[i * kGroupRows];
    const float reference = fmaxf(own.reference, total.x);
    const float factor = gpu::sm90::Exp2(own.reference - reference);
    const float weight = gpu::sm90::Exp2(total.x - reference);
    own = {reference, own.sum * factor + total.y * weight};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float4 other = sums[k * kNumMathThreads + i * kWarpThreads];
      sum[4 * k] = sum[4 * k] * factor + other.x * weight;
      sum[4 * k + 1] = sum[4 * k + 1] * factor + other.y * weight;
      sum[4 * k + 2] = sum[4 * k + 2] * factor + other.z * weight;
      sum[4 * k + 3] = sum[4 * k + 3] * factor + other.w * weight;
    }
  }
  return own;
}

// Weighted sums of kNum units of a warp, from `unit` on, whose vectors begin at `next`: together,
// as there are but two warps a scheduler to hide latencies. `weights` remembers where those of the
// rows are that a thread has.
template <class C, int kNum>
__device__ __forceinline__ void AddUnits(const MergeShare<C>& share, int unit, int num_parts,
                                         int next, const float2*& weights, float (&sum)[kNum][8]) {
  using Scratch = MergeScratch<C>;
  const Scratch scratch;
  const uint4* vectors = scratch.vectors + (next + unit) * kNumMathThreads;
  const float2* unit_weights[kNum];
#pragma unroll
  for (int k = 0; k < kNum; ++k) {
    if (share.IsFirst(unit + k)) {
      weights = scratch.stats + (next + (unit + k) * num_parts) * Scratch::kStatsStride +
                threadIdx.x % kWarpThreads / 4;
    }
    unit_weights[k] = weights;
  }
#pragma unroll 2
  for (int part = 0; part < num_parts; ++part) {
#pragma unroll
    for (int k = 0; k < kNum; ++k) {
      AddVector<typename C::T>(unit_weights[k]->x, vectors[k * kNumMathThreads], sum[k]);
      unit_weights[k] += Scratch::kStatsStride;
    }
    vectors += share.num_units * kNumMathThreads;
  }
}

// One unit's sums as rows of T.
template <class C>
__device__ __forceinline__ void WriteUnit(typename C::T* out, const RowTile& tile,
                                          const MergeShare<C>& share, int unit, bool writes,
                                          const float (&sum)[8]) {
  uint32_t v[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    v[k] = gpu::sm90::Pack2<typename C::T>(sum[2 * k], sum[2 * k + 1]);
  }
  PairColumns(v);
  const int lane = threadIdx.x % kWarpThreads, row = share.FirstRow(unit) + lane / 4;
  const int dim = share.DimsOf(unit) * PackedPartialsOf<C>::kUnitDims + PairedColumn();
  if (writes && row < tile.num_rows) {
    StorePaired(out + static_cast<uint32_t>(row * C::kDCkv + dim), v);
  }
}

// Merges this CTA's share of one sequence, whose vectors begin at `next`. The last group of copies
// that may be under way are the vectors of the last sequence fetched. All math threads. Returns the
// vector behind them.
template <class C>
__device__ __forceinline__ int MergeSplit(typename C::T* out, float* lse, const RowTile& tile,
                                          const WorkItem& item, int split_idx, int next,
                                          bool is_last_fetched) {
  const MergeShare<C> share(tile, item);
  gpu::CopyAsyncWait<1>();
  WeighParts(share, tile, lse, next, split_idx);
  if (is_last_fetched) gpu::CopyAsyncWait<0>();
  const float2* weights = nullptr;
  int unit = 0;
#pragma unroll 1
  for (; unit + 1 < share.num_units; unit += 2) {
    float sum[2][8] = {};
    AddUnits<C>(share, unit, share.num_parts, next, weights, sum);
    WriteUnit<C>(out, tile, share, unit, true, sum[0]);
    WriteUnit<C>(out, tile, share, unit + 1, true, sum[1]);
  }
  const bool exists = unit < share.num_units;
  const int end = next + share.num_units * share.num_parts;
  if (!exists && share.shift == 0) return end;
  // The last one, or the only one, on which other warps may work too.
  const int num_parts = exists ? share.num_parts : 0;
  float sum[1][8] = {};
  AddUnits<C>(share, unit, num_parts, next, weights, sum);
  if (share.shift > 0) {
    // The first parts are of different warps; there may be fewer than warps.
    const int num_warps = share.first_part == 0 ? min(1 << share.shift, item.num_parts) : 1;
    const RowTotal total = AddGroup<C>(num_warps, split_idx, sum[0]);
    const int lane = threadIdx.x % kWarpThreads, row = share.FirstRow(unit) + lane / 4;
    const float inverse = total.Inverse();
#pragma unroll
    for (float& x : sum[0]) x *= inverse;
    if (exists && share.first_part == 0 && share.DimsOf(unit) == 0 && lane % 4 == 0 &&
        row < tile.num_rows) {
      lse[row] = total.Lse();
    }
  }
  WriteUnit<C>(out, tile, share, unit, exists && share.first_part == 0, sum[0]);
  return end;
}

// Merges this CTA's share of the call's split sequences, once all CTAs have written their partials:
// at most the worker's first and its last item. All math threads, and JoinPartials by the others
// that have not exited. Both are fetched at once if they fit.
template <class C>
__device__ __forceinline__ void MergeSplits(const WideParams& params, const RowTile& tile) {
  trace::Enter(Phase::kWaitPartial);
  const auto grid = cooperative_groups::this_grid();
  auto arrival = grid.barrier_arrive();
  const PartialBuffers& partials = params.plan.partials;
  const WorkItem* splits = Shared<C>().splits;
  const int num_splits = Shared<C>().num_splits;
  int num_vectors = 0;
#pragma unroll 1
  for (int i = 0; i < num_splits; ++i) {
    num_vectors += MergeShare<C>(tile, splits[i]).num_vectors(splits[i]);
  }
  const bool at_once = num_vectors <= MergeScratch<C>::kNumVectors;
  PartCopies<C> copies(partials, tile, splits[0], 0);
  grid.barrier_wait(std::move(arrival));
  trace::Enter(Phase::kMerge);
  const DecodeParams& d = params.decode;
  const auto first_row = [&](const WorkItem& item) {
    return static_cast<int64_t>(item.seq_idx) * d.q_len * d.num_heads + tile.row_begin;
  };
  int num_fetched = 0, fetched = 0, next = 0;
#pragma unroll 1
  for (int i = 0; i < num_splits; ++i) {
    if (!at_once) fetched = next = 0;
#pragma unroll 1
    for (; num_fetched < (at_once ? num_splits : i + 1); ++num_fetched) {
      if (num_fetched > 0) copies = PartCopies<C>(partials, tile, splits[num_fetched], fetched);
      fetched += copies.Start();
    }
    if (i > 0) JoinMath();  // a group's sums are overwritten from here on
    next = MergeSplit<C>(static_cast<typename C::T*>(d.out) + first_row(splits[i]) * C::kDCkv,
                         d.lse + first_row(splits[i]), tile, splits[i], i, next,
                         /*is_last_fetched=*/i + 1 == num_fetched);
  }
}
// For the other threads of a CTA that merges.
__device__ __forceinline__ void JoinPartials() {
  trace::Enter(Phase::kWaitPartial);
  cooperative_groups::this_grid().sync();
}

}  // namespace jax_mla::decode::sm90::wide
