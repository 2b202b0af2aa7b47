// How the narrow kernel ends an item: rows of `out` and `lse`, or the partial result of a split
// sequence. Roles and barriers: kernel.cuh.
#pragma once

#include <cfloat>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "decode/sm90/narrow/math.cuh"
#include "decode/split/partial_range.cuh"
#include "decode/split/partials.h"

namespace jax_mla::decode::sm90::narrow {

// Leaves the item's statistics in shared memory: each warp's sums over its tokens, and the
// references. They are there behind the next barrier.
template <class C>
__device__ __forceinline__ void StoreSums(Math<C>& math) {
  const Thread& thread = math.thread;
  math.StoreOverLanes(math.sum, [](float a, float b) { return a + b; });
  if (!C::kHasManyRows && thread.idx < 4) {
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) {
      math.shared.reference[thread.Group()][thread.Row(j)] = math.reference[j];
    }
  }
}

__device__ __forceinline__ float SumOfWarps(const float (&stats)[kWarpgroupWarps]) {
  const float4 warps = *reinterpret_cast<const float4*>(stats);
  return (warps.x + warps.y) + (warps.z + warps.w);
}

// The sum of a row. With pairs each warpgroup has that of its blocks.
template <class C>
__device__ __forceinline__ float SumOfRow(const Math<C>& math, int row) {
  const auto& stats = math.shared.row_stats;
  if constexpr (C::kHasQueryCodes) return math.SumsOfItem()[row];
  if constexpr (C::kTakesPairs) return SumOfWarps(stats[0][row]) + SumOfWarps(stats[1][row]);
  return SumOfWarps(stats[math.thread.Group()][row]);
}

// 1 / sum of the thread's row j; 0 for a row without a key.
template <class C>
__device__ __forceinline__ float InverseSum(const Math<C>& math, int j) {
  return gpu::InverseSum(SumOfRow(math, math.thread.Row(j)));
}

// Whether the thread's row j has seen a key.
template <class C>
__device__ __forceinline__ bool HasKey(const Math<C>& math, int j) {
  if constexpr (C::kHasManyRows) {
    return math.rows_with_keys >> j & 1;
  } else {
    return math.reference[j] != gpu::kNoReference;
  }
}

// Where the reference of a row is, behind StoreSums.
template <class C>
__device__ __forceinline__ float& ReferenceOf(const Math<C>& math, int row) {
  if constexpr (C::kHasQueryCodes) {
    return math.shared.scored.references[ItemIndex<C>(math.query)][row];
  } else if constexpr (C::kTakesPairs) {
    return math.shared.softmax.reference[row];
  } else {
    return math.shared.reference[0][row];
  }
}

// The row that this thread finishes, if LooksAfterRow.
template <class C>
__device__ __forceinline__ int RowOfThread(const Math<C>& math) {
  // Read again: kept, what follows from it would be spilled.
  if constexpr (C::kHasQueryCodes) return static_cast<int>(gpu::ThreadIndex());
  return math.thread.idx;
}
template <class C>
__device__ __forceinline__ bool LooksAfterRow(const Math<C>& math, int row) {
  return (C::kHasQueryCodes || math.thread.wg == 0) && row < C::kBlockM;
}

// Writes the statistics that StoreSums left, or StoreStats (scores_role.cuh): one thread for each
// row.
template <class C>
__device__ __forceinline__ void WriteStats(const Math<C>& math) {
  const KernelParams& params = math.params;
  const typename C::Item& item = math.item;
  const int row = RowOfThread(math);
  if (!LooksAfterRow(math, row) || row >= math.RowsLeft()) return;
  const float sum = SumOfRow(math, row);
  const float reference = ReferenceOf(math, row);
  if (item.slot == kFinal) {
    params.decode.lse[math.FirstRow() + row] = gpu::ApproxLse(reference, sum);
  } else {
    params.partials.stats[params.partials.RowIndex(item.slot, math.row_tile) + row] = {
        sum != 0.0f ? reference : gpu::kNoReference, sum};
  }
}

