// How a CTA of the wide kernel adds another CTA's part of a sequence to its own, which it still has
// in registers. The other part comes from the other CTA of its cluster, or lies in a slot.
#pragma once

#include <cstdint>

#include "decode/schedule/plan.h"
#include "decode/sm90/wide/math.cuh"
#include "decode/sm90/wide/merge/fragments.cuh"
#include "decode/sm90/wide/merge/store_part.cuh"
#include "gpu/sm90.cuh"
#include "gpu/sm90_cluster.cuh"

namespace jax_mla::decode::sm90::wide {

// Another CTA's part, as this thread finds the vectors and statistics of its own rows in it.
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

// The rows of this thread whose bands its tile has, as bits.
template <class C, Half kHalf>
__device__ __forceinline__ int RowsOfTile(const Math<C, kHalf>& math) {
  const int left = math.tile.num_rows - math.thread.warp * 2 * kBandRows;
  return left > kBandRows ? kBothRows : left > 0 ? 1 : 0;
}

// What a CTA receives from the other one of its cluster, where its queries were.
template <class C>
struct ExchangeBuffer {
  uint4 vectors[PartialFragments<C>::kHalfFragments][kNumMathThreads];
  PartialStats stats[kNumMathThreads];

  static __device__ __forceinline__ ExchangeBuffer& Get() {
    static_assert(sizeof(ExchangeBuffer) <= sizeof(Shared<C>().q),
                  "what the peer sends must fit where the queries were");
    return *reinterpret_cast<ExchangeBuffer*>(Shared<C>().q);
  }
};

// The two CTAs of a cluster hold the two parts of a sequence. A thread of the first CTA takes over
// row 0 of the same thread of the second, and gives row 1 away.
__device__ __forceinline__ int RowToSend() { return 1 - gpu::sm90::ClusterRank(); }

// Sends this thread's row to the other CTA and waits for that CTA's. After ClusterArrive and
// FinishSums: q is idle in both CTAs once all have arrived.
template <class C, Half kHalf>
__device__ __forceinline__ void ExchangeRows(Math<C, kHalf>& math, const PartialScale& scale) {
  using Buffer = ExchangeBuffer<C>;
  Buffer& buffer = Buffer::Get();
  const uint32_t thread = gpu::sm90::ThreadIndex();
  const uint32_t full = SharedAddress(&Shared<C>().exchange_full);
  const int sent = RowToSend(), peer = 1 - gpu::sm90::ClusterRank();
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
__device__ __forceinline__ OtherPart StoredPart(const Math<C, kHalf>& math,
                                                const typename C::Item& done) {
  using Fragments = PartialFragments<C>;
  const PartialBuffers& partials = math.params.plan.partials;
  const int64_t first_row = partials.RowIndex(done.slot, math.tile.idx);
  const int band = math.thread.warp * 2;
  return {.vectors = Fragments::Of(partials, first_row, band, kHalf, math.thread.lane),
          .vector_stride = Fragments::kFragmentElements,
          .row_stride = 2 * Fragments::kHalfFragments * Fragments::kFragmentElements,
          .stats = partials.stats + HalfStatsIndex(first_row) + (2 * band + kHalf) * kBandRows +
                   math.thread.lane / 4,
          .stats_stride = 2 * kBandRows};
}

}  // namespace jax_mla::decode::sm90::wide
