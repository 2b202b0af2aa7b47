// The warpgroup for the scores, in the narrow kernel's tiles of 64 rows against a cache of codes
// (Config::kHasQueryCodes): what it does for a block. Its items are in scores_role.cuh, and what
// differs with tile scales in tile_scores.cuh.
//
// wgmma multiplies codes as they lie in shared memory, at twice the rate of 16-bit values. So K is
// never converted here. Queries that are codes are multiplied once. A row of other queries is
// multiplied by a power of two, and each of its values becomes the sum of two codes: one of the
// first four bits, and one of the rest. Together they have a bf16's 8 bits, except for what is
// below 2^-16 of the row's largest value. Both are multiplied. The sums of such products keep 13
// bits (docs/numerics.md).
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

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/kv_format.h"
#include "decode/params.h"
#include "decode/sm90/narrow/codes.cuh"
#include "decode/sm90/narrow/config.h"
#include "decode/sm90/narrow/math.cuh"
#include "decode/sm90/narrow/params.cuh"
#include "decode/sm90/tuning.h"
#include "decode/trace.cuh"
#include "gpu/codegen.cuh"
#include "gpu/sm90.cuh"
#include "gpu/sm90_wgmma.cuh"

namespace jax_mla::decode::sm90::narrow {

inline constexpr int kCodesMmaK = 32;  // depth of one wgmma of codes, and its bytes along a row
// A step of a query row: kCodesMmaK dims, which keep their place when they become codes. The first
// codes are in the first half of it, the second ones behind them.
inline constexpr int kStepBytes = kCodesMmaK * kElementBytes;
inline constexpr int kStepVectors = kStepBytes / kCopyBytes;
inline constexpr int kChunkSteps = kChunkRowBytes / kStepBytes;
// Exponent of the largest value of a row whose values are two codes. The largest code is 448.
inline constexpr int kMaxCodedExponent = 7;
inline constexpr uint32_t kInfinityBf16 = 0x7f80;  // the bits

__device__ __forceinline__ void SyncScores() {
  hw::NamedBarrierSync(kBarrierScores, kWarpgroupThreads);
}

// ---- queries

// Codes of two pairs of bf16 whose values have no more bits than a code. The upper value of a pair
// is converted with the lower one behind it, which is much less than half of a code's last bit.
__device__ __forceinline__ uint32_t EncodePairs(uint32_t first, uint32_t second) {
  uint32_t codes;
  asm("{\n"
      ".reg .b32 first, second;\n"
      ".reg .b16 low, high;\n"
      "shl.b32 first, %1, 16;\n"
      "shl.b32 second, %2, 16;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %1, first;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %2, second;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(codes)
      : "r"(first), "r"(second));
  return codes;
}

// A pair of bf16 without the last four bits, for which a code has no room.
__device__ __forceinline__ uint32_t FirstBits(uint32_t pair) { return pair & 0xfff0fff0u; }

// What they leave of the pair.
__device__ __forceinline__ uint32_t RestOf(uint32_t pair, uint32_t first_bits) {
  const __nv_bfloat162 rest = __hsub2(reinterpret_cast<const __nv_bfloat162&>(pair),
                                      reinterpret_cast<const __nv_bfloat162&>(first_bits));
  return reinterpret_cast<const uint32_t&>(rest);
}

// A pair of bf16 times a power of two.
__device__ __forceinline__ uint32_t Scale(uint32_t pair, __nv_bfloat162 factor) {
  const __nv_bfloat162 scaled = __hmul2(reinterpret_cast<const __nv_bfloat162&>(pair), factor);
  return reinterpret_cast<const uint32_t&>(scaled);
}

// Encodes a step in place. If kParts is 2, its values are multiplied by a power of two, and become
// sums of two codes.
template <int kParts>
__device__ __forceinline__ void EncodeStep(uint4 (&step)[kStepVectors], __nv_bfloat162 factor) {
  constexpr int kWords = kStepVectors * 2;  // of codes
  auto& pairs = reinterpret_cast<uint32_t (&)[2 * kWords]>(step);
  uint32_t codes[kParts][kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    uint32_t first[2], rest[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t pair = pairs[2 * i + j];
      if constexpr (kParts == 2) {
        const uint32_t scaled = Scale(pair, factor);
        first[j] = FirstBits(scaled);
        rest[j] = RestOf(scaled, first[j]);
      } else {
        first[j] = pair;
      }
    }
    codes[0][i] = EncodePairs(first[0], first[1]);
    if constexpr (kParts == 2) codes[1][i] = EncodePairs(rest[0], rest[1]);
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) pairs[part * kWords + i] = codes[part][i];
  }
}

