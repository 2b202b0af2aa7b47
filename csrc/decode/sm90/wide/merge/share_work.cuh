// A warp's work on a share of a split sequence: its fragments, their copies, their weights.
#pragma once

#include <cstdint>

#include "decode/sm90/wide/merge/fragments.cuh"
#include "decode/sm90/wide/params.cuh"
#include "gpu/sm80.cuh"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::wide {

// What lies in the buffers that the main loop leaves behind: vectors in kv and perhaps in p, which
// follows it, and statistics in q.
template <class C>
struct MergeScratch {
  static constexpr int kVectorBytes = kNumMathThreads * sizeof(uint4);
  static constexpr int kStatsStride = kNumMathWarps * kBandRows;
  // A warp's share of n parts takes at most 32 vectors a thread (half as many with half of the
  // dims), or n / warps. Behind them lie sums on their way to the first of the warps that share a
  // fragment, and in the statistics those warps' totals.
  // Without rope chunks the place of P behind kv is needed too.
  static constexpr int kBytes = sizeof(Shared<C>().kv) + (C::kHasRope ? 0 : sizeof(Shared<C>().p));
  static constexpr int kNumVectors = kBytes / kVectorBytes - 2;
  static_assert((kNumVectors + 1) * kStatsStride * sizeof(float2) <= sizeof(Shared<C>().q),
                "the statistics must fit where the queries were");
  static_assert(kNumVectors >= C::kDCkv / 16 && kNumVectors * kNumMathWarps >= kMaxMergeParts,
                "the vectors of a warp's share must fit where the keys were");

  uint4* vectors;  // [vector][thread]
  float2* stats;   // [vector][warp][row]: of the vector's part, for the first fragment of a strip

  __device__ __forceinline__ MergeScratch()
      : vectors(reinterpret_cast<uint4*>(Shared<C>().kv) + threadIdx.x),
        stats(reinterpret_cast<float2*>(Shared<C>().q) + threadIdx.x / kWarpThreads * kBandRows) {}
  // This warp's totals.
  __device__ __forceinline__ float2* totals() const { return stats + kNumVectors * kStatsStride; }
};

// This warp's work: consecutive fragments of the CTA's share. Of each it takes the parts from
// first_part on, in steps of 2^shift: where the share has fewer fragments than there are warps,
// 2^shift warps share one.
template <class C>
struct MergeShare {
  // Fragments of 8 rows and one half of their dims: they share statistics.
  static constexpr int kFragmentsPerStrip = PartialFragments<C>::kHalfFragments;
  int shift;
  int begin, num_fragments;  // begin: in the row tile
  int first_part, num_parts;

  __device__ __forceinline__ MergeShare(const RowTile& tile, const MergeTask& task) {
    const int total = (tile.num_rows + kBandRows - 1) / kBandRows * (2 * kFragmentsPerStrip);
    const int share = CountParts(total, task.num_shares);
    const int share_begin = min(task.share_idx * share, total);
    const int share_fragments = min(share, total - share_begin);
    shift = share_fragments > 4 ? 0 : share_fragments > 2 ? 1 : share_fragments > 1 ? 2 : 3;
    const int max_fragments = (share_fragments + kNumMathWarps - 1) / kNumMathWarps;
    const int warp = threadIdx.x / kWarpThreads;
    const int place = (warp >> shift) * max_fragments;
    begin = share_begin + place;
    num_fragments = max(min(max_fragments, share_fragments - place), 0);
    first_part = warp & ((1 << shift) - 1);
    num_parts = (task.num_parts - first_part + (1 << shift) - 1) >> shift;
  }
  // Of the warp's fragment `i`: its strip in the row tile, and its place in that strip.
  __device__ __forceinline__ int StripOf(int i) const {
    return static_cast<uint32_t>(begin + i) / kFragmentsPerStrip;
  }
  __device__ __forceinline__ int PlaceInStrip(int i) const {
    return static_cast<uint32_t>(begin + i) % kFragmentsPerStrip;
  }
  __device__ __forceinline__ int FirstRow(int i) const { return StripOf(i) / 2 * kBandRows; }
  // Whether the fragment is its band's first.
  __device__ __forceinline__ bool BeginsRows(int i) const {
    return static_cast<uint32_t>(begin + i) % (2 * kFragmentsPerStrip) == 0;
  }
  // The warp's first fragment of the strip of its fragment `i`, and of the next strip.
  __device__ __forceinline__ int FirstOfStrip(int i) const { return max(i - PlaceInStrip(i), 0); }
  __device__ __forceinline__ int NextStrip(int i) const {
    return i + kFragmentsPerStrip - PlaceInStrip(i);
  }
};

