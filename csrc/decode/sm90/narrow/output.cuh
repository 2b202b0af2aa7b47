// How the narrow kernel ends an item, but for what all kernels with swapped operands do
// (swapped/finish.cuh): two teams' parts become one, and rows of 16-bit values. Roles and barriers:
// kernel.cuh.
#pragma once

#include <cstddef>
#include <cstdint>

#include "decode/sm90/narrow/math.cuh"
#include "decode/sm90/swapped/finish.cuh"
#include "decode/trace.cuh"

namespace jax_mla::decode::sm90::narrow {

// Leaves the item's statistics in shared memory: each warp's sums over its tokens, and the
// references. They are there behind the next barrier.
template <class C>
__device__ __forceinline__ void StoreSums(Math<C>& math) {
  const Thread& thread = math.thread;
  math.StoreOverLanes(math.sum, [](float a, float b) { return a + b; });
  if (thread.idx < 4) {
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) {
      math.shared.reference[thread.Group()][thread.Row(j)] = math.reference[j];
    }
  }
}

// The result of a whole sequence. The accumulators of O^T are transposed as 8 x 8 matrices of
// packed pairs; then a lane has two neighbouring dims of row lane / 4 of eight.
template <class C>
__device__ __forceinline__ void WriteFinal(const Math<C>& math) {
  using T = typename Math<C>::T;
  const Thread& thread = math.thread;
  const int rows = math.RowsLeft();
  const int row_in_eight = thread.lane / 4;
  const int dim = thread.wg * kChunkDims + thread.warp * kMmaK + thread.lane % 4 * 2;
  const int64_t first_row = math.FirstRow();
  T* out = static_cast<T*>(math.params.decode.out) + (first_row + row_in_eight) * C::kDCkv + dim;
#pragma unroll
  for (int j = 0; j < C::kTileRows / 8; ++j) {
    const float scale0 = InverseSum(math, 2 * j);
    const float scale1 = InverseSum(math, 2 * j + 1);
#pragma unroll
    for (int i = 0; i < C::kOwnTiles * 2; ++i) {
      const float* o = &math.out[i / 2][4 * j + i % 2 * 2];
      const uint32_t packed = hw::TransposeMatrix(hw::Pack2<T>(o[0] * scale0, o[1] * scale1));
      T* target = out + j * 8 * C::kDCkv + i / 2 * kTeamWarpgroups * kChunkDims + i % 2 * 8;
      if (j * 8 + row_in_eight < rows) *reinterpret_cast<uint32_t*>(target) = packed;
    }
  }
}

// Adds the second team's O and sums to the first one's. Behind StoreSums.
template <class C>
__device__ __forceinline__ void MergeTeams(Math<C>& math) {
  constexpr int kVectors = C::kOwnTiles * C::kAccumulators / 4;
  using M = Math<C>;
  const Thread& thread = math.thread;
  // No team has a block left whose scores it would exchange, or whose P it would multiply. Both lie
  // side by side.
  auto& second =
      *reinterpret_cast<float4(*)[kTeamWarpgroups][kVectors][kWarpgroupThreads]>(math.shared.p);
  using Shared = SharedMemory<C>;
  static_assert(offsetof(Shared, exchange) == offsetof(Shared, p) + sizeof(Shared::p) &&
                    sizeof(second) <= sizeof(Shared::p) + sizeof(Shared::exchange),
                "the second team's part must fit where P was, and scores were exchanged");
  math.SyncTeams();
  if (thread.team == 1) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const float* o = &math.out[4 * v / C::kAccumulators][4 * v % C::kAccumulators];
      second[thread.wg][v][thread.idx] = make_float4(o[0], o[1], o[2], o[3]);
    }
  }
  math.SyncTeams();
  if (thread.team == 1) return;
  const int second_group = thread.Group() + kTeamWarpgroups;
  float factor[C::kThreadRows], second_factor[C::kThreadRows];
#pragma unroll
  for (int j = 0; j < C::kThreadRows; ++j) {
    const float second_reference = math.shared.reference[second_group][thread.Row(j)];
    const float top = fmaxf(math.reference[j], second_reference);
    factor[j] = hw::Exp2(math.reference[j] - top);
    second_factor[j] = hw::Exp2(second_reference - top);
    math.reference[j] = top;
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float* o = &math.out[4 * v / C::kAccumulators][4 * v % C::kAccumulators];
    const float4 x = second[thread.wg][v][thread.idx];
    const int j = M::RowOf(4 * v % C::kAccumulators);
    o[0] = fmaf(o[0], factor[j], x.x * second_factor[j]);
    o[1] = fmaf(o[1], factor[j + 1], x.y * second_factor[j + 1]);
    o[2] = fmaf(o[2], factor[j], x.z * second_factor[j]);
    o[3] = fmaf(o[3], factor[j + 1], x.w * second_factor[j + 1]);
  }
  if (thread.IsFirstOfRows()) {
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) {
      const int row = thread.Row(j);
      auto& stats = math.shared.row_stats;
      float& sum = stats[thread.Group()][row][thread.warp];
      sum = fmaf(sum, factor[j], stats[second_group][row][thread.warp] * second_factor[j]);
      if (thread.warp == 0) math.shared.reference[thread.Group()][row] = math.reference[j];
    }
  }
  math.SyncWarpgroup();
}

// Writes the item's result and gives the item and its queries back.
template <class C>
__device__ __forceinline__ void WriteItem(Math<C>& math) {
  trace::Enter(Phase::kWrite);
  StoreSums(math);
  math.SyncWarpgroup();
  math.ReleaseItem();
  if constexpr (C::kTeams > 1) {
    MergeTeams(math);
    if (math.thread.team != 0) return;
  }
  WriteStats(math);
  if (math.item.slot == kFinal) {
    if constexpr (C::kHasCodes) {
      WriteFinalVectors(math);
    } else {
      WriteFinal(math);
    }
  } else {
    if constexpr (C::kHasCodes) ScaleOutput(math);
    WritePartial(math);
  }
  math.SyncWarpgroup();  // before the next item's statistics overwrite this one's
}

}  // namespace jax_mla::decode::sm90::narrow
