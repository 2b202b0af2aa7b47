// Merge of split sequences inside the wide kernel, behind a grid barrier.
//
// For sequences of few parts: the combine kernel starts late after this one, since nothing fits
// beside a CTA that takes the whole SM, and would cost as much again where little or nothing is
// split. So the kernel is launched cooperatively (all CTAs run at once, the driver provides
// the barrier's memory), and after its last item every CTA merges as much as it has computed: of a
// sequence of which it holds part i of n, share i of n of its row tile. Every thread fetches what
// it will add up itself, into the KV buffers and q, which are idle by then: nobody waits for
// anybody else's copies or weights, and the code, which a launch runs but once, is short.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>
#include <type_traits>

#include "decode/sm90/wide/params.cuh"
#include "decode/trace.cuh"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::wide {

// Partials that this kernel merges itself have the call's dtype, which is half of the combine
// kernel's bytes: writing and reading them is most of what a merge costs. They lie as a warp holds
// them, [slot][row tile][group of 8 rows][32 dims][lane][8]: such a unit of 512 bytes is what a
// warp stores or loads at once. Lane 4 r + q has of row r the dims 2 q + {0, 1, 8, 9, 16, 17, 24,
// 25}. bf16 has the range of f32 and takes O as it is, f16 takes O / sum. `stats` holds what makes
// a mean of them.
template <class T>
struct PackedPartials {
  static constexpr bool kNormalised = std::is_same_v<T, __half>;
  static constexpr int kVector = 8;  // elements
  static constexpr int kUnitDims = 32;
  static constexpr int kUnitElements = kVector * kWarpThreads;

  T* out;
  float2* stats;  // [slot][row tile][row] {reference, sum} of the part's softmax

  // The scratch has room for f32: out takes the first half of that, the stats begin the second.
  __device__ explicit PackedPartials(const PartialBuffers& partials)
      : out(reinterpret_cast<T*>(partials.out)),
        stats(reinterpret_cast<float2*>(partials.out + (partials.lse_log2 - partials.out) / 2)) {}
};

inline constexpr int kGroupRows = 8;

template <class C>
using PackedPartialsOf = PackedPartials<typename C::T>;

__device__ __forceinline__ void JoinMath() { gpu::sm90::NamedBarrierSync(kMerge, kNumMathThreads); }

// What lies in the buffers that the main loop leaves behind: vectors in kv, statistics in q.
template <class C>
struct MergeScratch {
  static constexpr int kVectorBytes = kNumMathThreads * sizeof(uint4);
  // Shares of n parts take at most 32 (half as many with half of the dims), or n / warps. The last
  // ones are for sums on their way to the first warp of a group.
  static constexpr int kNumVectors = sizeof(Shared<C>().kv) / kVectorBytes - 2;
  static_assert((kNumVectors + 1) * kNumMathThreads * sizeof(float2) <= sizeof(Shared<C>().q));
  static_assert(kNumVectors * kNumMathWarps >= kMaxMergeParts);

  uint4* vectors;  // [vector][thread]
  float2* stats;   // the same

  __device__ __forceinline__ MergeScratch()
      : vectors(reinterpret_cast<uint4*>(Shared<C>().kv) + threadIdx.x),
        stats(reinterpret_cast<float2*>(Shared<C>().q) + threadIdx.x) {}
};

// This warp's work on one split sequence: consecutive units of the CTA's share, and of each the
// parts from first_part on, in steps of 2^shift: where the share has fewer units than there are
// warps, 2^shift warps work on one.
template <class C>
struct MergeShare {
  static constexpr int kUnitsPerGroup = C::kDCkv / PackedPartialsOf<C>::kUnitDims;
  int shift;
  int max_units;         // of a warp
  int begin, num_units;  // of this one; begin: in the row tile
  int first_part, num_parts;

  __device__ __forceinline__ MergeShare(const RowTile& tile, const WorkItem& item) {
    const int total = (tile.num_rows + kGroupRows - 1) / kGroupRows * kUnitsPerGroup;
    const int share = CountParts(total, item.num_parts);
    const int share_begin = min(item.part_idx * share, total);
    const int share_units = min(share, total - share_begin);
    shift = share_units > 4 ? 0 : share_units > 2 ? 1 : share_units > 1 ? 2 : 3;
    max_units = (share_units + kNumMathWarps - 1) / kNumMathWarps;
    const int warp = threadIdx.x / kWarpThreads;
    const int place = (warp >> shift) * max_units;
    begin = share_begin + place;
    num_units = max(min(max_units, share_units - place), 0);
    first_part = warp & ((1 << shift) - 1);
    num_parts = (item.num_parts - first_part + (1 << shift) - 1) >> shift;
  }
  // Whether unit `i` of the warp is its first one of these rows.
  __device__ __forceinline__ bool IsFirst(int i) const {
    return i == 0 || (begin + i) % kUnitsPerGroup == 0;
  }
  __device__ __forceinline__ int RowOf(int i) const {
    return (begin + i) / kUnitsPerGroup * kGroupRows + threadIdx.x % kWarpThreads / 4;
  }
  // Vectors that a thread holds at most.
  __device__ __forceinline__ int num_vectors(const WorkItem& item) const {
    return max_units * ((item.num_parts + (1 << shift) - 1) >> shift);
  }
};

