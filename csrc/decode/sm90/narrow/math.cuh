// One math warpgroup of the narrow kernel: its partial scores, the softmax, and P V of the latent
// chunks that it owns. It is one object, hence the length of the file. Roles and barriers:
// kernel.cuh.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "decode/params.h"
#include "decode/scales.cuh"
#include "decode/sm90/narrow/codes.cuh"
#include "decode/sm90/narrow/config.h"
#include "decode/sm90/narrow/params.cuh"
#include "decode/sm90/tuning.h"
#include "decode/trace.cuh"
#include "gpu/element.h"
#include "gpu/online_softmax.cuh"
#include "gpu/sm90.cuh"
#include "gpu/sm90_wgmma.cuh"

namespace jax_mla::decode::sm90::narrow {

// One math warpgroup. Its partial scores, its part of O and the tile scales of its P are its own;
// all else has the same bits in both warpgroups of a team. With pairs of blocks, scores and sums
// are its own too.
//
// wgmma's accumulators are 64 x kBlockM: tokens by query rows for S^T, dims of a chunk by query
// rows for O^T. Of each of its kThreadRows rows a thread has two tokens, or dims.
template <class C>
struct Math {
  using Config = C;
  using T = gpu::Element<C::kDType>;
  // Of P and V as they are multiplied.
  using PElement = std::conditional_t<C::kIsFp8 && !C::kScalesValues, __half, T>;
  using Cursor = KvCursor<C>;
  using Scores = float[C::kAccumulators];

  const KernelParams& params;
  SharedMemory<C>& shared;
  const Thread thread;
  const int row_tile;
  float out[C::kOwnTiles][C::kAccumulators];  // O^T of the own dims
  float reference[C::kThreadRows];            // lazy running maximum, log2 units; pairs: RowSoftmax
  float sum[C::kThreadRows];                  // of P, over the thread's tokens of the item
  typename C::Item item;
  Cursor kv;             // the first chunk of this block
  QueryCursor<C> query;  // this item
  int exchange_idx = 0;  // which of the exchange buffers this block uses
  // Config::kIsFp8 alone.
  Scales scales;            // of the item's sequence
  int tile_scale_idx = 0;   // Config::kHasTileScales alone: the block's place in tile_scales
  uint32_t rows_with_keys;  // Config::kHasManyRows alone: bit j: the thread's row j has seen a key

  __device__ __forceinline__ Math(const KernelParams& kernel_params, SharedMemory<C>& shared_memory,
                                  int cta_warp, int tile)
      : params(kernel_params),
        shared(shared_memory),
        thread(C::kTeams > 1 ? cta_warp / kTeamWarps : 0,
               C::kTeams > 1 ? cta_warp % kTeamWarps : cta_warp),
        row_tile(tile) {}

  // RowOf: the row, of kThreadRows, to which accumulator i belongs. AccumulatorOf: the first of row
  // j's two accumulators; the other one is two further.
  static constexpr __device__ int RowOf(int i) { return (i / 4) * 2 + i % 2; }
  static constexpr __device__ int AccumulatorOf(int j) { return (j / 2) * 4 + j % 2; }
  // Which of the thread's two tokens accumulator i of scores belongs to.
  static constexpr __device__ int TokenOf(int i) { return i / 2 % 2; }

  // Of the item. Where a register for it would be spilled, it is read from shared memory.
  __device__ __forceinline__ int NumBlocks() const {
    if constexpr (C::kHasTileScales) {
      return shared.items[ItemIndex<C>(query)].num_blocks;
    }
    return item.num_blocks;
  }
  // In a call of units. Where registers are few it stays in shared memory.
  __device__ __forceinline__ const Unit& unit() const {
    if constexpr (C::kMovesRegisters) return shared.items[ItemIndex<C>(query)].unit;
    return item.unit;
  }
  // The tile's first row, as a row of `out` and `lse`.
  __device__ __forceinline__ int64_t FirstRow() const {
    const int in_sequence = row_tile * C::kBlockM;
    if constexpr (C::kHasUnits) return unit().row_begin + in_sequence;
    const int rows = params.decode.q_len * params.decode.num_heads;
    return static_cast<int64_t>(item.seq_idx) * rows + in_sequence;
  }
  // The number of rows from the tile's first one to the sequence's last one. The tile has no more
  // than kBlockM of them.
  __device__ __forceinline__ int RowsLeft() const {
    if constexpr (C::kHasUnits) return unit().num_rows - row_tile * C::kBlockM;
    return params.decode.q_len * params.decode.num_heads - row_tile * C::kBlockM;
  }
  // Whether the thread's row j is one of the unit's. The others are the next unit's queries, which
  // may be another sequence's: they must not change what this one's rows are rounded to.
  __device__ __forceinline__ bool IsOwnRow(int j) const {
    return !C::kHasUnits || thread.Row(j) < RowsLeft();
  }
  __device__ __forceinline__ int WarpgroupBarrier() const {
    return kBarrierWg + thread.team * kSecondTeam + thread.wg;
  }
  __device__ __forceinline__ int TeamBarrier() const {
    return kBarrierMath + thread.team * kSecondTeam;
  }
  // Of the partial scores that warpgroup `wg` of the team reads.
  __device__ __forceinline__ int ExchangeReadBarrier(int wg) const {
    return kBarrierExchangeRead + thread.team * kTeamWarpgroups + wg;
  }
  __device__ __forceinline__ void SyncWarpgroup() const {
    hw::NamedBarrierSync(WarpgroupBarrier(), kWarpgroupThreads);
  }

