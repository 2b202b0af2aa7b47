// The two warpgroups for the values (WG0, WG1), in the kernel with query codes. Each has half of
// the dims of O^T, and P of every block from the warpgroup for the scores (scores.cuh). Roles and
// barriers: kernel.cuh.
#pragma once

#include <cstdint>

#include "decode/sm90/codes64/config.h"
#include "decode/sm90/codes64/math.cuh"
#include "decode/sm90/codes64/scores.cuh"
#include "decode/sm90/swapped/codes.cuh"
#include "decode/sm90/swapped/finish.cuh"
#include "decode/sm90/swapped/params.cuh"
#include "decode/trace.cuh"
#include "gpu/fp8.cuh"
#include "gpu/sm90.cuh"
#include "gpu/sm90_wgmma.cuh"

namespace jax_mla::decode::sm90::codes64 {

// Codes of V as they are multiplied.
struct PlainValues {
  __device__ __forceinline__ void LoadStep(int) {}
  __device__ __forceinline__ uint2 Decode(uint32_t codes, int) const { return DecodeWord(codes); }
};

// The same times the tile scales of a chunk.
struct ScaledValues {
  const uint2* steps;  // of ScaleTable::values, from the thread's first token on
  uint2 scales;        // of the thread's tokens of a step: two in each half of it

  __device__ __forceinline__ void LoadStep(int step) { scales = steps[step * 4]; }
  __device__ __forceinline__ uint2 Decode(uint32_t codes, int half) const {
    return gpu::ScaleE4m3(codes, half == 0 ? scales.x : scales.y);
  }
};

// O^T += V^T P^T on the own latent chunks of the block at `math.kv`, whose P is at `place`. Like
// AccumulateCodes, but half of a step at a time, for which 16 registers hold fragments instead of
// 32. Meanwhile the other warpgroups keep the tensor cores busy.
template <class Values, class M>
__device__ __forceinline__ void AccumulateBlock(M& math, int place, Values chunk_values) {
  using C = typename M::Config;
  constexpr int kWords = kRunDims<C> / 4, kWordTiles = 2, kSteps = kBlockN / kMmaK;
  static_assert(kWords == 2, "a thread's codes of a token are loaded at once");
  const Thread& thread = math.thread;
  const uint8_t* chunk = math.shared.kv[math.OwnChunk(thread.warp / kChunkWarps<C>).stage];
  const int byte = FirstDimOfCodes<C>(thread, 0) % C::kLatentChunkDims;
  uint32_t first_tokens[2];  // as in AccumulateCodes (f16_codes.cuh)
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    first_tokens[i] = VectorOffset(thread.lane % 4 * 2 + i, byte / kCopyBytes) + byte % kCopyBytes;
  }
  const uint64_t p = hw::SharedDescriptor(hw::SharedAddress(math.shared.p[place]));
  uint32_t values[2][kWordTiles][4];
  math.FenceOut();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t codes[4][kWords];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = step * kMmaK + i / 2 * kSwizzleRows;
      const uint2 pair =
          *reinterpret_cast<const uint2*>(chunk + first_tokens[i % 2] + token * kChunkRowBytes);
      codes[i][0] = pair.x, codes[i][1] = pair.y;
    }
    chunk_values.LoadStep(step);
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      if (step > 0) hw::WgmmaWait<1>();  // products with the set's last contents
      auto& set = values[word];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Codes of two tokens side by side: dims 0 and 1 of the word, then 2 and 3.
        const uint32_t a = codes[2 * half][word], b = codes[2 * half + 1][word];
        const uint2 first = chunk_values.Decode(__byte_perm(a, b, 0x5140), half);
        const uint2 second = chunk_values.Decode(__byte_perm(a, b, 0x7362), half);
        set[0][2 * half] = first.x, set[0][2 * half + 1] = first.y;
        set[1][2 * half] = second.x, set[1][2 * half + 1] = second.y;
      }
      hw::WgmmaArrive();
#pragma unroll
      for (int tile = 0; tile < kWordTiles; ++tile) {
        hw::WgmmaRS<typename M::PElement, C::kTileRows, hw::Major::K>(
            set[tile], hw::AdvanceDescriptor(p, step * kMmaKBytes),
            math.out[word * kWordTiles + tile], true);
      }
      hw::WgmmaCommit();
    }
  }
  math.ReleaseOwnChunks(math.kv);
  math.WaitValues();
}