// Starts the copies of what this thread adds up, from vector `next` of the scratch on: unit after
// unit its parts, and with the first unit of a row its statistics. Returns the vector behind them.
template <class C>
__device__ __forceinline__ int FetchParts(const PartialBuffers& partials, const RowTile& tile,
                                          const WorkItem& item, int next) {
  using Packed = PackedPartialsOf<C>;
  const MergeShare<C> share(tile, item);
  const Packed packed(partials);
  const int lane = threadIdx.x % kWarpThreads;
  // A part has every second slot; the first one comes a slot late.
  const int64_t slot_rows = int64_t{partials.num_row_tiles} * partials.block_m;
  const int64_t first_row = partials.RowIndex(item.slot_base + 2 * share.first_part, tile.idx);
  const int64_t part_rows = (2 * slot_rows) << share.shift;
  const MergeScratch<C> scratch;
  uint32_t vector_target = SharedAddress(scratch.vectors + next * kNumMathThreads);
  uint32_t stat_target = SharedAddress(scratch.stats + next * kNumMathThreads);
#pragma unroll 1
  for (int i = 0; i < share.num_units; ++i) {
    const bool is_first = share.IsFirst(i);
    const float2* stats = packed.stats + first_row + share.RowOf(i);
    const auto* vectors = packed.out + first_row * C::kDCkv +
                          (share.begin + i) * Packed::kUnitElements + lane * Packed::kVector;
    int64_t skipped = share.first_part == 0 ? slot_rows : 0;
#pragma unroll 1
    for (int part = 0; part < share.num_parts; ++part) {
      gpu::sm90::CopyAsync16(vector_target, vectors + skipped * C::kDCkv);
      if (is_first) gpu::sm90::CopyAsync8(stat_target, stats + skipped);
      skipped = 0;
      vectors += part_rows * C::kDCkv, stats += part_rows;
      vector_target += kNumMathThreads * sizeof(uint4);
      stat_target += kNumMathThreads * sizeof(float2);
    }
    next += share.num_parts;
  }
  return next;
}

// Of some parts of a row: their largest reference, their sum relative to it.
struct RowTotal {
  float reference, sum;
};

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

// Adds up the first vectors of a row and leaves the weights where the references were. The order
// depends on the number of parts alone.
template <class C>
__device__ __forceinline__ RowTotal WeighAndAdd(const uint4* vectors, float2* stats, int num_parts,
                                                float (&sum)[8]) {
  RowTotal total = {kNoReference, 0.0f};
#pragma unroll 4
  for (int i = 0; i < num_parts; ++i) {
    total.reference = fmaxf(total.reference, stats[i * kNumMathThreads].x);
  }
#pragma unroll 2
  for (int i = 0; i < num_parts; ++i) {
    const float2 stat = stats[i * kNumMathThreads];
    const float weight = gpu::sm90::Exp2(stat.x - total.reference);
    const float mass = weight * stat.y;
    const float factor = PackedPartialsOf<C>::kNormalised ? mass : weight;
    total.sum += mass;
    stats[i * kNumMathThreads].x = factor;
    AddVector<typename C::T>(factor, vectors[i * kNumMathThreads], sum);
  }
  return total;
}

// Sums of the other warps of a group, in their order, into those of its first warp.
template <class C>
__device__ __forceinline__ void AddGroup(int num_warps, RowTotal& own, float (&sum)[8]) {
  using Scratch = MergeScratch<C>;
  const Scratch scratch;
  auto* sums = reinterpret_cast<float4*>(scratch.vectors + Scratch::kNumVectors * kNumMathThreads);
  float2* stats = scratch.stats + Scratch::kNumVectors * kNumMathThreads;
  sums[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  sums[kNumMathThreads] = make_float4(sum[4], sum[5], sum[6], sum[7]);
  *stats = make_float2(own.reference, own.sum);
  JoinMath();
  if ((threadIdx.x / kWarpThreads & (num_warps - 1)) != 0) return;
#pragma unroll 1
  for (int i = 1; i < num_warps; ++i) {
    const float2 stat = stats[i * kWarpThreads];
    const float reference = fmaxf(own.reference, stat.x);
    const float factor = gpu::sm90::Exp2(own.reference - reference);
    const float weight = gpu::sm90::Exp2(stat.x - reference);
    own = {reference, own.sum * factor + stat.y * weight};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float4 other = sums[k * kNumMathThreads + i * kWarpThreads];
      sum[4 * k] = sum[4 * k] * factor + other.x * weight;
      sum[4 * k + 1] = sum[4 * k + 1] * factor + other.y * weight;
      sum[4 * k + 2] = sum[4 * k + 2] * factor + other.z * weight;
      sum[4 * k + 3] = sum[4 * k + 3] * factor + other.w * weight;
    }
  }
}

