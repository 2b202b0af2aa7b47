// One math warpgroup of the wide kernel: it computes scores and softmax of its own block, and P V
// of both blocks for its half of O. Roles and barriers: kernel.cuh.
#pragma once

#include <cstdint>

#include "decode/params.h"
#include "decode/sm90/common/limits.cuh"
#include "decode/sm90/common/softmax.cuh"
#include "decode/sm90/tuning.h"
#include "decode/sm90/wide/params.cuh"
#include "decode/trace.cuh"
#include "gpu/sm90.cuh"
#include "gpu/sm90_wgmma.cuh"

namespace jax_mla::decode::sm90::wide {

// What a thread of a math warpgroup holds: its elements of O, of the own block's scores and of P,
// and the running softmax of its two rows. Element j of an accumulator belongs to row
// thread.row + 8 * RowOf(j).
template <class C, Half kHalf>
struct Math {
  using T = typename C::T;
  static constexpr int kNumOut = C::kHalfDims / 2;
  static constexpr int kNumScores = kBlockN / 2;
  static constexpr typename C::OwnedMask kAllOwned = ~typename C::OwnedMask{0};

  const WideParams& params;
  RowTile tile;
  const Thread thread;
  float scale_log2;  // |sm_scale| * log2(e)
  float out[kNumOut];
  float scores[kNumScores];
  uint32_t p[C::kKSteps][4];  // P as wgmma A fragments
  float reference[2], sum[2];
  float factor[2];              // by which O is to be multiplied after this block's rescale
  int item_idx = 0;             // index of the current item, plus one
  int32_t num_blocks, seq_len;  // of the item
  int block_pair = 0;           // number of block pairs so far, mod kBlockPairNumbers
  uint32_t full_phases = 0;     // phases of the own blocks' kv_full, one bit a block pair
  bool is_plain;                // every row sees all of the own block, with its scores as they are

  static __device__ __forceinline__ constexpr int RowOf(int j) { return j >> 1 & 1; }

  __device__ Math(const WideParams& wide_params, const RowTile& row_tile)
      : params(wide_params),
        tile(row_tile),
        scale_log2(fmaxf(fabsf(wide_params.decode.sm_scale) * kLog2E, kMinScaleLog2)) {}

  // Whether sm_scale is negative: scores are negated instead.
  __device__ __forceinline__ bool FlipsScores() const { return params.decode.sm_scale < 0; }

  // The block of a block pair that this half scores. Both halves multiply both blocks.
  static constexpr int kOwnBlock = kHalf == kLead ? 0 : 1;

  // The place in the ring of block 0 or 1 of the current block pair.
  __device__ __forceinline__ int RingBlock(int block) const {
    return C::RingBlock(block_pair, block);
  }
  __device__ __forceinline__ uint16_t* FollowP() const {
    if constexpr (!C::kHasRope) return Shared<C>().p[1];
    return Shared<C>().kv[RingBlock(1)][C::kKpeChunk];
  }
  __device__ __forceinline__ void NextBlockPair() { block_pair = C::NextBlockPair(block_pair); }

  __device__ __forceinline__ void Release(uint64_t& barrier) const {
    if (thread.idx == 0) gpu::sm90::MbarrierArrive(SharedAddress(&barrier));
  }
  __device__ __forceinline__ void ReleaseValues(int ring_block) const {
#pragma unroll
    for (int g = 0; g < C::kHalfCopyGroups; ++g) {
      Release(Shared<C>().kv_empty[ring_block][kHalf * C::kHalfCopyGroups + g]);
    }
  }

  // Frees a block's rope chunk, if there is one.
  __device__ __forceinline__ void ReleaseRope(int ring_block) const {
    if constexpr (C::kHasRope) Release(Shared<C>().kv_empty[ring_block][C::kKpeCopyGroup]);
  }

  // Frees the lead's half of block 1, and the rope chunk with the follower's P.
  __device__ __forceinline__ void ReleaseLeadFollowBlock(int done_block_pair) const {
    const int ring_block = C::RingBlock(done_block_pair, 1);
    ReleaseValues(ring_block);
    ReleaseRope(ring_block);
  }

