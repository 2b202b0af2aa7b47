// One math warpgroup of the narrow kernel: its partial scores, the softmax, and P V of the latent
// chunks that it owns. Roles and barriers: kernel.cuh.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "decode/sm90/common/softmax.cuh"
#include "decode/sm90/narrow/config.h"
#include "decode/sm90/narrow/tile_scales.cuh"
#include "decode/sm90/swapped/context.cuh"
#include "decode/sm90/swapped/finish.cuh"
#include "decode/sm90/tuning.h"
#include "decode/trace.cuh"
#include "gpu/online_softmax.cuh"
#include "gpu/sm90.cuh"
#include "gpu/sm90_wgmma.cuh"

namespace jax_mla::decode::sm90::narrow {

// Its partial scores, its part of O and the tile scales of its P are a warpgroup's own; all else
// has the same bits in both warpgroups of a team.
template <class C>
struct Math : Output<C> {
  using Base = Output<C>;
  using Base::AccumulatorOf, Base::RowOf, Base::TokenOf, Base::MaxOfRow;
  using Base::item, Base::kv, Base::out, Base::params, Base::query, Base::row_tile, Base::scales,
      Base::shared, Base::thread, Base::tile_scale_idx;
  using typename Base::Cursor, typename Base::PElement, typename Base::Scores, typename Base::T;

  float reference[C::kThreadRows];  // lazy running maximum, log2 units
  float sum[C::kThreadRows];        // of P, over the thread's tokens of the item
  int exchange_idx = 0;             // which of the exchange buffers this block uses

  __device__ __forceinline__ Math(const KernelParams& kernel_params, SharedMemory<C>& shared_memory,
                                  int cta_warp, int tile)
      : Base(kernel_params, shared_memory,
             Thread(C::kTeams > 1 ? cta_warp / kTeamWarps : 0,
                    C::kTeams > 1 ? cta_warp % kTeamWarps : cta_warp),
             tile) {}

  // Of the item. Where a register for it would be spilled, it is read from shared memory.
  __device__ __forceinline__ int NumBlocks() const {
    if constexpr (C::kHasTileScales) {
      return shared.items[ItemIndex<C>(query)].num_blocks;
    }
    return item.num_blocks;
  }
  // Whether the thread's row j is one of the unit's. The others are the next unit's queries, which
  // may be another sequence's: they must not change what this one's rows are rounded to.
  __device__ __forceinline__ bool IsOwnRow(int j) const {
    return !C::kHasUnits || thread.Row(j) < this->RowsLeft();
  }
  __device__ __forceinline__ int TeamBarrier() const {
    return kBarrierMath + thread.team * C::kSecondTeam;
  }
  // Of the partial scores that warpgroup `wg` of the team reads.
  __device__ __forceinline__ int ExchangeReadBarrier(int wg) const {
    return kBarrierExchangeRead + thread.team * kTeamWarpgroups + wg;
  }
  __device__ __forceinline__ void SyncTeams() const {
    hw::NamedBarrierSync(kBarrierTeams, C::kMathThreads);
  }

  // What scores of row j have to be multiplied by, where queries are float16 (PrepareQueries): each
  // warpgroup's part of a row has a power of two of its own.
  __device__ __forceinline__ float QueryScale(int j) const {
    return shared.query_scale[thread.wg][thread.Row(j)];
  }
  __device__ __forceinline__ void StoreQueryScale(int row, float scale, float) const {
    shared.query_scale[thread.wg][row] = scale;
  }
  static __device__ __forceinline__ int RowExponent(int, int part_exponent) {
    return part_exponent;
  }

  // Waits for the next item and its queries. False if there is none left.
  __device__ __forceinline__ bool NextItem() {
    trace::Enter(Phase::kWaitItem);
    hw::MbarrierWait(hw::SharedAddress(&shared.q_full[query.stage]), query.parity);
    item = shared.items[ItemIndex<C>(query)];
    if (item.num_blocks == kNoMoreItems) return false;
    if constexpr (C::kTeams > 1) {
      if (thread.team == 0) PrepareQueries(*this);
      this->LoadScales();
      SyncTeams();
    } else if constexpr (C::kHasCodes) {
      this->LoadScales();
      PrepareQueries(*this);
      this->SyncWarpgroup();
    }
    return true;
  }
  __device__ __forceinline__ void ResetSoftmax() {
    this->ResetOut();
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) {
      reference[j] = gpu::kNoReference;
      sum[j] = 0.0f;
    }
  }

