// The warpgroup for the scores, in the narrow kernel for queries that are codes
// (Config::kHasQueryCodes).
//
// wgmma multiplies codes as they lie in shared memory, at twice the rate of 16-bit values. So K is
// never converted here. The sums of such products keep 13 bits (docs/numerics.md).
//
// Query rows are wgmma's M here, and tokens N. Then a thread has scores of two rows only, and the
// softmax needs nothing of another warp. P goes to the value warpgroups (values.cuh), block by
// block, by one of two places in shared memory (ScoredBlocks). The products of the next block's
// scores begin before P is stored. Not earlier, because the tensor cores queue about five products,
// and whoever issues another one waits. Roles and barriers: kernel.cuh.
#pragma once

#include <cstdint>

#include "core/kv_format.h"
#include "decode/params.h"
#include "decode/sm90/narrow/codes.cuh"
#include "decode/sm90/narrow/config.h"
#include "decode/sm90/narrow/math.cuh"
#include "decode/sm90/narrow/params.cuh"
#include "decode/sm90/tuning.h"
#include "decode/trace.cuh"
#include "gpu/sm90.cuh"
#include "gpu/sm90_wgmma.cuh"

namespace jax_mla::decode::sm90::narrow {

inline constexpr int kCodesMmaK = 32;  // depth of one wgmma of codes, and its bytes along a row
// q_pe of kCodesMmaK dims lies where it was as bf16, in the first half of these bytes.
inline constexpr int kRopeCodesStride = kCodesMmaK * kElementBytes;

__device__ __forceinline__ void SyncScores() {
  hw::NamedBarrierSync(kBarrierScores, kWarpgroupThreads);
}

// ---- queries

// Four bf16, in two pairs, as codes.
__device__ __forceinline__ uint32_t EncodePairs(uint32_t low, uint32_t high) {
  const float2 a = hw::Unpack2<__nv_bfloat16>(low), b = hw::Unpack2<__nv_bfloat16>(high);
  uint32_t codes;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(codes)
      : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y));
  return codes;
}
__device__ __forceinline__ uint4 EncodeDims(const uint4& low, const uint4& high) {
  return {EncodePairs(low.x, low.y), EncodePairs(low.z, low.w), EncodePairs(high.x, high.y),
          EncodePairs(high.z, high.w)};
}

// Queries come as the bf16 that codes stand for, and become codes again: those of a latent chunk in
// the place of its first 64 dims, and q_pe at kRopeCodesStride, unless kpe is bf16.
template <class M>
__device__ __forceinline__ void PackQueries(const M& math) {
  using C = typename M::Config;
  constexpr int kRowThreads = kWarpgroupThreads / C::kBlockM;
  constexpr int kThreadChunks = C::kCkvQueryChunks / kRowThreads;  // of bf16
  constexpr int kHalfVectors = kChunkDims / kCopyBytes;            // of codes, of a chunk of bf16
  static_assert(C::kLatentChunkDims == 2 * kChunkDims && kThreadChunks % 2 == 0,
                "a thread has both halves of a latent chunk");
  const int row = math.thread.idx / kRowThreads, part = math.thread.idx % kRowThreads;
  uint8_t* const q = math.shared.q[math.query.stage];
  const auto vector_at = [&](uint8_t* chunk, int vector) -> uint4& {
    return *reinterpret_cast<uint4*>(chunk + VectorOffset(row, vector));
  };
#pragma unroll 1
  for (int i = 0; i < kThreadChunks; ++i) {
    uint8_t* source = q + (part * kThreadChunks + i) * C::kQueryChunkBytes;
    uint8_t* chunk = source - i % 2 * C::kQueryChunkBytes;
    uint4 codes[kHalfVectors];
#pragma unroll
    for (int v = 0; v < kHalfVectors; ++v) {
      codes[v] = EncodeDims(vector_at(source, 2 * v), vector_at(source, 2 * v + 1));
    }
#pragma unroll
    for (int v = 0; v < kHalfVectors; ++v) vector_at(chunk, i % 2 * kHalfVectors + v) = codes[v];
  }
  if (math.params.decode.kv_format == KvFormat::kE4m3 && part < C::kDKpe / kCodesMmaK) {
    uint8_t* rope = q + C::kCkvQueryChunks * C::kQueryChunkBytes;
    const int first = part * kRopeCodesStride / kCopyBytes;
    const uint4 low = EncodeDims(vector_at(rope, first), vector_at(rope, first + 1));
    const uint4 high = EncodeDims(vector_at(rope, first + 2), vector_at(rope, first + 3));
    vector_at(rope, first) = low, vector_at(rope, first + 1) = high;
  }
  hw::FenceProxyAsyncShared();
}

