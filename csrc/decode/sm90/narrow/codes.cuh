// The two products of the narrow kernel where the cache holds codes of e4m3, one scale for all of
// ckv. Roles and barriers: kernel.cuh.
//
// wgmma's A operand may lie in registers, and in this kernel A is the cache. So codes never become
// 16-bit values in shared memory: a thread loads its fragment's codes, and float16 holds each of
// them exactly. That is done twice, once for K and once for V, which must lie in another order.
//
// There are two ways to make float16 of codes, and both are used, because they keep different units
// busy. `cvt` makes two values at a time, but only 16 lanes of an SM a cycle. Shifts and masks move
// the bits of a code s eeee mmm to bits 15 and 13 to 7 of a half. Exponents of float16 are biased
// by 15 and not by 7, so that is 2^-8 of the value. The factor of 2^8 goes into the queries of K's
// steps, and into O for V's tiles.
//
// Queries are float16 too, then. A row of them is multiplied by a power of two which brings its
// largest value to between 2^6 and 2^7 (2^14 and 2^15 with the factor): what bf16 holds of that
// row, down to 2^-20 of its largest value, is a float16 as it stands. kpe stays in bf16, in the
// cache or made from codes: its scale may be another one than that of ckv, so its scores have
// accumulators of their own.
//
// Dims of a product may be taken in any order, if both operands have the same one. A lane's four
// values of a step of 16 dims are the neighbours 4c to 4c + 3, a word of codes (c is lane % 4), and
// not 2c, 2c + 1, 2c + 8, 2c + 9. So PrepareQueries puts the queries of a step into that order. And
// a lane's rows of the tiles of O^T are neighbouring dims.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/kv_format.h"
#include "decode/sm90/narrow/config.h"
#include "decode/sm90/narrow/params.cuh"
#include "decode/trace.cuh"
#include "gpu/element.h"
#include "gpu/fp8.cuh"
#include "gpu/sm80.cuh"
#include "gpu/sm90.cuh"
#include "gpu/sm90_wgmma.cuh"

namespace jax_mla::decode::sm90::narrow {

// What P and V are multiplied in.
template <class C>
using ValueElement = std::conditional_t<C::kIsFp8, __half, gpu::Element<C::kDType>>;

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

inline constexpr int kSwizzleRows = 8;  // the swizzle's period

// The codes in the upper bytes of the halves of a register, or in the lower ones, as a pair of
// float16 times 2^-8.
inline constexpr uint32_t kSigns = 0x80008000u, kMagnitudes = 0x3f803f80u;
inline constexpr float kShiftedFactor = 256.0f;
__device__ __forceinline__ uint32_t ShiftUpper(uint32_t codes) {
  return (codes & kSigns) | ((codes >> 1) & kMagnitudes);
}
__device__ __forceinline__ uint32_t ShiftLower(uint32_t codes) {
  return ((codes << 8) & kSigns) | ((codes << 7) & kMagnitudes);
}

// Which steps of K, counted in a chunk, and which words of a lane's codes of V are shifted and not
// converted by cvt. So the two units take about as long.
constexpr bool IsShiftedStep(int step) { return step % 4 != 0; }
template <class C>
constexpr bool IsShiftedWord(int word) {
  return C::kOwnTiles < 4 || word % 2 != 0;
}

// Where vector v of a row of 128 swizzled bytes lies.
__device__ __forceinline__ uint32_t VectorOffset(int row, int vector) {
  return row * kChunkRowBytes + (vector ^ row % kSwizzleRows) * kCopyBytes;
}

// 16 dims of a query row: two vectors of bf16.
struct QueryDims {
  uint4 low, high;

