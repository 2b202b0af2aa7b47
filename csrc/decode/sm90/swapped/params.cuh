// What the roles of the kernels with swapped operands share: parameters, positions in the rings, a
// thread's place.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "decode/merge/partials.h"
#include "decode/params.h"
#include "decode/schedule/schedule.h"
#include "decode/sm90/common/new_row.cuh"
#include "decode/sm90/common/rotate_queries.cuh"
#include "decode/sm90/swapped/shape.h"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90 {

namespace hw = gpu::sm90;

using Append = Appender<kAppendTold, kAppendDone>;

// Everything that the host hands to one launch besides the tensor maps.
struct KernelParams {
  DecodeParams decode;
  ScheduleParams schedule;
  PartialBuffers partials;
  float scale_log2;              // sm_scale * log2(e): scores are kept in log2 units
  Divisor page_size, num_heads;  // num_heads: rows of a token
  NewRows new_rows;              // Config::kAppends alone
  uint64_t gather_policy;        // GatherPolicy
};

// A position in a ring of kSize stages: the stage, and the parity of the phase that its barriers
// complete next.
template <int kSize>
struct RingCursor {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void Advance(int steps) {
    stage += steps;
    if (stage >= kSize) {
      stage -= kSize;
      parity ^= 1;
    }
  }
  __device__ RingCursor Ahead(int steps) const {
    RingCursor other = *this;
    other.Advance(steps);
    return other;
  }
};

template <class C>
using KvCursor = RingCursor<C::kKvStages>;
template <class C>
using QueryCursor = RingCursor<C::kQueryStages>;

template <class C>
__device__ __forceinline__ QueryBarriers QueryBarriersOf(typename C::Shared& shared, int stage) {
  return {hw::SharedAddress(&shared.q_full[stage]), hw::SharedAddress(&shared.q_rope_full[stage])};
}

// Which of the two places of items belongs to the queries at `cursor`. With one query stage the
// next item may arrive while this one is still being written, so items take the places in turn, by
// parity.
template <class C>
__device__ __forceinline__ int ItemIndex(const QueryCursor<C>& cursor) {
  return C::kQueryStages == 1 ? static_cast<int>(cursor.parity) : cursor.stage;
}

// The place in SharedMemory::tile_scales of the block behind that with place `idx`.
template <class C>
__device__ __forceinline__ int NextTileScaleBlock(int idx) {
  return idx == C::kTileScaleBlocks - 1 ? 0 : idx + 1;
}

// Where a math thread stands. `team`, `wg` and `warp` are the same in all lanes of a warp.
struct Thread {
  int team, wg, warp, lane, idx;  // wg: in the team; warp and idx: in the warpgroup

  __device__ __forceinline__ Thread(int own_team, int team_warp)
      : team(own_team),
        wg(team_warp / kWarpgroupWarps),
        warp(team_warp % kWarpgroupWarps),
        lane(threadIdx.x % kWarpThreads),
        idx(threadIdx.x % kWarpgroupThreads) {}

  // The warpgroup, of all of the CTA.
  __device__ __forceinline__ int Group() const { return team * kTeamWarpgroups + wg; }
  // The first of the thread's two tokens of a block; the other one lies 8 behind.
  __device__ __forceinline__ int FirstToken() const { return warp * kMmaK + lane / 4; }
  // The tile's row that is the thread's row j, of kThreadRows.
  __device__ __forceinline__ int Row(int j) const { return (j / 2) * 8 + (lane % 4) * 2 + j % 2; }
  // Whether this is the first of the eight lanes of a warp that hold the same rows.
  __device__ __forceinline__ bool IsFirstOfRows() const { return lane < 4; }
};

}  // namespace jax_mla::decode::sm90
