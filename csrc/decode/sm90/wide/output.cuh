// How the wide kernel writes a finished item: rows of `out`, or the partial result of a split
// sequence.
#pragma once

#include <cstdint>

#include "decode/sm90/wide/grid.cuh"
#include "decode/sm90/wide/math.cuh"
#include "decode/sm90/wide/partials.cuh"
#include "decode/split/plan.h"
#include "gpu/sm90.cuh"
#include "gpu/sm90_cluster.cuh"

namespace jax_mla::decode::sm90::wide {

// This half's sums to where the other one reads them.
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

// Rows of T. Bit i of `rows`: whether this thread's row i is written.
template <class C, Half kHalf>
__device__ __forceinline__ void WriteFinal(const Math<C, kHalf>& math, const Item& done, int rows) {
  using T = typename C::T;
  const DecodeParams& d = math.params.decode;
  const int64_t first_row =
      static_cast<int64_t>(done.seq_idx) * d.q_len * d.num_heads + math.tile.row_begin;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if ((rows >> i & 1) == 0) continue;
    const int row = Opaque(math.thread.row) + 8 * i;  // else it is spilled, from the start to here
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
      d.lse[first_row + row] = Lse(math.reference[i], math.sum[i]);
    }
  }
}

// This thread's two rows as a partial result: how much smaller they are stored than they are, log2.
struct PartialScale {
  float log2[2] = {};
};

// Whether this warp's rows fit float16, given the largest magnitudes that were packed. If not, O is
// scaled by a power of two, for another try. A few tries serve all of float32.
template <class C, Half kHalf>
__device__ __forceinline__ bool FitsPartial(Math<C, kHalf>& math, const uint32_t (&top)[2],
                                            PartialScale& scale) {
  constexpr float kStepLog2 = 20.0f, kMaxScaleLog2 = 6 * kStepLog2;
  float max[2];
  bool fits = true;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    max[i] = math.reference[i] == kNoReference ? 1.0f : LargerHalf(top[i]);  // 0 without a key
    fits &= max[i] <= kMaxPartial && max[i] >= kMinPartial;
  }
  if (__all_sync(kAllLanes, fits)) [[likely]]
    return true;
  bool changes = false;
  float factor_log2[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    max[i] = fmaxf(max[i], __shfl_xor_sync(kAllLanes, max[i], 1));
    max[i] = fmaxf(max[i], __shfl_xor_sync(kAllLanes, max[i], 2));
    factor_log2[i] = max[i] > kMaxPartial ? -kStepLog2 : max[i] < kMinPartial ? kStepLog2 : 0.0f;
    if (fabsf(scale.log2[i]) >= kMaxScaleLog2) factor_log2[i] = 0.0f;  // zeros, or infinite
    scale.log2[i] -= factor_log2[i];
    changes |= factor_log2[i] != 0.0f;
  }
  if (!__any_sync(kAllLanes, changes)) return true;
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
#pragma unroll
    for (const uint32_t pair : v) top = MaxMagnitude(top, pair);
    take(j, make_uint4(v[0], v[1], v[2], v[3]));
  }
  return top;
}

// Stores this thread's row i, if its tile has that, as a part of the sequence: for the combine
// kernel as the accumulators lie (PartialOrder::kWgmma), since this code runs once a launch and is
// fetched cold, so that exchanging values between lanes first would cost more than the stores; for
// a merge in this kernel as the warp holds them. Returns the largest magnitudes.
template <class C, Half kHalf>
__device__ __forceinline__ uint32_t StoreRow(const Math<C, kHalf>& math, int64_t first_row, int i) {
  using Units = PartialFragments<C>;
  constexpr bool kMergesInside = C::kMerge == Merge::kInside;
  const PartialBuffers& partials = math.params.plan.partials;
  const int group = math.thread.warp * 2 + i, row = math.thread.row + 8 * i;
  if ((kMergesInside ? group * kBandRows : row) >= math.tile.num_rows) return kNothingStored;
  PartialElement* target = kMergesInside
                               ? Units::Of(partials, first_row, group, kHalf, math.thread.lane)
                               : reinterpret_cast<PartialElement*>(partials.out) +
                                     (first_row + row) * C::kDCkv + kHalf * C::kHalfDims +
                                     math.thread.quad * Units::kVector;
  constexpr int kStride = kMergesInside ? Units::kFragmentElements : Units::kFragmentDims;
  return PackRow(
      math, i, [&](int j, const uint4& v) { *reinterpret_cast<uint4*>(target + j * kStride) = v; });
}

