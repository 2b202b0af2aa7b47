// How the wide kernel writes a finished item: rows of `out`, or the partial result of a split
// sequence.
#pragma once

#include <cstdint>

#include "decode/sm90/wide/grid.cuh"
#include "decode/sm90/wide/math.cuh"
#include "decode/sm90/wide/partials.cuh"
#include "decode/split/combine.h"
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
                PairedColumn();
#pragma unroll
    for (int j = 0; j < math.kNumOut; j += 16) {
      uint32_t v[4];
      PackColumns<T>(math, i, j, inverse, v);
      PairColumns(v);
      if (row < math.tile.num_rows) StorePaired(target + 2 * j, v);
    }
    if (kHalf == kLead && math.thread.quad == 0 && row < math.tile.num_rows) {
      d.lse[first_row + row] = Lse(math.reference[i], math.sum[i]);
    }
  }
}

// This thread's vectors of its row i, times `factor`: consecutive ones `stride` elements apart.
template <class T, class C, Half kHalf>
__device__ __forceinline__ void StoreVectors(const Math<C, kHalf>& math, int i, float factor,
                                             T* target, int stride) {
#pragma unroll
  for (int j = 0; j < C::kHalfDims / PackedPartials<T>::kUnitDims; ++j) {
    uint32_t v[4];
    PackColumns<T>(math, i, 16 * j, factor, v);
    *reinterpret_cast<uint4*>(target + j * stride) = make_uint4(v[0], v[1], v[2], v[3]);
  }
}

// Rows for the combine kernel, as the accumulators lie (PartialOrder::kWgmma): the code runs once a
// launch and is fetched cold, so exchanging values between lanes first would cost more than the
// stores.
template <class C, Half kHalf>
__device__ __forceinline__ void WriteRows(const Math<C, kHalf>& math, int64_t first_row, int i,
                                          float factor) {
  using T = typename C::T;
  using Packed = PackedPartialsOf<C>;
  const int row = math.thread.row + 8 * i;
  if (row >= math.tile.num_rows) return;
  StoreVectors(math, i, factor,
               reinterpret_cast<T*>(math.params.plan.partials.out) + (first_row + row) * C::kDCkv +
                   kHalf * C::kHalfDims + math.thread.quad * Packed::kVector,
               Packed::kUnitDims);
}

// Vectors for the merge inside this kernel: a warp's store is 512 bytes in one piece.
template <class C, Half kHalf>
__device__ __forceinline__ void WritePacked(const Math<C, kHalf>& math, int64_t first_row, int i,
                                            float factor) {
  using Packed = PackedPartialsOf<C>;
  constexpr int kUnits = C::kHalfDims / Packed::kUnitDims;  // of a group of rows
  const int group = math.thread.warp * 2 + i;
  if (group * kGroupRows >= math.tile.num_rows) return;
  StoreVectors(math, i, factor,
               Packed(math.params.plan.partials).out + first_row * C::kDCkv +
                   (group * 2 + kHalf) * kUnits * Packed::kUnitElements +
                   math.thread.lane * Packed::kVector,
               Packed::kUnitElements);
}

// The partial result of a split sequence. It takes as long as an SM needs to store so much, at 32
// bytes a cycle: where the vectors do not need the sums (bf16) they do not wait for them, and the
// half that does not write the sums never does.
template <class C, Half kHalf>
__device__ __forceinline__ void WritePartial(Math<C, kHalf>& math, const Item& done, int done_idx) {
  constexpr bool kNormalised = PackedPartialsOf<C>::kNormalised;
  const PartialBuffers& partials = math.params.plan.partials;
  const int64_t first_row = partials.RowIndex(done.slot, math.tile.idx);
  if constexpr (kNormalised) {
    FinishSums(math, done_idx);
  } else if constexpr (kHalf == kFollow) {
    gpu::sm90::NamedBarrierArrive(kItemEnd, kNumMathThreads);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float factor = !kNormalised ? 1.0f : gpu::InverseSum(math.sum[i]);
    if constexpr (C::kMerge == Merge::kInside) {
      WritePacked(math, first_row, i, factor);
    } else {
      WriteRows(math, first_row, i, factor);
    }
  }
  if constexpr (kHalf == kLead) {
    if constexpr (!kNormalised) FinishSums(math, done_idx);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = math.thread.row + 8 * i;
      if (math.thread.quad != 0 || row >= math.tile.num_rows) continue;
      partials.stats[first_row + row] =
          PackedPartialsOf<C>::StatsOf(math.reference[i], math.sum[i]);
    }
  }
}

// This thread's values of 32 columns of its row i (columns j * 2 on) times `factor`, plus a packed
// vector of the same columns times `weight`.
template <class C, Half kHalf>
__device__ __forceinline__ void AddScaled(Math<C, kHalf>& math, int i, int j, float factor,
                                          float weight, const uint4& vector) {
  const uint32_t pairs[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float* own = math.out + j + 4 * k + 2 * i;
    const float2 x = gpu::sm90::Unpack2<typename C::T>(pairs[k]);
    own[0] = own[0] * factor + x.x * weight;
    own[1] = own[1] * factor + x.y * weight;
  }
}

// What the two parts of a row are multiplied with when they become one.
struct PartWeights {
  float own, other;
};

// Makes the statistics of this thread's row i those of its own part and another one.
template <class C, Half kHalf>
__device__ __forceinline__ PartWeights AddStats(Math<C, kHalf>& math, int i,
                                                const PartialStats& other) {
  const float reference = fmaxf(math.reference[i], other.reference);
  const float factor = gpu::sm90::Exp2(math.reference[i] - reference);
  const float weight = gpu::sm90::Exp2(other.reference - reference);
  math.reference[i] = reference;
  math.sum[i] = factor * math.sum[i] + weight * other.sum;
  return {factor, weight};
}