  __device__ __forceinline__ uint32_t Magnitude() const {
    const auto larger = [](uint32_t a, uint32_t b) { return __vmaxu2(a, b); };
    const auto top = [&](const uint4& v) {
      constexpr uint32_t kNoSigns = 0x7fff7fffu;
      return larger(larger(v.x & kNoSigns, v.y & kNoSigns), larger(v.z & kNoSigns, v.w & kNoSigns));
    };
    const uint32_t pair = larger(top(low), top(high));
    return max(pair & 0xffffu, pair >> 16);  // as the bits of a bf16
  }
  template <class Convert>
  __device__ __forceinline__ void ForEachPair(Convert convert) {
    for (uint4* v : {&low, &high}) {
      *v = {convert(v->x), convert(v->y), convert(v->z), convert(v->w)};
    }
  }
  // The order of a step: a lane's words are the first and the second pair of its four dims. With
  // `splits`, they are the even and the odd ones.
  __device__ __forceinline__ void Reorder(bool splits) {
    const uint4 a = low, b = high;
    const uint32_t first = splits ? 0x5410 : 0x3210, second = splits ? 0x7632 : 0x7654;
    low = {__byte_perm(a.x, a.y, first), __byte_perm(a.z, a.w, first), __byte_perm(b.x, b.y, first),
           __byte_perm(b.z, b.w, first)};
    high = {__byte_perm(a.x, a.y, second), __byte_perm(a.z, a.w, second),
            __byte_perm(b.x, b.y, second), __byte_perm(b.z, b.w, second)};
  }
};

// Makes float16 of the warpgroup's part of the queries, in the order that the cache's fragments
// have, and leaves by what its rows' scores have to be multiplied in math.query_scale. The two
// warpgroups have different parts, and different scales.
template <class M>
__device__ __forceinline__ void PrepareQueries(M& math) {
  using C = typename M::Config;
  constexpr int kGroupDims = 16;
  constexpr int kRowGroups = C::kDCkv / kNumMathWarpgroups / kGroupDims;
  constexpr int kRowThreads = std::min(kWarpgroupThreads / C::kBlockM, kRowGroups);
  constexpr int kThreadGroups = kRowGroups / kRowThreads;
  constexpr int kChunkGroups = C::kLatentChunkDims / kGroupDims;
  constexpr int kQueryChunkGroups = kChunkDims / kGroupDims;
  constexpr int kMaxExponent = 6;                   // and 8 more where codes are shifted
  constexpr int kMinBiased = kMaxExponent + 8 + 1;  // then all factors are normal numbers
  const Thread& thread = math.thread;
  uint8_t* const q = math.shared.q[math.query.stage];
  const int row = thread.idx / kRowThreads % C::kBlockM;
  const bool has_dims = thread.idx < C::kBlockM * kRowThreads;
  QueryDims dims[kThreadGroups];
  uint4* places[kThreadGroups][2];
  uint32_t magnitude = 0;
#pragma unroll
  for (int i = 0; i < kThreadGroups; ++i) {
    const int group = thread.idx % kRowThreads * kThreadGroups + i;  // of the warpgroup's part
    const int chunk = group / kChunkGroups * kNumMathWarpgroups + thread.wg;
    const int first = chunk * kChunkGroups + group % kChunkGroups;  // of the row
    uint8_t* query_chunk = q + first / kQueryChunkGroups * C::kQueryChunkBytes;
    const int vector = first % kQueryChunkGroups * 2;
    places[i][0] = reinterpret_cast<uint4*>(query_chunk + VectorOffset(row, vector));
    places[i][1] = reinterpret_cast<uint4*>(query_chunk + VectorOffset(row, vector + 1));
    dims[i] = {*places[i][0], *places[i][1]};
    magnitude = max(magnitude, dims[i].Magnitude());
  }
#pragma unroll
  for (int lanes = 1; lanes < kRowThreads; lanes *= 2) {
    magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, lanes));
  }
  // 2^exponent <= the largest magnitude < 2^(exponent + 1), but for what is tiny or infinite.
  const int biased = min(max(static_cast<int>(magnitude >> 7), kMinBiased), 254);
  const float factor = __int_as_float((2 * 127 + kMaxExponent - biased) << 23);
  if (has_dims) {
#pragma unroll
    for (int i = 0; i < kThreadGroups; ++i) {
      const int group = thread.idx % kRowThreads * kThreadGroups + i;
      const bool is_shifted = IsShiftedStep(group % kChunkGroups);
      const float group_factor = is_shifted ? factor * kShiftedFactor : factor;
      dims[i].ForEachPair([&](uint32_t pair) {
        const float2 x = hw::Unpack2<__nv_bfloat16>(pair);
        return hw::Pack2<__half>(x.x * group_factor, x.y * group_factor);
      });
      dims[i].Reorder(/*splits=*/is_shifted);
      *places[i][0] = dims[i].low, *places[i][1] = dims[i].high;
    }
    if (thread.idx % kRowThreads == 0) {
      math.shared.query_scale[thread.wg][row] = __int_as_float((biased - kMaxExponent) << 23);
    }
  }
  if (math.params.decode.kv_format == KvFormat::kE4m3) ReorderRope(math);
  hw::FenceProxyAsyncShared();
  math.SyncWarpgroup();
