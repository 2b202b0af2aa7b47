// The two products of the narrow kernel where the cache holds codes of e4m3. Roles and barriers:
// kernel.cuh.
//
// wgmma's A operand may lie in registers, and in this kernel A is the cache. So codes never become
// 16-bit values in shared memory: a thread loads its fragment's codes, and float16 holds each of
// them exactly. That is done twice, once for K and once for V, which must lie in another order. One
// instruction makes two values of two codes.
//
// Queries are float16 too, then. A row of them is multiplied by a power of two which brings its
// largest value to between 2^14 and 2^15: a bf16 of that range, and of 2^28 below, is a float16 as
// it stands. kpe stays in bf16, in the cache or made from codes: its scale may be another one than
// that of ckv, so its scores have accumulators of their own, or with pairs of blocks come first and
// are multiplied by the quotient of the scales before the others are added.
//
// With a scale for each token and latent chunk (Config::kHasTileScales) the scores of a chunk have
// accumulators of their own too, which are multiplied by the scales, and P is stored once for each
// chunk, times its scales. These may be of any magnitude, but float16 has a small range. So a power
// of two is taken out of a token's scales (PowerOf), and its logarithm is added to the token's
// scores. References are found then, so they belong to P times that power: P is of common size for
// the tokens that count most for O. Where P is added to the sums, it is divided by the power.
//
// The dot product may visit dims in any order, as long as both operands agree. A lane's four
// values of a step of 16 dims are the neighbours 4c to 4c + 3, a word of codes (c is lane % 4), and
// not 2c, 2c + 1, 2c + 8, 2c + 9. So PrepareQueries puts the pairs of 16 dims of the queries into
// the order 0, 2, 4, 6, 1, 3, 5, 7. And a lane's rows of the tiles of O^T are neighbouring dims.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "core/kv_format.h"
#include "decode/sm90/narrow/config.h"
#include "decode/sm90/narrow/params.cuh"
#include "decode/trace.cuh"
#include "gpu/codegen.cuh"
#include "gpu/fp8.cuh"
#include "gpu/sm80.cuh"
#include "gpu/sm90.cuh"
#include "gpu/sm90_wgmma.cuh"

namespace jax_mla::decode::sm90::narrow {

// Two codes, in the lower or the upper half of a register, as a pair of float16.
__device__ __forceinline__ uint32_t DecodeLow(uint32_t codes) {
  uint32_t pair;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "}"
      : "=r"(pair)
      : "r"(codes));
  return pair;
}
__device__ __forceinline__ uint32_t DecodeHigh(uint32_t codes) {
  uint32_t pair;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 %0, high;\n"
      "}"
      : "=r"(pair)
      : "r"(codes));
  return pair;
}
// Four codes as two such pairs.
__device__ __forceinline__ uint2 DecodeWord(uint32_t codes) {
  return {DecodeLow(codes), DecodeHigh(codes)};
}

// 2^(biased - 127).
struct PowerOfTwo {
  static constexpr int kBias = 127;
  int biased;

  __device__ __forceinline__ float Log2() const { return static_cast<float>(biased - kBias); }
  __device__ __forceinline__ float Inverse() const {
    return __int_as_float((2 * kBias - biased) << 23);
  }
};

// What is taken out of a token's tile scales: the largest power of two that is not larger than the
// largest of them. It is limited so that sums of P times its inverse stay finite.
__device__ __forceinline__ PowerOfTwo PowerOf(const TokenScales& scales) {
  constexpr int kBias = PowerOfTwo::kBias, kMaxExponent = 96;
  static_assert(sizeof(scales) == sizeof(float4));
  const float4 tiles = *reinterpret_cast<const float4*>(scales.tiles);
  const float top =
      fmaxf(fmaxf(fabsf(tiles.x), fabsf(tiles.y)), fmaxf(fabsf(tiles.z), fabsf(tiles.w)));
  return {min(max(__float_as_int(top) >> 23, kBias - kMaxExponent), kBias + kMaxExponent)};
}

