// The warpgroup for the scores (SWG), in the kernel with query codes: what it does for a block. Its
// items are in scores_role.cuh, and what differs with tile scales in tile_scores.cuh.
//
// wgmma multiplies codes as they lie in shared memory, at twice the rate of 16-bit values. So K is
// never converted here. Sums of such products keep 13 bits (docs/numerics.md).
//
// Query rows are wgmma's M here, and tokens N. Then a thread has scores of two rows only, and the
// softmax needs nothing of another warp. P goes to the value warpgroups (values.cuh), block by
// block, by one of two places in shared memory (ScoredBlocks). If both parts of the cache have one
// scale and the next block has keys, its products begin before P is stored. Not earlier, because
// the tensor cores queue about five products, and whoever issues another one waits.
//
// Between MakeP and SendScored no wait may need more than the next block's stages: this block's own
// ones are not freed before its P is sent. Roles and barriers: kernel.cuh.
#pragma once

#include <cstdint>

#include "core/kv_format.h"
#include "decode/params.h"
#include "decode/sm90/codes64/config.h"
#include "decode/sm90/codes64/math.cuh"
#include "decode/sm90/codes64/queries.cuh"
#include "decode/sm90/codes64/softmax.cuh"
#include "decode/trace.cuh"
#include "gpu/codegen.cuh"
#include "gpu/sm90.cuh"
#include "gpu/sm90_wgmma.cuh"

namespace jax_mla::decode::sm90::codes64 {

__device__ __forceinline__ void SyncScores() {
  hw::NamedBarrierSync(kBarrierScores, kWarpgroupThreads);
}

// The value warpgroups say that the queries are packed, and the warpgroup for the scores waits.
__device__ __forceinline__ void SendPacked() {
  hw::NamedBarrierArrive(kBarrierScores, kTeamThreads + kWarpgroupThreads);
}
__device__ __forceinline__ void WaitPacked() {
  hw::NamedBarrierSync(kBarrierScores, kTeamThreads + kWarpgroupThreads);
}

// What is added up to a block's scores, in this order: for each part of the queries the rope chunk,
// if there is one of codes, and the latent chunks. What the second codes give is small, so it comes
// first, and loses little in sums of 13 bits.
template <class C>
inline constexpr int kPartProducts = C::kChunks;
template <class C>
inline constexpr int kBlockProducts = C::kQueryParts * kPartProducts<C>;
// How many products of the next block are issued before a block's P is sent. Later, the value
// warpgroups wait; earlier, their products delay these.
template <class C>
inline constexpr int kProductsBeforeSend = C::kQueryParts == 2 ? 5 : 3;

// Issues one of these products. If not `accumulates`, it overwrites the scores. A block's first
// chunk has landed (Context::KeyMaskOf); the others are waited for.
template <class M>
__device__ __forceinline__ void IssueProduct(const M& math, const typename M::Cursor& block,
                                             int product, bool accumulates,
                                             typename M::Scores& scores) {
  using C = typename M::Config;
  const int part = C::kQueryParts - 1 - product / kPartProducts<C>;
  const int chunk = product % kPartProducts<C>;
  const bool is_rope = chunk < C::kFirstLatentChunk;
  const auto place = block.Ahead(chunk);
  if (chunk > 0) math.WaitChunk(place);
  const int first_chunk =  // of the queries
      is_rope ? C::kCkvQueryChunks : 2 * (chunk - C::kFirstLatentChunk);
  const uint64_t k = hw::SharedDescriptor(hw::SharedAddress(math.shared.kv[place.stage]));
  const int steps = (is_rope ? C::kDKpe : C::kLatentChunkDims) / kCodesMmaK;
  hw::WgmmaArrive();
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    const int offset = step % kChunkSteps * kStepBytes + part * kCodesMmaK;
    const uint64_t q =
        hw::SharedDescriptor(hw::SharedAddress(math.shared.q[math.query.stage]) +
                             (first_chunk + step / kChunkSteps) * C::kQueryChunkBytes);
    hw::WgmmaCodes<kBlockN>(hw::AdvanceDescriptor(q, offset),
                            hw::AdvanceDescriptor(k, step * kCodesMmaK), scores,
                            accumulates || step > 0);
  }
  hw::WgmmaCommit();
}