#pragma unroll
  for (int j = 0; j < C::kThreadRows; ++j) {
    math.query_scale[j] = math.shared.query_scale[thread.wg][thread.Row(j)];
  }
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
  dims.Reorder(/*splits=*/false);
  *low = dims.low, *high = dims.high;
}

// Words of two vectors of the warp's 16 tokens: of the rows lane / 4 and lane / 4 + 8 for the first
// vector, then for the second. Two vectors are the codes of two steps of 16 dims, or the bf16 of
// one.
__device__ __forceinline__ void LoadKeyFragment(const Thread& thread, const uint8_t* chunk,
                                                int vector, uint32_t (&words)[4]) {
  const int token = thread.warp * kMmaK + thread.lane % kMmaK;
  // Chunks are aligned to more than a row, and `vector` is even.
  const uint32_t first = hw::SharedAddress(chunk) + VectorOffset(token, thread.lane / kMmaK);
  gpu::LoadMatrix(words, first ^ vector * kCopyBytes);
}

// scores = the warpgroup's part of S^T, but for kpe's. The fragments of a chunk of the queries'
// size are made while the products with those before run. There are two sets of registers for them.
template <class M>
__device__ __forceinline__ void LatentScores(const M& math, typename M::Scores& scores) {
  using C = typename M::Config;
  constexpr int kBatchSteps = kChunkDims / kMmaK, kBatches = C::kLatentChunkDims / kChunkDims;
  const uint64_t q = hw::SharedDescriptor(hw::SharedAddress(math.shared.q[math.query.stage]));
  uint32_t keys[2][kBatchSteps][4];
  hw::WgmmaFenceOperand(scores);
#pragma unroll
  for (int batch = 0; batch < C::kOwnChunks * kBatches; ++batch) {
    const int own = batch / kBatches, part = batch % kBatches;
    const auto cursor = math.OwnChunk(own);
    if (part == 0) math.WaitChunk(cursor);
    if (batch >= 2) hw::WgmmaWait<1>();  // the products with these registers' last contents
    auto& set = keys[batch % 2];
#pragma unroll
    for (int step = 0; step < kBatchSteps; step += 2) {
      uint32_t codes[4];
      LoadKeyFragment(math.thread, math.shared.kv[cursor.stage], part * kBatchSteps + step, codes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool is_shifted = IsShiftedStep(part * kBatchSteps + step + i);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const uint32_t word = codes[2 * i + row];
          set[step + i][row] = is_shifted ? ShiftLower(word) : DecodeLow(word);
          set[step + i][row + 2] = is_shifted ? ShiftUpper(word) : DecodeHigh(word);
        }
      }
    }
    const int query_chunk = (own * kNumMathWarpgroups + math.thread.wg) * kBatches + part;
    const uint64_t q_chunk = hw::AdvanceDescriptor(q, query_chunk * C::kQueryChunkBytes);
    hw::WgmmaArrive();
#pragma unroll
    for (int step = 0; step < kBatchSteps; ++step) {
      hw::WgmmaRS<__half, C::kBlockM, hw::Major::K>(
          set[step], hw::AdvanceDescriptor(q_chunk, step * kMmaKBytes), scores,
          batch > 0 || step > 0);
    }
    hw::WgmmaCommit();
  }
}