inline constexpr int kSwizzleRows = 8;   // the swizzle's period
inline constexpr int kMaxExponent = 14;  // of the largest value of a row of the queries

// Where vector v of a row of 128 swizzled bytes lies.
__device__ __forceinline__ uint32_t VectorOffset(int row, int vector) {
  return row * kChunkRowBytes + (vector ^ row % kSwizzleRows) * kCopyBytes;
}

// Which of a warp's rows of queries a lane has, and which part of it: kRowThreads lanes share a
// row. Shared memory serves the vectors of eight lanes at once. Parts of a row may lie in the same
// banks, while eight rows do not. So eight lanes have as many rows as the warp has, up to eight.
template <int kRowThreads>
struct RowLanes {
  static constexpr uint32_t kRows = kWarpThreads / kRowThreads;
  // Of a row, in eight lanes.
  static constexpr uint32_t kParts = std::max(uint32_t{kSwizzleRows} / kRows, 1u);

  static __device__ __forceinline__ uint32_t Row(uint32_t lane) { return lane / kParts % kRows; }
  static __device__ __forceinline__ uint32_t Part(uint32_t lane) {
    return lane / (kParts * kRows) * kParts + lane % kParts;
  }
  // The largest value of the row's lanes.
  static __device__ __forceinline__ uint32_t Max(uint32_t value) {
#pragma unroll
    for (uint32_t lanes = 1; lanes < kWarpThreads; lanes *= 2) {
      if (lanes >= kParts && lanes < kParts * kRows) continue;
      value = max(value, __shfl_xor_sync(~0u, value, lanes));
    }
    return value;
  }
};

// The larger magnitude of each half of two pairs of bf16; NaN if one is. Its sign means nothing.
__device__ __forceinline__ uint32_t LargerMagnitudes(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}
__device__ __forceinline__ uint32_t LargerMagnitudes(const uint4& v) {
  return LargerMagnitudes(LargerMagnitudes(v.x, v.y), LargerMagnitudes(v.z, v.w));
}
// The larger one of the two halves, as the bits of a bf16.
__device__ __forceinline__ uint32_t LargestMagnitude(uint32_t magnitudes) {
  const uint32_t pair = magnitudes & 0x7fff7fffu;
  return max(pair & 0xffffu, pair >> 16);
}

// 16 dims of a query row: two vectors of bf16.
struct QueryDims {
  uint4 low, high;

  __device__ __forceinline__ uint32_t Magnitude() const {
    return LargestMagnitude(LargerMagnitudes(LargerMagnitudes(low), LargerMagnitudes(high)));
  }
  // The order of a step (see above), each pair changed by `convert`.
  template <class Convert>
  __device__ __forceinline__ void Reorder(Convert convert) {
    const uint4 a = low, b = high;
    low = {convert(a.x), convert(a.z), convert(b.x), convert(b.z)};
    high = {convert(a.y), convert(a.w), convert(b.y), convert(b.w)};
  }
};