// Each half has statistics of its own, since each is scaled by itself. After FinishSums.
template <class C, Half kHalf>
__device__ __forceinline__ void StoreStats(const Math<C, kHalf>& math, const Item& done,
                                           const PartialScale& scale) {
  const PartialBuffers& partials = math.params.plan.partials;
  const int64_t first_row = partials.RowIndex(done.slot, math.tile.idx);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = Opaque(math.thread.row) + 8 * i;
    if (math.thread.quad != 0 || row >= math.tile.num_rows) continue;
    partials.stats[HalfStatsIndex(first_row + row) + kHalf * kBandRows] =
        ScaledStats(math.reference[i], math.sum[i], scale.log2[i]);
  }
}

// A part that another CTA computed, as this thread finds its share of it.
struct OtherPart {
  const PartialElement* vectors;  // in a slot or in this CTA's shared memory
  int32_t vector_stride;          // in elements
  int32_t row_stride;             // from row 0's vector to row 1's
  const PartialStats* stats;
  int32_t stats_stride;
};

// Adds the other part to this thread's rows; bit i of `rows`: to row i. After FinishSums.
template <class C, Half kHalf>
__device__ __forceinline__ void AddOtherPart(Math<C, kHalf>& math, int rows,
                                             const OtherPart& other) {
  constexpr int kVectors = PartialFragments<C>::kHalfFragments;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if ((rows >> i & 1) == 0) continue;
    const PartialStats stats = other.stats[i * other.stats_stride];
    uint4 vectors[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      vectors[j] = *reinterpret_cast<const uint4*>(other.vectors + j * other.vector_stride +
                                                   i * other.row_stride);
    }
    const float reference = fmaxf(math.reference[i], stats.reference);
    const float factor = gpu::sm90::Exp2(math.reference[i] - reference);
    const float weight = gpu::sm90::Exp2(stats.reference - reference);
    math.reference[i] = reference;
    math.sum[i] = factor * math.sum[i] + weight * stats.sum;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const uint32_t pairs[] = {vectors[j].x, vectors[j].y, vectors[j].z, vectors[j].w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float* own = math.out + 16 * j + 4 * k + 2 * i;
        const float2 x = gpu::sm90::Unpack2<PartialElement>(pairs[k]);
        own[0] = own[0] * factor + x.x * weight;
        own[1] = own[1] * factor + x.y * weight;
      }
    }
  }
}

constexpr int kBothRows = 0b11;

// What a CTA of a pair receives from the other, where its queries were.
template <class C>
struct ExchangeBuffer {
  uint4 vectors[PartialFragments<C>::kHalfFragments][kNumMathThreads];
  PartialStats stats[kNumMathThreads];

  static __device__ __forceinline__ ExchangeBuffer& Get() {
    static_assert(sizeof(ExchangeBuffer) <= sizeof(Shared<C>().q));
    return *reinterpret_cast<ExchangeBuffer*>(Shared<C>().q);
  }
};

// Of both parts of a sequence that the two CTAs of a cluster hold, a thread of the first CTA gets
// row 0 of the same thread of the second, and gives it row 1.
__device__ __forceinline__ int RowToSend() { return 1 - gpu::sm90::ClusterRank(); }

// Sends this thread's row to the other CTA and waits for that CTA's. After ClusterArrive and
// FinishSums: q is idle in both CTAs once all have arrived.
template <class C, Half kHalf>
__device__ __forceinline__ void ExchangeRows(Math<C, kHalf>& math, const PartialScale& scale) {
  using Buffer = ExchangeBuffer<C>;
  Buffer& buffer = Buffer::Get();
  const uint32_t thread = gpu::sm90::ThreadIndex();
  const uint32_t full = SharedAddress(&Shared<C>().exchange_full);
  const int sent = RowToSend(), peer = sent;
  const uint32_t peer_full = gpu::sm90::PeerAddress(full, peer);
  const uint32_t peer_vectors =
      gpu::sm90::PeerAddress(SharedAddress(&buffer.vectors[0][thread]), peer);
  if (thread == 0) gpu::sm90::MbarrierArriveExpectTx(full, sizeof(Buffer));
  trace::Enter(Phase::kWaitPartial);
  gpu::sm90::ClusterWait();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (i != sent) continue;
    const PartialStats stats = ScaledStats(math.reference[i], math.sum[i], scale.log2[i]);
    gpu::sm90::PeerStore8(gpu::sm90::PeerAddress(SharedAddress(&buffer.stats[thread]), peer),
                          make_float2(stats.reference, stats.sum), peer_full);
    PackRow(math, i, [&](int j, const uint4& v) {
      gpu::sm90::PeerStore16(peer_vectors + j * sizeof(buffer.vectors[0]), v, peer_full);
    });
  }
  gpu::sm90::MbarrierWait(full, 0);
}

