// Merge of split sequences inside the wide kernel, behind a grid barrier.
//
// The combine kernel would start cold after this one, since nothing fits beside a CTA that takes
// the whole SM. So the kernel is launched cooperatively (all CTAs run at once, the driver provides
// the barrier's memory), and after its last item every CTA merges as much as it has computed: of a
// sequence of which it holds part i of n, slice i of n of its row tile. The n pieces of a slice are
// contiguous: one bulk copy each into the KV buffers, which are idle by then.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>
#include <type_traits>

#include "decode/sm90/wide/params.cuh"
#include "decode/trace.cuh"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::wide {

// Partials that this kernel merges itself have the call's dtype, which is half of the combine
// kernel's bytes: writing and reading them is most of what a merge costs. [slot][row tile][row]
// [d_ckv], each thread's 8 values of 32 dims (wgmma's accumulator layout) one vector: vector v of a
// row holds dims 32 (v / 4) + 2 (v % 4) + {0, 1, 8, 9, 16, 17, 24, 25}. bf16 has the range of f32
// and takes O as it is, f16 takes O / sum. `stats` holds what makes a mean of them.
template <class T>
struct PackedPartials {
  static constexpr bool kNormalised = std::is_same_v<T, __half>;
  static constexpr int kVector = 8;       // elements
  static constexpr int kVectorDims = 32;  // that four of them hold
  static constexpr int kUnitDims = kVector * kWarpThreads;

  T* out;
  float2* stats;  // [slot][row tile][row] {reference, sum} of the part's softmax

  // The scratch has room for f32: out takes the first half of that, the stats begin the second.
  __device__ explicit PackedPartials(const PartialBuffers& partials)
      : out(reinterpret_cast<T*>(partials.out)),
        stats(reinterpret_cast<float2*>(partials.out + (partials.lse_log2 - partials.out) / 2)) {}
};

template <class C>
using PackedPartialsOf = PackedPartials<typename C::T>;

// What lies in the buffers that the main loop leaves behind: in kv the parts' vectors
// [part][slice], in q the rest. Parts are at most as many as SMs; n of them have at most 64 + 2 n
// rows in a slice.
struct MergeScratch {
  static constexpr int kMaxRows = 1024;
  float2 stats[kMaxRows];           // [part][row of the slice]; x becomes the part's weight
  float4 sums[2][kNumMathThreads];  // on their way to the first warp of a group
};

// This CTA's share of a sequence, part_idx of num_parts, in units: what a warp merges at once.
template <class C>
struct Slice {
  static constexpr int kUnitsPerRow = C::kDCkv / PackedPartialsOf<C>::kUnitDims;
  int begin, num_units;     // of the row tile
  int first_row, num_rows;  // that they touch

  __device__ __forceinline__ Slice(const RowTile& tile, const WorkItem& item) {
    const int total = tile.num_rows * kUnitsPerRow;
    const int share = CeilDiv(total, item.num_parts);
    begin = min(item.part_idx * share, total);
    num_units = min(share, total - begin);
    first_row = begin / kUnitsPerRow;
    num_rows = (begin + num_units + kUnitsPerRow - 1) / kUnitsPerRow - first_row;
  }
};

__device__ __forceinline__ void JoinMath() { gpu::sm90::NamedBarrierSync(kMerge, kNumMathThreads); }

template <class C>
__device__ __forceinline__ MergeScratch& Scratch() {
  static_assert(sizeof(MergeScratch) <= sizeof(Shared<C>().q));
  return *reinterpret_cast<MergeScratch*>(Shared<C>().q);
}

// Where the parts of one of the CTA's splits are fetched to.
template <class C>
struct MergeBuffer {
  static constexpr int kUnitBytes = PackedPartialsOf<C>::kUnitDims * kElementBytes;
  static constexpr int kHalfUnits = sizeof(Shared<C>().kv[0]) / kUnitBytes;

  uint16_t* vectors;
  uint64_t* full;

  // `half`: of kv.
  __device__ __forceinline__ MergeBuffer(int split, int half)
      : vectors(Shared<C>().kv[half][0]), full(&Shared<C>().merge_full[split]) {}
};

