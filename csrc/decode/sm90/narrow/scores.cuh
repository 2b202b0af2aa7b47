// The warpgroup for the scores, in the narrow kernel's tiles of 64 rows against a cache of codes
// (Config::kHasQueryCodes): what it does for a block. Its items are in scores_role.cuh, and what
// differs with tile scales in tile_scores.cuh.
//
// wgmma multiplies codes as they lie in shared memory, at twice the rate of 16-bit values. So K is
// never converted here. Queries that are codes are multiplied once. A row of other queries is
// multiplied by a power of two, and each of its values becomes the sum of two codes: the nearest
// code, and that of the rest. Together they have a bf16's 8 bits, except for what is below 2^-17 of
// the row's largest value. Both are multiplied. The sums of such products keep 13 bits
// (docs/numerics.md).
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
// q_pe of kCodesMmaK dims keeps its place: the first codes in the first half, the second behind it.
inline constexpr int kRopeStep = kCodesMmaK * kElementBytes;
// Exponent of the largest value of a row whose values are two codes. The largest code is 448.
inline constexpr int kMaxCodedExponent = 7;
inline constexpr uint32_t kInfinityBf16 = 0x7f80;  // the bits

__device__ __forceinline__ void SyncScores() {
  hw::NamedBarrierSync(kBarrierScores, kWarpgroupThreads);
}

// ---- queries

// 16 dims of a query row as codes, or as the sums of two of them.
struct CodedDims {
  uint4 high, low;
};

// Two pairs of float16 as four codes.
__device__ __forceinline__ uint32_t EncodePairs(uint32_t first, uint32_t second) {
  uint32_t codes;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 low, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 high, %2;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(codes)
      : "r"(first), "r"(second));
  return codes;
}

// What codes leave of the pair that they were made of.
__device__ __forceinline__ uint32_t RestOf(uint32_t pair, uint32_t decoded) {
  const __half2 rest =
      __hsub2(reinterpret_cast<const __half2&>(pair), reinterpret_cast<const __half2&>(decoded));
  return reinterpret_cast<const uint32_t&>(rest);
}

// A pair of bf16 times a power of two.
__device__ __forceinline__ uint32_t Scale(uint32_t pair, __nv_bfloat162 factor) {
  const __nv_bfloat162 scaled = __hmul2(reinterpret_cast<const __nv_bfloat162&>(pair), factor);
  return reinterpret_cast<const uint32_t&>(scaled);
}

// Encodes dims. If kParts is 2, they are multiplied by a power of two, and then the sums of two
// codes.
template <int kParts>
__device__ __forceinline__ CodedDims EncodeDims(const QueryDims& dims, __nv_bfloat162 factor) {
  CodedDims coded{};
  const auto* pairs = reinterpret_cast<const uint32_t*>(&dims);
  auto* high = reinterpret_cast<uint32_t*>(&coded.high);
  auto* low = reinterpret_cast<uint32_t*>(&coded.low);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t values[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t pair = pairs[2 * i + j];
      const float2 x = hw::Unpack2<__nv_bfloat16>(kParts == 2 ? Scale(pair, factor) : pair);
      values[j] = hw::Pack2<__half>(x.x, x.y);
    }
    high[i] = EncodePairs(values[0], values[1]);
    if constexpr (kParts == 2) {
      low[i] = EncodePairs(RestOf(values[0], DecodeLow(high[i])),
                           RestOf(values[1], DecodeHigh(high[i])));
    }
  }
  return coded;
}

