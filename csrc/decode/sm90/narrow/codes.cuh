// The two products of the narrow kernel where the cache holds codes of e4m3, one scale for all of
// ckv. Roles and barriers: kernel.cuh.
//
// wgmma's A operand may lie in registers, and in this kernel A is the cache. So codes never become
// 16-bit values in shared memory: a thread loads its fragment's codes, and float16 holds each of
// them exactly. That is done twice, once for K and once for V, which must lie in another order. One
// instruction makes two values of two codes.
//
// Queries are float16 too, then. A row of them is multiplied by a power of two which brings its
// largest value to between 2^14 and 2^15: a bf16 of that range, and of 2^28 below, is a float16 as
// it stands. kpe stays in bf16, in the cache or made from codes: its scale may be another one than
// that of ckv, so its scores have accumulators of their own.
//
// Dims of a product may be taken in any order, if both operands have the same one. A lane's four
// values of a step of 16 dims are the neighbours 4c to 4c + 3, a word of codes (c is lane % 4), and
// not 2c, 2c + 1, 2c + 8, 2c + 9. So PrepareQueries puts the pairs of 16 dims of the queries into
// the order 0, 2, 4, 6, 1, 3, 5, 7. And a lane's rows of the tiles of O^T are neighbouring dims.
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
  // The order of a step (see above), each pair changed by `convert`.
  template <class Convert>
  __device__ __forceinline__ void Reorder(Convert convert) {
    const uint4 a = low, b = high;
    low = {convert(a.x), convert(a.z), convert(b.x), convert(b.z)};
    high = {convert(a.y), convert(a.w), convert(b.y), convert(b.w)};
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
  constexpr int kMaxExponent = 14;
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
  const int biased = min(max(static_cast<int>(magnitude >> 7), kMaxExponent + 1), 254);
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
  dims.Reorder([](uint32_t pair) { return pair; });
  *low = dims.low, *high = dims.high;
}

// Words of two vectors of the warp's 16 tokens: of the rows lane / 4 and lane / 4 + 8 for the first
// vector, then for the second. Two vectors are the codes of two steps of 16 dims, or the bf16 of
// one.
__device__ __forceinline__ void LoadKeyFragment(const Thread& thread, const uint8_t* chunk,
                                                int vector, uint32_t (&words)[4]) {
  const int token = thread.warp * kMmaK + thread.lane % kMmaK;
  // Chunks are aligned to more than a row. With an odd `vector` the second one is that before it.
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
        set[step + i][0] = DecodeLow(codes[2 * i]);
        set[step + i][1] = DecodeLow(codes[2 * i + 1]);
        set[step + i][2] = DecodeHigh(codes[2 * i]);
        set[step + i][3] = DecodeHigh(codes[2 * i + 1]);
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
        // Codes of two tokens side by side: dims 0 and 1 of the word, then 2 and 3.
        const uint32_t a = codes[2 * half][word], b = codes[2 * half + 1][word];
        const uint32_t first = __byte_perm(a, b, 0x5140), second = __byte_perm(a, b, 0x7362);
        set[2 * word][2 * half] = DecodeLow(first);
        set[2 * word][2 * half + 1] = DecodeHigh(first);
        set[2 * word + 1][2 * half] = DecodeLow(second);
        set[2 * word + 1][2 * half + 1] = DecodeHigh(second);
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
