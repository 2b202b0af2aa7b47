// How an item ends in the kernels with swapped operands: rows of `out` and `lse`, or the partial
// result of a split sequence. A kernel's Math is an Output that also has its rows' statistics:
//
//   SumOfRow(row), ReferenceOf(row)    of a row of the tile
//   HasKey(j)                          whether the thread's row j has seen a key
//   RowOfThread(), LooksAfterRow(row)  the row whose statistics this thread writes, if any
//   ScaleStats(j, factor, log2), ScaleRowStats(log2_of)  multiply the sums by a factor and take its
//                                      logarithm from the references: of the thread's row j, or of
//                                      the row that it looks after
//   ForgetRows()                       before a partial result is stored again
#pragma once

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "decode/merge/partial_range.cuh"
#include "decode/merge/partials.h"
#include "decode/sm90/swapped/codes.cuh"
#include "decode/sm90/swapped/context.cuh"
#include "gpu/codegen.cuh"
#include "gpu/online_softmax.cuh"

namespace jax_mla::decode::sm90 {

// 1 / sum of the thread's row j; 0 for a row without a key.
template <class M>
__device__ __forceinline__ float InverseSum(const M& math, int j) {
  return gpu::InverseSum(math.SumOfRow(math.thread.Row(j)));
}

// Writes the rows' statistics: one thread for each row.
template <class M>
__device__ __forceinline__ void WriteStats(const M& math) {
  const KernelParams& params = math.params;
  const auto& item = math.item;
  const int row = math.RowOfThread();
  if (!math.LooksAfterRow(row) || row >= math.RowsLeft()) return;
  const float sum = math.SumOfRow(row);
  const float reference = math.ReferenceOf(row);
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
  if constexpr (!C::kHasCodes) {
    const int vector = thread.wg * (kChunkDims / 2) + thread.warp * kWarpVectors + thread.lane / 4;
    return vector * kRunDims<C>;
  }
  return FirstDimOfCodes<C>(thread, run);
}
template <class C>
using RowVector = std::conditional_t<kRunDims<C> == 8, uint4, uint2>;

// The result of a whole sequence where V was read as codes: then a thread has neighbouring dims of
// each of its rows, and O still lacks the scale of the codes.
template <class M>
__device__ __forceinline__ void WriteFinalVectors(const M& math) {
  using C = typename M::Config;
  using T = typename M::T;
  using Vector = RowVector<C>;
  const Thread& thread = math.thread;
  T* out[C::kRuns];
#pragma unroll
  for (int run = 0; run < C::kRuns; ++run) {
    out[run] = static_cast<T*>(math.params.decode.out) + math.FirstRow() * C::kDCkv +
               FirstOfVector<C>(thread, run);
  }
  const int rows = math.RowsLeft();
#pragma unroll
  for (int j = 0; j < C::kThreadRows; ++j) {
    const float inverse_sum = InverseSum(math, j), scale = inverse_sum * math.scales.value;
    const int i = M::AccumulatorOf(j);
    alignas(Vector) uint32_t packed[C::kOwnTiles];
#pragma unroll
    for (int own = 0; own < C::kOwnTiles; ++own) {
      packed[own] = hw::Pack2<T>(math.out[own][i] * scale, math.out[own][i + 2] * scale);
      // A row without a key, also if the codes' scale is NaN.
      if (inverse_sum == 0.0f) packed[own] = 0;
    }
    if (thread.Row(j) >= rows) continue;
#pragma unroll
    for (int run = 0; run < C::kRuns; ++run) {
      *reinterpret_cast<Vector*>(out[run] + thread.Row(j) * C::kDCkv) =
          reinterpret_cast<const Vector*>(packed)[run];
    }
  }
}

// O of a partial result, in the order in which the accumulators lie (PartialOrder::kTransposed, or
// kPackedRows): what a thread has of a row is a vector, and the lanes of a warp write whole lines.
// Returns whether all of the thread's rows fit float16.
template <class M>
__device__ __forceinline__ bool StorePartial(const M& math) {
  using C = typename M::Config;
  using Vector = RowVector<C>;
  static_assert(sizeof(Vector) == kRunDims<C> * kElementBytes, "a vector is one store");
  const Thread& thread = math.thread;
  const PartialBuffers& partials = math.params.partials;
  // Recomputed: kept since WriteStats, the address would be spilled.
  const auto slot = static_cast<int32_t>(gpu::RecomputeHere(math.item.slot));
  const int64_t first_row = partials.RowIndex(slot, math.row_tile) + thread.Row(0);
  PartialElement* out[C::kRuns];
#pragma unroll
  for (int run = 0; run < C::kRuns; ++run) {
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
      const int i = M::AccumulatorOf(j + k);
      alignas(Vector) uint32_t packed[C::kOwnTiles];
#pragma unroll
      for (int own = 0; own < C::kOwnTiles; ++own) {
        packed[own] = hw::Pack2<PartialElement>(math.out[own][i], math.out[own][i + 2]);
        top[k] = own == 0 ? packed[0] : MaxMagnitude(top[k], packed[own]);
      }
      const int row_offset = j / 2 * 8 + k;
      if (thread.Row(j + k) >= rows) continue;
#pragma unroll
      for (int run = 0; run < C::kRuns; ++run) {
        __builtin_assume(__isGlobal(out[run]));
        __stcg(reinterpret_cast<Vector*>(out[run] + row_offset * C::kDCkv),
               reinterpret_cast<const Vector*>(packed)[run]);
      }
    }
    range.Add(top[0], top[1], math.HasKey(j), math.HasKey(j + 1));
  }
  return range.Fit();
}

// The largest magnitude of what the thread has of row j.
template <class M>
__device__ __forceinline__ float MaxOfOutput(const M& math, int j) {
  using C = typename M::Config;
  const int i = M::AccumulatorOf(j);
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
template <class M>
__device__ __forceinline__ bool ScalePartial(M& math) {
  using C = typename M::Config;
  constexpr float kMaxScaleLog2 = 120.0f;  // the factor stays a normal number
  const Thread& thread = math.thread;
  // Between the last block of this item and the next item nobody else uses `exchange`.
  auto& tops = *reinterpret_cast<float (*)[C::kTileRows][kTeamWarps]>(math.shared.exchange);
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
    math.ScaleStats(j, factor, scale_log2);
  }
  math.ScaleRowStats(scale_log2_of);
  return hw::NamedBarrierAny(kBarrierMath, kTeamThreads, changes);
}

// The partial result of a part. Whether it fits float16 is found out behind the stores, which take
// as long as finding out; if it does not, it is scaled and stored again.
template <class M>
__device__ __forceinline__ void WritePartial(M& math) {
  while (hw::NamedBarrierAny(kBarrierMath, kTeamThreads, !StorePartial(math))) {
    if (!ScalePartial(math)) break;
    math.ForgetRows();
    WriteStats(math);
  }
}

// Multiplies O by the scale of the codes.
template <class M>
__device__ __forceinline__ void ScaleOutput(M& math) {
  using C = typename M::Config;
#pragma unroll
  for (int own = 0; own < C::kOwnTiles; ++own) {
#pragma unroll
    for (int i = 0; i < C::kAccumulators; ++i) math.out[own][i] *= math.scales.value;
  }
}

}  // namespace jax_mla::decode::sm90
