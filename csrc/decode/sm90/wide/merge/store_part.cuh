// How a math warpgroup of the wide kernel leaves its half of a part: packed as float16, stored in a
// slot, with the statistics of its rows.
#pragma once

#include <cstdint>

#include "decode/merge/partial_range.cuh"
#include "decode/schedule/plan.h"
#include "decode/sm90/wide/math.cuh"
#include "decode/sm90/wide/merge/fragments.cuh"

namespace jax_mla::decode::sm90::wide {

// This thread's 8 values of 32 columns of its row i (columns j * 2 on), times `factor`, as T.
template <class T, class C, Half kHalf>
__device__ __forceinline__ void PackColumns(const Math<C, kHalf>& math, int i, int j, float factor,
                                            uint32_t (&v)[4]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int e = j + 4 * k + 2 * i;
    v[k] = gpu::sm90::Pack2<T>(math.out[e] * factor, math.out[e + 1] * factor);
  }
}

// log2[i] = k: this thread's row i is stored as O * 2^-k.
struct PartialScale {
  float log2[2] = {};
};

// Whether this warp's rows fit float16, given the largest magnitudes that were packed. If not, O is
// scaled by a power of two, for another try. A few tries serve all of float32.
template <class C, Half kHalf>
__device__ __forceinline__ bool FitsPartial(Math<C, kHalf>& math, const uint32_t (&top)[2],
                                            PartialScale& scale) {
  constexpr float kStepLog2 = 20.0f, kMaxScaleLog2 = 6 * kStepLog2;
  const bool has_key[2] = {math.reference[0] != kNoReference, math.reference[1] != kNoReference};
  if (__all_sync(kAllLanes, BothFit(top[0], top[1], has_key[0], has_key[1]))) [[likely]] {
    return true;
  }
  float max[2];
  bool changes = false;
  float factor_log2[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    max[i] = has_key[i] ? LargerHalf(top[i]) : 1.0f;  // 0 without a key
    max[i] = fmaxf(max[i], __shfl_xor_sync(kAllLanes, max[i], 1));
    max[i] = fmaxf(max[i], __shfl_xor_sync(kAllLanes, max[i], 2));
    factor_log2[i] = max[i] > kMaxPartial ? -kStepLog2 : max[i] < kMinPartial ? kStepLog2 : 0.0f;
    if (fabsf(scale.log2[i]) >= kMaxScaleLog2) factor_log2[i] = 0.0f;  // zeros, or infinite
    scale.log2[i] -= factor_log2[i];
    changes |= factor_log2[i] != 0.0f;
  }
  if (!__any_sync(kAllLanes, changes)) {
    // Zeros are as they were. Scaled, they would lose their weight beside a part of large values.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (max[i] == 0.0f) scale.log2[i] = 0.0f;
    }
    return true;
  }
  const float factor[2] = {gpu::Exp2(factor_log2[0]), gpu::Exp2(factor_log2[1])};
  math.ScaleOut(factor);
  return false;
}

inline constexpr uint32_t kNothingStored = 0x3c003c00;  // ones: they fit

// Packs this thread's row i; `take(j, v)` gets vector j. Returns the largest magnitudes.
template <class C, Half kHalf, class Take>
__device__ __forceinline__ uint32_t PackRow(const Math<C, kHalf>& math, int i, Take take) {
  uint32_t top = 0;
#pragma unroll
  for (int j = 0; j < PartialFragments<C>::kHalfFragments; ++j) {
    uint32_t v[4];
    PackColumns<PartialElement>(math, i, 16 * j, 1.0f, v);
    take(j, make_uint4(v[0], v[1], v[2], v[3]));
    top = MaxMagnitude(top, MaxMagnitude(MaxMagnitude(v[0], v[1]), MaxMagnitude(v[2], v[3])));
  }
  return top;
}

// Stores this thread's row i, if its tile has that, in the slot that begins with `first_row`.
// Returns the largest magnitudes. For the combine kernel, in rows (PartialOrder::kWgmma); for a
// merge in this kernel, in fragments. In both, vectors are as the accumulators lie: this code runs
// once a launch and is fetched cold, so exchanging values between lanes first would cost more than
// it saves.
template <class C, Half kHalf>
__device__ __forceinline__ uint32_t StoreRow(const Math<C, kHalf>& math, int64_t first_row, int i) {
  using Fragments = PartialFragments<C>;
  constexpr bool kMergesInside = C::kMerge == Merge::kInside;
  const PartialBuffers& partials = math.params.plan.partials;
  const int band = math.thread.warp * 2 + i, row = math.thread.row + 8 * i;
  if ((kMergesInside ? band * kBandRows : row) >= math.tile.num_rows) return kNothingStored;
  PartialElement* target = kMergesInside
                               ? Fragments::Of(partials, first_row, band, kHalf, math.thread.lane)
                               : reinterpret_cast<PartialElement*>(partials.out) +
                                     (first_row + row) * C::kDCkv + kHalf * C::kHalfDims +
                                     math.thread.quad * Fragments::kVector;
  constexpr int kStride = kMergesInside ? Fragments::kFragmentElements : Fragments::kFragmentDims;
  const uint32_t top = PackRow(
      math, i, [&](int j, const uint4& v) { *reinterpret_cast<uint4*>(target + j * kStride) = v; });
  return math.IsOwnRow(i) ? top : kNothingStored;
}

// Each half has statistics of its own, since each is scaled by itself. After FinishSums.
template <class C, Half kHalf>
__device__ __forceinline__ void StoreStats(const Math<C, kHalf>& math, const typename C::Item& done,
                                           const PartialScale& scale) {
  const PartialBuffers& partials = math.params.plan.partials;
  const int64_t first_row = partials.RowIndex(done.slot, math.tile.idx);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = RecomputeHere(math.thread.row) + 8 * i;
    if (math.thread.quad != 0 || row >= math.tile.num_rows) continue;
    partials.stats[HalfStatsIndex(first_row + row) + kHalf * kBandRows] =
        ScaledStats(math.reference[i], math.sum[i], scale.log2[i]);
  }
}

}  // namespace jax_mla::decode::sm90::wide