// The warpgroup's steps of kpe as fragments of bf16, made from codes or as they lie in the chunk.
template <class M, int kSteps>
__device__ __forceinline__ void LoadRopeKeys(const M& math, uint32_t (&keys)[kSteps][4]) {
  const int first_step = math.thread.wg * kSteps;
  const uint8_t* chunk = math.shared.kv[math.kv.stage];
  if (math.params.decode.kv_format == KvFormat::kE4m3) {
    // Two steps are loaded at once. With one step a warpgroup, the second one is not used.
    uint32_t codes[4];
    LoadKeyFragment(math.thread, chunk, first_step, codes);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint2 row0 = gpu::DecodeE4m3(codes[2 * step]);
      const uint2 row8 = gpu::DecodeE4m3(codes[2 * step + 1]);
      keys[step][0] = row0.x, keys[step][1] = row8.x, keys[step][2] = row0.y,
      keys[step][3] = row8.y;
    }
  } else {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      LoadKeyFragment(math.thread, chunk, 2 * (first_step + step), keys[step]);
    }
  }
}

// scores = the warpgroup's half of q_pe kpe.
template <class M>
__device__ __forceinline__ void RopeScores(const M& math, typename M::Scores& scores) {
  using C = typename M::Config;
  const uint64_t q = hw::AdvanceDescriptor(
      hw::SharedDescriptor(hw::SharedAddress(math.shared.q[math.query.stage])),
      C::kCkvQueryChunks * C::kQueryChunkBytes + math.thread.wg * (C::kOwnRopeSteps * kMmaKBytes));
  uint32_t keys[C::kOwnRopeSteps][4];
  LoadRopeKeys(math, keys);
  hw::WgmmaFenceOperand(scores);
  hw::WgmmaArrive();
#pragma unroll
  for (int step = 0; step < C::kOwnRopeSteps; ++step) {
    hw::WgmmaRS<__nv_bfloat16, C::kBlockM, hw::Major::K>(
        keys[step], hw::AdvanceDescriptor(q, step * kMmaKBytes), scores, step > 0);
  }
  hw::WgmmaCommit();
}

// scores = the warpgroup's part of S^T, without the scale of ckv. The rope chunk has landed.
template <class M>
__device__ __forceinline__ void PartialScoresOfCodes(const M& math, typename M::Scores& scores) {
  using C = typename M::Config;
  trace::Enter(Phase::kQk);
  typename M::Scores rope;
  RopeScores(math, rope);
  LatentScores(math, scores);
  trace::Enter(Phase::kWaitMma);
  hw::WgmmaWait<0>();
  hw::WgmmaFenceOperand(rope);
  hw::WgmmaFenceOperand(scores);
#pragma unroll
  for (int i = 0; i < C::kAccumulators; ++i) {
    scores[i] = fmaf(scores[i], math.query_scale[M::RowOf(i)], rope[i] * math.scales.kpe);
  }
}

// A thread has 2 * kOwnTiles neighbouring dims of O^T, from this one on: rows lane / 4 and
// lane / 4 + 8 of each tile are two of them. The warps of a warpgroup follow each other in its
// chunks.
template <class C>
__device__ __forceinline__ int FirstDimOfCodes(const Thread& thread) {
  constexpr int kWarpDims = C::kOwnTiles * kMmaK;
  constexpr int kChunkWarps = C::kLatentChunkDims / kWarpDims;
  const int chunk = thread.warp / kChunkWarps * kNumMathWarpgroups + thread.wg;
  return chunk * C::kLatentChunkDims + thread.warp % kChunkWarps * kWarpDims +
         thread.lane / 4 * (2 * C::kOwnTiles);
}

