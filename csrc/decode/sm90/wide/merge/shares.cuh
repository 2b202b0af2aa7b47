// Merge of split sequences inside the wide kernel, in shares, behind a grid barrier.
//
// This is for sequences of few parts. The combine kernel would start late, since nothing fits
// beside a CTA that takes the whole SM, and it would cost the same where little or nothing is
// split. So the kernel is launched cooperatively: all CTAs run at once, and the driver provides the
// barrier's memory. After its last item a CTA merges its share of the sequence that this item
// continues, if it has one (MergeTask); in balanced mode the worker of a first part has none. A
// warp fetches what it will add up itself into the buffers of KV and queries, which are idle by
// then: no warp waits for another one's copies or weights. What depends on the schedule alone is
// computed before the wait for the other CTAs. (Where a sequence has two parts and the second one
// is still in registers: add_part.cuh.)
#pragma once

#include <cstdint>

#include "decode/schedule/load_units.cuh"
#include "decode/sm90/wide/merge/fragments.cuh"
#include "decode/sm90/wide/merge/grid.cuh"
#include "decode/sm90/wide/merge/share_work.cuh"
#include "decode/sm90/wide/params.cuh"
#include "decode/trace.cuh"
#include "gpu/sm80.cuh"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::wide {

// Adds a part's vector to `sum`.
__device__ __forceinline__ void AddVector(float weight, const uint4& vector, float (&sum)[8]) {
  const uint32_t pairs[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float2 x = gpu::sm90::Unpack2<PartialElement>(pairs[k]);
    sum[2 * k] += weight * x.x;
    sum[2 * k + 1] += weight * x.y;
  }
}

