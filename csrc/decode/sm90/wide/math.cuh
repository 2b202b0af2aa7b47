// One math warpgroup of the wide kernel: scores, softmax, P V of its half of O. Roles and barriers:
// kernel.cuh.
#pragma once

#include <cstdint>

#include "decode/params.h"
#include "decode/sm90/wide/params.cuh"
#include "decode/trace.cuh"
#include "gpu/sm90.cuh"
#include "gpu/sm90_wgmma.cuh"

namespace jax_mla::decode::sm90::wide {

// One math warpgroup: its part of O, the scores of its block, and the running softmax of two rows.
// Accumulator element j belongs to row + 8 * RowOf(j).
template <class C, Half kHalf>
struct Math {
  using T = typename C::T;
  static constexpr int kNumOut = C::kHalfDims / 2;
  static constexpr int kNumScores = kBlockN / 2;
  static constexpr typename C::OwnedMask kAllOwned = ~typename C::OwnedMask{0};

  const WideParams& params;
  const RowTile& tile;
  const Thread thread;
  const float scale_log2;  // of scores taken with their sign flipped if `flip_scores`
  const bool flip_scores;  // sm_scale is negative: the maximum is then that of -S
  float out[kNumOut];
  float scores[kNumScores];
  uint32_t p[C::kKSteps][4];  // P as wgmma A fragments
  float reference[2], sum[2];
  float factor[2];  // what this block's rescale multiplies O with
  Item item;
  int32_t limit[2];          // first token that the row does not see
  int item_idx = 0;          // of `item`, plus one
  int block_pair = 0;              // pairs so far, mod kBlockPairNumbers
  uint32_t full_phases = 0;  // of kv_full of the own blocks, one bit a pair of the ring
  bool is_plain;             // of the own block: every row sees every score as it is

  static __device__ __forceinline__ constexpr int RowOf(int j) { return j >> 1 & 1; }

  __device__ Math(const WideParams& wide_params, const RowTile& row_tile)
      : params(wide_params),
        tile(row_tile),
        scale_log2(fmaxf(fabsf(wide_params.decode.sm_scale) * kLog2E, kMinScaleLog2)),
        flip_scores(wide_params.decode.sm_scale < 0) {}

  __device__ __forceinline__ int32_t num_blocks() const {
    return item.block_end - item.block_begin;
  }
  // Block that this half scores; both halves multiply both.
  static constexpr int kOwnBlock = kHalf == kLead ? 0 : 1;