  __device__ __forceinline__ void SyncTeams() const {
    hw::NamedBarrierSync(kBarrierTeams, C::kMathThreads);
  }

  // Waits for all whose statistics these are.
  __device__ __forceinline__ void SyncStats() const {
    if constexpr (C::kHasManyRows) {
      hw::NamedBarrierSync(kBarrierMath, kTeamThreads);
    } else {
      SyncWarpgroup();
    }
  }

  __device__ __forceinline__ float ScaleLog2() const {
    if constexpr (C::kIsFp8) return params.scale_log2 * scales.score;
    return params.scale_log2;
  }

  // By what scores of row j have to be multiplied (PrepareQueries). Not with pairs: RowSoftmax.
  __device__ __forceinline__ float QueryScale(int j) const {
    return shared.query_scale[thread.wg][thread.Row(j)];
  }

  // Config::kHasQueryCodes alone: the sums of the rows, at the item's end.
  __device__ __forceinline__ auto& SumsOfItem() const {
    return shared.scored.sums[ItemIndex<C>(query)];
  }

  // Waits for the next item and its queries. False if there is none left.
  __device__ __forceinline__ bool NextItem() {
    trace::Enter(Phase::kWaitItem);
    hw::MbarrierWait(hw::SharedAddress(&shared.q_full[query.stage]), query.parity);
    item = shared.items[ItemIndex<C>(query)];
    if (item.num_blocks == kNoMoreItems) return false;
    if constexpr (C::kTeams > 1) {
      if (thread.team == 0) PrepareQueries(*this);
      LoadScales();
      SyncTeams();
    } else if constexpr (C::kIsFp8) {
      LoadScales();
      PrepareQueries(*this);
      SyncStats();
    }
    return true;
  }
  // Loads an item of block pairs again at its end, because in between it would take registers.
  __device__ __forceinline__ void ReloadItem() {
    item = shared.items[ItemIndex<C>(query)];
    LoadScales();
  }
  __device__ __forceinline__ void LoadScales() {
    int32_t seq_idx = item.seq_idx;
    if constexpr (C::kHasUnits) seq_idx = unit().seq_idx;
    scales = ScalesOf(params.decode, seq_idx);
    if constexpr (C::kHasTileScales) {  // constants
      scales.value = C::kScalesValues ? kValueUnit : 1.0f;
      scales.kpe = 1.0f;
    }
  }
  __device__ __forceinline__ void ReleaseItem() const {
    if (thread.idx == 0) hw::MbarrierArrive(hw::SharedAddress(&shared.q_empty[query.stage]));
  }

  __device__ __forceinline__ void ResetSoftmax() {
#pragma unroll
    for (int own = 0; own < C::kOwnTiles; ++own) {
#pragma unroll
      for (int i = 0; i < C::kAccumulators; ++i) out[own][i] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) {
      reference[j] = gpu::kNoReference;
      sum[j] = 0.0f;
    }
  }