// With pairs both warpgroups' parts of a row have one scale, and kpe's scores are divided by it
// (RowSoftmax::rope_factor). Returns the row's biased exponent: the larger one of its parts, raised
// where kpe's scores would overflow. Where it is raised so far, they are so much larger that what
// the rest loses in float16 does not matter. All math threads.
template <class M>
__device__ __forceinline__ int RowExponent(const M& math, int row, int latent_exponent) {
  using C = typename M::Config;
  constexpr int kBias = 127, kMaxRopeExponent = 100;
  static_assert(C::kBlockM == 64 && C::kOwnRopeSteps <= 2, "two threads of a warpgroup have a row");
  const Thread& thread = math.thread;
  auto& exponents = *reinterpret_cast<int (*)[C::kBlockM][2][4]>(math.shared.exchange);
  const int part = thread.wg * 2 + RowLanes<2>::Part(thread.lane);
  const uint8_t* rope = math.shared.q[math.query.stage] + C::kCkvQueryChunks * C::kQueryChunkBytes;
  const int vector = part % (C::kDKpe / 16) * 2;
  const QueryDims dims{*reinterpret_cast<const uint4*>(rope + VectorOffset(row, vector)),
                       *reinterpret_cast<const uint4*>(rope + VectorOffset(row, vector + 1))};
  exponents[row][0][part] = latent_exponent;
  exponents[row][1][part] = static_cast<int>(dims.Magnitude() >> 7);
  hw::NamedBarrierSync(kBarrierMath, kTeamThreads);
  const auto largest = [&](int which) {
    const int4 x = *reinterpret_cast<const int4*>(exponents[row][which]);
    return max(max(x.x, x.y), max(x.z, x.w));
  };
  const int kpe_exponent = __float_as_int(math.scales.kpe) >> 23 & 255;
  const int rope_exponent = max(largest(1) - kMaxRopeExponent, 0);
  return max(largest(0), kpe_exponent + rope_exponent + kMaxExponent - kBias);
}

// Makes float16 of the warpgroup's part of the queries, in the order that the cache's fragments
// have, and leaves in SharedMemory::query_scale by what its rows' scores have to be multiplied. The
// two warpgroups have different parts, and different scales. With pairs a row has one scale, and
// its factors are in RowSoftmax.
template <class M>
__device__ __forceinline__ void PrepareQueries(M& math) {
  using C = typename M::Config;
  constexpr int kGroupDims = 16;
  constexpr int kRowGroups = C::kDCkv / kTeamWarpgroups / kGroupDims;
  constexpr int kRowThreads = std::min(kWarpgroupThreads / C::kBlockM, kRowGroups);
  constexpr int kThreadGroups = kRowGroups / kRowThreads;
  constexpr int kChunkGroups = C::kLatentChunkDims / kGroupDims;
  constexpr int kQueryChunkGroups = kChunkDims / kGroupDims;
  const Thread& thread = math.thread;
  uint8_t* const q = math.shared.q[math.query.stage];
  using Lanes = RowLanes<kRowThreads>;
  // Recomputed for each item, to save registers in the main loop.
  const uint32_t lane = gpu::RecomputeHere(thread.lane);
  const uint32_t row = (thread.warp * Lanes::kRows + Lanes::Row(lane)) % C::kBlockM;
  const uint32_t part = Lanes::Part(lane);
  const bool has_dims = thread.idx < C::kBlockM * kRowThreads;
  QueryDims dims[kThreadGroups];
  uint4* places[kThreadGroups][2];
  uint32_t magnitude = 0;
#pragma unroll
  for (int i = 0; i < kThreadGroups; ++i) {
    const uint32_t group = part * kThreadGroups + i;  // of the warpgroup's part
    const uint32_t chunk = group / kChunkGroups * kTeamWarpgroups + thread.wg;
    const uint32_t first = chunk * kChunkGroups + group % kChunkGroups;  // of the row
    uint8_t* query_chunk = q + first / kQueryChunkGroups * C::kQueryChunkBytes;
    const uint32_t vector = first % kQueryChunkGroups * 2;
    places[i][0] = reinterpret_cast<uint4*>(query_chunk + VectorOffset(row, vector));
    places[i][1] = reinterpret_cast<uint4*>(query_chunk + VectorOffset(row, vector + 1));
    dims[i] = {*places[i][0], *places[i][1]};
    magnitude = max(magnitude, dims[i].Magnitude());
  }
  magnitude = Lanes::Max(magnitude);
  // 2^exponent <= the largest magnitude < 2^(exponent + 1), but for what is tiny or infinite.
  int biased = static_cast<int>(magnitude >> 7);
  if constexpr (C::kTakesPairs) biased = RowExponent(math, row, biased);
  biased = min(max(biased, kMaxExponent + 1), 254);
  const float factor = __int_as_float((2 * 127 + kMaxExponent - biased) << 23);
  if (has_dims) {
#pragma unroll
    for (int i = 0; i < kThreadGroups; ++i) {
      dims[i].Reorder([&](uint32_t pair) {
        const float2 x = hw::Unpack2<__nv_bfloat16>(pair);
        return hw::Pack2<__half>(x.x * factor, x.y * factor);
      });
      *places[i][0] = dims[i].low, *places[i][1] = dims[i].high;
    }
    if (part == 0) {
      const float scale = __int_as_float((biased - kMaxExponent) << 23);
      if constexpr (C::kTakesPairs) {
        math.shared.softmax.score_scale[row] = scale * math.ScaleLog2();
        math.shared.softmax.rope_factor[row] = math.scales.kpe * factor;
      } else {
        math.shared.query_scale[thread.wg][row] = scale;
      }
    }
  }
  if (math.params.decode.kv_format == KvFormat::kE4m3) ReorderRope(math);
  hw::FenceProxyAsyncShared();
}

