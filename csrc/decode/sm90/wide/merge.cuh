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
  static constexpr int kStatsRows = kBlockM;  // of a row tile, so that two rows are 16-byte aligned

  T* out;
  float2* stats;  // [slot][row tile][kStatsRows] {reference, sum} of the part's softmax
  int num_row_tiles;

  // The scratch has room for f32: out takes the first half of that, the stats begin the second.
  __device__ explicit PackedPartials(const PartialBuffers& partials)
      : out(reinterpret_cast<T*>(partials.out)),
        stats(reinterpret_cast<float2*>(partials.out + (partials.lse_log2 - partials.out) / 2)),
        num_row_tiles(partials.num_row_tiles) {}

  __device__ __forceinline__ float2* StatsOf(int32_t slot, const RowTile& tile) const {
    return stats + (static_cast<int64_t>(slot) * num_row_tiles + tile.idx) * kStatsRows;
  }
};

template <class C>
using PackedPartialsOf = PackedPartials<typename C::T>;

// What lies in the buffers that the main loop leaves behind: in kv the parts' vectors
// [part][slice], in q the rest. Parts are at most as many as SMs; n of them have at most 64 + 4 n
// rows of stats in a slice.
struct MergeScratch {
  static constexpr int kMaxStats = 1024;
  float2 stats[kMaxSplits][kMaxStats];  // [split][part][row of the slice]
  float4 sums[2][kNumMathThreads];      // on their way to the first warp of a group
};

// This CTA's share of a sequence, part_idx of num_parts, in units: what a warp merges at once.
template <class C>
struct Slice {
  static constexpr int kUnitsPerRow = C::kDCkv / PackedPartialsOf<C>::kUnitDims;
  int begin, num_units;        // of the row tile
  int stats_begin, num_stats;  // rows; both even

  __device__ __forceinline__ Slice(const RowTile& tile, const WorkItem& item) {
    const int total = tile.num_rows * kUnitsPerRow;
    const int share = CeilDiv(total, item.num_parts);
    begin = min(item.part_idx * share, total);
    num_units = min(share, total - begin);
    stats_begin = begin / kUnitsPerRow & ~1;
    num_stats = ((begin + num_units + kUnitsPerRow - 1) / kUnitsPerRow + 1 & ~1) - stats_begin;
  }
};

__device__ __forceinline__ void JoinMath() { gpu::sm90::NamedBarrierSync(kMerge, kNumMathThreads); }

// Where the parts of one of the CTA's splits are fetched to.
template <class C>
struct MergeBuffers {
  static constexpr int kUnitBytes = PackedPartialsOf<C>::kUnitDims * kElementBytes;
  static constexpr int kHalfUnits = sizeof(Shared<C>().kv[0]) / kUnitBytes;

  float2* stats;
  uint16_t* vectors;
  uint64_t* full;

  // `half`: of kv.
  __device__ __forceinline__ MergeBuffers(int split, int half)
      : stats(Scratch().stats[split]),
        vectors(Shared<C>().kv[half][0]),
        full(&Shared<C>().merge_full[split]) {}

  static __device__ __forceinline__ MergeScratch& Scratch() {
    static_assert(sizeof(MergeScratch) <= sizeof(Shared<C>().q));
    return *reinterpret_cast<MergeScratch*>(Shared<C>().q);
  }
};

// Starts the copies of all parts of the slice. One warp.
template <class C>
__device__ __forceinline__ void FetchParts(const PartialBuffers& partials, const RowTile& tile,
                                           const WorkItem& item, const MergeBuffers<C>& buffers) {
  constexpr int kUnitBytes = MergeBuffers<C>::kUnitBytes;
  const PackedPartialsOf<C> packed(partials);
  const Slice<C> slice(tile, item);
  const uint32_t full = SharedAddress(buffers.full);
  const int num_bytes = slice.num_units * kUnitBytes;
  const int stats_bytes = slice.num_stats * static_cast<int>(sizeof(float2));
  if (threadIdx.x == 0) {
    gpu::sm90::MbarrierArriveExpectTx(
        full, num_bytes > 0 ? (num_bytes + stats_bytes) * item.num_parts : 0);
  }
  __syncwarp();
  for (int part = threadIdx.x; part < item.num_parts && num_bytes > 0; part += kWarpThreads) {
    const int32_t slot = item.slot_of(part);
    gpu::sm90::BulkLoad(SharedAddress(buffers.stats) + part * stats_bytes,
                        packed.StatsOf(slot, tile) + slice.stats_begin, stats_bytes, full);
    gpu::sm90::BulkLoad(SharedAddress(buffers.vectors) + part * num_bytes,
                        packed.out + partials.RowIndex(slot, tile.idx) * C::kDCkv +
                            slice.begin * PackedPartialsOf<C>::kUnitDims,
                        num_bytes, full);
  }
}