  // Frees the stage of a block's rope chunk, if it has one. Both warpgroups have passed math_all
  // since they read it, and the key mask of a first chunk that has one owner.
  __device__ __forceinline__ void ReleaseRopeChunk() const {
    if constexpr (C::kHasRope) ReleaseFirstChunk();
  }
  // The same of an empty block, which may have no other chunk (SkipEmptyBlock).
  __device__ __forceinline__ void ReleaseFirstChunk() const {
    const bool arrives = C::kHasCodes ? (thread.wg == 0 && thread.lane == 0) : threadIdx.x == 0;
    if (arrives) hw::MbarrierArrive(hw::SharedAddress(&shared.kv_empty[kv.stage]));
  }

  // scores = the warpgroup's part of S^T. The first chunk has landed. If that is the rope chunk, it
  // comes first; the latent chunks follow as they land.
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
      hw::WgmmaSS<T, C::kTileRows, kK, kK>(hw::AdvanceDescriptor(rope, step * kMmaKBytes),
                                           hw::AdvanceDescriptor(q_rope, step * kMmaKBytes), scores,
                                           step > 0);
    }
#pragma unroll 1
    for (int own = 0; own < C::kOwnChunks; ++own) {
      const Cursor cursor = this->OwnChunk(own);
      const int chunk = own * kTeamWarpgroups + thread.wg;
      this->WaitChunk(cursor);
      hw::WgmmaArrive();
      const uint64_t k_chunk = hw::SharedDescriptor(hw::SharedAddress(shared.kv[cursor.stage]));
      const uint64_t q_chunk = hw::SharedDescriptor(q + chunk * C::kQueryChunkBytes);
#pragma unroll
      for (int step = 0; step < kChunkDims / kMmaK; ++step) {
        hw::WgmmaSS<T, C::kTileRows, kK, kK>(hw::AdvanceDescriptor(k_chunk, step * kMmaKBytes),
                                             hw::AdvanceDescriptor(q_chunk, step * kMmaKBytes),
                                             scores, C::kHasRope || own > 0 || step > 0);
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
    for (int j = 0; j < C::kTileRows / 8; ++j) {
      buffer[thread.wg][j][thread.idx] =
          make_float4(scores[4 * j], scores[4 * j + 1], scores[4 * j + 2], scores[4 * j + 3]);
    }
    hw::NamedBarrierSync(TeamBarrier(), kTeamThreads);
#pragma unroll
    for (int j = 0; j < C::kTileRows / 8; ++j) {
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

  // Raises the references of all rows to their maxima if any score of the warpgroup exceeds its
  // row's by the threshold. In an item's first block one does, so there is no vote. Where
  // threads gather the vote stays, because page size 1 is up to 1 % slower without it.
  __device__ __forceinline__ void UpdateReference(const Scores& scores, bool is_first) {
    constexpr float kThreshold = C::kHasCodes ? kCodesRescaleThreshold : kNarrowRescaleThreshold;
    bool exceeds = false;
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) {
      const bool votes = kThreshold == 0.0f || IsOwnRow(j);  // without a threshold no bit changes
      exceeds |= votes && MaxOfRow(scores, j) > reference[j] + kThreshold;
    }
    const bool is_certain = is_first && C::kLoad != KvLoad::kGather;
    if (!is_certain && !hw::NamedBarrierAny(this->WarpgroupBarrier(), kWarpgroupThreads, exceeds)) {
      return;
    }
    float maxima[C::kThreadRows];
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) maxima[j] = MaxOfRow(scores, j);
    this->StoreOverLanes(maxima, [](float a, float b) { return fmaxf(a, b); });
    this->SyncWarpgroup();
    const auto& stats = shared.row_stats[thread.Group()];
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) {
      const Raised raised = Raise(reference[j], MaxOfWarps(stats[thread.Row(j)]));
      reference[j] = raised.reference;
      if (is_first) continue;  // sum and O are 0
      sum[j] *= raised.factor;
      this->ScaleOutRow(j, raised.factor);
    }
  }
  // The scales of the own chunks for the block's tokens that the thread has scores of.
  using OwnTileScales = float[C::kRuns][2];
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
        for (int own = 0; own < C::kRuns; ++own) {
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
    const int row = (C::kTileRows > 8 ? thread.lane / 16 * 8 : 0) + thread.lane % 8;
    const int token = thread.warp * kMmaK + thread.lane / 8 % 2 * 8;
    const uint32_t swizzle = thread.lane % 8 * kCopyBytes;
    const uint32_t address = hw::SharedAddress(shared.p[thread.Group()]) + row * kChunkRowBytes +
                             ((token * kElementBytes) ^ swizzle);
#pragma unroll
    for (int chunk = 0; chunk < C::kRuns; ++chunk) {
      uint32_t packed[C::kAccumulators / 2];
#pragma unroll
      for (int i = 0; i < C::kAccumulators / 2; ++i) {
        float scale = 1.0f;
        if constexpr (C::kHasTileScales) scale = factors[chunk][TokenOf(2 * i)];
        packed[i] = hw::Pack2<PElement>(scores[2 * i] * scale, scores[2 * i + 1] * scale);
      }
      const uint32_t target = address + chunk * C::kQueryChunkBytes;
      if constexpr (C::kTileRows == 8) {
        hw::StoreMatrixX2Transposed(target, packed[0], packed[1]);
      } else {
        hw::StoreMatrixX4Transposed(target, packed[0], packed[1], packed[2], packed[3]);
      }
    }
  }

  // O^T += V^T P^T on the own latent chunks.
  __device__ __forceinline__ void AccumulateOutput() {
    const uint64_t p = hw::SharedDescriptor(hw::SharedAddress(shared.p[thread.Group()]));
    this->FenceOut();
    hw::WgmmaArrive();
#pragma unroll
    for (int own = 0; own < C::kOwnChunks; ++own) {
      const uint64_t v =
          hw::SharedDescriptor(hw::SharedAddress(shared.kv[this->OwnChunk(own).stage]));
#pragma unroll
      for (int step = 0; step < kBlockN / kMmaK; ++step) {
        hw::WgmmaSS<T, C::kTileRows, hw::Major::MN, hw::Major::K>(
            hw::AdvanceDescriptor(v, step * kMmaK * kChunkRowBytes),
            hw::AdvanceDescriptor(p, step * kMmaKBytes), out[own], true);
      }
    }
    hw::WgmmaCommit();
    this->WaitValues();
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
    if constexpr (C::kTeams == 1) {
      ReleaseFirstChunk();
      kv.Advance(1);
    } else {
      ReleaseRopeChunk();
#pragma unroll 1
      for (int own = 0; own < C::kOwnChunks; ++own) this->WaitChunk(this->OwnChunk(own));
      this->ReleaseOwnChunks(kv);
      this->NextBlock();
    }
  }

  // Scores, softmax and output of the item's block `block`.
  __device__ __forceinline__ void ProcessBlock(int block, uint64_t key_mask) {
    const int tokens_left = item.tokens_left - block * kBlockN;
    Scores scores;
    if constexpr (C::kHasCodes) {
      PartialScoresOfCodes(*this, scores);
    } else {
      PartialScores(scores);
    }
    ExchangeScores(exchange_idx, scores);
    TokenPowers powers = {};
    if constexpr (C::kHasTileScales) LoadTokenPowers(powers);
    ReleaseRopeChunk();
    trace::Enter(Phase::kSoftmax);
#pragma unroll
    for (int i = 0; i < C::kAccumulators; ++i) {
      if constexpr (C::kHasTileScales) {
        scores[i] = fmaf(scores[i], this->ScaleLog2(), powers[TokenOf(i)].Log2());
      } else {
        scores[i] *= this->ScaleLog2();
      }
    }
    if (this->HidesTokens(key_mask, tokens_left)) {
      this->MaskScores(key_mask, tokens_left, scores);
      if (key_mask != ~uint64_t{0}) this->ZeroAbsentTokens(kv, key_mask);
    }
    UpdateReference(scores, block < C::kTeams);
    trace::Enter(Phase::kStoreP);
    StoreP(scores, key_mask, powers);
    hw::FenceProxyAsyncShared();
    this->SyncWarpgroup();
    trace::Enter(Phase::kPv);
    if constexpr (C::kHasCodes) {
      AccumulateCodes<1>(*this, thread.Group(), [] {}, [] {});
      this->WaitValues();
    } else {
      AccumulateOutput();
    }
    this->ReleaseOwnChunks(kv);
    this->NextBlock();
    exchange_idx ^= C::kExchangeBuffers - 1;
  }

  // ---- the rows' statistics, behind StoreSums: finish.cuh asks for them

  __device__ __forceinline__ float SumOfRow(int row) const {
    return SumOfWarps(shared.row_stats[thread.Group()][row]);
  }
  __device__ __forceinline__ float& ReferenceOf(int row) const { return shared.reference[0][row]; }
  __device__ __forceinline__ bool HasKey(int j) const { return reference[j] != gpu::kNoReference; }
  __device__ __forceinline__ int RowOfThread() const { return thread.idx; }
  __device__ __forceinline__ bool LooksAfterRow(int row) const {
    return thread.wg == 0 && row < C::kTileRows;
  }
  __device__ __forceinline__ void ScaleStats(int j, float factor, float scale_log2) const {
    if (thread.wg != 0 || !thread.IsFirstOfRows()) return;
    shared.row_stats[thread.Group()][thread.Row(j)][thread.warp] *= factor;
    if (thread.warp == 0) ReferenceOf(thread.Row(j)) += scale_log2;
  }
  template <class ScaleLog2Of>
  static __device__ __forceinline__ void ScaleRowStats(ScaleLog2Of) {}
  static __device__ __forceinline__ void ForgetRows() {}
};

}  // namespace jax_mla::decode::sm90::narrow