// The same order for the warpgroup's half of q_pe, which stays in bf16.
template <class M>
__device__ __forceinline__ void ReorderRope(const M& math) {
  using C = typename M::Config;
  const Thread& thread = math.thread;
  if (thread.idx >= C::kBlockM * C::kOwnRopeSteps) return;
  const int row = thread.idx % C::kBlockM;
  const int vector = (thread.wg * C::kOwnRopeSteps + thread.idx / C::kBlockM) * 2;
  uint8_t* chunk = math.shared.q[math.query.stage] + C::kCkvQueryChunks * C::kQueryChunkBytes;
  auto* low = reinterpret_cast<uint4*>(chunk + VectorOffset(row, vector));
  auto* high = reinterpret_cast<uint4*>(chunk + VectorOffset(row, vector + 1));
  QueryDims dims{*low, *high};
  dims.Reorder([](uint32_t pair) { return pair; });
  *low = dims.low, *high = dims.high;
}

// Words of two vectors of the warp's 16 tokens: of the rows lane / 4 and lane / 4 + 8 for the first
// vector, then for the second. Two vectors are the codes of two steps of 16 dims, or the bf16 of
// one.
__device__ __forceinline__ void LoadKeyFragment(const Thread& thread, const uint8_t* chunk,
                                                int vector, uint32_t (&words)[4]) {
  const int token = thread.warp * kMmaK + thread.lane % kMmaK;
  // The exclusive or works because chunks are aligned to more than a row. If `vector` is odd, the
  // second one is vector - 1.
  const uint32_t first = hw::SharedAddress(chunk) + VectorOffset(token, thread.lane / kMmaK);
  gpu::LoadMatrix(words, first ^ vector * kCopyBytes);
}

// A batch of kSteps steps of a block's keys: its codes as they are loaded, and its fragments. Two
// steps are loaded at once; of an odd number, the last one is not used.
template <int kSteps>
struct KeyCodes {
  static constexpr int kLoads = (kSteps + 1) / 2;
  uint32_t words[kLoads][4];

  __device__ __forceinline__ void Load(const Thread& thread, const uint8_t* chunk, int first_step) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      LoadKeyFragment(thread, chunk, first_step + 2 * i, words[i]);
    }
  }
  // Of rows lane / 4 and lane / 4 + 8 in a step.
  __device__ __forceinline__ const uint32_t (&Step(int step) const)[2] {
    return reinterpret_cast<const uint32_t (&)[2]>(words[step / 2][step % 2 * 2]);
  }
};
template <int kSteps>
struct KeyFragments {
  uint32_t steps[kSteps][4];