// Of some parts of a row: their largest reference, and their sum relative to it.
struct RowTotal {
  float reference, sum;
};

// Replaces the reference of each of a row's parts by its weight in the mean, or in the sum. Lanes 8
// apart share the parts. The order of the sums depends on the number of parts alone.
template <class C>
__device__ __forceinline__ RowTotal WeighRow(float2* stats, int num_parts, bool as_mean) {
  constexpr int kStride = MergeScratch<C>::kStatsStride, kPartLanes = kWarpThreads / kBandRows;
  const int begin = threadIdx.x % kWarpThreads / kBandRows;
  RowTotal total = {kNoReference, 0.0f};
#pragma unroll 1
  for (int i = begin; i < num_parts; i += kPartLanes) {
    total.reference = fmaxf(total.reference, stats[i * kStride].x);
  }
#pragma unroll
  for (int mask = kBandRows; mask < kWarpThreads; mask *= 2) {
    total.reference = fmaxf(total.reference, __shfl_xor_sync(kAllLanes, total.reference, mask));
  }
#pragma unroll 1
  for (int i = begin; i < num_parts; i += kPartLanes) {
    const float2 stat = stats[i * kStride];
    const float weight = gpu::sm90::Exp2(stat.x - total.reference);
    stats[i * kStride].x = weight;
    total.sum += weight * stat.y;
  }
#pragma unroll
  for (int mask = kBandRows; mask < kWarpThreads; mask *= 2) {
    total.sum += __shfl_xor_sync(kAllLanes, total.sum, mask);
  }
  const float factor = as_mean ? gpu::InverseSum(total.sum) : 1.0f;
#pragma unroll 1
  for (int i = begin; i < num_parts; i += kPartLanes) {
    stats[i * kStride].x *= factor;
  }
  return total;
}

// Turns the statistics of a warp's parts into weights. `lse`: of the tile's first row.
template <class C>
__device__ __forceinline__ void WeighParts(const MergeShare<C>& share, const RowTile& tile,
                                           float* lse) {
  using Scratch = MergeScratch<C>;
  const int lane = threadIdx.x % kWarpThreads, row = lane % kBandRows;
  const Scratch scratch;
  __syncwarp();  // a lane's statistics are copied by others
#pragma unroll 1
  for (int fragment = 0; fragment < share.num_fragments; fragment = share.NextStrip(fragment)) {
    float2* stats = scratch.stats + fragment * share.num_parts * Scratch::kStatsStride + row;
    const RowTotal total = WeighRow<C>(stats, share.num_parts, /*as_mean=*/share.shift == 0);
    if (lane >= kBandRows) continue;
    if (share.shift > 0) {  // other warps have more parts
      scratch.totals()[row] = make_float2(total.reference, total.sum);
    } else if (share.BeginsRows(fragment) && share.FirstRow(fragment) + row < tile.num_rows) {
      lse[share.FirstRow(fragment) + row] = gpu::ApproxLse(total.reference, total.sum);
    }
  }
  __syncwarp();
}

// The copies of what a warp adds up: the parts of one fragment after another, and with a strip's
// first fragment its statistics.
template <class C>
struct PartCopies {
  using Fragments = PartialFragments<C>;
  using Scratch = MergeScratch<C>;
  static constexpr int kStatsBytes = Scratch::kStatsStride * sizeof(float2);
  static constexpr int kCopiesAtOnce = 4;