  // The stage of a latent chunk of this block. `own` counts those of the warpgroup.
  __device__ __forceinline__ Cursor OwnChunk(int own) const { return OwnChunk(kv, own); }
  // The same of another block.
  __device__ __forceinline__ Cursor OwnChunk(const Cursor& block, int own) const {
    return block.Ahead(1 + own * kTeamWarpgroups + thread.wg);
  }
  // For what threads read.
  __device__ __forceinline__ void WaitLanded(const Cursor& chunk) const {
    hw::MbarrierWait(hw::SharedAddress(&shared.kv_full[chunk.stage]), chunk.parity);
  }
  // For what wgmma reads, through the asynchronous proxy. Gathered chunks were written by the
  // generic one. With codes wgmma reads chunks for the scores of query codes alone.
  __device__ __forceinline__ void WaitChunk(const Cursor& chunk) const {
    WaitLanded(chunk);
    if constexpr (C::kLoad == KvLoad::kGather && (!C::kIsFp8 || C::kHasQueryCodes)) {
      hw::FenceProxyAsyncShared();
    }
  }
  // Frees the stage of the rope chunk, or of an empty block. Both warpgroups have passed math_all
  // since they read it.
  __device__ __forceinline__ void ReleaseFirstChunk() const {
    const int arriving = C::kIsFp8 ? (thread.wg == 0 && thread.lane == 0) : threadIdx.x == 0;
    if (arriving) hw::MbarrierArrive(hw::SharedAddress(&shared.kv_empty[kv.stage]));
  }

  // scores = the warpgroup's part of S^T. The rope chunk has landed, and comes first; the latent
  // chunks follow as they land.
  __device__ __forceinline__ void PartialScores(Scores& scores) const {
    constexpr auto kK = hw::Major::K;
    const uint32_t q = hw::SharedAddress(shared.q[query.stage]);
    const uint32_t rope_begin = thread.wg * C::kOwnRopeSteps * kMmaKBytes;
    const uint64_t rope = hw::SharedDescriptor(hw::SharedAddress(shared.kv[kv.stage]) + rope_begin);
    const uint64_t q_rope =
        hw::SharedDescriptor(q + C::kCkvQueryChunks * C::kQueryChunkBytes + rope_begin);
    trace::Enter(Phase::kQk);
    hw::WgmmaFenceOperand(scores);
    hw::WgmmaArrive();
#pragma unroll
    for (int step = 0; step < C::kOwnRopeSteps; ++step) {
      hw::WgmmaSS<T, C::kBlockM, kK, kK>(hw::AdvanceDescriptor(rope, step * kMmaKBytes),
                                         hw::AdvanceDescriptor(q_rope, step * kMmaKBytes), scores,
                                         step > 0);
    }
#pragma unroll 1
    for (int own = 0; own < C::kOwnChunks; ++own) {
      const Cursor cursor = OwnChunk(own);
      const int chunk = own * kTeamWarpgroups + thread.wg;
      WaitChunk(cursor);
      hw::WgmmaArrive();
      const uint64_t k_chunk = hw::SharedDescriptor(hw::SharedAddress(shared.kv[cursor.stage]));
      const uint64_t q_chunk = hw::SharedDescriptor(q + chunk * C::kQueryChunkBytes);
#pragma unroll
      for (int step = 0; step < kChunkDims / kMmaK; ++step) {
        hw::WgmmaSS<T, C::kBlockM, kK, kK>(hw::AdvanceDescriptor(k_chunk, step * kMmaKBytes),
                                           hw::AdvanceDescriptor(q_chunk, step * kMmaKBytes),
                                           scores, true);
      }
      hw::WgmmaCommit();
    }
    trace::Enter(Phase::kWaitMma);
    hw::WgmmaWait<0>();
    hw::WgmmaFenceOperand(scores);
  }

  // Adds the other warpgroup's partial scores. It is a single addition, so both get the same bits.
  __device__ __forceinline__ void ExchangeScores(int idx, Scores& scores) const {
    auto& buffer = shared.exchange[thread.team][idx];
    trace::Enter(Phase::kExchange);
    if constexpr (C::kExchangeBuffers == 1) {
      hw::NamedBarrierSync(ExchangeReadBarrier(1 - thread.wg), kTeamThreads);
    }
#pragma unroll
    for (int j = 0; j < C::kBlockM / 8; ++j) {
      buffer[thread.wg][j][thread.idx] =
          make_float4(scores[4 * j], scores[4 * j + 1], scores[4 * j + 2], scores[4 * j + 3]);
    }
    hw::NamedBarrierSync(TeamBarrier(), kTeamThreads);
#pragma unroll
    for (int j = 0; j < C::kBlockM / 8; ++j) {
      const float4 other = buffer[1 - thread.wg][j][thread.idx];
      scores[4 * j] += other.x;
      scores[4 * j + 1] += other.y;
      scores[4 * j + 2] += other.z;
      scores[4 * j + 3] += other.w;
    }
    FreeExchange();
  }
  // Tells the other warpgroup that this one has read its partial scores, where there is one buffer
  // for them. Also at the start, when there is nothing to read.
  __device__ __forceinline__ void FreeExchange() const {
    if constexpr (C::kExchangeBuffers == 1) {
      hw::NamedBarrierArrive(ExchangeReadBarrier(thread.wg), kTeamThreads);
    }
  }