  __device__ __forceinline__ void MakeF16(const KeyCodes<kSteps>& codes) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const auto& rows = codes.Step(i);
      steps[i][0] = DecodeLow(rows[0]);
      steps[i][1] = DecodeLow(rows[1]);
      steps[i][2] = DecodeHigh(rows[0]);
      steps[i][3] = DecodeHigh(rows[1]);
    }
  }
  __device__ __forceinline__ void MakeBf16(const KeyCodes<kSteps>& codes) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const auto& rows = codes.Step(i);
      const uint2 row0 = gpu::DecodeE4m3(rows[0]), row8 = gpu::DecodeE4m3(rows[1]);
      steps[i][0] = row0.x, steps[i][1] = row8.x, steps[i][2] = row0.y, steps[i][3] = row8.y;
    }
  }
  // From a chunk of bf16.
  __device__ __forceinline__ void Load(const Thread& thread, const uint8_t* chunk, int first_step) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      LoadKeyFragment(thread, chunk, 2 * (first_step + i), steps[i]);
    }
  }

  // Issues scores (+)= Q K^T of the batch. `q`: of its first step.
  template <class Element, class Scores>
  __device__ __forceinline__ void Multiply(uint64_t q, Scores& scores, bool accumulate) const {
    constexpr int kRows = sizeof(Scores) / sizeof(float) * 2;
    hw::WgmmaArrive();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      hw::WgmmaRS<Element, kRows, hw::Major::K>(steps[i], hw::AdvanceDescriptor(q, i * kMmaKBytes),
                                                scores, accumulate || i > 0);
    }
    hw::WgmmaCommit();
  }
};

template <bool kFirst, class First, class Second>
__device__ __forceinline__ auto& Select(First& first, Second& second) {
  if constexpr (kFirst) {
    return first;
  } else {
    return second;
  }
}

// The descriptor of the queries of a step, `chunk` and `step` of the cache's chunks.
template <class C>
__device__ __forceinline__ uint64_t QueriesOf(uint64_t q, int chunk, int step) {
  constexpr int kQueryChunkSteps = kChunkDims / kMmaK;
  const int query_chunk = chunk * (C::kLatentChunkDims / kChunkDims) + step / kQueryChunkSteps;
  return hw::AdvanceDescriptor(
      q, query_chunk * C::kQueryChunkBytes + step % kQueryChunkSteps * kMmaKBytes);
}

// Waits for the products with V.
template <class M>
__device__ __forceinline__ void WaitValues(M& math) {
  hw::WgmmaWait<0>();
#pragma unroll
  for (int own = 0; own < M::Config::kOwnTiles; ++own) hw::WgmmaFenceOperand(math.out[own]);
}

