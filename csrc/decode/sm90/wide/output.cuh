// What becomes of an item of the wide kernel when its last block is done (ItemEnd): rows of `out`,
// a part in a slot, or rows of `out` after another CTA's part has been added.
#pragma once

#include <cstdint>

#include "decode/sm90/wide/math.cuh"
#include "decode/sm90/wide/merge/add_part.cuh"
#include "decode/sm90/wide/merge/fragments.cuh"
#include "decode/sm90/wide/merge/grid.cuh"
#include "decode/sm90/wide/merge/store_part.cuh"
#include "gpu/sm90.cuh"
#include "gpu/sm90_cluster.cuh"

namespace jax_mla::decode::sm90::wide {

// Writes this half's sums where the other half reads them.
template <class C, Half kHalf>
__device__ __forceinline__ void ShareSums(Math<C, kHalf>& math, int done_idx) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    math.sum[i] += __shfl_xor_sync(kAllLanes, math.sum[i], 1);
    math.sum[i] += __shfl_xor_sync(kAllLanes, math.sum[i], 2);
    if (math.thread.quad == 0)
      Shared<C>().sum[done_idx % 2][kHalf][math.thread.row + 8 * i] = math.sum[i];
  }
}

// Both halves' sums together; a row that saw nothing keeps 0. After ShareSums.
template <class C, Half kHalf>
__device__ __forceinline__ void FinishSums(Math<C, kHalf>& math, int done_idx) {
  gpu::sm90::NamedBarrierSync(kItemEnd, kNumMathThreads);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = math.thread.row + 8 * i;
    math.sum[i] = Shared<C>().sum[done_idx % 2][0][row] + Shared<C>().sum[done_idx % 2][1][row];
  }
}

// Rows of T. Bit i of `rows`: whether this thread's row i is written.
template <class C, Half kHalf>
__device__ __forceinline__ void WriteFinal(const Math<C, kHalf>& math, const typename C::Item& done,
                                           int rows) {
  using T = typename C::T;
  const DecodeParams& d = math.params.decode;
  const int64_t first_row = FirstRow<C>(d, done) + math.tile.row_begin;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if ((rows >> i & 1) == 0) continue;
    const int row =
        RecomputeHere(math.thread.row) + 8 * i;  // recomputed: kept, it would be spilled
    const float inverse = gpu::InverseSum(math.sum[i]);
    T* target = static_cast<T*>(d.out) + (first_row + row) * C::kDCkv + kHalf * C::kHalfDims +
                SwappedColumn();
#pragma unroll
    for (int j = 0; j < math.kNumOut; j += 16) {
      uint32_t v[4];
      PackColumns<T>(math, i, j, inverse, v);
      SwapColumns(v);
      if (row < math.tile.num_rows) StoreSwapped(target + 2 * j, v);
    }
    if (kHalf == kLead && math.thread.quad == 0 && row < math.tile.num_rows) {
      d.lse[first_row + row] = gpu::ApproxLse(math.reference[i], math.sum[i]);
    }
  }
}

// Packs and stores this half of a part, or only packs the row that the cluster's other CTA takes
// over, to see that it fits. Once, unless O does not fit float16.
template <class C, Half kHalf>
__device__ __forceinline__ PartialScale PackPart(Math<C, kHalf>& math, const typename C::Item& done,
                                                 bool is_exchanged) {
  const int64_t first_row = math.params.plan.partials.RowIndex(done.slot, math.tile.idx);
  const auto drop = [](int, const uint4&) {};
  PartialScale scale;
  uint32_t top[2];
#pragma unroll 1
  do {
    top[0] = top[1] = kNothingStored;
    if (!is_exchanged) {
#pragma unroll
      for (int i = 0; i < 2; ++i) top[i] = StoreRow(math, first_row, i);
    } else if (RowToSend() == 0) {
      top[0] = PackRow(math, 0, drop);
    } else {
      top[1] = PackRow(math, 1, drop);
    }
  } while (!FitsPartial(math, top, scale));
  return scale;
}

// Adds the other part to the rows that this CTA finishes. Returns those, as bits.
template <class C, Half kHalf>
__device__ __forceinline__ int MergeOther(Math<C, kHalf>& math, const typename C::Item& done,
                                          const PartialScale& scale) {
  OtherPart other;
  int rows, merged_rows;
  if (C::kExchanges && done.end == ItemEnd::kExchanged) {
    ExchangeRows(math, scale);
    rows = merged_rows = kBothRows ^ 1 << RowToSend();
    other = ReceivedPart<C>();
  } else {
    WaitGrid<C>();
    rows = kBothRows, merged_rows = RowsOfTile(math);
    other = StoredPart(math, done);
  }
  trace::Enter(Phase::kMerge);
  AddOtherPart(math, merged_rows, other);
  return rows;
}

// What becomes of the item that is done. done_idx is its index plus one, as Math::item_idx is: so
// `items` is indexed by done_idx - 1, and `sum` by done_idx. The item stays in `items` until both
// halves have freed the next one's queries.
template <class C, Half kHalf>
__device__ __forceinline__ void WriteItem(Math<C, kHalf>& math, int done_idx) {
  constexpr bool kMergesInside = C::kMerge == Merge::kInside;
  trace::Enter(Phase::kWrite);
  gpu::sm90::WgmmaFenceOperand(math.out);
  const typename C::Item& done = Shared<C>().items[(done_idx - 1) % kNumItems];
  const bool is_exchanged = C::kExchanges && done.end == ItemEnd::kExchanged;
  if (is_exchanged) gpu::sm90::ClusterArrive();  // q is free
  ShareSums(math, done_idx);
  PartialScale scale;
  if (done.end == ItemEnd::kPart || is_exchanged) scale = PackPart(math, done, is_exchanged);
  FinishSums(math, done_idx);
  if (done.end == ItemEnd::kPart) StoreStats(math, done, scale);
  if (kMergesInside && Shared<C>().arrives[(done_idx - 1) % kNumItems]) ArriveAtGrid<C>();
  if (done.end == ItemEnd::kPart) return;
  int rows = kBothRows;
  if constexpr (kMergesInside) {
    if (done.end != ItemEnd::kWhole) rows = MergeOther(math, done, scale);
  }
  trace::Enter(Phase::kWrite);
  WriteFinal(math, done, rows);
}

}  // namespace jax_mla::decode::sm90::wide