// The steps of a row of queries that a thread has: one in every second chunk, always at the same
// place. If it has one of q_pe, that is the last.
template <class C>
struct QuerySteps {
  static constexpr int kRowThreads = kTeamThreads / C::kBlockM;
  using Lanes = RowLanes<kRowThreads>;
  static constexpr int kStride = kRowThreads / kChunkSteps;  // chunks from one step to the next
  static constexpr int kLatentSteps = C::kCkvQueryChunks / kStride;
  static_assert(C::kCkvQueryChunks % kStride == 0 && C::kDKpe == kChunkDims,
                "q_pe is a chunk behind those of q_nope");

  uint32_t row, row_thread;
  uint8_t* first[kStepVectors];

  __device__ __forceinline__ explicit QuerySteps(uint8_t* q) {
    const uint32_t thread = gpu::ThreadIndex(), lane = thread % kWarpThreads;
    row = thread / kWarpThreads * Lanes::kRows + Lanes::Row(lane);
    row_thread = Lanes::Part(lane);
#pragma unroll
    for (int i = 0; i < kStepVectors; ++i) {
      first[i] = q + row_thread / kChunkSteps * C::kQueryChunkBytes +
                 VectorOffset(row, row_thread % kChunkSteps * kStepVectors + i);
    }
  }
  __device__ __forceinline__ bool IsFirstOfRow() const { return row_thread == 0; }
  __device__ __forceinline__ bool HasRope() const { return row_thread < kChunkSteps; }
  __device__ __forceinline__ uint4& Vector(int step, int i) const {
    return *reinterpret_cast<uint4*>(first[i] + step * kStride * C::kQueryChunkBytes);
  }
};

// Queries come as bf16 and become codes, step by step; q_pe stays bf16 where kpe is. Leaves in
// SharedMemory::query_scale by what a row's scores have to be multiplied. The value warpgroups do
// it: they have the registers, and are twice as many threads as the warpgroup for the scores, which
// waits for it.
template <class M>
__device__ __forceinline__ void PackQueries(const M& math) {
  using C = typename M::Config;
  using Steps = QuerySteps<C>;
  constexpr int kParts = C::kQueryParts;
  // Computed for every item: kept, the places would take registers of the main loop.
  const Steps steps(math.shared.q[math.query.stage]);
  const int all_steps = Steps::kLatentSteps + (steps.HasRope() ? 1 : 0);
  __nv_bfloat162 factor{};
  float scale = 1.0f;
  if constexpr (kParts == 2) {
    uint32_t tops[2] = {};
#pragma unroll 1
    for (int step = 0; step < all_steps; ++step) {
#pragma unroll
      for (int i = 0; i < kStepVectors; ++i) {
        tops[i % 2] = LargerMagnitudes(tops[i % 2], LargerMagnitudes(steps.Vector(step, i)));
      }
    }
    const uint32_t magnitude =
        Steps::Lanes::Max(LargestMagnitude(LargerMagnitudes(tops[0], tops[1])));
    // 2^exponent <= the largest magnitude < 2^(exponent + 1), but for what is tiny or not finite.
    const int biased = min(max(static_cast<int>(magnitude >> 7), kMaxCodedExponent + 1), 254);
    factor = __float2bfloat162_rn(__int_as_float((2 * 127 + kMaxCodedExponent - biased) << 23));
    scale = __int_as_float((biased - kMaxCodedExponent) << 23);
    if (magnitude >= kInfinityBf16) scale = NAN;  // there is no code of infinity
  }
  if (steps.IsFirstOfRow()) math.shared.query_scale[0][steps.row] = scale;
  const bool has_rope_codes = math.params.decode.kv_format == KvFormat::kE4m3;
  const int coded_steps = has_rope_codes ? all_steps : Steps::kLatentSteps;
#pragma unroll 1
  for (int step = 0; step < coded_steps; ++step) {
    uint4 vectors[kStepVectors];
#pragma unroll
    for (int i = 0; i < kStepVectors; ++i) vectors[i] = steps.Vector(step, i);
    EncodeStep<kParts>(vectors, factor);
#pragma unroll
    for (int i = 0; i < kStepVectors / 2 * kParts; ++i) steps.Vector(step, i) = vectors[i];
  }
  if (kParts == 2 && !has_rope_codes && steps.HasRope()) {
#pragma unroll
    for (int i = 0; i < kStepVectors; ++i) {
      uint4& v = steps.Vector(Steps::kLatentSteps, i);
      v = {Scale(v.x, factor), Scale(v.y, factor), Scale(v.z, factor), Scale(v.w, factor)};
    }
  }
  hw::FenceProxyAsyncShared();
}

