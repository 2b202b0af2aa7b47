// Rotates the queries of an item in shared memory, by the warp that appends (new_row.cuh): TMA has
// copied them as they are.
#pragma once

#include <cstdint>

#include "append/chunk.cuh"
#include "core/kv_format.h"
#include "core/transform.h"
#include "decode/sm90/common/append_task.h"
#include "decode/sm90/common/new_row.cuh"
#include "decode/sm90/common/sizes.h"
#include "gpu/codegen.cuh"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90 {

// The mbarriers of a stage of queries. The math waits for `full`. If the queries are rotated, their
// rope chunk lands on `rope_full`, for which the appending warp waits. It arrives at `full` when
// the chunk is rotated.
struct QueryBarriers {
  uint32_t full, rope_full;
};

// Arrivals of QueryBarriers::full.
template <class C>
__device__ __forceinline__ int QueryFullArrivals(const NewRows& rows) {
  return RotatesQueries<C>(rows) ? 2 : 1;
}

// Rotates the rope chunk of a query tile of `num_rows` rows, each 128 bytes in the 128-byte
// swizzle. A lane takes the same pair of values of row after row, by the angle of QueryAngles. Up
// to seven rows behind the last one are rotated too. Called by a whole warp.
template <DType kDType, int kDKpe>
__device__ __forceinline__ void RotateQueries(bool interleaved, float2 cos_sin,
                                              const AppendTask& task, const QueryBarriers& barriers,
                                              uint8_t* chunk, int num_rows) {
  using Value = append::Bits<kDType>;
  constexpr uint32_t kPairs = kDKpe / 2, kRowsAtOnce = kWarpThreads / kPairs;
  constexpr uint32_t kSwizzleRows = 8, kRowBytes = 128, kVectorBytes = 16;
  const uint32_t lane = gpu::ThreadIndex() % kWarpThreads;
  const uint32_t pair = lane % kPairs, first_row = lane / kPairs;
  const PairPlace at = PlaceOfPair(pair, kPairs, interleaved);
  const auto offset = [=](int dim) {
    const uint32_t byte = dim * sizeof(Value);
    return (byte ^ first_row * kVectorBytes) + first_row * kRowBytes;
  };
  const uint32_t first = offset(at.first), second = offset(at.second);
  gpu::sm90::MbarrierWait(barriers.rope_full, task.query_parity);
#pragma unroll 1
  for (int begin = 0; begin < num_rows; begin += kSwizzleRows, chunk += kSwizzleRows * kRowBytes) {
    const auto value = [=](uint32_t at_first_row, uint32_t row) {
      return reinterpret_cast<Value*>(chunk + (at_first_row ^ row * kVectorBytes) +
                                      row * kRowBytes);
    };
    // All loads come before the first store: the compiler would not move one across the other.
    Value values[kSwizzleRows / kRowsAtOnce][2];
#pragma unroll
    for (uint32_t row = 0; row < kSwizzleRows; row += kRowsAtOnce) {
      auto& [a, b] = values[row / kRowsAtOnce];
      a = *value(first, row), b = *value(second, row);
    }
#pragma unroll
    for (uint32_t row = 0; row < kSwizzleRows; row += kRowsAtOnce) {
      const auto& [a, b] = values[row / kRowsAtOnce];
      const ValuePair rotated =
          Rotated({append::ToFloat<kDType>(a), append::ToFloat<kDType>(b)}, cos_sin.x, cos_sin.y);
      *value(first, row) = append::FromFloat<kDType>(rotated.first);
      *value(second, row) = append::FromFloat<kDType>(rotated.second);
    }
  }
  gpu::sm90::FenceProxyAsyncShared();
  __syncwarp();
  if (lane == 0) gpu::sm90::MbarrierArrive(barriers.full);
}

}  // namespace jax_mla::decode::sm90