// Issues products [begin, end) of a block.
template <int kBegin, int kEnd, class M>
__device__ __forceinline__ void IssueProducts(const M& math, const typename M::Cursor& block,
                                              typename M::Scores& scores) {
  if constexpr (kBegin == 0) hw::WgmmaFenceOperand(scores);
  auto place = block;
  // Where the chunks lie is computed again. Without rope the compiler would keep it, and others
  // would be spilled.
  if constexpr (!M::Config::kHasRope) place.stage = gpu::RecomputeHere(place.stage);
#pragma unroll
  for (int product = kBegin; product < kEnd; ++product) {
    IssueProduct(math, place, product, product > 0, scores);
  }
}

template <int kSize>
__device__ __forceinline__ void WaitScores(float (&scores)[kSize]) {
  hw::WgmmaWait<0>();
  hw::WgmmaFenceOperand(scores);
}

// Whether the scores of kpe have the scale of those of ckv, so that all are added up at once.
template <class M>
__device__ __forceinline__ bool HasOneScale(const M& math) {
  if constexpr (!M::Config::kHasRope) return true;
  return !M::Config::kHasTileScales && math.params.decode.kv_format == KvFormat::kE4m3 &&
         math.scales.kpe == 1.0f;
}

// Issues the scores of kpe in bf16, which are added to the others.
template <class M>
__device__ __forceinline__ void IssueRopeInBf16(const M& math, const typename M::Cursor& block,
                                                typename M::Scores& scores) {
  using C = typename M::Config;
  constexpr auto kK = hw::Major::K;
  const uint64_t q = hw::SharedDescriptor(hw::SharedAddress(math.shared.q[math.query.stage]) +
                                          C::kCkvQueryChunks * C::kQueryChunkBytes);
  const uint64_t k = hw::SharedDescriptor(hw::SharedAddress(math.shared.kv[block.stage]));
  hw::WgmmaArrive();
#pragma unroll
  for (int step = 0; step < C::kDKpe / kMmaK; ++step) {
    hw::WgmmaSS<typename M::T, kBlockN, kK, kK>(hw::AdvanceDescriptor(q, step * kMmaKBytes),
                                                hw::AdvanceDescriptor(k, step * kMmaKBytes), scores,
                                                true);
  }
  hw::WgmmaCommit();
}

// The scores of a block where ckv and kpe have different scales. They come at the scale of kpe.
template <class M>
__device__ __forceinline__ void ScoresOfTwoScales(const M& math, const typename M::Cursor& block,
                                                  typename M::Scores& scores) {
  using C = typename M::Config;
  hw::WgmmaFenceOperand(scores);
#pragma unroll
  for (int product = 0; product < kBlockProducts<C>; ++product) {
    if (product % kPartProducts<C> != 0) IssueProduct(math, block, product, product > 1, scores);
  }
  WaitScores(scores);
  const float factor = 1.0f / math.scales.kpe;
#pragma unroll
  for (int i = 0; i < C::kAccumulators; ++i) scores[i] *= factor;
  hw::WgmmaFenceOperand(scores);
  if (math.params.decode.kv_format == KvFormat::kE4m3) {
#pragma unroll
    for (int part = 0; part < C::kQueryParts; ++part) {
      IssueProduct(math, block, part * kPartProducts<C>, true, scores);
    }
    WaitScores(scores);
  } else {
    IssueRopeInBf16(math, block, scores);
    WaitScores(scores);
  }
}

// How often each of the warpgroup's warps arrives for an empty block, or a chunk that nobody else
// reads.
template <class C>
inline constexpr int kSoleArrivals = C::kEmptyArrivals / kWarpgroupWarps;

// Passes over empty blocks, which have one stage and no chunks (SendEmptyBlock).
template <class M>
__device__ __forceinline__ BlockToScore<M> FindBlockToScore(const M& math, typename M::Cursor place,
                                                            int idx) {
  using C = typename M::Config;
  int32_t empty_blocks = 0;
#pragma unroll 1
  for (; idx < math.item.num_blocks; ++idx, ++empty_blocks) {
    const uint64_t key_mask = math.KeyMaskOf(place, idx);
    if (key_mask != 0) return {place, idx, empty_blocks, key_mask};
    __syncwarp();
    if (math.thread.lane < kSoleArrivals<C>) {
      hw::MbarrierArrive(hw::SharedAddress(&math.shared.kv_empty[place.stage]));
    }
    place.Advance(1);
  }
  return {place, idx, empty_blocks, 0};
}