// The value warpgroups say that the queries are packed, and the warpgroup for the scores waits.
__device__ __forceinline__ void SendPacked() {
  hw::NamedBarrierArrive(kBarrierScores, kTeamThreads + kWarpgroupThreads);
}
__device__ __forceinline__ void WaitPacked() {
  hw::NamedBarrierSync(kBarrierScores, kTeamThreads + kWarpgroupThreads);
}

// ---- scores

// What is added up to a block's scores, in this order: for each part of the queries the rope chunk,
// if that is codes, and the latent chunks. What the second codes give is small, so it comes first,
// and loses little in sums of 13 bits.
template <class C>
inline constexpr int kPartProducts = 1 + C::kCkvChunks;
template <class C>
inline constexpr int kBlockProducts = C::kQueryParts * kPartProducts<C>;
// How many products of the next block are issued before a block's P is sent. Later, the value
// warpgroups wait; earlier, their products delay these.
template <class C>
inline constexpr int kProductsBeforeSend = C::kQueryParts == 2 ? 5 : 3;

// Issues one of these products. If not `accumulates`, it overwrites the scores. The rope chunk has
// landed (KeyMaskOf); a latent one is waited for.
template <class M>
__device__ __forceinline__ void IssueProduct(const M& math, const typename M::Cursor& block,
                                             int product, bool accumulates,
                                             typename M::Scores& scores) {
  using C = typename M::Config;
  const int part = C::kQueryParts - 1 - product / kPartProducts<C>;
  const int chunk = product % kPartProducts<C>;  // 0: the rope one
  const auto place = block.Ahead(chunk);
  if (chunk > 0) math.WaitChunk(place);
  const int first_chunk = chunk == 0 ? C::kCkvQueryChunks : 2 * (chunk - 1);  // of the queries
  const uint64_t k = hw::SharedDescriptor(hw::SharedAddress(math.shared.kv[place.stage]));
  const int steps = (chunk == 0 ? C::kDKpe : C::kLatentChunkDims) / kCodesMmaK;
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
#pragma unroll
  for (int product = kBegin; product < kEnd; ++product) {
    IssueProduct(math, block, product, product > 0, scores);
  }
}

template <int kSize>
__device__ __forceinline__ void WaitScores(float (&scores)[kSize]) {
  hw::WgmmaWait<0>();
  hw::WgmmaFenceOperand(scores);
}