  // Of this pair.
  __device__ __forceinline__ int RingBlock(int block) const { return C::RingBlock(block_pair, block); }
  __device__ __forceinline__ uint16_t* FollowP() const {
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

  // The lead's share of block 1, its P included.
  __device__ __forceinline__ void ReleaseLeadFollowBlock(int done_block_pair) const {
    const int ring_block = C::RingBlock(done_block_pair, 1);
    ReleaseValues(ring_block);
    Release(Shared<C>().kv_empty[ring_block][C::kKpeCopyGroup]);
  }

  // Takes over the next published item and waits for its queries.
  __device__ __forceinline__ void NextItem() {
    trace::Enter(Phase::kWaitItem);
    gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().q_full), item_idx & 1);
    item = Shared<C>().items[item_idx % kNumItems];
    ++item_idx;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const DecodeParams& d = params.decode;
      const int32_t row = tile.row_begin + RecomputeHere(thread.row) + 8 * i;
      const int32_t q_idx = min(row / d.num_heads, d.q_len - 1);
      limit[i] = d.causal ? item.seq_len - (d.q_len - 1 - q_idx) : item.seq_len;
    }
  }
  __device__ __forceinline__ bool HasNext() const {
    return Shared<C>().has_next[(item_idx - 1) % kNumItems];
  }
  __device__ __forceinline__ void ResetSoftmax() {
    reference[0] = reference[1] = kNoReference;
    sum[0] = sum[1] = 0;
  }

  // Waits until a group of the own block has landed.
  __device__ __forceinline__ void WaitCopyGroup(int group) const {
    gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().kv_full[RingBlock(kOwnBlock)][group]),
                            full_phases >> C::RingBlockPair(block_pair) & 1);
    // What threads copied has to cross to wgmma's proxy; the other half's PV relies on it too.
    if constexpr (C::kLoad == KvLoad::kGather) gpu::sm90::FenceProxyAsyncShared();
  }

  // S (+)= Q K^T over one step of a chunk, `offset` bytes into the operands.
  __device__ __forceinline__ void ScoreStep(uint64_t q, uint64_t k, uint32_t offset,
                                            bool accumulate) {
    gpu::sm90::WgmmaSS<T, kBlockN, Major::K, Major::K>(gpu::sm90::AdvanceDescriptor(q, offset),
                                                       gpu::sm90::AdvanceDescriptor(k, offset),
                                                       scores, accumulate);
  }

  // ... over a group of latent chunks, once that has landed. `q`, `k`: descriptors of chunk 0 of
  // the queries and of the own block.
  __device__ __forceinline__ void ScoreCopyGroup(uint64_t q, uint64_t k, int group, bool accumulate) {
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

  // ... over the rope chunk.
  __device__ __forceinline__ void ScoreRope(uint64_t q, uint64_t k, bool accumulate) {
    WaitCopyGroup(C::kKpeCopyGroup);
    gpu::sm90::WgmmaArrive();
#pragma unroll
    for (int step = 0; step < C::kKpeKSteps; ++step) {
      ScoreStep(q, k, C::kKpeChunk * C::kChunkBytes + step * C::kMmaK * kElementBytes,
                accumulate || step > 0);
    }
  }

  // O (+)= P V over this half's columns of one block; P from registers (own block) or shared
  // memory.
  __device__ __forceinline__ void IssueValues(int block, bool accumulate) {
    trace::Enter(Phase::kPv);
    const uint64_t v = gpu::sm90::SharedDescriptor<1024, C::kChunkBytes>(
        RecomputeHere(SharedAddress(Shared<C>().kv[RingBlock(block)][kHalf * C::kHalfChunks])));
    const uint64_t remote_p =
        gpu::sm90::SharedDescriptor(RecomputeHere(SharedAddress(block == 0 ? Shared<C>().p : FollowP())));
    gpu::sm90::WgmmaFenceOperand(out);
    gpu::sm90::WgmmaArrive();
#pragma unroll
    for (int step = 0; step < C::kKSteps; ++step) {
      const uint64_t v_step = gpu::sm90::AdvanceDescriptor(v, step * C::kMmaK * C::kRowBytes);
      if (block == kOwnBlock) {
        gpu::sm90::WgmmaRS<T, C::kHalfDims, Major::MN>(p[step], v_step, out,
                                                       accumulate || step > 0);
      } else {
        gpu::sm90::WgmmaSS<T, C::kHalfDims, Major::K, Major::MN>(
            gpu::sm90::AdvanceDescriptor(remote_p, step * C::kMmaK * kElementBytes), v_step, out,
            accumulate || step > 0);
      }
    }
    gpu::sm90::WgmmaCommit();
  }

  __device__ __forceinline__ void ScaleOut(const float (&f)[2]) {
#pragma unroll
    for (int j = 0; j < kNumOut; ++j) out[j] *= f[RowOf(j)];
  }

  // Stores 16 columns of P where the other half reads them: as soon as they are computed, since the
  // lead's stores wait for shared memory behind the follower's scores. (The follower's lie where
  // its scores read the rope: wgmma is one operation of all four warps, and it is complete.)
  __device__ __forceinline__ void StoreP(int step) const {
    const uint32_t target = SharedAddress(kHalf == kLead ? Shared<C>().p : FollowP());
    const uint32_t row = thread.warp * 16 + thread.lane % 16;
    const uint32_t vector = (step * 2 + thread.lane / 16) ^ (row % 8);
    gpu::sm90::StoreMatrixX4(target + row * C::kRowBytes + vector * 16, p[step][0], p[step][1],
                             p[step][2], p[step][3]);
  }

  // Scores -> P, against the reference as it is; adds it to the rows' sums.
  template <class Score>
  __device__ __forceinline__ void Exponentiate(Score score, float (&sums)[2]) {
#pragma unroll
    for (int j = 0; j < kNumScores; j += 2) {
      const int i = RowOf(j);
      const float a = gpu::sm90::Exp2(fmaf(score(j), scale_log2, -reference[i]));
      const float b = gpu::sm90::Exp2(fmaf(score(j + 1), scale_log2, -reference[i]));
      sums[i] += a + b;
      p[j / 8][j / 2 % 4] = gpu::sm90::Pack2<T>(a, b);
      if (j % 8 == 6) StoreP(j / 8);
    }
  }

  // Scores -> P, row sums. `score(j)` is score j or -inf: the array itself is never written, or
  // ptxas serialises every wgmma (C7515). Returns whether the reference rose in this warp.
  template <class Score>
  __device__ __forceinline__ bool SoftmaxOf(Score score) {
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < kNumScores; ++j) top[RowOf(j)] = fmaxf(top[RowOf(j)], score(j));
    bool exceeds = false;  // of this thread's scores: no need for those of the other lanes yet
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] *= scale_log2;
      exceeds |= top[i] > reference[i] + gpu::kRescaleThreshold;
    }
    const bool rescale = __any_sync(kAllLanes, exceeds);
    if (rescale) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        top[i] = fmaxf(top[i], __shfl_xor_sync(kAllLanes, top[i], 1));
        top[i] = fmaxf(top[i], __shfl_xor_sync(kAllLanes, top[i], 2));
        const float raised = fmaxf(reference[i], top[i]);
        factor[i] = gpu::sm90::Exp2(reference[i] - raised);
        reference[i] = raised;
        sum[i] *= factor[i];
        if (thread.quad == 0) Shared<C>().reference[kHalf][thread.row + 8 * i] = raised;
      }
    }
    Exponentiate(score, sum);
    if (thread.lane == 0) Shared<C>().rescaled[kHalf][thread.warp] = rescale;
    return rescale;
  }

  // Scores -> P of a plain block, against the reference as it is. True if that may stay: where no
  // sum is too large no score is too far above it, and nobody needs the maximum. `KeepSums` is then
  // to follow, else `Softmax`, which begins anew.
  __device__ __forceinline__ bool TrySoftmax(float (&block_sum)[2]) {
    trace::Enter(Phase::kSoftmax);
    block_sum[0] = block_sum[1] = 0;
    Exponentiate([&](int j) { return scores[j]; }, block_sum);
    const bool exceeds = block_sum[0] > gpu::kMaxWeight || block_sum[1] > gpu::kMaxWeight;
    return !__any_sync(kAllLanes, exceeds);
  }
  __device__ __forceinline__ void KeepSums(const float (&block_sum)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) sum[i] += block_sum[i];
    if (thread.lane == 0) Shared<C>().rescaled[kHalf][thread.warp] = false;
  }

  // Bit j: this thread's score j is of a token that its row sees.
  __device__ __forceinline__ uint32_t VisibleScores(int32_t token_begin,
                                                    typename C::OwnedMask owned) const {
    const int32_t first_token = token_begin + thread.quad * 2;
    uint32_t visible = 0;
#pragma unroll
    for (int j = 0; j < kNumScores; ++j) {
      const bool sees = j / 4 * 8 + j % 2 < limit[RowOf(j)] - first_token;
      visible |= static_cast<uint32_t>(sees) << j;
    }
    if (owned == kAllOwned) return visible;
#pragma unroll 1
    for (int j = 0; j < kNumScores; ++j) {
      const int token = j / 4 * 8 + thread.quad * 2 + j % 2;
      const bool absent = ~owned >> (token >> params.box_shift) & 1;
      visible &= ~(static_cast<uint32_t>(absent) << j);
    }
    return visible;
  }

  // What the softmax of the own block has to know, once a group of it has landed: found out while
  // the scores are computed.
  __device__ __forceinline__ void PrepareSoftmax(int32_t block) {
    const auto owned = Shared<C>().owned[block_pair][kOwnBlock];
    const int32_t seen_by_all = item.seq_len - (params.decode.causal ? params.decode.q_len - 1 : 0);
    is_plain = (block + 1) * kBlockN <= seen_by_all && owned == kAllOwned && !flip_scores;
  }

  __device__ __forceinline__ bool Softmax(int32_t block) {
    trace::Enter(Phase::kSoftmax);
    const int32_t token_begin = block * kBlockN;
    if (is_plain) {
      return SoftmaxOf([&](int j) { return scores[j]; });
    }
    const uint32_t visible = VisibleScores(token_begin, Shared<C>().owned[block_pair][kOwnBlock]);
    return SoftmaxOf([&](int j) {
      return (visible >> j & 1) == 0 ? -INFINITY : flip_scores ? -scores[j] : scores[j];
    });
  }

  // Makes P and this block's V fit for wgmma.
  __device__ __forceinline__ void FinishP(int32_t block) {
    trace::Enter(Phase::kStoreP);
    const int32_t rows_left = item.seq_len - block * kBlockN;
    if (rows_left < kBlockN) {  // V rows past the end: 0 * NaN would be NaN
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
  // Tells the other half. Apart from FinishP: the follower issues its own PV in between.
  __device__ __forceinline__ void AnnounceP() const {
    gpu::sm90::NamedBarrierArrive(kHalf == kLead ? kLeadPFull : kFollowPFull, kNumMathThreads);
  }

  // After the other half's P: takes over its reference where that rose. True if O has to be scaled
  // by `factor`.
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