// O^T += V^T P^T on the own latent chunks. P is there.
template <class M>
__device__ __forceinline__ void AccumulateCodes(M& math) {
  using C = typename M::Config;
  constexpr int kThreadDims = 2 * C::kOwnTiles, kWords = kThreadDims / 4;
  constexpr int kSteps = kBlockN / kMmaK;
  constexpr int kChunkWarps = C::kLatentChunkDims / (C::kOwnTiles * kMmaK);
  const Thread& thread = math.thread;
  const uint8_t* chunk = math.shared.kv[math.OwnChunk(thread.warp / kChunkWarps).stage];
  const int byte = FirstDimOfCodes<C>(thread) % C::kLatentChunkDims;
  // The thread's codes of its first two tokens of a block. Those of the others lie whole periods of
  // the swizzle further on.
  const uint8_t* first_tokens[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    first_tokens[i] =
        chunk + VectorOffset(thread.lane % 4 * 2 + i, byte / kCopyBytes) + byte % kCopyBytes;
  }
  const uint64_t p = hw::SharedDescriptor(hw::SharedAddress(math.shared.p[thread.wg]));
  uint32_t values[2][C::kOwnTiles][4];  // two sets of registers, as in LatentScores
#pragma unroll
  for (int own = 0; own < C::kOwnTiles; ++own) hw::WgmmaFenceOperand(math.out[own]);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    auto& set = values[step % 2];
    // Tokens 2c, 2c + 1, 2c + 8 and 2c + 9 of the step.
    uint32_t codes[4][kWords];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint8_t* source =
          first_tokens[i % 2] + (step * kMmaK + i / 2 * kSwizzleRows) * kChunkRowBytes;
      if constexpr (kWords == 2) {
        const uint2 words = *reinterpret_cast<const uint2*>(source);
        codes[i][0] = words.x, codes[i][1] = words.y;
      } else {
        codes[i][0] = *reinterpret_cast<const uint32_t*>(source);
      }
    }
    if (step >= 2) hw::WgmmaWait<1>();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        // Two tokens side by side: dims 0 and 1 of the word are the first tile's, 2 and 3 the
        // second one's. In shifted words the dims are the bytes of a half, otherwise the halves.
        const bool is_shifted = IsShiftedWord<C>(word);
        const uint32_t a = codes[2 * half][word], b = codes[2 * half + 1][word];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t (&tile)[4] = set[2 * word + i];
          if (is_shifted) {
            const uint32_t dims = __byte_perm(a, b, i == 0 ? 0x5410 : 0x7632);
            tile[2 * half] = ShiftLower(dims), tile[2 * half + 1] = ShiftUpper(dims);
          } else {
            const uint32_t dims = __byte_perm(a, b, i == 0 ? 0x5140 : 0x7362);
            tile[2 * half] = DecodeLow(dims), tile[2 * half + 1] = DecodeHigh(dims);
          }
        }
      }
    }
    hw::WgmmaArrive();
#pragma unroll
    for (int own = 0; own < C::kOwnTiles; ++own) {
      hw::WgmmaRS<__half, C::kBlockM, hw::Major::K>(
          set[own], hw::AdvanceDescriptor(p, step * kMmaKBytes), math.out[own], true);
    }
    hw::WgmmaCommit();
  }
  hw::WgmmaWait<0>();
#pragma unroll
  for (int own = 0; own < C::kOwnTiles; ++own) hw::WgmmaFenceOperand(math.out[own]);
}

}  // namespace jax_mla::decode::sm90::narrow