// Queries come as bf16 and become codes, in place. The first codes of a latent chunk take the
// place of its first 64 dims, and the second ones that of the others; for q_pe see kRopeStep. It
// stays bf16 where kpe is. Leaves in SharedMemory::query_scale by what a row's scores have to be
// multiplied. The value warpgroups do it: they have the registers for a latent chunk of a row a
// thread, and are twice as many threads as the warpgroup for the scores, which waits for it.
template <class M>
__device__ __forceinline__ void PackQueries(const M& math) {
  using C = typename M::Config;
  constexpr int kParts = C::kQueryParts;
  constexpr int kGroups = C::kLatentChunkDims / kMmaK;  // of dims, one vector of codes each
  constexpr int kHalfGroups = kGroups / 2;              // of a chunk of bf16
  using Lanes = RowLanes<kTeamThreads / C::kBlockM>;
  static_assert(C::kLatentChunkDims == 2 * kChunkDims && kTeamThreads / C::kBlockM == C::kCkvChunks,
                "a thread has a latent chunk of a row");
  static_assert(C::kDKpe / kMmaK == C::kCkvChunks, "and 16 dims of q_pe");
  // Recomputed: kept between items, rows and places would take registers of the main loop.
  const uint32_t thread = gpu::ThreadIndex(), lane = thread % kWarpThreads;
  const uint32_t row = thread / kWarpThreads * Lanes::kRows + Lanes::Row(lane);
  const uint32_t part = Lanes::Part(lane);
  uint8_t* const q = math.shared.q[math.query.stage];
  uint8_t* const halves[2] = {q + 2 * part * C::kQueryChunkBytes,
                              q + (2 * part + 1) * C::kQueryChunkBytes};
  uint8_t* const rope = q + C::kCkvQueryChunks * C::kQueryChunkBytes;
  const auto vector_at = [&](uint8_t* chunk, int vector) -> uint4& {
    return *reinterpret_cast<uint4*>(chunk + VectorOffset(row, vector));
  };
  const auto dims_at = [&](uint8_t* chunk, int group) {
    return QueryDims{vector_at(chunk, 2 * group), vector_at(chunk, 2 * group + 1)};
  };
  QueryDims dims[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    dims[g] = dims_at(halves[g / kHalfGroups], g % kHalfGroups);
  }
  __nv_bfloat162 factor{};
  float scale = 1.0f;
  if constexpr (kParts == 2) {
    uint32_t magnitude = dims_at(rope, part).Magnitude();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      magnitude = max(magnitude, dims[g].Magnitude());
    }
    magnitude = Lanes::Max(magnitude);
    // 2^exponent <= the largest magnitude < 2^(exponent + 1), but for what is tiny or not finite.
    const int biased = min(max(static_cast<int>(magnitude >> 7), kMaxCodedExponent + 1), 254);
    factor = __float2bfloat162_rn(__int_as_float((2 * 127 + kMaxCodedExponent - biased) << 23));
    scale = __int_as_float((biased - kMaxCodedExponent) << 23);
    if (magnitude >= kInfinityBf16) scale = NAN;  // there is no code of infinity
  }
  if (part == 0) math.shared.query_scale[0][row] = scale;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const CodedDims coded = EncodeDims<kParts>(dims[g], factor);
    vector_at(halves[0], g) = coded.high;
    if constexpr (kParts == 2) vector_at(halves[1], g) = coded.low;
  }
  if (math.params.decode.kv_format == KvFormat::kE4m3) {
    const CodedDims coded = EncodeDims<kParts>(dims_at(rope, part), factor);
    __syncwarp();  // the other threads of the row have read what is overwritten
    constexpr int kStepGroups = kCodesMmaK / kMmaK;
    const int vector = part / kStepGroups * 2 * kStepGroups + part % kStepGroups;
    vector_at(rope, vector) = coded.high;
    if constexpr (kParts == 2) vector_at(rope, vector + kStepGroups) = coded.low;
  } else if constexpr (kParts == 2) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      auto& pairs = reinterpret_cast<uint32_t (&)[4]>(vector_at(rope, 2 * part + v));
#pragma unroll
      for (uint32_t& pair : pairs) pair = Scale(pair, factor);
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
  const int query_chunk = chunk == 0 ? C::kCkvQueryChunks : 2 * (chunk - 1) + part;
  const uint64_t q = hw::SharedDescriptor(hw::SharedAddress(math.shared.q[math.query.stage]) +
                                          query_chunk * C::kQueryChunkBytes);
  const uint64_t k = hw::SharedDescriptor(hw::SharedAddress(math.shared.kv[place.stage]));
  const int steps = (chunk == 0 ? C::kDKpe : C::kLatentChunkDims) / kCodesMmaK;
  hw::WgmmaArrive();
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    const int offset = chunk == 0 ? step * kRopeStep + part * kCodesMmaK : step * kCodesMmaK;
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
  const Thread& thread = math.thread;
  const uint32_t address = hw::SharedAddress(math.shared.p[place.stage]);
  const int row = thread.warp * kMmaK + thread.lane % 16;
#pragma unroll
  for (int i = 0; i < kBlockN / 16; ++i) {
    // 8 rows and 8 tokens, then the next 8 rows; then the same of the next 8 tokens.
    hw::StoreMatrixX4(address + VectorOffset(row, 2 * i + thread.lane / 16), p[4 * i], p[4 * i + 1],
                      p[4 * i + 2], p[4 * i + 3]);
  }
}

}  // namespace jax_mla::decode::sm90::narrow