// ---- scores

// Issues the scores of kpe of a block, whose rope chunk has landed (KeyMaskOf).
template <bool kRopeIsCodes, class M>
__device__ __forceinline__ void IssueRopeScores(const M& math, const typename M::Cursor& block,
                                                typename M::Scores& scores) {
  using C = typename M::Config;
  constexpr auto kK = hw::Major::K;
  const uint64_t q = hw::SharedDescriptor(hw::SharedAddress(math.shared.q[math.query.stage]) +
                                          C::kCkvQueryChunks * C::kQueryChunkBytes);
  const uint64_t k = hw::SharedDescriptor(hw::SharedAddress(math.shared.kv[block.stage]));
  hw::WgmmaFenceOperand(scores);
  hw::WgmmaArrive();
  if constexpr (kRopeIsCodes) {
#pragma unroll
    for (int step = 0; step < C::kDKpe / kCodesMmaK; ++step) {
      hw::WgmmaCodes<kBlockN>(hw::AdvanceDescriptor(q, step * kRopeCodesStride),
                              hw::AdvanceDescriptor(k, step * kCodesMmaK), scores, step > 0);
    }
  } else {
#pragma unroll
    for (int step = 0; step < C::kDKpe / kMmaK; ++step) {
      hw::WgmmaSS<typename M::T, kBlockN, kK, kK>(hw::AdvanceDescriptor(q, step * kMmaKBytes),
                                                  hw::AdvanceDescriptor(k, step * kMmaKBytes),
                                                  scores, step > 0);
    }
  }
  hw::WgmmaCommit();
}

// Waits for a latent chunk, and issues its scores, which are added to them.
template <class M>
__device__ __forceinline__ void IssueLatentScores(const M& math, const typename M::Cursor& block,
                                                  int chunk, typename M::Scores& scores) {
  using C = typename M::Config;
  const auto place = block.Ahead(1 + chunk);
  math.WaitChunk(place);
  const uint64_t q = hw::SharedDescriptor(hw::SharedAddress(math.shared.q[math.query.stage]));
  const uint64_t k = hw::SharedDescriptor(hw::SharedAddress(math.shared.kv[place.stage]));
  hw::WgmmaArrive();
#pragma unroll
  for (int step = 0; step < C::kLatentChunkDims / kCodesMmaK; ++step) {
    hw::WgmmaCodes<kBlockN>(
        hw::AdvanceDescriptor(q, 2 * chunk * C::kQueryChunkBytes + step * kCodesMmaK),
        hw::AdvanceDescriptor(k, step * kCodesMmaK), scores, true);
  }
  hw::WgmmaCommit();
}

template <int kSize>
__device__ __forceinline__ void WaitScores(float (&scores)[kSize]) {
  hw::WgmmaWait<0>();
  hw::WgmmaFenceOperand(scores);
}

// Whether the scores of kpe have the units of those of ckv, so that all are added up at once.
template <class M>
__device__ __forceinline__ bool HasOneUnit(const M& math) {
  return math.params.decode.kv_format == KvFormat::kE4m3 && math.scales.kpe == 1.0f;
}