// scores = the warpgroup's part of S^T, without the scale of ckv where all of it has one. The rope
// chunk has landed. The fragments of a batch are made while the products with those before run.
// There are two sets of registers for them.
template <class M>
__device__ __forceinline__ void PartialScoresOfCodes(const M& math, typename M::Scores& scores) {
  using C = typename M::Config;
  // Only the plain kernel of 8 rows has registers for four steps at once.
  constexpr bool kFewRegisters = C::kBlockM > 8 || C::kHasUnits || C::kAppends;
  constexpr int kSteps = kFewRegisters ? C::kOwnRopeSteps : 4, kSets = 2;  // of a batch
  constexpr int kChunkBatches = C::kLatentChunkDims / kMmaK / kSteps;
  const Thread& thread = math.thread;
  const auto& kv = math.shared.kv;
  trace::Enter(Phase::kQk);
  const uint64_t q = hw::SharedDescriptor(hw::SharedAddress(math.shared.q[math.query.stage]));
  typename M::Scores rope;
  KeyFragments<kSteps> keys[kSets];
  KeyFragments<C::kOwnRopeSteps> separate_set;
  // With few registers kpe's fragments are in the last set, as if they were a batch before all
  // others.
  auto& rope_keys = Select<kFewRegisters>(keys[kSets - 1], separate_set);
  const int first_rope_step = thread.wg * C::kOwnRopeSteps;
  if (math.params.decode.kv_format != KvFormat::kE4m3) {
    rope_keys.Load(thread, kv[math.kv.stage], first_rope_step);
  } else {
    KeyCodes<C::kOwnRopeSteps> codes;
    codes.Load(thread, kv[math.kv.stage], first_rope_step);
    rope_keys.MakeBf16(codes);
  }
  hw::WgmmaFenceOperand(rope);
  rope_keys.template Multiply<__nv_bfloat16>(
      hw::AdvanceDescriptor(QueriesOf<C>(q, C::kCkvChunks, 0), first_rope_step * kMmaKBytes), rope,
      false);
  typename M::Scores latent[C::kScaledChunks];
#pragma unroll
  for (int chunk = 0; chunk < C::kScaledChunks; ++chunk) hw::WgmmaFenceOperand(latent[chunk]);
#pragma unroll
  for (int batch = 0; batch < C::kOwnChunks * kChunkBatches; ++batch) {
    const int own = batch / kChunkBatches, first_step = batch % kChunkBatches * kSteps;
    const int scaled = C::kHasTileScales ? own : 0;
    const auto cursor = math.OwnChunk(own);
    if (first_step == 0) math.WaitChunk(cursor);
    KeyCodes<kSteps> codes;
    codes.Load(thread, kv[cursor.stage], first_step);
    const int batches_before = batch + (kFewRegisters ? 1 : 0);
    if (batches_before >= kSets)
      hw::WgmmaWait<kSets - 1>();  // products with the set's last contents
    auto& set = keys[batch % kSets];
    set.MakeF16(codes);
    set.template Multiply<__half>(QueriesOf<C>(q, own * kTeamWarpgroups + thread.wg, first_step),
                                  latent[scaled], C::kHasTileScales ? first_step > 0 : batch > 0);
  }
  trace::Enter(Phase::kWaitMma);
  typename M::OwnTileScales scales = {};
  if constexpr (C::kHasTileScales) math.LoadTileScales(scales);
  hw::WgmmaWait<0>();
  hw::WgmmaFenceOperand(rope);
#pragma unroll
  for (int chunk = 0; chunk < C::kScaledChunks; ++chunk) hw::WgmmaFenceOperand(latent[chunk]);
#pragma unroll
  for (int i = 0; i < C::kAccumulators; ++i) {
    float score = latent[0][i];
    if constexpr (C::kHasTileScales) {
      score = 0.0f;
#pragma unroll
      for (int chunk = 0; chunk < C::kScaledChunks; ++chunk) {
        score = fmaf(latent[chunk][i], scales[chunk][M::TokenOf(i)], score);
      }
    }
    scores[i] = fmaf(score, math.QueryScale(M::RowOf(i)), rope[i] * math.scales.kpe);
  }
}

// Waits for kpe's scores of a block and brings them to the units of those of ckv.
template <class M>
__device__ __forceinline__ void ScaleRopeScores(const M& math, typename M::Scores& scores) {
  hw::WgmmaWait<0>();
  hw::WgmmaFenceOperand(scores);
#pragma unroll
  for (int i = 0; i < M::Config::kAccumulators; i += 4) {
    const float2 factors = *reinterpret_cast<const float2*>(
        &math.shared.softmax.rope_factor[math.thread.Row(M::RowOf(i))]);
    scores[i] *= factors.x, scores[i + 2] *= factors.x;
    scores[i + 1] *= factors.y, scores[i + 3] *= factors.y;
  }
  hw::WgmmaFenceOperand(scores);
}