// Starts the copies of all parts of the slice. All math threads: a warp that issued them all, some
// 60 cycles each, would be late with its weights.
template <class C>
__device__ __forceinline__ void FetchParts(const PartialBuffers& partials, const RowTile& tile,
                                           const WorkItem& item, const MergeBuffer<C>& buffer) {
  const Slice<C> slice(tile, item);
  const uint32_t full = SharedAddress(buffer.full);
  const int num_bytes = slice.num_units * MergeBuffer<C>::kUnitBytes;
  const auto* source =
      PackedPartialsOf<C>(partials).out + slice.begin * PackedPartialsOf<C>::kUnitDims;
  if (threadIdx.x == 0) gpu::sm90::MbarrierArriveExpectTx(full, num_bytes * item.num_parts);
  const int warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
  for (int part = lane * (kNumMathThreads / kWarpThreads) + warp;
       part < item.num_parts && num_bytes > 0; part += kNumMathThreads) {
    gpu::sm90::BulkLoad(SharedAddress(buffer.vectors) + part * num_bytes,
                        source + partials.RowIndex(item.slot_of(part), tile.idx) * C::kDCkv,
                        num_bytes, full);
  }
}

// Sum or maximum over aligned groups of `num_lanes` lanes, a power of 2.
template <class Combine>
__device__ __forceinline__ float ReduceLanes(float value, int num_lanes, Combine combine) {
#pragma unroll 1
  for (int step = 1; step < num_lanes; step *= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

// What every part of every row of the slice counts in the mean; the rows' log-sum-exps. All math
// threads, 8 to 32 a row, which for most shapes have one part each.
template <class C>
__device__ __forceinline__ void WeighParts(const WideParams& params, const RowTile& tile,
                                           const WorkItem& item, const Slice<C>& slice,
                                           float* lse) {
  const PartialBuffers& partials = params.plan.partials;
  const float2* source = PackedPartialsOf<C>(partials).stats + slice.first_row;
  int shift = 5;  // log2 of a row's lanes
  while (shift > 3 && slice.num_rows << shift > kNumMathThreads) --shift;
  const int row_lanes = 1 << shift, lane = threadIdx.x & (row_lanes - 1);
#pragma unroll 1
  for (int base = 0; base < slice.num_rows; base += kNumMathThreads >> shift) {
    const int row = base + (threadIdx.x >> shift);
    const int num_parts = row < slice.num_rows ? item.num_parts : 0;
    float2* own = Scratch<C>().stats + row;
    float max = kNoReference;
#pragma unroll 1
    for (int part = lane; part < num_parts; part += row_lanes) {
      const float2 stat = __ldcg(source + partials.RowIndex(item.slot_of(part), tile.idx) + row);
      own[part * slice.num_rows] = stat;
      max = fmaxf(max, stat.x);
    }
    max = ReduceLanes(max, row_lanes, [](float a, float b) { return fmaxf(a, b); });
    float sum = 0.0f;
#pragma unroll 1
    for (int part = lane; part < num_parts; part += row_lanes) {
      float2& stat = own[part * slice.num_rows];
      const float weight = gpu::sm90::Exp2(stat.x - max);
      sum += weight * stat.y;
      stat.x = PackedPartialsOf<C>::kNormalised ? weight * stat.y : weight;
    }
    sum = ReduceLanes(sum, row_lanes, [](float a, float b) { return a + b; });
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // 0: a row that sees no key
#pragma unroll 1
    for (int part = lane; part < num_parts; part += row_lanes) {
      own[part * slice.num_rows].x *= inverse;
    }
    const bool holds_begin = (slice.first_row + row) * Slice<C>::kUnitsPerRow >= slice.begin;
    if (lane == 0 && num_parts > 0 && holds_begin) {
      lse[slice.first_row + row] = sum == 0.0f ? -INFINITY : (max + log2f(sum)) * kLn2;
    }
  }
  JoinMath();
}

// Adds a part's vector to `sum`.
template <class T>
__device__ __forceinline__ void AddPart(float weight, const uint4& vector, float (&sum)[8]) {
  const uint32_t pairs[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = gpu::sm90::Unpack2<T>(pairs[i]);
    sum[2 * i] += weight * x.x;
    sum[2 * i + 1] += weight * x.y;
  }
}

// Sums of the other warps of a group, in their order, into those of its first warp.
__device__ __forceinline__ void AddGroup(int num_warps, MergeScratch& scratch, float (&sum)[8]) {
  scratch.sums[0][threadIdx.x] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  scratch.sums[1][threadIdx.x] = make_float4(sum[4], sum[5], sum[6], sum[7]);
  JoinMath();
  if ((threadIdx.x / kWarpThreads & (num_warps - 1)) != 0) return;
#pragma unroll 1
  for (int i = 1; i < num_warps; ++i) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float4 other = scratch.sums[k][threadIdx.x + i * kWarpThreads];
      sum[4 * k] += other.x, sum[4 * k + 1] += other.y;
      sum[4 * k + 2] += other.z, sum[4 * k + 3] += other.w;
    }
  }
}

