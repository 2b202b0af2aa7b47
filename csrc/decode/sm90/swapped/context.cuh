// What a math warp knows of its CTA's work, in the kernels with swapped operands: its place, the
// item, and where in the rings it is.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "decode/params.h"
#include "decode/scales.cuh"
#include "decode/sm90/common/limits.cuh"
#include "decode/sm90/swapped/params.cuh"
#include "decode/trace.cuh"
#include "gpu/element.h"
#include "gpu/sm90.cuh"
#include "gpu/sm90_wgmma.cuh"

namespace jax_mla::decode::sm90 {

template <class C>
struct Context {
  using Config = C;
  using T = gpu::Element<C::kDType>;
  using PElement = typename C::PElement;  // of P and V as they are multiplied
  using Cursor = KvCursor<C>;
  using Scores = float[C::kAccumulators];

  const KernelParams& params;
  typename C::Shared& shared;
  const Thread thread;
  const int row_tile;
  typename C::Item item;
  Cursor kv;               // the first chunk of this block
  QueryCursor<C> query;    // this item
  Scales scales;           // of the item's sequence; Config::kHasCodes alone
  int tile_scale_idx = 0;  // Config::kHasTileScales alone: the block's place in tile_scales

  __device__ __forceinline__ Context(const KernelParams& kernel_params,
                                     typename C::Shared& shared_memory, const Thread& own_thread,
                                     int tile)
      : params(kernel_params), shared(shared_memory), thread(own_thread), row_tile(tile) {}

  // In a call of units. Where registers are few it stays in shared memory.
  __device__ __forceinline__ const Unit& unit() const {
    if constexpr (C::kMovesRegisters) return shared.items[ItemIndex<C>(query)].unit;
    return item.unit;
  }
  // The tile's first row, as a row of `out` and `lse`.
  __device__ __forceinline__ int64_t FirstRow() const {
    const int in_sequence = row_tile * C::kTileRows;
    if constexpr (C::kHasUnits) return unit().row_begin + in_sequence;
    const int rows = params.decode.q_len * params.decode.num_heads;
    return static_cast<int64_t>(item.seq_idx) * rows + in_sequence;
  }
  // The number of rows from the tile's first one to the sequence's last one. The tile has no more
  // than kTileRows of them.
  __device__ __forceinline__ int RowsLeft() const {
    if constexpr (C::kHasUnits) return unit().num_rows - row_tile * C::kTileRows;
    return params.decode.q_len * params.decode.num_heads - row_tile * C::kTileRows;
  }
  __device__ __forceinline__ Limits<C> RowLimits() const {
    if constexpr (C::kHasUnits) {
      return {params.decode, params.num_heads, &unit()};
    } else {
      return {params.decode, params.num_heads, nullptr};
    }
  }
  // Whether any row must not see some of a block's tokens. `tokens_left`: of the sequence, from the
  // block's first token on.
  __device__ __forceinline__ bool HidesTokens(uint64_t key_mask, int tokens_left) const {
    return key_mask != ~uint64_t{0} || tokens_left - RowLimits().HiddenByRows() < kBlockN;
  }

  __device__ __forceinline__ int WarpgroupBarrier() const {
    return kBarrierWg + thread.team * C::kSecondTeam + thread.wg;
  }
  __device__ __forceinline__ void SyncWarpgroup() const {
    hw::NamedBarrierSync(WarpgroupBarrier(), kWarpgroupThreads);
  }