// What this CTA received, as this thread finds it.
template <class C>
__device__ __forceinline__ OtherPart ReceivedPart() {
  const auto& buffer = ExchangeBuffer<C>::Get();
  const uint32_t thread = gpu::sm90::ThreadIndex();
  return {.vectors = reinterpret_cast<const PartialElement*>(&buffer.vectors[0][thread]),
          .vector_stride = sizeof(buffer.vectors[0]) / sizeof(PartialElement),
          .row_stride = 0,
          .stats = &buffer.stats[thread],
          .stats_stride = 0};
}

// The part that lies in a slot, where another CTA's same thread has written it. After WaitGrid.
template <class C, Half kHalf>
__device__ __forceinline__ OtherPart StoredPart(const Math<C, kHalf>& math, const Item& done) {
  using Units = PartialFragments<C>;
  const PartialBuffers& partials = math.params.plan.partials;
  const int64_t first_row = partials.RowIndex(done.slot, math.tile.idx);
  const int group = math.thread.warp * 2;
  return {.vectors = Units::Of(partials, first_row, group, kHalf, math.thread.lane),
          .vector_stride = Units::kFragmentElements,
          .row_stride = 2 * Units::kHalfFragments * Units::kFragmentElements,
          .stats = partials.stats + HalfStatsIndex(first_row) + (2 * group + kHalf) * kBandRows +
                   math.thread.lane / 4,
          .stats_stride = 2 * kBandRows};
}

// Bit i: this thread's row i is of a group that its tile has.
template <class C, Half kHalf>
__device__ __forceinline__ int RowsOfTile(const Math<C, kHalf>& math) {
  const int left = math.tile.num_rows - math.thread.warp * 2 * kBandRows;
  return left > kBandRows ? kBothRows : left > 0 ? 1 : 0;
}

// The item that was the done_idx-th. It stays in `items` until both halves have freed the next
// one's queries.
template <class C, Half kHalf>
__device__ __forceinline__ void WriteItem(Math<C, kHalf>& math, int done_idx) {
  constexpr bool kMergesInside = C::kMerge == Merge::kInside;
  trace::Enter(Phase::kWrite);
  gpu::sm90::WgmmaFenceOperand(math.out);
  const Item& done = Shared<C>().items[(done_idx - 1) % kNumItems];
  if (kMergesInside && done.end == ItemEnd::kExchanged) gpu::sm90::ClusterArrive();  // q is free
  ShareSums(math, done_idx);
  const bool is_clustered = kMergesInside && done.end == ItemEnd::kExchanged;
  PartialScale scale;
  if (done.end == ItemEnd::kPart || is_clustered) {
    const int64_t first_row = math.params.plan.partials.RowIndex(done.slot, math.tile.idx);
    uint32_t top[2];
#pragma unroll 1
    do {  // once, unless O does not fit
      top[0] = top[1] = kNothingStored;
      if (!is_clustered) {
#pragma unroll
        for (int i = 0; i < 2; ++i) top[i] = StoreRow(math, first_row, i);
      } else if (RowToSend() == 0) {
        top[0] = PackRow(math, 0, [](int, const uint4&) {});
      } else {
        top[1] = PackRow(math, 1, [](int, const uint4&) {});
      }
    } while (!FitsPartial(math, top, scale));
  }
  FinishSums(math, done_idx);
  if (done.end == ItemEnd::kPart) StoreStats(math, done, scale);
  if (kMergesInside && Shared<C>().arrives[(done_idx - 1) % kNumItems]) ArriveAtGrid<C>();
  if (done.end == ItemEnd::kPart) return;
  int rows = kBothRows;
  if constexpr (kMergesInside) {
    if (done.end != ItemEnd::kWhole) {
      OtherPart other;
      int merged_rows;
      if (is_clustered) {
        ExchangeRows(math, scale);
        rows = merged_rows = 0b10 >> RowToSend();
        other = ReceivedPart<C>();
      } else {
        WaitGrid<C>();
        merged_rows = RowsOfTile(math);
        other = StoredPart(math, done);
      }
      trace::Enter(Phase::kMerge);
      AddOtherPart(math, merged_rows, other);
    }
  }
  trace::Enter(Phase::kWrite);
  WriteFinal(math, done, rows);
}

}  // namespace jax_mla::decode::sm90::wide