// A thread's part of a row of O, in the order of its tiles, is one vector of kRunDims values; with
// tile scales one for each own chunk (codes.cuh). This is where vector `run` begins in the row.
template <class C>
__device__ __forceinline__ int FirstOfVector(const Thread& thread, int run) {
  constexpr int kWarpVectors = 8;  // one for each lane / 4
  if constexpr (!C::kIsFp8) {
    const int vector = thread.wg * (kChunkDims / 2) + thread.warp * kWarpVectors + thread.lane / 4;
    return vector * kRunDims<C>;
  }
  return FirstDimOfCodes<C>(thread, run);
}
template <class C>
using RowVector = std::conditional_t<kRunDims<C> == 8, uint4, uint2>;

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
  for (int j = 0; j < C::kBlockM / 8; ++j) {
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

// The same where V was read as codes: then a thread has neighbouring dims of each of its rows, and
// O still lacks the scale of the codes.
template <class C>
__device__ __forceinline__ void WriteFinalVectors(const Math<C>& math) {
  using T = typename Math<C>::T;
  using Vector = RowVector<C>;
  const Thread& thread = math.thread;
  T* out[C::kScaledChunks];
#pragma unroll
  for (int run = 0; run < C::kScaledChunks; ++run) {
    out[run] = static_cast<T*>(math.params.decode.out) + math.FirstRow() * C::kDCkv +
               FirstOfVector<C>(thread, run);
  }
  const int rows = math.RowsLeft();
#pragma unroll
  for (int j = 0; j < C::kThreadRows; ++j) {
    const float inverse_sum = InverseSum(math, j), scale = inverse_sum * math.scales.value;
    const int i = Math<C>::AccumulatorOf(j);
    alignas(Vector) uint32_t packed[C::kOwnTiles];
#pragma unroll
    for (int own = 0; own < C::kOwnTiles; ++own) {
      packed[own] = hw::Pack2<T>(math.out[own][i] * scale, math.out[own][i + 2] * scale);
      // A row without a key, also if the codes' scale is NaN.
      if (inverse_sum == 0.0f) packed[own] = 0;
    }
    if (thread.Row(j) >= rows) continue;
#pragma unroll
    for (int run = 0; run < C::kScaledChunks; ++run) {
      *reinterpret_cast<Vector*>(out[run] + thread.Row(j) * C::kDCkv) =
          reinterpret_cast<const Vector*>(packed)[run];
    }
  }
}

// O of a partial result, in the order in which the accumulators lie (PartialOrder::kTransposed, or
// kPackedRows): what a thread has of a row is a vector, and the lanes of a warp write whole lines.
// Returns whether all of the thread's rows fit float16.
template <class C>
__device__ __forceinline__ bool StorePartial(const Math<C>& math) {
  using Vector = RowVector<C>;
  static_assert(sizeof(Vector) == kRunDims<C> * kElementBytes, "a vector is one store");
  const Thread& thread = math.thread;
  const PartialBuffers& partials = math.params.partials;
  // Recomputed: kept since WriteStats, the address would be spilled.
  const auto slot = static_cast<int32_t>(gpu::RecomputeHere(math.item.slot));
  const int64_t first_row = partials.RowIndex(slot, math.row_tile) + thread.Row(0);
  PartialElement* out[C::kScaledChunks];
#pragma unroll
  for (int run = 0; run < C::kScaledChunks; ++run) {
    out[run] = reinterpret_cast<PartialElement*>(partials.out) + first_row * C::kDCkv +
               FirstOfVector<C>(thread, run);
  }
  // Kept in registers: otherwise every row would load them again.
#pragma unroll
  for (auto& run : out) asm volatile("" : "+l"(run));
  const int rows = math.RowsLeft();
  RangeOfRows range;
#pragma unroll
  for (int j = 0; j < C::kThreadRows; j += 2) {
    uint32_t top[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int i = Math<C>::AccumulatorOf(j + k);
      alignas(Vector) uint32_t packed[C::kOwnTiles];
#pragma unroll
      for (int own = 0; own < C::kOwnTiles; ++own) {
        packed[own] = hw::Pack2<PartialElement>(math.out[own][i], math.out[own][i + 2]);
        top[k] = own == 0 ? packed[0] : MaxMagnitude(top[k], packed[own]);
      }
      const int row_offset = j / 2 * 8 + k;
      if (thread.Row(j + k) >= rows) continue;
#pragma unroll
      for (int run = 0; run < C::kScaledChunks; ++run) {
        __builtin_assume(__isGlobal(out[run]));
        __stcg(reinterpret_cast<Vector*>(out[run] + row_offset * C::kDCkv),
               reinterpret_cast<const Vector*>(packed)[run]);
      }
    }
    range.Add(top[0], top[1], HasKey(math, j), HasKey(math, j + 1));
  }
  return range.Fit();
}

// The largest magnitude of what the thread has of row j.
template <class C>
__device__ __forceinline__ float MaxOfOutput(const Math<C>& math, int j) {
  const int i = Math<C>::AccumulatorOf(j);
  float top = 0.0f;
#pragma unroll
  for (int own = 0; own < C::kOwnTiles; ++own) {
    top = fmaxf(top, fmaxf(fabsf(math.out[own][i]), fabsf(math.out[own][i + 2])));
  }
  return top;
}

// Scales every row of O that does not fit float16 by a power of two that brings its largest
// magnitude to between 1 and 2, and the statistics that StoreSums left with it. Returns whether any
// row changed. All math threads. A row that fits stays as it is, whichever row asked for this.
template <class C>
__device__ __forceinline__ bool ScalePartial(Math<C>& math) {
  constexpr float kMaxScaleLog2 = 120.0f;  // the factor stays a normal number
  const Thread& thread = math.thread;
  // Between the last block of this item and the next item nobody else uses `exchange`.
  auto& tops = *reinterpret_cast<float (*)[C::kBlockM][kTeamWarps]>(math.shared.exchange);
#pragma unroll
  for (int j = 0; j < C::kThreadRows; ++j) {
    float top = MaxOfOutput(math, j);
#pragma unroll
    for (int offset = 4; offset < kWarpThreads; offset *= 2) {
      top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
    }
    if (thread.IsFirstOfRows()) {
      tops[thread.Row(j)][thread.wg * kWarpgroupWarps + thread.warp] = top;
    }
  }
  hw::NamedBarrierSync(kBarrierMath, kTeamThreads);
  const auto scale_log2_of = [&](int row) {
    float top = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kTeamWarps; ++warp) top = fmaxf(top, tops[row][warp]);
    const bool is_scalable = top >= FLT_MIN && top <= FLT_MAX;  // not 0 and not infinite
    const bool scales = is_scalable && !RowFits(top);
    return scales ? fminf(floorf(hw::Log2(top)), kMaxScaleLog2) : 0.0f;
  };
  bool changes = false;
#pragma unroll
  for (int j = 0; j < C::kThreadRows; ++j) {
    const float scale_log2 = scale_log2_of(thread.Row(j));
    const float factor = hw::Exp2(-scale_log2);
    changes |= scale_log2 != 0.0f;
    math.ScaleOutRow(j, factor);
    if (C::kHasQueryCodes || (!C::kTakesPairs && thread.wg != 0)) continue;
    if (!thread.IsFirstOfRows()) continue;
    math.shared.row_stats[thread.Group()][thread.Row(j)][thread.warp] *= factor;
    if (thread.wg == 0 && thread.warp == 0) ReferenceOf(math, thread.Row(j)) += scale_log2;
  }
  if constexpr (C::kHasQueryCodes) {
    if (const int row = RowOfThread(math); LooksAfterRow(math, row)) {
      const float scale_log2 = scale_log2_of(row);
      math.SumsOfItem()[row] *= hw::Exp2(-scale_log2);
      ReferenceOf(math, row) += scale_log2;
    }
  }
  return hw::NamedBarrierAny(kBarrierMath, kTeamThreads, changes);
}