// Whether the scores of kpe have the units of those of ckv, so that all are added up at once.
template <class M>
__device__ __forceinline__ bool HasOneUnit(const M& math) {
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

// The scores of a block where they have not. In the units of those of kpe.
template <class M>
__device__ __forceinline__ void ScoresOfTwoUnits(const M& math, const typename M::Cursor& block,
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

// ---- blocks

// A block with keys, or what is behind an item's last block.
template <class M>
struct BlockToScore {
  typename M::Cursor place;
  int idx;               // of the item
  int32_t empty_blocks;  // in front of it
  uint64_t key_mask;     // 0 behind the last block
};

// How often each of the warpgroup's warps arrives for a rope chunk, or an empty block.
template <class C>
inline constexpr int kFirstArrivals = C::kEmptyArrivals / kWarpgroupWarps;

// Passes over empty blocks, which have one stage and no chunks (SendEmptyBlock).
template <class M>
__device__ __forceinline__ BlockToScore<M> FindBlockToScore(const M& math, typename M::Cursor place,
                                                            int idx) {
  using C = typename M::Config;
  int32_t empty_blocks = 0;
#pragma unroll 1
  for (; idx < math.item.num_blocks; ++idx, ++empty_blocks) {
    const uint64_t key_mask = KeyMaskOf(math, place, idx);
    if (key_mask != 0) return {place, idx, empty_blocks, key_mask};
    __syncwarp();
    if (math.thread.lane < kFirstArrivals<C>) {
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
  __syncwarp();
  const int lane = math.thread.lane;
  if (lane >= kFirstArrivals<C> + C::kCkvChunks) return;
  const auto place = block.Ahead(lane < kFirstArrivals<C> ? 0 : lane - kFirstArrivals<C> + 1);
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

// ---- softmax

// Of the two rows of which a thread has scores.
template <class M>
struct Softmax {
  static constexpr int kRows = 2;
  float scale[kRows];      // of scores, to log2 units; 0 for rows that are not the unit's
  float reference[kRows];  // lazy running maximum, log2 units; 0 without a key
  float sum[kRows];        // of P, over the thread's tokens of the item
  bool has_key[kRows];

  static __device__ __forceinline__ int Row(const Thread& thread, int r) {
    return thread.warp * kMmaK + thread.lane / 4 + 8 * r;
  }
  // The row, and the token of a block, to which accumulator i belongs.
  static constexpr __device__ int RowOf(int i) { return i / 2 % 2; }
  static __device__ __forceinline__ int TokenOf(const Thread& thread, int i) {
    return i / 4 * 8 + thread.lane % 4 * 2 + i % 2;
  }
};

// Math::MaskScores for accumulators of this layout.
template <class M>
__device__ __forceinline__ void MaskScoresOfRows(const M& math, uint64_t key_mask, int tokens_left,
                                                 typename M::Scores& scores) {
  using C = typename M::Config;
  using S = Softmax<M>;
  const DecodeParams& decode = math.params.decode;
  const int first_token = S::TokenOf(math.thread, 0);
  uint64_t seen[S::kRows];  // from the thread's first token on
#pragma unroll
  for (int r = 0; r < S::kRows; ++r) {
    const int row = math.row_tile * C::kBlockM + S::Row(math.thread, r);
    int limit = tokens_left;
    if constexpr (C::kHasUnits) {
      const Unit& unit = math.unit();
      const int query = math.params.num_heads.Floor(unit.first_head + row);
      limit += min(unit.first_limit + query - unit.seq_len, 0);
    } else if (decode.causal) {  // a query does not see the tokens of the queries behind it
      limit += math.params.num_heads.Floor(row) - (decode.q_len - 1);
    }
    seen[r] = (key_mask & LowBits(limit)) >> first_token;
  }
#pragma unroll
  for (int i = 0; i < C::kAccumulators; ++i) {
    if (!(seen[S::RowOf(i)] >> (S::TokenOf(math.thread, i) - first_token) & 1)) {
      scores[i] = -INFINITY;
    }
  }
}

// Scores become relative to their references. Those of the warp's rows rise if a score asks for it.
// Returns whether one of a row with keys did; `factors` then has by what O has to be multiplied.
template <class M>
__device__ __forceinline__ bool FindReferences(const M& math, const BlockToScore<M>& block,
                                               Softmax<M>& softmax,
                                               float (&factors)[M::Config::kBlockM],
                                               typename M::Scores& scores) {
  using C = typename M::Config;
  using S = Softmax<M>;
#pragma unroll
  for (int i = 0; i < C::kAccumulators; ++i) {
    scores[i] = fmaf(scores[i], softmax.scale[S::RowOf(i)], -softmax.reference[S::RowOf(i)]);
  }
  const int tokens_left = math.item.tokens_left - block.idx * kBlockN;
  if (math.HidesTokens(block.key_mask, tokens_left)) {
    MaskScoresOfRows(math, block.key_mask, tokens_left, scores);
  }
  float top[S::kRows] = {scores[0], scores[2]};
#pragma unroll
  for (int i = 0; i < C::kAccumulators; ++i) {
    top[S::RowOf(i)] = fmaxf(top[S::RowOf(i)], scores[i]);
  }
  const bool exceeds = fmaxf(top[0], top[1]) > kCodesRescaleThreshold;
  const bool lacks_key = !softmax.has_key[0] || !softmax.has_key[1];
  if (!__any_sync(~0u, exceeds || lacks_key)) return false;
  float raise[S::kRows];
  bool rises = false;
#pragma unroll
  for (int r = 0; r < S::kRows; ++r) {
    top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
    top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
    if (isnan(top[r])) top[r] = 0.0f;  // a NaN is a key, too: its row would ask again and again
    const bool had_key = softmax.has_key[r], has_key = had_key || top[r] > -INFINITY;
    // The first reference may be any number, a later one only rises.
    raise[r] = had_key ? fmaxf(top[r], 0.0f) : has_key ? top[r] : 0.0f;
    const float factor = had_key ? hw::Exp2(-raise[r]) : 1.0f;  // without a key, sum and O are 0
    softmax.reference[r] += raise[r];
    softmax.sum[r] *= factor;
    softmax.has_key[r] = has_key;
    rises |= had_key && raise[r] != 0.0f;
    if (math.thread.lane % 4 == 0) factors[S::Row(math.thread, r)] = factor;
  }
#pragma unroll
  for (int i = 0; i < C::kAccumulators; ++i) scores[i] -= raise[S::RowOf(i)];
  return __any_sync(~0u, rises);
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

}  // namespace jax_mla::decode::sm90::narrow