// Writes a merged vector to its row of `out`.
template <class T>
__device__ __forceinline__ void StoreVector(T* out_row, int vector, const float (&sum)[8]) {
  using Packed = PackedPartials<T>;
  T* target = out_row + vector / 4 * Packed::kVectorDims + vector % 4 * 2;
#pragma unroll
  for (int i = 0; i < Packed::kVector; i += 2) {
    *reinterpret_cast<uint32_t*>(target + 4 * i) = gpu::sm90::Pack2<T>(sum[i], sum[i + 1]);
  }
}

// Merges this CTA's slice of one sequence. All math threads. Where the slice has fewer units than
// there are warps, groups of warps share a unit: each takes every num_warps-th part. The order of
// every sum depends on the number of parts alone.
template <class C>
__device__ __forceinline__ void MergeSplit(const WideParams& params, const RowTile& tile,
                                           const WorkItem& item, const MergeBuffer<C>& buffer) {
  using T = typename C::T;
  using Packed = PackedPartials<T>;
  constexpr int kNumWarps = kNumMathThreads / kWarpThreads;
  const DecodeParams& d = params.decode;
  const Slice<C> slice(tile, item);
  int shift = 3;  // log2 of a group's warps
  while (shift > 0 && slice.num_units << shift > kNumWarps) --shift;
  const int num_warps = 1 << shift;
  const int warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
  const auto* vectors = reinterpret_cast<const uint4*>(buffer.vectors) + lane;
  const int64_t first_row =
      static_cast<int64_t>(item.seq_idx) * d.q_len * d.num_heads + tile.row_begin;
  WeighParts(params, tile, item, slice, d.lse + first_row);  // while the parts are on their way
  gpu::sm90::MbarrierWait(SharedAddress(buffer.full), 0);
#pragma unroll 1
  for (int base = 0; base < slice.num_units; base += kNumWarps >> shift) {
    const int unit = min(base + (warp >> shift), slice.num_units - 1);
    const int row = (slice.begin + unit) / Slice<C>::kUnitsPerRow;
    const int vector = (slice.begin + unit) % Slice<C>::kUnitsPerRow * kWarpThreads + lane;
    const float2* weights = Scratch<C>().stats + row - slice.first_row;
    float sum[Packed::kVector] = {};
#pragma unroll 4
    for (int part = warp & (num_warps - 1); part < item.num_parts; part += num_warps) {
      AddPart<T>(weights[part * slice.num_rows].x,
                 vectors[(part * slice.num_units + unit) * kWarpThreads], sum);
    }
    if (num_warps > 1) AddGroup(num_warps, Scratch<C>(), sum);
    if ((warp & (num_warps - 1)) != 0 || base + (warp >> shift) >= slice.num_units) continue;
    StoreVector(static_cast<T*>(d.out) + (first_row + row) * C::kDCkv, vector, sum);
  }
}

// Waits until all CTAs have written their partials. All threads of the CTA that have not exited.
// After it, the asynchronous proxy may read what any of them wrote.
__device__ __forceinline__ void WaitForAllPartials() {
  trace::Enter(Phase::kWaitPartial);
  gpu::sm90::FenceProxyAsync();
  cooperative_groups::this_grid().sync();
  gpu::sm90::FenceProxyAsync();
}

// Merges this CTA's share of the call's split sequences: at most the worker's first and its last
// item. All math threads, after WaitForAllPartials. Each is fetched into a half of kv at once, or
// one after the other where one does not fit.
template <class C>
__device__ __forceinline__ void MergeSplits(const WideParams& params, const RowTile& tile) {
  trace::Enter(Phase::kMerge);
  const WorkItem* splits = Shared<C>().splits;
  const int num_splits = Shared<C>().num_splits;
  bool at_once = true;
#pragma unroll 1
  for (int i = 0; i < num_splits; ++i) {
    at_once &=
        Slice<C>(tile, splits[i]).num_units * splits[i].num_parts <= MergeBuffer<C>::kHalfUnits;
  }
  int num_fetched = 0;
#pragma unroll 1
  for (int i = 0; i < num_splits; ++i) {
    if (i > 0) JoinMath();  // what the slowest thread still reads is overwritten from here on
#pragma unroll 1
    for (; num_fetched < (at_once ? num_splits : i + 1); ++num_fetched) {
      FetchParts(params.plan.partials, tile, splits[num_fetched],
                 MergeBuffer<C>(num_fetched, at_once ? num_fetched : 0));
    }
    MergeSplit(params, tile, splits[i], MergeBuffer<C>(i, at_once ? i : 0));
  }
}

}  // namespace jax_mla::decode::sm90::wide
