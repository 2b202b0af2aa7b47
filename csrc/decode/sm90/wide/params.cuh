// What the roles of the wide kernel share: parameters, access to shared memory, the row tile.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "decode/params.h"
#include "decode/schedule/plan.h"
#include "decode/sm90/common/new_row.cuh"
#include "decode/sm90/common/rotate_queries.cuh"
#include "decode/sm90/wide/config.h"
#include "gpu/codegen.cuh"
#include "gpu/online_softmax.cuh"
#include "gpu/sm90.cuh"
#include "gpu/sm90_wgmma.cuh"

namespace jax_mla::decode::sm90::wide {

using gpu::kLog2E, gpu::kNoReference, gpu::RecomputeHere;
using gpu::sm90::Major;
using gpu::sm90::SharedAddress;

inline constexpr uint32_t kAllLanes = 0xffffffffu;
inline constexpr float kMinScaleLog2 =
    1e-30f;  // replaces 0, so that a score of -inf times it is -inf

// Ids of named barriers, explained in kernel.cuh.
inline constexpr int kSyncThreads = 0, kLeadPFull = 1, kFollowPFull = 2, kLeadScores = 3,
                     kItemEnd = 4, kLeadTail = 5, kFollowTail = 6, kMerge = 7, kAppendTold = 8,
                     kAppendDone = 9;
using Append = Appender<kAppendTold, kAppendDone>;

// What the host passes to one launch, besides the tensor maps.
struct WideParams {
  DecodeParams decode;
  SplitPlan plan;
  int32_t rows_per_tile;
  Divisor page_size, num_heads;  // num_heads: rows of a token
  NewRows new_rows;              // Config::kAppends alone
  uint64_t gather_policy;        // GatherPolicy
};

enum Half { kLead = 0, kFollow = 1 };

// The CTA's shared memory. Functions call this instead of taking a reference: the compiler then
// knows the address as a constant, and the many wgmma descriptors made from it take no registers.
template <class C>
__device__ __forceinline__ SharedMemory<C>& Shared() {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  return *reinterpret_cast<SharedMemory<C>*>(shared_bytes);
}

template <class C>
__device__ __forceinline__ QueryBarriers QueryBarriersOf() {
  return {SharedAddress(&Shared<C>().q_full), SharedAddress(&Shared<C>().q_rope_full)};
}

// The row tile of a CTA.
struct RowTile {
  int32_t idx;
  int32_t row_begin;  // in query rows of a sequence
  int32_t num_rows;   // those that the sequence has; of a unit, 0 or less if the tile has none

  __device__ RowTile(const WideParams& params, int32_t tile_idx)
      : idx(tile_idx),
        row_begin(tile_idx * params.rows_per_tile),
        num_rows(
            min(params.rows_per_tile, params.decode.q_len * params.decode.num_heads - row_begin)) {}

  __device__ __forceinline__ void SetUnit(const WideParams& params, const Unit& unit) {
    num_rows = min(params.rows_per_tile, unit.num_rows - row_begin);
  }
};

// The first query row of an item's sequence, or of its unit, in the whole call.
template <class C>
__device__ __forceinline__ int64_t FirstRow(const DecodeParams& d, const typename C::Item& item) {
  if constexpr (C::kHasUnits) return item.unit.row_begin;
  return static_cast<int64_t>(item.seq_idx) * d.q_len * d.num_heads;
}

inline constexpr int kMathWarpRows = 16;  // of the row tile, one behind the other

// A thread's place in its warpgroup. In wgmma's accumulator layout it owns the rows `row` and
// row + 8 of the row tile, and of every 8 columns the two that begin with 2 * quad.
struct Thread {
  int warp, lane, idx, row, quad;

  __device__ Thread()
      : warp(__shfl_sync(kAllLanes, threadIdx.x % kWarpgroupThreads / kWarpThreads, 0)),
        lane(threadIdx.x % kWarpThreads),
        idx(threadIdx.x % kWarpgroupThreads),
        row(warp * kMathWarpRows + lane / 4),
        quad(lane % 4) {}
};

}  // namespace jax_mla::decode::sm90::wide