// The scores of a block where they have not. In the units of those of ckv.
template <class M>
__device__ __forceinline__ void ScoresOfTwoUnits(const M& math, const typename M::Cursor& block,
                                                 typename M::Scores& scores) {
  using C = typename M::Config;
  if (math.params.decode.kv_format == KvFormat::kE4m3) {
    IssueRopeScores<true>(math, block, scores);
    WaitScores(scores);
  } else {
    IssueRopeScores<false>(math, block, scores);
    WaitScores(scores);
  }
#pragma unroll
  for (int i = 0; i < C::kAccumulators; ++i) scores[i] *= math.scales.kpe;
  hw::WgmmaFenceOperand(scores);
#pragma unroll
  for (int chunk = 0; chunk < C::kCkvChunks; ++chunk) {
    IssueLatentScores(math, block, chunk, scores);
  }
  WaitScores(scores);
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
    p[i] = hw::Pack2<ValueElement<typename M::Config>>(p0, p1);
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

// ---- items

// Scores and softmax of an item's blocks. Returns what comes behind them.
template <class M>
__device__ __forceinline__ BlockToScore<M> ScoreBlocks(const M& math, ScoredCursor& place,
                                                       Softmax<M>& softmax) {
  using C = typename M::Config;
  static_assert(C::kKvStages >= 2 * C::kChunks, "a block and the next one must fit into the ring");
  BlockToScore<M> block = FindBlockToScore(math, math.kv, 0);
  typename M::Scores scores;
  PackedP<M> p;
  const auto send = [&](bool raises) {
    hw::FenceProxyAsyncShared();
    SendScored(math, place, block.key_mask, block.empty_blocks, raises);
  };
  const auto find_next = [&] {
    block = FindBlockToScore(math, block.place.Ahead(C::kChunks), block.idx + 1);
  };
  if (!HasOneUnit(math)) {
#pragma unroll 1
    while (block.key_mask != 0) {
      trace::Enter(Phase::kQk);
      ScoresOfTwoUnits(math, block.place, scores);
      const bool raises = MakeP(math, block, place, softmax, scores, p);
      trace::Enter(Phase::kStoreP);
      StoreP(math, place, p);
      send(raises);
      find_next();
    }
    return block;
  }
#pragma unroll 1
  while (block.key_mask != 0) {
    IssueRopeScores<true>(math, block.place, scores);
#pragma unroll
    for (int chunk = 0; chunk < C::kCkvChunks; ++chunk) {
      IssueLatentScores(math, block.place, chunk, scores);
    }
    // This block, and those that follow each other behind it without an empty one between them.
#pragma unroll 1
    while (true) {
      trace::Enter(Phase::kWaitMma);
      WaitScores(scores);
      const bool raises = MakeP(math, block, place, softmax, scores, p);
      // No look further than at the next block: this one's stages are not freed before its P is
      // sent, and empty blocks could fill the rest of the ring.
      const auto next = block.place.Ahead(C::kChunks);
      const uint64_t next_mask = KeyMaskOf(math, next, block.idx + 1);
      trace::Enter(Phase::kStoreP);
      if (next_mask == 0) {
        StoreP(math, place, p);
        send(raises);
        break;
      }
      IssueRopeScores<true>(math, next, scores);
      IssueLatentScores(math, next, 0, scores);
      StoreP(math, place, p);
      IssueLatentScores(math, next, 1, scores);
      send(raises);
      trace::Enter(Phase::kQk);
#pragma unroll
      for (int chunk = 2; chunk < C::kCkvChunks; ++chunk) {
        IssueLatentScores(math, next, chunk, scores);
      }
      block = {next, block.idx + 1, 0, next_mask};
    }
    find_next();
  }
  return block;
}

// Leaves the sums and references of an item's rows where the value warpgroups read them.
template <class M>
__device__ __forceinline__ void StoreStats(const M& math, const Softmax<M>& softmax) {
  const int item = ItemIndex<typename M::Config>(math.query);
#pragma unroll
  for (int r = 0; r < Softmax<M>::kRows; ++r) {
    float sum = softmax.sum[r];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (math.thread.lane % 4 != 0) continue;
    const int row = Softmax<M>::Row(math.thread, r);
    math.shared.scored.sums[item][row] = sum;
    math.shared.scored.references[item][row] = softmax.reference[r];
  }
}

// Scores and softmax of all items.
template <class C>
__device__ __forceinline__ void ScoresRole(const KernelParams& params, SharedMemory<C>& shared,
                                           int warp, int row_tile) {
  using M = Math<C>;
  using S = Softmax<M>;
  // Its thread.wg is 0, like WG0's. It uses none of WG0's barriers and chunks.
  M math(params, shared, warp - kTeamWarps, row_tile);
  ScoredCursor place;
#pragma unroll 1
  while (true) {
    trace::Enter(Phase::kWaitItem);
    hw::MbarrierWait(hw::SharedAddress(&shared.q_full[math.query.stage]), math.query.parity);
    math.item = shared.items[ItemIndex<C>(math.query)];
    if (math.item.num_blocks == kNoMoreItems) break;
    math.LoadScales();
    PackQueries(math);
    S softmax;
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) {
      // Rows that are not the unit's get scores of 0, which never ask for a higher reference.
      const bool is_own = !C::kHasUnits || S::Row(math.thread, r) < math.RowsLeft();
      softmax.scale[r] = is_own ? math.ScaleLog2() : 0.0f;
      softmax.reference[r] = softmax.sum[r] = 0.0f;
      softmax.has_key[r] = false;
    }
    SyncScores();
    const BlockToScore<M> end = ScoreBlocks(math, place, softmax);
    math.kv = end.place;
    WaitEmpty(math, place);
    StoreStats(math, softmax);
    SendScored(math, place, end.key_mask, end.empty_blocks, /*raises=*/false);
    SyncScores();
    if (math.thread.idx == 0) {
      hw::MbarrierArrive(hw::SharedAddress(&shared.q_empty[math.query.stage]));
    }
    math.query.Advance(1);
  }
}

}  // namespace jax_mla::decode::sm90::narrow