// Frees a block's stages, as far as the warp's scores need them.
template <class M>
__device__ __forceinline__ void ReleaseScored(const M& math, const typename M::Cursor& block) {
  using C = typename M::Config;
  constexpr int kRopeArrivals = C::kHasRope ? kSoleArrivals<C> : 0;
  __syncwarp();
  const int lane = math.thread.lane;
  if (lane >= kRopeArrivals + C::kCkvChunks) return;
  const auto place =
      block.Ahead(lane < kRopeArrivals ? 0 : lane - kRopeArrivals + C::kFirstLatentChunk);
  hw::MbarrierArrive(hw::SharedAddress(&math.shared.kv_empty[place.stage]));
}

// Waits until the value warpgroups need no longer what is in a place.
template <class M>
__device__ __forceinline__ void WaitEmpty(const M& math, const ScoredCursor& place) {
  trace::Enter(Phase::kExchange);
  hw::MbarrierWait(hw::SharedAddress(&math.shared.scored.empty[place.stage]), place.parity ^ 1);
}

// Hands over what the warp has stored in a place.
template <class M>
__device__ __forceinline__ void SendScored(const M& math, ScoredCursor& place, uint64_t key_mask,
                                           int32_t empty_blocks, bool raises) {
  auto& scored = math.shared.scored;
  if (math.thread.lane == 0) {
    ScoredBlock& block = scored.blocks[place.stage];
    if (math.thread.warp == 0) block.key_mask = key_mask, block.empty_blocks = empty_blocks;
    block.raises[math.thread.warp] = raises;
  }
  __syncwarp();
  if (math.thread.lane == 0) hw::MbarrierArrive(hw::SharedAddress(&scored.full[place.stage]));
  place.Advance(1);
}

// P of a block, in pairs of tokens.
template <class M>
using PackedP = uint32_t[M::Config::kAccumulators / 2];

// Softmax of a block, whose scores have been computed. Returns what FindReferences does.
template <class M>
__device__ __forceinline__ bool MakeP(const M& math, const BlockToScore<M>& block,
                                      const ScoredCursor& place, Softmax<M>& softmax,
                                      typename M::Scores& scores, PackedP<M>& p) {
  using S = Softmax<M>;
  ReleaseScored(math, block.place);
  WaitEmpty(math, place);
  trace::Enter(Phase::kSoftmax);
  auto& factors = math.shared.scored.factors[place.stage];
  const bool raises = FindReferences(math, block, softmax, factors, scores);
#pragma unroll
  for (int i = 0; i < M::Config::kAccumulators / 2; ++i) {
    const float p0 = hw::Exp2(scores[2 * i]), p1 = hw::Exp2(scores[2 * i + 1]);
    softmax.sum[S::RowOf(2 * i)] += p0 + p1;
    p[i] = hw::Pack2<typename M::PElement>(p0, p1);
  }
  return raises;
}

// Stores P as [row][token], wgmma's B operand.
template <class M>
__device__ __forceinline__ void StoreP(const M& math, const ScoredCursor& place,
                                       const PackedP<M>& p) {
  // Read again with tile scales: kept, it would be spilled.
  const uint32_t lane =
      M::Config::kScalesValues ? gpu::ThreadIndex() % kWarpThreads : math.thread.lane;
  const uint32_t address = hw::SharedAddress(math.shared.p[place.stage]);
  const int row = math.thread.warp * kMmaK + lane % 16;
#pragma unroll
  for (int i = 0; i < kBlockN / 16; ++i) {
    // 8 rows and 8 tokens, then the next 8 rows; then the same of the next 8 tokens.
    hw::StoreMatrixX4(address + VectorOffset(row, 2 * i + lane / 16), p[4 * i], p[4 * i + 1],
                      p[4 * i + 2], p[4 * i + 3]);
  }
}

}  // namespace jax_mla::decode::sm90::codes64