// Multiplies O by the factors of the rows whose references rose.
template <class M>
__device__ __forceinline__ void ScaleRaisedRows(M& math, const ScoredBlock& block,
                                                const float (&factors)[M::Config::kTileRows]) {
  constexpr int kWarpRows = M::Config::kThreadRows / kWarpgroupWarps;  // of a warp of the scores
#pragma unroll
  for (int warp = 0; warp < kWarpgroupWarps; ++warp) {
    if (!block.raises[warp]) continue;
#pragma unroll
    for (int j = warp * kWarpRows; j < (warp + 1) * kWarpRows; ++j) {
      math.ScaleOutRow(j, factors[math.thread.Row(j)]);
    }
  }
}

// Called by each warp, when it is done with what is in a place.
template <class M>
__device__ __forceinline__ void FreeScored(const M& math, ScoredCursor& place) {
  __syncwarp();
  if (math.thread.lane == 0) {
    hw::MbarrierArrive(hw::SharedAddress(&math.shared.scored.empty[place.stage]));
  }
  place.Advance(1);
}

// All blocks of an item. Returns at its end, whose place is not freed yet.
template <class M>
__device__ __forceinline__ void AccumulateBlocks(M& math, ScoredCursor& place) {
  using C = typename M::Config;
  const auto& scored = math.shared.scored;
#pragma unroll 1
  while (true) {
    trace::Enter(Phase::kExchange);
    hw::MbarrierWait(hw::SharedAddress(&scored.full[place.stage]), place.parity);
    const ScoredBlock block = scored.blocks[place.stage];
#pragma unroll 1
    for (int i = 0; i < block.empty_blocks; ++i) math.kv.Advance(1);
    if (block.key_mask == 0) return;
    trace::Enter(Phase::kPv);
    ScaleRaisedRows(math, block, scored.factors[place.stage]);
    // They have landed, since their scores are known. So no phase can be missed here, although
    // these warps do not wait for each one of a stage.
#pragma unroll
    for (int own = 0; own < C::kOwnChunks; ++own) math.WaitLanded(math.OwnChunk(own));
    if (block.key_mask != ~uint64_t{0}) {
      math.ZeroAbsentTokens(math.kv, block.key_mask);
      hw::FenceProxyAsyncShared();
      math.SyncWarpgroup();
    }
    if constexpr (C::kScalesValues) {
      const ScaleTable& table = math.shared.scale_tables.tables[math.tile_scale_idx];
      const int tile = math.thread.warp / kChunkWarps<C> * kTeamWarpgroups + math.thread.wg;
      const auto* scales =
          reinterpret_cast<const uint2*>(table.values[tile]) + math.thread.lane % 4;
      AccumulateBlock(math, place.stage, ScaledValues{scales, {}});
    } else {
      AccumulateBlock(math, place.stage, PlainValues{});
    }
    FreeScored(math, place);
    math.NextBlock();
  }
}

// Writes the item's result.
template <class M>
__device__ __forceinline__ void WriteItem(M& math) {
  trace::Enter(Phase::kWrite);
  math.ReloadItem();
  WriteStats(math);
  if (math.item.slot == kFinal) {
    WriteFinalVectors(math);
  } else {
    ScaleOutput(math);
    WritePartial(math);
  }
  // The next item overwrites what the end of this one uses.
  hw::NamedBarrierSync(kBarrierMath, kTeamThreads);
}

// O^T of all items, and their results.
template <class C>
__device__ __forceinline__ void ValuesRole(const KernelParams& params, SharedMemory<C>& shared,
                                           int warp, int row_tile) {
  Math<C> math(params, shared, warp, row_tile);
  ScoredCursor place;
#pragma unroll 1
  while (true) {
    trace::Enter(Phase::kWaitItem);
    hw::MbarrierWait(hw::SharedAddress(&shared.q_full[math.query.stage]), math.query.parity);
    if (shared.items[ItemIndex<C>(math.query)].num_blocks == kNoMoreItems) break;
    trace::Enter(Phase::kConvert);
    PackQueries(math);
    SendPacked();
    // These warps are done with the queries, and the item stays where it is until the next but one
    // comes, which waits for these warps to have seen the next one.
    __syncwarp();
    if (math.thread.lane == 0) {
      hw::MbarrierArrive(hw::SharedAddress(&shared.q_empty[math.query.stage]));
    }
    math.ResetOut();
    AccumulateBlocks(math, place);
    math.rows_with_keys = 0;
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) {
      if (math.SumOfRow(math.thread.Row(j)) != 0.0f) math.rows_with_keys |= 1u << j;
    }
    WriteItem(math);
    FreeScored(math, place);
    math.query.Advance(1);
  }
}

}  // namespace jax_mla::decode::sm90::codes64