// Merges this CTA's share of one sequence, whose vectors begin at `next`. All math threads. Returns
// the vector behind them.
template <class C>
__device__ __forceinline__ int MergeSplit(const DecodeParams& d, const RowTile& tile,
                                          const WorkItem& item, int next) {
  using T = typename C::T;
  const MergeShare<C> share(tile, item);
  const MergeScratch<C> scratch;
  const int lane = threadIdx.x % kWarpThreads;
  const int64_t first_row =
      static_cast<int64_t>(item.seq_idx) * d.q_len * d.num_heads + tile.row_begin;
  float2* stats = nullptr;  // of the row, by now weights
  RowTotal total;
  float inverse = 0.0f;
  int i = 0;
#pragma unroll 1
  do {  // a warp without units joins the others of its group
    const bool exists = i < share.num_units;
    const int num_parts = exists ? share.num_parts : 0;
    const uint4* vectors = scratch.vectors + next * kNumMathThreads;
    float sum[8] = {};
    if (share.IsFirst(i)) {
      stats = scratch.stats + next * kNumMathThreads;
      total = WeighAndAdd<C>(vectors, stats, num_parts, sum);
      if (share.shift > 0) AddGroup<C>(1 << share.shift, total, sum);
      inverse = total.sum == 0.0f ? 0.0f : 1.0f / total.sum;  // 0: a row that sees no key
    } else {
#pragma unroll 2
      for (int part = 0; part < num_parts; ++part) {
        AddVector<T>(stats[part * kNumMathThreads].x, vectors[part * kNumMathThreads], sum);
      }
    }
    next += num_parts;
    const int row = share.RowOf(i);
    if (exists && share.first_part == 0 && row < tile.num_rows) {
      const int dims = (share.begin + i) % MergeShare<C>::kUnitsPerGroup;
      T* target = static_cast<T*>(d.out) + (first_row + row) * C::kDCkv +
                  dims * PackedPartials<T>::kUnitDims + lane % 4 * 2;
#pragma unroll
      for (int k = 0; k < 8; k += 2) {
        *reinterpret_cast<uint32_t*>(target + 4 * k) =
            gpu::sm90::Pack2<T>(sum[k] * inverse, sum[k + 1] * inverse);
      }
      if (dims == 0 && lane % 4 == 0) {
        d.lse[first_row + row] =
            total.sum == 0.0f ? -INFINITY : (total.reference + gpu::sm90::Log2(total.sum)) * kLn2;
      }
    }
  } while (++i < share.num_units);
  return next;
}

// Waits until all CTAs have written their partials. All threads of the CTA that have not exited.
__device__ __forceinline__ void WaitForAllPartials() {
  trace::Enter(Phase::kWaitPartial);
  cooperative_groups::this_grid().sync();
}

// Merges this CTA's share of the call's split sequences: at most the worker's first and its last
// item. All math threads, after WaitForAllPartials. Both are fetched at once if they fit.
template <class C>
__device__ __forceinline__ void MergeSplits(const WideParams& params, const RowTile& tile) {
  const WorkItem* splits = Shared<C>().splits;
  const int num_splits = Shared<C>().num_splits;
  int num_vectors = 0;
#pragma unroll 1
  for (int i = 0; i < num_splits; ++i) {
    num_vectors += MergeShare<C>(tile, splits[i]).num_vectors(splits[i]);
  }
  trace::Enter(Phase::kMerge);  // further up the clock is read before the barrier is passed
  const bool at_once = num_vectors <= MergeScratch<C>::kNumVectors;
  int fetched = 0, num_fetched = 0, next = 0;
#pragma unroll 1
  for (int i = 0; i < num_splits; ++i) {
    if (!at_once) fetched = next = 0;
#pragma unroll 1
    for (; num_fetched < (at_once ? num_splits : i + 1); ++num_fetched) {
      fetched = FetchParts<C>(params.plan.partials, tile, splits[num_fetched], fetched);
    }
    gpu::sm90::CopyAsyncWait();
    if (i > 0) JoinMath();  // a group's sums are overwritten from here on
    next = MergeSplit<C>(params.decode, tile, splits[i], next);
  }
}

}  // namespace jax_mla::decode::sm90::wide