  // Whether any row must not see some of a block's tokens.
  __device__ __forceinline__ bool HidesTokens(uint64_t key_mask, int tokens_left) const {
    int hidden_tokens = params.decode.causal ? params.decode.q_len - 1 : 0;
    if constexpr (C::kHasUnits) hidden_tokens = unit().seq_len - unit().first_limit;
    return key_mask != ~uint64_t{0} || tokens_left - hidden_tokens < kBlockN;
  }

  // Hides what a row must not see: absent keys, tokens past the end, the causal future.
  // `tokens_left`: of the sequence, from the block's first token on.
  __device__ __forceinline__ void MaskScores(uint64_t key_mask, int tokens_left,
                                             Scores& scores) const {
    const int token = thread.FirstToken();
    const bool is_key[] = {(key_mask >> token & 1) != 0, (key_mask >> (token + 8) & 1) != 0};
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) {
      int limit = tokens_left - token;
      if constexpr (C::kHasUnits) {
        const int row = unit().first_head + row_tile * C::kBlockM + thread.Row(j);
        limit += min(unit().first_limit + params.num_heads.Floor(row) - unit().seq_len, 0);
      } else if (params.decode
                     .causal) {  // a query does not see the tokens of the queries behind it
        const int q_idx = params.num_heads.Floor(row_tile * C::kBlockM + thread.Row(j));
        limit += q_idx - (params.decode.q_len - 1);
      }
      const int i = AccumulatorOf(j);
      if (!is_key[0] || limit <= 0) scores[i] = -INFINITY;
      if (!is_key[1] || limit <= 8) scores[i + 2] = -INFINITY;
    }
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

  // The larger of the thread's two scores of row j.
  static __device__ __forceinline__ float MaxOfRow(const Scores& scores, int j) {
    const int i = AccumulatorOf(j);
    return fmaxf(scores[i], scores[i + 2]);
  }