// scores = all of S^T of a block, in units that RowSoftmax::score_scale brings to log2 units. As
// above, but kpe's scores are added to the others, and codes are loaded one batch ahead.
template <class M>
__device__ __forceinline__ void ScoresOfBlock(const M& math, const typename M::Cursor& block,
                                              typename M::Scores& scores) {
  using C = typename M::Config;
  constexpr int kSteps = 2, kSets = 2;  // of a batch
  constexpr int kRopeBatches = C::kDKpe / kMmaK / kSteps;
  constexpr int kChunkBatches = C::kLatentChunkDims / kMmaK / kSteps;
  constexpr int kBatches = kRopeBatches + C::kCkvChunks * kChunkBatches;
  const Thread& thread = math.thread;
  trace::Enter(Phase::kQk);
  const uint64_t q = hw::SharedDescriptor(hw::SharedAddress(math.shared.q[math.query.stage]));
  const bool has_rope_codes = math.params.decode.kv_format == KvFormat::kE4m3;
  KeyCodes<kSteps> codes[2];
  KeyFragments<kSteps> keys[kSets];
  const auto load = [&](int batch) {
    const int latent = batch - kRopeBatches;
    const bool is_rope = latent < 0;
    const auto cursor = is_rope ? block : block.Ahead(1 + latent / kChunkBatches);
    const int first_step = is_rope ? batch * kSteps : latent % kChunkBatches * kSteps;
    if (!is_rope && first_step == 0) math.WaitChunk(cursor);
    codes[batch % 2].Load(thread, math.shared.kv[cursor.stage], first_step);
  };
  load(0);
#pragma unroll
  for (int batch = 0; batch < kBatches; ++batch) {
    if (batch + 1 < kBatches) load(batch + 1);
    if (batch >= kSets) hw::WgmmaWait<kSets - 1>();  // products with the set's last contents
    auto& set = keys[batch % kSets];
    if (batch < kRopeBatches) {
      if (has_rope_codes) {
        set.MakeBf16(codes[batch % 2]);
      } else {
        set.Load(thread, math.shared.kv[block.stage], batch * kSteps);
      }
      if (batch == 0) hw::WgmmaFenceOperand(scores);
      set.template Multiply<__nv_bfloat16>(QueriesOf<C>(q, C::kCkvChunks, batch * kSteps), scores,
                                           batch > 0);
    } else {
      const int latent = batch - kRopeBatches;
      set.MakeF16(codes[batch % 2]);
      if (latent == 0) ScaleRopeScores(math, scores);
      set.template Multiply<__half>(
          QueriesOf<C>(q, latent / kChunkBatches, latent % kChunkBatches * kSteps), scores, true);
    }
  }
  trace::Enter(Phase::kWaitMma);
  hw::WgmmaWait<0>();
  hw::WgmmaFenceOperand(scores);
}

// A thread has kRunDims neighbouring dims of O^T, from this one on: rows lane / 4 and lane / 4 + 8
// of each tile are two of them. The warps of a warpgroup follow each other in its chunks. With tile
// scales every warp has such a run in each own chunk, since a tile of O^T has one P.
template <class C>
inline constexpr int kRunTiles = C::kOwnTiles / C::kScaledChunks;
template <class C>
inline constexpr int kRunDims = 2 * kRunTiles<C>;
template <class C>
inline constexpr int kChunkWarps = C::kLatentChunkDims / (kRunTiles<C> * kMmaK);
template <class C>
__device__ __forceinline__ int FirstDimOfCodes(const Thread& thread, int run) {
  constexpr int kWarpDims = kRunTiles<C> * kMmaK;
  const int own = thread.warp / kChunkWarps<C> + run;
  const int chunk = own * kTeamWarpgroups + thread.wg;
  // Recomputed: kept, it would be spilled.
  const int lane = static_cast<int>(gpu::RecomputeHere(threadIdx.x) % kWarpThreads);
  return chunk * C::kLatentChunkDims + thread.warp % kChunkWarps<C> * kWarpDims +
         lane / 4 * kRunDims<C>;
}