// What a CTA of a pair receives from the other, where its queries were.
template <class C>
struct PairBuffer {
  static constexpr int kNumVectors = C::kHalfDims / PackedPartialsOf<C>::kUnitDims;
  uint4 vectors[kNumVectors][kNumMathThreads];
  PartialStats stats[kNumMathThreads];
};

// Both parts of a sequence that the two CTAs of a cluster hold become one: a thread of the first
// CTA gets row 0 of the same thread of the second, and gives it row 1. Returns which row it
// has. After ClusterArrive and FinishSums: both CTAs' q is idle once all have arrived.
template <class C, Half kHalf>
__device__ __forceinline__ int MergePair(Math<C, kHalf>& math) {
  using T = typename C::T;
  using Packed = PackedPartialsOf<C>;
  using Buffer = PairBuffer<C>;
  static_assert(sizeof(Buffer) <= sizeof(Shared<C>().q));
  auto& buffer = *reinterpret_cast<Buffer*>(Shared<C>().q);
  const uint32_t thread = gpu::sm90::ThreadIndex();
  const uint32_t full = SharedAddress(&Shared<C>().pair_full);
  const int kept = gpu::sm90::ClusterRank(), peer = kept ^ 1;
  const uint32_t peer_full = gpu::sm90::PeerAddress(full, peer);
  const uint32_t peer_vectors =
      gpu::sm90::PeerAddress(SharedAddress(&buffer.vectors[0][thread]), peer);
  if (thread == 0) gpu::sm90::MbarrierArriveExpectTx(full, sizeof(Buffer));
  trace::Enter(Phase::kWaitPartial);
  gpu::sm90::ClusterWait();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (i == kept) continue;
    const float factor = !Packed::kNormalised ? 1.0f : gpu::InverseSum(math.sum[i]);
    const PartialStats stats = Packed::StatsOf(math.reference[i], math.sum[i]);
    gpu::sm90::PeerStore8(gpu::sm90::PeerAddress(SharedAddress(&buffer.stats[thread]), peer),
                          make_float2(stats.reference, stats.sum), peer_full);
#pragma unroll
    for (int j = 0; j < Buffer::kNumVectors; ++j) {
      uint32_t v[4];
      PackColumns<T>(math, i, 16 * j, factor, v);
      gpu::sm90::PeerStore16(peer_vectors + j * sizeof(buffer.vectors[0]), v, peer_full);
    }
  }
  gpu::sm90::MbarrierWait(full, 0);
  trace::Enter(Phase::kMerge);
  const PartialStats other = buffer.stats[thread];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (i != kept) continue;
    const auto [factor, weight] = AddStats(math, i, other);
#pragma unroll
    for (int j = 0; j < Buffer::kNumVectors; ++j) {
      AddScaled(math, i, 16 * j, factor, weight, buffer.vectors[j][thread]);
    }
  }
  return kept;
}

constexpr int kBothRows = 0b11;

// Adds the part that lies in a slot, where another CTA's same thread has written it, to the one
// that this thread has. After FinishSums and WaitGrid.
template <class C, Half kHalf>
__device__ __forceinline__ void MergeKept(Math<C, kHalf>& math, const Item& done) {
  using T = typename C::T;
  using Packed = PackedPartialsOf<C>;
  constexpr int kUnits = C::kHalfDims / Packed::kUnitDims;
  const Packed partials(math.params.plan.partials);
  const int64_t first_row = math.params.plan.partials.RowIndex(done.slot, math.tile.idx);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int group = math.thread.warp * 2 + i;
    if (group * kGroupRows >= math.tile.num_rows) continue;
    const PartialStats stats = partials.stats[first_row + Opaque(math.thread.row) + 8 * i];
    const T* vector = partials.out + first_row * C::kDCkv +
                      (group * 2 + kHalf) * kUnits * Packed::kUnitElements +
                      math.thread.lane * Packed::kVector;
    uint4 vectors[kUnits];
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      vectors[j] = *reinterpret_cast<const uint4*>(vector + j * Packed::kUnitElements);
    }
    const auto [factor, weight] = AddStats(math, i, stats);
#pragma unroll
    for (int j = 0; j < kUnits; ++j) AddScaled(math, i, 16 * j, factor, weight, vectors[j]);
  }
}

// The item that was the done_idx-th. It stays in `items` until both halves have freed the next
// one's queries.
template <class C, Half kHalf>
__device__ __forceinline__ void WriteItem(Math<C, kHalf>& math, int done_idx) {
  constexpr bool kMergesInside = C::kMerge == Merge::kInside;
  trace::Enter(Phase::kWrite);
  gpu::sm90::WgmmaFenceOperand(math.out);
  const Item& done = Shared<C>().items[(done_idx - 1) % kNumItems];
  if (kMergesInside && done.end == ItemEnd::kPaired) gpu::sm90::ClusterArrive();  // q is free
  ShareSums(math, done_idx);
  if (done.end == ItemEnd::kPart) WritePartial(math, done, done_idx);
  if (kMergesInside && Shared<C>().arrives[(done_idx - 1) % kNumItems]) ArriveAtGrid<C>();
  if (done.end != ItemEnd::kPart) {
    FinishSums(math, done_idx);
    int rows = kBothRows;
    if constexpr (kMergesInside) {
      if (done.end == ItemEnd::kPaired) {
        rows = 1 << MergePair(math);
      } else if (done.end == ItemEnd::kKept) {
        WaitGrid<C>();
        trace::Enter(Phase::kMerge);
        MergeKept(math, done);
      }
    }
    trace::Enter(Phase::kWrite);
    WriteFinal(math, done, rows);
  }
}

}  // namespace jax_mla::decode::sm90::wide