// Where several warps share a fragment: adds the sums of the others, in their order, to those of
// the first. Returns the total of this thread's row.
template <class C>
__device__ __forceinline__ RowTotal AddWarps(int num_warps, float (&sum)[8]) {
  using Scratch = MergeScratch<C>;
  const Scratch scratch;
  auto* sums = reinterpret_cast<float4*>(scratch.vectors + Scratch::kNumVectors * kNumMathThreads);
  const float2* totals = scratch.totals() + threadIdx.x % kWarpThreads / 4;
  sums[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  sums[kNumMathThreads] = make_float4(sum[4], sum[5], sum[6], sum[7]);
  gpu::sm90::NamedBarrierSync(kMerge, kNumMathThreads);
  RowTotal own = {totals->x, totals->y};
#pragma unroll 1
  for (int i = 1; i < num_warps; ++i) {
    const float2 total = totals[i * kBandRows];
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

// Weighted sums of kNum of a warp's fragments, from `fragment` on. Together, because a scheduler
// has only two warps to hide latencies with.
template <class C, int kNum>
__device__ __forceinline__ void AddFragments(const MergeShare<C>& share, int fragment,
                                             int num_parts, float (&sum)[kNum][8]) {
  using Scratch = MergeScratch<C>;
  const Scratch scratch;
  const uint4* vectors = scratch.vectors + fragment * kNumMathThreads;
  const float2* weights[kNum];
#pragma unroll
  for (int k = 0; k < kNum; ++k) {
    weights[k] = scratch.stats +
                 share.FirstOfStrip(fragment + k) * num_parts * Scratch::kStatsStride +
                 threadIdx.x % kWarpThreads / 4;
  }
#pragma unroll 2
  for (int part = 0; part < num_parts; ++part) {
#pragma unroll
    for (int k = 0; k < kNum; ++k) {
      AddVector(weights[k]->x, vectors[k * kNumMathThreads], sum[k]);
      weights[k] += Scratch::kStatsStride;
    }
    vectors += share.num_fragments * kNumMathThreads;
  }
}

// Where a lane's sums of a fragment of the row tile go.
template <class C>
struct FragmentTarget {
  using T = typename C::T;
  static constexpr uint32_t kFragmentsPerBand = 2 * MergeShare<C>::kFragmentsPerStrip;
  T* out;              // of the row tile's fragment 0
  uint32_t row_limit;  // a band that begins here, or later, has no row for this lane

  __device__ __forceinline__ FragmentTarget(T* tile_out, const RowTile& tile) {
    const int row = threadIdx.x % kWarpThreads / 4;
    out = tile_out + row * C::kDCkv + SwappedColumn();
    row_limit = max(tile.num_rows - row, 0);
  }
  __device__ __forceinline__ void Write(uint32_t fragment, bool exists,
                                        const float (&sum)[8]) const {
    uint32_t v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = gpu::sm90::Pack2<T>(sum[2 * k], sum[2 * k + 1]);
    SwapColumns(v);
    const uint32_t first_row = fragment / kFragmentsPerBand * kBandRows;
    const uint32_t dim = fragment % kFragmentsPerBand * PartialFragments<C>::kFragmentDims;
    if (exists && first_row < row_limit) StoreSwapped(out + (first_row * C::kDCkv + dim), v);
  }
};

// Adds up and writes a warp's share, whose copies are under way.
template <class C>
__device__ __forceinline__ void AddShare(typename C::T* out, float* lse, const RowTile& tile,
                                         const MergeShare<C>& share, int seq_parts) {
  gpu::CopyAsyncWait<1>();
  WeighParts(share, tile, lse);
  gpu::CopyAsyncWait<0>();
  const FragmentTarget<C> target(out, tile);
  int fragment = 0;
#pragma unroll 1
  for (; fragment + 1 < share.num_fragments; fragment += 2) {
    float sum[2][8] = {};
    AddFragments<C>(share, fragment, share.num_parts, sum);
    target.Write(share.begin + fragment, true, sum[0]);
    target.Write(share.begin + fragment + 1, true, sum[1]);
  }
  const bool exists = fragment < share.num_fragments;
  if (!exists && share.shift == 0) return;
  // The last fragment, or the only one, which other warps may share.
  const int num_parts = exists ? share.num_parts : 0;
  float sum[1][8] = {};
  AddFragments<C>(share, fragment, num_parts, sum);
  if (share.shift > 0) {
    // Warp i of them begins with part i; there may be fewer parts than warps.
    const int num_warps = share.first_part == 0 ? min(1 << share.shift, seq_parts) : 1;
    const RowTotal total = AddWarps<C>(num_warps, sum[0]);
    const int lane = threadIdx.x % kWarpThreads, row = share.FirstRow(fragment) + lane / 4;
    const float inverse = gpu::InverseSum(total.sum);
#pragma unroll
    for (float& x : sum[0]) x *= inverse;
    if (exists && share.first_part == 0 && share.BeginsRows(fragment) && lane % 4 == 0 &&
        row < tile.num_rows) {
      lse[row] = gpu::ApproxLse(total.reference, total.sum);
    }
  }
  target.Write(share.begin + fragment, exists && share.first_part == 0, sum[0]);
}

// Merges this CTA's share of a split sequence, if it has one, once all CTAs have written their
// partials. All math threads.
template <class C>
__device__ __forceinline__ void MergeParts(const WideParams& params, RowTile tile) {
  const MergeTask task = Shared<C>().merge;
  if (task.num_shares == 0) return;
  const DecodeParams& d = params.decode;
  Unit unit{};
  if constexpr (C::kHasUnits) {
    unit = LoadUnit(d, task.seq_idx);
    tile.SetUnit(params, unit);
    tile.num_rows = max(tile.num_rows, 0);  // the unit may have no row of this tile
  }
  const PartCopies<C> copies(params.plan.partials, tile, task);
  WaitGrid<C>();
  trace::Enter(Phase::kMerge);
  copies.Start();
  const int64_t first_row =
      (C::kHasUnits ? unit.row_begin : static_cast<int64_t>(task.seq_idx) * d.q_len * d.num_heads) +
      tile.row_begin;
  AddShare<C>(static_cast<typename C::T*>(d.out) + first_row * C::kDCkv, d.lse + first_row, tile,
              copies.share, task.num_parts);
}

}  // namespace jax_mla::decode::sm90::wide