  // Takes over the next published item and waits for its queries.
  __device__ __forceinline__ void NextItem() {
    trace::Enter(Phase::kWaitItem);
    gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().q_full), item_idx & 1);
    ++item_idx;
    num_blocks = Item().block_end - Item().block_begin;
    seq_len = Item().seq_len;
    if constexpr (C::kHasUnits) tile.SetUnit(params, Item().unit);
  }
  // The current item. What few blocks need of it is read again: kept, it would take the last
  // registers where the cache holds codes.
  __device__ __forceinline__ const typename C::Item& Item() const {
    return Shared<C>().items[(item_idx - 1) % kNumItems];
  }
  // The first token that the thread's row i does not see.
  __device__ __forceinline__ int32_t LimitOf(int i) const {
    return RowLimits().EndToken(tile.row_begin + RecomputeHere(thread.row) + 8 * i, seq_len);
  }
  __device__ __forceinline__ Limits<C> RowLimits() const {
    if constexpr (C::kHasUnits) {
      return {params.decode, params.num_heads, &Item().unit};
    } else {
      return {params.decode, params.num_heads, nullptr};
    }
  }
  __device__ __forceinline__ bool HasNext() const {
    return Shared<C>().has_next[(item_idx - 1) % kNumItems];
  }
  __device__ __forceinline__ void ResetSoftmax() {
    reference[0] = reference[1] = kNoReference;
    sum[0] = sum[1] = 0;
  }

  // Waits until a copy group of the own block has landed.
  __device__ __forceinline__ void WaitCopyGroup(int group) const {
    gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().kv_full[RingBlock(kOwnBlock)][group]),
                            full_phases >> C::RingBlockPair(block_pair) & 1);
    // What threads copied becomes visible to wgmma. The other half's PV relies on this fence too.
    if constexpr (C::kLoad == KvLoad::kGather) gpu::sm90::FenceProxyAsyncShared();
  }

  // S (+)= Q K^T over 16 dims of a chunk, `offset` bytes into the operands.
  __device__ __forceinline__ void ScoreStep(uint64_t q, uint64_t k, uint32_t offset,
                                            bool accumulate) {
    gpu::sm90::WgmmaSS<T, kBlockN, Major::K, Major::K>(gpu::sm90::AdvanceDescriptor(q, offset),
                                                       gpu::sm90::AdvanceDescriptor(k, offset),
                                                       scores, accumulate);
  }

  // S (+)= Q K^T over a latent copy group, after waiting for it. `q` and `k` are the descriptors of
  // chunk 0 of the queries and of the own block.
  __device__ __forceinline__ void ScoreCopyGroup(uint64_t q, uint64_t k, int group,
                                                 bool accumulate) {
    WaitCopyGroup(group);
    const uint32_t begin = group * (C::kChunksPerCopyGroup * C::kChunkBytes);
    q = gpu::sm90::AdvanceDescriptor(q, begin), k = gpu::sm90::AdvanceDescriptor(k, begin);
    gpu::sm90::WgmmaArrive();
#pragma unroll
    for (int i = 0; i < C::kChunksPerCopyGroup; ++i) {
#pragma unroll
      for (int step = 0; step < C::kKSteps; ++step) {
        ScoreStep(q, k, i * C::kChunkBytes + step * C::kMmaK * kElementBytes,
                  accumulate || i > 0 || step > 0);
      }
    }
  }

  // S (+)= Q K^T over the rope chunk, after waiting for it as above.
  __device__ __forceinline__ void ScoreRope(uint64_t q, uint64_t k, bool accumulate) {
    WaitCopyGroup(C::kKpeCopyGroup);
    gpu::sm90::WgmmaArrive();
#pragma unroll
    for (int step = 0; step < C::kKpeKSteps; ++step) {
      ScoreStep(q, k, C::kKpeChunk * C::kChunkBytes + step * C::kMmaK * kElementBytes,
                accumulate || step > 0);
    }
  }

  // O (+)= P V of one block, for this half's columns. The own block's P comes from registers, the
  // other one's from shared memory.
  __device__ __forceinline__ void IssueValues(int block, bool accumulate) {
    trace::Enter(Phase::kPv);
    const uint64_t v = gpu::sm90::SharedDescriptor<1024, C::kChunkBytes>(
        RecomputeHere(SharedAddress(Shared<C>().kv[RingBlock(block)][kHalf * C::kHalfChunks])));
    const uint64_t remote_p = gpu::sm90::SharedDescriptor(
        RecomputeHere(SharedAddress(block == 0 ? Shared<C>().p[0] : FollowP())));
    gpu::sm90::WgmmaFenceOperand(out);
    gpu::sm90::WgmmaArrive();
#pragma unroll
    for (int step = 0; step < C::kKSteps; ++step) {
      const uint64_t p_step =
          gpu::sm90::AdvanceDescriptor(remote_p, step * C::kMmaK * kElementBytes);
      const uint64_t v_step = gpu::sm90::AdvanceDescriptor(v, step * C::kMmaK * C::kRowBytes);
      if (block == kOwnBlock) {
        gpu::sm90::WgmmaRS<T, C::kHalfDims, Major::MN>(p[step], v_step, out,
                                                       accumulate || step > 0);
      } else {
        gpu::sm90::WgmmaSS<T, C::kHalfDims, Major::K, Major::MN>(p_step, v_step, out,
                                                                 accumulate || step > 0);
      }
    }
    gpu::sm90::WgmmaCommit();
  }

  __device__ __forceinline__ void ScaleOut(const float (&f)[2]) {
#pragma unroll
    for (int j = 0; j < kNumOut; ++j) out[j] *= f[RowOf(j)];
  }

  // Stores 16 columns of P where the other half reads them. They are stored as soon as they are
  // computed, since the lead's stores compete with the follower's scores for shared memory. The
  // follower stores where its scores read the rope. That is safe: wgmma is one operation of all
  // four warps, and this warp has waited for its end.
  __device__ __forceinline__ void StoreP(int step) const {
    const uint32_t target = SharedAddress(kHalf == kLead ? Shared<C>().p[0] : FollowP());
    const uint32_t row = thread.warp * kMathWarpRows + thread.lane % kMathWarpRows;
    const uint32_t vector = (step * 2 + thread.lane / 16) ^ (row % 8);
    gpu::sm90::StoreMatrixX4(target + row * C::kRowBytes + vector * 16, p[step][0], p[step][1],
                             p[step][2], p[step][3]);
  }

  // Makes P from the scores times `scale`, relative to the current reference, and adds it to the
  // rows' `sums`. `keep(j, x)` returns element x of P, or 0 where score j is masked: masked scores
  // beside all others would not fit into the registers.
  template <class Keep>
  __device__ __forceinline__ void Exponentiate(float scale, Keep keep, float (&sums)[2]) {
#pragma unroll
    for (int j = 0; j < kNumScores; j += 2) {
      const int i = RowOf(j);
      const float a = keep(j, gpu::sm90::Exp2(fmaf(scores[j], scale, -reference[i])));
      const float b = keep(j + 1, gpu::sm90::Exp2(fmaf(scores[j + 1], scale, -reference[i])));
      sums[i] += a + b;
      p[j / 8][j / 2 % 4] = gpu::sm90::Pack2<T>(a, b);
      if (j % 8 == 6) StoreP(j / 8);
    }
  }

  // Whether the thread's row i is one of the unit's. The others are the next unit's queries, which
  // may be another sequence's: they must not change what this one's rows are rounded to.
  __device__ __forceinline__ bool IsOwnRow(int i) const {
    return !C::kHasUnits || RecomputeHere(thread.row) + 8 * i < tile.num_rows;
  }

  // Makes P and the row sums from the scores; raises the reference first if a score exceeds it by
  // too much. `score(j)` returns score j, or -inf where it is masked; negated where `scale` is
  // negative. The array of scores is never written, since ptxas would then serialise every wgmma
  // (C7515). Returns whether the reference rose in this warp.
  template <class Score, class Keep>
  __device__ __forceinline__ bool SoftmaxOf(Score score, float scale, Keep keep) {
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < kNumScores; ++j) top[RowOf(j)] = fmaxf(top[RowOf(j)], score(j));
    bool exceeds = false;  // this thread's scores suffice: the vote below asks all lanes
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] *= scale_log2;
      exceeds |= IsOwnRow(i) && top[i] > reference[i] + kWideRescaleThreshold;
    }
    const bool rescale = __any_sync(kAllLanes, exceeds);
    if (rescale) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        top[i] = fmaxf(top[i], __shfl_xor_sync(kAllLanes, top[i], 1));
        top[i] = fmaxf(top[i], __shfl_xor_sync(kAllLanes, top[i], 2));
        const Raised raised = Raise(reference[i], top[i]);
        factor[i] = raised.factor;
        reference[i] = raised.reference;
        sum[i] *= factor[i];
        if (thread.quad == 0) Shared<C>().reference[kHalf][thread.row + 8 * i] = reference[i];
      }
    }
    Exponentiate(scale, keep, sum);
    if (thread.lane == 0) Shared<C>().rescaled[kHalf][thread.warp] = rescale;
    return rescale;
  }

  // Bit j: this thread's score j is of a token that its row sees.
  __device__ __forceinline__ uint32_t VisibleScores(int32_t token_begin,
                                                    typename C::OwnedMask owned) const {
    const int32_t first_token = token_begin + thread.quad * 2;
    const int32_t limit[2] = {LimitOf(0) - first_token, LimitOf(1) - first_token};
    uint32_t visible = 0;
#pragma unroll
    for (int j = 0; j < kNumScores; ++j) {
      const bool sees = j / 4 * 8 + j % 2 < limit[RowOf(j)];
      visible |= static_cast<uint32_t>(sees) << j;
    }
    if (owned == kAllOwned) return visible;
    if constexpr (C::kLoad == KvLoad::kBoxes) {
      return 0;
    } else {
#pragma unroll 1
      for (int j = 0; j < kNumScores; ++j) {
        const int token = j / 4 * 8 + thread.quad * 2 + j % 2;
        const bool absent = ~owned >> token & 1;
        visible &= ~(static_cast<uint32_t>(absent) << j);
      }
      return visible;
    }
  }

  // Finds out whether the own block is plain. Called after the block's first wait, which makes
  // `owned` visible, while the scores are being computed.
  __device__ __forceinline__ void PrepareSoftmax(int32_t block) {
    const auto owned = Shared<C>().owned[block_pair][kOwnBlock];
    is_plain = (block + 1) * kBlockN <= RowLimits().SeenByAll(seq_len) && owned == kAllOwned &&
               !FlipsScores();
  }

  // P of a warp that has none of the unit's rows.
  __device__ __forceinline__ bool SkipSoftmax() {
#pragma unroll
    for (int step = 0; step < C::kKSteps; ++step) {
#pragma unroll
      for (uint32_t& pair : p[step]) pair = 0;
      StoreP(step);
    }
    if (thread.lane == 0) Shared<C>().rescaled[kHalf][thread.warp] = false;
    return false;
  }

  __device__ __forceinline__ bool Softmax(int32_t block) {
    trace::Enter(Phase::kSoftmax);
    if (C::kHasUnits && thread.warp * kMathWarpRows >= tile.num_rows) return SkipSoftmax();
    const int32_t token_begin = block * kBlockN;
    if (is_plain) {
      return SoftmaxOf([&](int j) { return scores[j]; }, scale_log2,
                       [](int, float probability) { return probability; });
    }
    const uint32_t visible = VisibleScores(token_begin, Shared<C>().owned[block_pair][kOwnBlock]);
    const bool flips_scores = FlipsScores();
    const auto sees = [&](int j) { return (visible >> j & 1) != 0; };
    return SoftmaxOf(
        [&](int j) { return !sees(j)       ? -INFINITY
                            : flips_scores ? -scores[j]
                                           : scores[j]; },
        flips_scores ? -scale_log2 : scale_log2,
        [&](int j, float probability) { return sees(j) ? probability : 0.0f; });
  }

  // Makes the own block's P and V ready for wgmma.
  __device__ __forceinline__ void FinishP(int32_t block) {
    trace::Enter(Phase::kStoreP);
    const int32_t rows_left = seq_len - block * kBlockN;
    if (rows_left < kBlockN) {  // V rows past the end become 0, since 0 * NaN would be NaN
      constexpr int kVectors = C::kRowBytes / 16;
      for (int i = thread.idx; i < (kBlockN - rows_left) * kVectors * C::kCkvChunks;
           i += kWarpgroupThreads) {
        const int chunk = i / kVectors % C::kCkvChunks;
        const int tail_row = rows_left + i / (kVectors * C::kCkvChunks);
        reinterpret_cast<uint4*>(
            Shared<C>().kv[RingBlock(kOwnBlock)][chunk])[tail_row * kVectors + i % kVectors] =
            uint4{};
      }
      gpu::sm90::FenceProxyAsyncShared();
      gpu::sm90::NamedBarrierSync(kHalf == kLead ? kLeadTail : kFollowTail, kWarpgroupThreads);
    }
    gpu::sm90::FenceProxyAsyncShared();
  }
  // Tells the other half that P is stored. Not a part of FinishP, because the follower issues its
  // own PV in between.
  __device__ __forceinline__ void AnnounceP() const {
    gpu::sm90::NamedBarrierArrive(kHalf == kLead ? kLeadPFull : kFollowPFull, kNumMathThreads);
  }

  // Takes over the other half's reference if that rose. Called after the wait for its P. Returns
  // whether O has to be scaled by `factor`.
  __device__ __forceinline__ bool FollowReference() {
    constexpr int kOther = 1 - kHalf;
    if (!Shared<C>().rescaled[kOther][thread.warp]) return false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float raised = Shared<C>().reference[kOther][thread.row + 8 * i];
      factor[i] = gpu::sm90::Exp2(reference[i] - raised);
      reference[i] = raised;
      sum[i] *= factor[i];
    }
    return true;
  }
};

}  // namespace jax_mla::decode::sm90::wide