  MergeShare<C> share;
  int32_t slot_rows;
  const PartialElement* vectors;  // this thread's of the first fragment, at slot_base; see PartRows
  const PartialStats* stats;      // of a row of the strip, at slot_base; see PartRows
  uint32_t vector_target, stats_target;

  // Nothing here depends on what other CTAs write.
  __device__ __forceinline__ PartCopies(const PartialBuffers& partials, const RowTile& tile,
                                        const MergeTask& task)
      : share(tile, task), slot_rows(partials.num_row_tiles * partials.block_m) {
    const Scratch scratch;
    const int lane = threadIdx.x % kWarpThreads;
    const int32_t first_row = task.slot_base * slot_rows + tile.idx * partials.block_m;
    vectors =
        Fragments::Of(partials, first_row, 0, 0, lane) + share.begin * Fragments::kFragmentElements;
    stats = partials.stats + HalfStatsIndex(first_row) + lane % kBandRows;
    vector_target = SharedAddress(scratch.vectors);
    stats_target = SharedAddress(scratch.stats + lane % kBandRows);
  }

  // Rows from slot_base to the slot of the warp's i-th part. Parts lie in every second slot; part 0
  // lies one slot later than that.
  __device__ __forceinline__ int32_t PartRows(int i) const {
    const int32_t part = share.first_part + (i << share.shift);
    return (2 * part + (part == 0 ? 1 : 0)) * slot_rows;
  }

  // Four parts of eight rows at once, by lane.
  __device__ __forceinline__ void FetchStats(int fragment) const {
    const PartialStats* source = stats + share.StripOf(fragment) * kBandRows;
    const uint32_t target = stats_target + fragment * share.num_parts * kStatsBytes;
#pragma unroll 1
    for (int i = threadIdx.x % kWarpThreads / kBandRows; i < share.num_parts;
         i += kWarpThreads / kBandRows) {
      gpu::sm90::CopyAsync8(target + i * kStatsBytes, source + 2 * PartRows(i));
    }
  }

  // Starts all copies, in two groups: statistics, then vectors.
  __device__ __forceinline__ void Start() const {
    uint32_t target = vector_target;
#pragma unroll 1
    for (int fragment = 0; fragment < share.num_fragments; fragment = share.NextStrip(fragment))
      FetchStats(fragment);
    gpu::CopyAsyncCommit();
    // Part after part, or all parts of the only fragment. Four copies at once: otherwise each would
    // wait until the one before has read its address.
    const bool has_one = share.num_fragments == 1;
    const int num_outer = has_one ? 1 : share.num_parts;
    const int num_inner = has_one ? share.num_parts : share.num_fragments;
    const int32_t step =
        has_one ? (PartRows(2) - PartRows(1)) * C::kDCkv : Fragments::kFragmentElements;
#pragma unroll 1
    for (int i = 0; i < num_outer; ++i) {
      const auto* first = vectors + PartRows(i) * C::kDCkv;
      // Part 0 lies a slot late, the parts behind it do not.
      const auto* source =
          has_one ? first + PartRows(1) * C::kDCkv - PartRows(0) * C::kDCkv - step : first;
#pragma unroll 1
      for (int j = 0; j < num_inner; j += kCopiesAtOnce) {
#pragma unroll
        for (int k = 0; k < kCopiesAtOnce; ++k) {
          const auto* place = k == 0 && j == 0 ? first : source + k * int64_t{step};
          if (j + k < num_inner) gpu::sm90::CopyAsync16(target + k * Scratch::kVectorBytes, place);
        }
        const int num_copied = min(num_inner - j, kCopiesAtOnce);
        source += int64_t{kCopiesAtOnce} * step;
        target += num_copied * Scratch::kVectorBytes;
      }
    }
    gpu::CopyAsyncCommit();
  }
};

}  // namespace jax_mla::decode::sm90::wide