  // Loads an item again at its end, because in between it would take registers.
  __device__ __forceinline__ void ReloadItem() {
    item = shared.items[ItemIndex<C>(query)];
    LoadScales();
  }
  __device__ __forceinline__ void LoadScales() {
    int32_t seq_idx = item.seq_idx;
    if constexpr (C::kHasUnits) seq_idx = unit().seq_idx;
    scales = ScalesOf(params.decode, seq_idx);
    if constexpr (C::kHasTileScales) {  // constants
      scales.value = C::kValueScale;
      scales.kpe = 1.0f;
    }
  }
  __device__ __forceinline__ float ScaleLog2() const {
    if constexpr (C::kHasCodes) return params.scale_log2 * scales.score;
    return params.scale_log2;
  }
  __device__ __forceinline__ void ReleaseItem() const {
    if (thread.idx == 0) hw::MbarrierArrive(hw::SharedAddress(&shared.q_empty[query.stage]));
  }

  // The stage of a latent chunk of this block. `own` counts those of the warpgroup.
  __device__ __forceinline__ Cursor OwnChunk(int own) const { return OwnChunk(kv, own); }
  // The same of another block.
  __device__ __forceinline__ Cursor OwnChunk(const Cursor& block, int own) const {
    return block.Ahead(C::kFirstLatentChunk + own * kTeamWarpgroups + thread.wg);
  }
  // For what threads read.
  __device__ __forceinline__ void WaitLanded(const Cursor& chunk) const {
    hw::MbarrierWait(hw::SharedAddress(&shared.kv_full[chunk.stage]), chunk.parity);
  }
  // For what wgmma reads, through the asynchronous proxy. Gathered chunks were written by the
  // generic one.
  __device__ __forceinline__ void WaitChunk(const Cursor& chunk) const {
    WaitLanded(chunk);
    if constexpr (C::kLoad == KvLoad::kGather && C::kWgmmaReadsKv) hw::FenceProxyAsyncShared();
  }
  // The key mask of the item's block `block`, whose first chunk is at `place`; 0 behind the last
  // block.
  __device__ __forceinline__ uint64_t KeyMaskOf(const Cursor& place, int block) const {
    if (block >= item.num_blocks) return 0;
    trace::Enter(Phase::kWaitKv);
    WaitChunk(place);
    return shared.key_mask[place.stage];
  }

  // Zeroes V of the tokens that are no keys, in the warpgroup's chunks. P is 0 there, but 0 * NaN
  // is NaN.
  __device__ __forceinline__ void ZeroAbsentTokens(const Cursor& block, uint64_t key_mask) const {
    constexpr int kRowVectors = kChunkRowBytes / kCopyBytes;
#pragma unroll 1
    for (int own = 0; own < C::kOwnChunks; ++own) {
      uint8_t* chunk = shared.kv[OwnChunk(block, own).stage];
#pragma unroll 1
      for (int i = thread.idx; i < kBlockN * kRowVectors; i += kWarpgroupThreads) {
        if (key_mask >> (i / kRowVectors) & 1) continue;
        *reinterpret_cast<uint4*>(chunk + i * kCopyBytes) = uint4{};
      }
    }
  }
  // wgmma reads a stage for all warps of a warpgroup at once, while codes are loaded by each warp.
  __device__ __forceinline__ void ReleaseOwnChunks(const Cursor& block) const {
    if constexpr (C::kHasCodes) __syncwarp();
    const int own = C::kHasCodes ? thread.lane : thread.idx;
    if (own < C::kOwnChunks) {
      hw::MbarrierArrive(hw::SharedAddress(&shared.kv_empty[OwnChunk(block, own).stage]));
    }
  }
  // Goes on behind a block that has its chunks.
  __device__ __forceinline__ void NextBlock() {
    kv.Advance(C::kChunks);
    if constexpr (C::kHasTileScales) tile_scale_idx = NextTileScaleBlock<C>(tile_scale_idx);
  }
};

// A math warpgroup's part of O^T: dims of a chunk by query rows. Of each of its kThreadRows rows a
// thread has two dims of a tile. S^T, tokens by query rows, has the same layout.
template <class C>
struct Output : Context<C> {
  float out[C::kOwnTiles][C::kAccumulators];

  using Context<C>::Context;