  // Combines the values of the lanes that hold the same rows, and stores a warp's result where the
  // warpgroup's other warps read it. All rows take each step together, so that their shuffles are
  // under way at the same time.
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
    if (!thread.IsFirstOfRows()) return;
    auto& stats = shared.row_stats[thread.Group()];
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) stats[thread.Row(j)][thread.warp] = values[j];
  }

  // Raises the references of all rows to their maxima if any score of the warpgroup exceeds its
  // row's by the threshold. In an item's first block one does, so there is no vote. Where
  // threads gather the vote stays, because page size 1 is up to 1 % slower without it.
  __device__ __forceinline__ void UpdateReference(const Scores& scores, bool is_first) {
    constexpr float kThreshold = C::kIsFp8 ? kCodesRescaleThreshold : kNarrowRescaleThreshold;
    bool exceeds = false;
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) {
      const bool votes = kThreshold == 0.0f || IsOwnRow(j);  // without a threshold no bit changes
      exceeds |= votes && MaxOfRow(scores, j) > reference[j] + kThreshold;
    }
    const bool is_certain = is_first && C::kLoad != KvLoad::kGather;
    if (!is_certain && !hw::NamedBarrierAny(WarpgroupBarrier(), kWarpgroupThreads, exceeds)) {
      return;
    }
    float maxima[C::kThreadRows];
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) maxima[j] = MaxOfRow(scores, j);
    StoreOverLanes(maxima, [](float a, float b) { return fmaxf(a, b); });
    SyncWarpgroup();
    const auto& stats = shared.row_stats[thread.Group()];
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) {
      const float4 warps = *reinterpret_cast<const float4*>(stats[thread.Row(j)]);
      const float raised =
          fmaxf(reference[j], fmaxf(fmaxf(warps.x, warps.y), fmaxf(warps.z, warps.w)));
      const float factor = hw::Exp2(reference[j] - raised);
      reference[j] = raised;
      if (is_first) continue;  // sum and O are 0
      sum[j] *= factor;
      ScaleOutRow(j, factor);
    }
  }
  __device__ __forceinline__ void ScaleOutRow(int j, float factor) {
#pragma unroll
    for (int own = 0; own < C::kOwnTiles; ++own) {
      out[own][AccumulatorOf(j)] *= factor;
      out[own][AccumulatorOf(j) + 2] *= factor;
    }
  }

  // The scales of the own chunks for the block's tokens that the thread has scores of.
  using OwnTileScales = float[C::kScaledChunks][2];
  __device__ __forceinline__ void LoadTileScales(OwnTileScales& own_scales) const {
    const TokenScales* block = shared.tile_scales.blocks[tile_scale_idx];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int own = 0; own < C::kOwnChunks; ++own) {
        own_scales[own][i] =
            block[thread.FirstToken() + 8 * i].tiles[own * kTeamWarpgroups + thread.wg];
      }
    }
  }
  // The powers of two that are taken out of all scales of these tokens (codes.cuh).
  using TokenPowers = PowerOfTwo[2];
  __device__ __forceinline__ void LoadTokenPowers(TokenPowers& powers) const {
    const TokenScales* block = shared.tile_scales.blocks[tile_scale_idx];
#pragma unroll
    for (int i = 0; i < 2; ++i) powers[i] = PowerOf(block[thread.FirstToken() + 8 * i]);
  }

  // P = exp2(scores - reference). It is added to the sums and stored as [row][token], wgmma's B
  // operand; with tile scales once for each own chunk, times its scale without the token's power.
  __device__ __forceinline__ void StoreP(Scores& scores, uint64_t key_mask,
                                         const TokenPowers& powers) {
    OwnTileScales factors = {};
    if constexpr (C::kHasTileScales) {
      LoadTileScales(factors);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool is_key = key_mask >> (thread.FirstToken() + 8 * i) & 1;
#pragma unroll
        for (int own = 0; own < C::kScaledChunks; ++own) {
          factors[own][i] = is_key ? factors[own][i] * powers[i].Inverse() : 0.0f;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < C::kAccumulators; ++i) {
      scores[i] = hw::Exp2(scores[i] - reference[RowOf(i)]);
      if constexpr (C::kHasTileScales) {
        sum[RowOf(i)] = fmaf(scores[i], powers[TokenOf(i)].Inverse(), sum[RowOf(i)]);
      } else {
        sum[RowOf(i)] += scores[i];
      }
    }
    // stmatrix stores 8 x 8 matrices, and takes the address of row l % 8 of matrix l / 8 from lane
    // l. Matrices 0 and 1 are the halves of the warp's 16 tokens; 2 and 3 the same of the next 8
    // rows.
    const int row = (C::kBlockM > 8 ? thread.lane / 16 * 8 : 0) + thread.lane % 8;
    const int token = thread.warp * kMmaK + thread.lane / 8 % 2 * 8;
    const uint32_t swizzle = thread.lane % 8 * kCopyBytes;
    const uint32_t address = hw::SharedAddress(shared.p[thread.Group()]) + row * kChunkRowBytes +
                             ((token * kElementBytes) ^ swizzle);
#pragma unroll
    for (int chunk = 0; chunk < C::kScaledChunks; ++chunk) {
      uint32_t packed[C::kAccumulators / 2];
#pragma unroll
      for (int i = 0; i < C::kAccumulators / 2; ++i) {
        float scale = 1.0f;
        if constexpr (C::kHasTileScales) scale = factors[chunk][TokenOf(2 * i)];
        packed[i] = hw::Pack2<PElement>(scores[2 * i] * scale, scores[2 * i + 1] * scale);
      }
      const uint32_t target = address + chunk * C::kQueryChunkBytes;
      if constexpr (C::kBlockM == 8) {
        hw::StoreMatrixX2Transposed(target, packed[0], packed[1]);
      } else {
        hw::StoreMatrixX4Transposed(target, packed[0], packed[1], packed[2], packed[3]);
      }
    }
  }

  // O^T += V^T P^T on the own latent chunks.
  __device__ __forceinline__ void AccumulateOutput() {
    const uint64_t p = hw::SharedDescriptor(hw::SharedAddress(shared.p[thread.Group()]));
#pragma unroll
    for (int own = 0; own < C::kOwnChunks; ++own) hw::WgmmaFenceOperand(out[own]);
    hw::WgmmaArrive();
#pragma unroll
    for (int own = 0; own < C::kOwnChunks; ++own) {
      const uint64_t v = hw::SharedDescriptor(hw::SharedAddress(shared.kv[OwnChunk(own).stage]));
#pragma unroll
      for (int step = 0; step < kBlockN / kMmaK; ++step) {
        hw::WgmmaSS<T, C::kBlockM, hw::Major::MN, hw::Major::K>(
            hw::AdvanceDescriptor(v, step * kMmaK * kChunkRowBytes),
            hw::AdvanceDescriptor(p, step * kMmaKBytes), out[own], true);
      }
    }
    hw::WgmmaCommit();
    hw::WgmmaWait<0>();
#pragma unroll
    for (int own = 0; own < C::kOwnChunks; ++own) hw::WgmmaFenceOperand(out[own]);
  }
  __device__ __forceinline__ void ReleaseOwnChunks(const Cursor& block) const {
    if constexpr (C::kIsFp8) __syncwarp();
    const int own = C::kIsFp8 ? thread.lane : thread.idx;
    if (own < C::kOwnChunks) {
      hw::MbarrierArrive(hw::SharedAddress(&shared.kv_empty[OwnChunk(block, own).stage]));
    }
  }

  // Goes on behind a block that has its chunks.
  __device__ __forceinline__ void NextBlock() {
    kv.Advance(C::kChunks);
    if constexpr (C::kHasTileScales) tile_scale_idx = NextTileScaleBlock<C>(tile_scale_idx);
  }

  // Whether the other team takes the block. Its stages say so: a barrier tells only the parity of
  // its phase, so whoever waits for a stage has to wait for it each time that it is filled.
  __device__ __forceinline__ bool IsOtherTeams() const {
    return C::kTeams > 1 && kv.stage / C::kChunks % C::kTeams != thread.team;
  }

  // Passes over a block without a single key. It has one stage and no chunks (SendEmptyBlock). With
  // teams it has all stages and no data, so that the other team need not know that it is empty.
  __device__ __forceinline__ void SkipEmptyBlock() {
    hw::NamedBarrierSync(TeamBarrier(), kTeamThreads);
    ReleaseFirstChunk();
    if constexpr (C::kTeams == 1) {
      kv.Advance(1);
    } else {
#pragma unroll 1
      for (int own = 0; own < C::kOwnChunks; ++own) WaitChunk(OwnChunk(own));
      ReleaseOwnChunks(kv);
      NextBlock();
    }
  }

  // Scores, softmax and output of the item's block `block`.
  __device__ __forceinline__ void ProcessBlock(int block, uint64_t key_mask) {
    const int tokens_left = item.tokens_left - block * kBlockN;
    Scores scores;
    if constexpr (C::kIsFp8) {
      PartialScoresOfCodes(*this, scores);
    } else {
      PartialScores(scores);
    }
    ExchangeScores(exchange_idx, scores);
    TokenPowers powers = {};
    if constexpr (C::kHasTileScales) LoadTokenPowers(powers);
    ReleaseFirstChunk();
    trace::Enter(Phase::kSoftmax);
#pragma unroll
    for (int i = 0; i < C::kAccumulators; ++i) {
      if constexpr (C::kHasTileScales) {
        scores[i] = fmaf(scores[i], ScaleLog2(), powers[TokenOf(i)].Log2());
      } else {
        scores[i] *= ScaleLog2();
      }
    }
    if (HidesTokens(key_mask, tokens_left)) {
      MaskScores(key_mask, tokens_left, scores);
      if (key_mask != ~uint64_t{0}) ZeroAbsentTokens(kv, key_mask);
    }
    UpdateReference(scores, block < C::kTeams);
    trace::Enter(Phase::kStoreP);
    StoreP(scores, key_mask, powers);
    hw::FenceProxyAsyncShared();
    SyncWarpgroup();
    trace::Enter(Phase::kPv);
    if constexpr (C::kIsFp8) {
      AccumulateCodes<1>(*this, thread.Group(), [] {}, [] {});
      WaitValues(*this);
    } else {
      AccumulateOutput();
    }
    ReleaseOwnChunks(kv);
    NextBlock();
    exchange_idx ^= C::kExchangeBuffers - 1;
  }
};

// The key mask of the item's block `block`, whose rope chunk is at `place`; 0 behind the last
// block.
template <class M>
__device__ __forceinline__ uint64_t KeyMaskOf(const M& math, const typename M::Cursor& place,
                                              int block) {
  if (block >= math.item.num_blocks) return 0;
  trace::Enter(Phase::kWaitKv);
  math.WaitChunk(place);
  return math.shared.key_mask[place.stage];
}

}  // namespace jax_mla::decode::sm90::narrow