// The partial result of a part. Whether it fits float16 is found out behind the stores, which take
// as long as finding out; if it does not, it is scaled and stored again.
template <class C>
__device__ __forceinline__ void WritePartial(Math<C>& math) {
  while (hw::NamedBarrierAny(kBarrierMath, kTeamThreads, !StorePartial(math))) {
    if (!ScalePartial(math)) break;
    // Otherwise what RangeOfRows makes of them would be kept in registers.
    if constexpr (C::kHasQueryCodes) math.rows_with_keys = gpu::RecomputeHere(math.rows_with_keys);
    WriteStats(math);
  }
}

// Multiplies O by the scale of the codes.
template <class C>
__device__ __forceinline__ void ScaleOutput(Math<C>& math) {
#pragma unroll
  for (int own = 0; own < C::kOwnTiles; ++own) {
#pragma unroll
    for (int i = 0; i < C::kAccumulators; ++i) math.out[own][i] *= math.scales.value;
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
  if constexpr (C::kHasManyRows) math.ReloadItem();
  if constexpr (!C::kHasQueryCodes) {
    StoreSums(math);
    math.SyncStats();
  }
  if constexpr (!C::kHasManyRows) math.ReleaseItem();
  if constexpr (C::kTeams > 1) {
    MergeTeams(math);
    if (math.thread.team != 0) return;
  }
  WriteStats(math);
  if (math.item.slot == kFinal) {
    if constexpr (C::kIsFp8) {
      WriteFinalVectors(math);
    } else {
      WriteFinal(math);
    }
  } else {
    if constexpr (C::kIsFp8) ScaleOutput(math);
    WritePartial(math);
  }
  math.SyncStats();  // before the next item's statistics overwrite this one's
}

}  // namespace jax_mla::decode::sm90::narrow