  // RowOf: the row, of kThreadRows, to which accumulator i belongs. AccumulatorOf: the first of row
  // j's two accumulators; the other one is two further.
  static constexpr __device__ int RowOf(int i) { return (i / 4) * 2 + i % 2; }
  static constexpr __device__ int AccumulatorOf(int j) { return (j / 2) * 4 + j % 2; }
  // Which of the thread's two tokens accumulator i of scores belongs to.
  static constexpr __device__ int TokenOf(int i) { return i / 2 % 2; }
  // The larger of the thread's two scores of row j.
  static __device__ __forceinline__ float MaxOfRow(const float (&scores)[C::kAccumulators], int j) {
    const int i = AccumulatorOf(j);
    return fmaxf(scores[i], scores[i + 2]);
  }

  __device__ __forceinline__ void ResetOut() {
#pragma unroll
    for (int own = 0; own < C::kOwnTiles; ++own) {
#pragma unroll
      for (int i = 0; i < C::kAccumulators; ++i) out[own][i] = 0.0f;
    }
  }
  __device__ __forceinline__ void ScaleOutRow(int j, float factor) {
#pragma unroll
    for (int own = 0; own < C::kOwnTiles; ++own) {
      out[own][AccumulatorOf(j)] *= factor;
      out[own][AccumulatorOf(j) + 2] *= factor;
    }
  }
  __device__ __forceinline__ void FenceOut() {
#pragma unroll
    for (int own = 0; own < C::kOwnTiles; ++own) hw::WgmmaFenceOperand(out[own]);
  }
  // Waits for the products with V.
  __device__ __forceinline__ void WaitValues() {
    hw::WgmmaWait<0>();
    FenceOut();
  }

  // Hides what a row must not see of a block: absent keys, tokens past the end, the causal future.
  // `tokens_left`: of the sequence, from the block's first token on.
  __device__ __forceinline__ void MaskScores(uint64_t key_mask, int tokens_left,
                                             float (&scores)[C::kAccumulators]) const {
    const int token = this->thread.FirstToken();
    const bool is_key[] = {(key_mask >> token & 1) != 0, (key_mask >> (token + 8) & 1) != 0};
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) {
      const int row = this->row_tile * C::kTileRows + this->thread.Row(j);
      const int limit = tokens_left - token + this->RowLimits().End(row);
      const int i = AccumulatorOf(j);
      if (!is_key[0] || limit <= 0) scores[i] = -INFINITY;
      if (!is_key[1] || limit <= 8) scores[i + 2] = -INFINITY;
    }
  }

  // Combines the values of the lanes that hold the same rows, and stores a warp's result where
  // others read it. All rows take each step together, so that their shuffles are under way at the
  // same time.
  template <class Combine>
  __device__ __forceinline__ void StoreOverLanes(float (&values)[C::kThreadRows],
                                                 Combine combine) const {
#pragma unroll
    for (int offset = 4; offset < kWarpThreads; offset *= 2) {
#pragma unroll
      for (int j = 0; j < C::kThreadRows; ++j) {
        values[j] = combine(values[j], __shfl_xor_sync(~0u, values[j], offset));
      }
    }
    const Thread& thread = this->thread;
    if (!thread.IsFirstOfRows()) return;
    auto& stats = this->shared.row_stats[thread.Group()];
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) stats[thread.Row(j)][thread.warp] = values[j];
  }
};

// What StoreOverLanes left of a row's four warps, added up.
__device__ __forceinline__ float SumOfWarps(const float (&stats)[kWarpgroupWarps]) {
  const float4 warps = *reinterpret_cast<const float4*>(stats);
  return (warps.x + warps.y) + (warps.z + warps.w);
}
__device__ __forceinline__ float MaxOfWarps(const float (&stats)[kWarpgroupWarps]) {
  const float4 warps = *reinterpret_cast<const float4*>(stats);
  return fmaxf(fmaxf(warps.x, warps.y), fmaxf(warps.z, warps.w));
}

}  // namespace jax_mla::decode::sm90