// Log-sum-exp over parts, in the making.
struct RunningLse {
  float max = kNoReference;  // log2 units
  float sum = 0.0f;

  __device__ __forceinline__ void Add(float other_max, float other_sum) {
    const float raised = fmaxf(max, other_max);
    sum = sum * gpu::sm90::Exp2(max - raised) + other_sum * gpu::sm90::Exp2(other_max - raised);
    max = raised;
  }
};

// One row's, from the stats of its parts, `stride` apart; equal in all lanes of the warp.
__device__ __forceinline__ RunningLse LseOfParts(const float2* stats, int stride, int num_parts) {
  RunningLse lse;
#pragma unroll 1
  for (int part = threadIdx.x % kWarpThreads; part < num_parts; part += kWarpThreads) {
    lse.Add(stats[part * stride].x, stats[part * stride].y);
  }
  // Lanes past the last part hold nothing: lane 0 has the sum after few steps.
#pragma unroll 1
  for (int step = 1; step < kWarpThreads && step < num_parts; step *= 2) {
    lse.Add(__shfl_xor_sync(kAllLanes, lse.max, step), __shfl_xor_sync(kAllLanes, lse.sum, step));
  }
  return {__shfl_sync(kAllLanes, lse.max, 0), __shfl_sync(kAllLanes, lse.sum, 0)};
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
  if (threadIdx.x / kWarpThreads % num_warps != 0) return;
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
                                           const WorkItem& item, const MergeBuffers<C>& buffers) {
  using T = typename C::T;
  using Packed = PackedPartials<T>;
  constexpr int kNumWarps = kNumMathThreads / kWarpThreads;
  const DecodeParams& d = params.decode;
  const Slice<C> slice(tile, item);
  int num_warps = kNumWarps;  // of a group
  while (num_warps > 1 && num_warps * slice.num_units > kNumWarps) num_warps /= 2;
  const int warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
  const auto* vectors = reinterpret_cast<const uint4*>(buffers.vectors) + lane;
  const int64_t first_row =
      static_cast<int64_t>(item.seq_idx) * d.q_len * d.num_heads + tile.row_begin;
  gpu::sm90::MbarrierWait(SharedAddress(buffers.full), 0);
#pragma unroll 1
  for (int base = 0; base < slice.num_units; base += kNumWarps / num_warps) {
    const int unit = min(base + warp / num_warps, slice.num_units - 1);
    const int row = (slice.begin + unit) / Slice<C>::kUnitsPerRow;
    const int vector = (slice.begin + unit) % Slice<C>::kUnitsPerRow * kWarpThreads + lane;
    const float2* stats = buffers.stats + row - slice.stats_begin;
    const RunningLse lse = LseOfParts(stats, slice.num_stats, item.num_parts);
    const float inverse = lse.sum == 0.0f ? 0.0f : 1.0f / lse.sum;  // 0: a row that sees no key
    float sum[Packed::kVector] = {};
#pragma unroll 4
    for (int part = warp % num_warps; part < item.num_parts; part += num_warps) {
      const float2 stat = stats[part * slice.num_stats];
      const float weight = gpu::sm90::Exp2(stat.x - lse.max) * inverse;
      AddPart<T>(Packed::kNormalised ? weight * stat.y : weight,
                 vectors[(part * slice.num_units + unit) * kWarpThreads], sum);
    }
    if (num_warps > 1) AddGroup(num_warps, MergeBuffers<C>::Scratch(), sum);
    if (warp % num_warps != 0 || base + warp / num_warps >= slice.num_units) continue;
    StoreVector(static_cast<T*>(d.out) + (first_row + row) * C::kDCkv, vector, sum);
    if (vector == 0) {
      d.lse[first_row + row] = lse.sum == 0.0f ? -INFINITY : (lse.max + log2f(lse.sum)) * kLn2;
    }
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
        Slice<C>(tile, splits[i]).num_units * splits[i].num_parts <= MergeBuffers<C>::kHalfUnits;
  }
  int num_fetched = 0;
#pragma unroll 1
  for (int i = 0; i < num_splits; ++i) {
    if (i > 0) JoinMath();  // what the slowest thread still reads is overwritten from here on
#pragma unroll 1
    for (; num_fetched < (at_once ? num_splits : i + 1); ++num_fetched) {
      if (threadIdx.x >= kWarpThreads) continue;
      FetchParts(params.plan.partials, tile, splits[num_fetched],
                 MergeBuffers<C>(num_fetched, at_once ? num_fetched : 0));
    }
    MergeSplit(params, tile, splits[i], MergeBuffers<C>(i, at_once ? i : 0));
  }
}

}  // namespace jax_mla::decode::sm90::wide