// Issues O^T += V^T P^T on the own latent chunks of the block at `math.kv`, and of the one behind
// it if kBlocks is 2. Their P's are in shared.p, from `first_p` on. `before_products` runs when the
// first fragments are made, and `after_block` when the warp has read a block's codes. WaitValues
// waits for the products.
template <int kBlocks, class M, class BeforeProducts, class AfterBlock>
__device__ __forceinline__ void AccumulateCodes(M& math, int first_p,
                                                BeforeProducts before_products,
                                                AfterBlock after_block) {
  using C = typename M::Config;
  constexpr int kRuns = C::kScaledChunks, kWords = kRunDims<C> / 4;
  constexpr int kBlockSteps = kBlockN / kMmaK, kSteps = kBlocks * kBlockSteps;
  const Thread& thread = math.thread;
  const int byte = FirstDimOfCodes<C>(thread, 0) % C::kLatentChunkDims;  // the same in all runs
  // Where the thread's codes of its first two tokens of a block lie in the chunk. Those of the
  // others lie whole periods of the swizzle further on.
  uint32_t first_tokens[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    first_tokens[i] = VectorOffset(thread.lane % 4 * 2 + i, byte / kCopyBytes) + byte % kCopyBytes;
  }
  const uint8_t* chunks[kBlocks][kRuns];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const auto place = math.kv.Ahead(block * C::kChunks);
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      chunks[block][run] =
          math.shared.kv[math.OwnChunk(place, thread.warp / kChunkWarps<C> + run).stage];
    }
  }
  const uint64_t p = hw::SharedDescriptor(hw::SharedAddress(math.shared.p[first_p]));
  // Two sets of either, as for scores.
  uint32_t codes[2][4][kRuns * kWords], values[2][C::kOwnTiles][4];
  const auto load = [&](int step) {
  // Tokens 2c, 2c + 1, 2c + 8 and 2c + 9 of the step.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = step % kBlockSteps * kMmaK + i / 2 * kSwizzleRows;
      const uint32_t offset = first_tokens[i % 2] + token * kChunkRowBytes;
      auto& words = codes[step % 2][i];
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        const uint8_t* source = chunks[step / kBlockSteps][run] + offset;
        if constexpr (kWords == 2) {
          const uint2 pair = *reinterpret_cast<const uint2*>(source);
          words[2 * run] = pair.x, words[2 * run + 1] = pair.y;
        } else {
          words[run] = *reinterpret_cast<const uint32_t*>(source);
        }
      }
    }
  };
  if constexpr (C::kTakesPairs) load(0);
#pragma unroll
  for (int own = 0; own < C::kOwnTiles; ++own) hw::WgmmaFenceOperand(math.out[own]);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if constexpr (!C::kTakesPairs) {
      load(step);
    } else if (step + 1 < kSteps) {
      load(step + 1);
    }
    if (step >= 2) hw::WgmmaWait<1>();
    auto& set = values[step % 2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int word = 0; word < kRuns * kWords; ++word) {
        // Codes of two tokens side by side: dims 0 and 1 of the word, then 2 and 3.
        const uint32_t a = codes[step % 2][2 * half][word];
        const uint32_t b = codes[step % 2][2 * half + 1][word];
        const uint2 first = DecodeWord(__byte_perm(a, b, 0x5140));
        const uint2 second = DecodeWord(__byte_perm(a, b, 0x7362));
        set[2 * word][2 * half] = first.x, set[2 * word][2 * half + 1] = first.y;
        set[2 * word + 1][2 * half] = second.x, set[2 * word + 1][2 * half + 1] = second.y;
      }
    }
    if (step == 0) before_products();
    const uint64_t p_step = hw::AdvanceDescriptor(
        p, step / kBlockSteps * C::kQueryChunkBytes + step % kBlockSteps * kMmaKBytes);
    hw::WgmmaArrive();
#pragma unroll
    for (int own = 0; own < C::kOwnTiles; ++own) {
      const uint64_t p_run =
          hw::AdvanceDescriptor(p_step, own / kRunTiles<C> * C::kQueryChunkBytes);
      hw::WgmmaRS<__half, C::kBlockM, hw::Major::K>(set[own], p_run, math.out[own], true);
    }
    hw::WgmmaCommit();
    if (step % kBlockSteps == kBlockSteps - 1) after_block();
  }
}

}  // namespace jax_mla::decode::sm90::narrow
