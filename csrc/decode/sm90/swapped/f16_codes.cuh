// The products of K and V as float16, made from codes of e4m3 in registers (codes.cuh).
//
// Queries are float16 too, then. A row of them is multiplied by a power of two which brings its
// largest value to between 2^14 and 2^15: a bf16 of that range, and of 2^28 below, is a float16 as
// it stands. kpe stays in bf16, in the cache or made from codes: its scale may be another one than
// that of ckv.
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
#include "decode/sm90/swapped/codes.cuh"
#include "decode/sm90/swapped/context.cuh"
#include "gpu/codegen.cuh"
#include "gpu/fp8.cuh"
#include "gpu/sm80.cuh"
#include "gpu/sm90.cuh"
#include "gpu/sm90_wgmma.cuh"

namespace jax_mla::decode::sm90 {

inline constexpr int kMaxExponent = 14;  // of the largest value of a row of the queries

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

// Makes float16 of the warpgroup's part of the queries, in the order that the cache's fragments
// have. The two warpgroups have different parts, and a part of a row its own power of two, unless
// the kernel's RowExponent gives both the same. StoreQueryScale keeps what scores have to be
// multiplied by.
template <class M>
__device__ __forceinline__ void PrepareQueries(M& math) {
  using C = typename M::Config;
  constexpr int kGroupDims = 16;
  constexpr int kRowGroups = C::kDCkv / kTeamWarpgroups / kGroupDims;
  constexpr int kRowThreads = std::min(kWarpgroupThreads / C::kTileRows, kRowGroups);
  constexpr int kThreadGroups = kRowGroups / kRowThreads;
  constexpr int kChunkGroups = C::kLatentChunkDims / kGroupDims;
  constexpr int kQueryChunkGroups = kChunkDims / kGroupDims;
  const Thread& thread = math.thread;
  uint8_t* const q = math.shared.q[math.query.stage];
  using Lanes = RowLanes<kRowThreads>;
  // Recomputed for each item, to save registers in the main loop.
  const uint32_t lane = gpu::RecomputeHere(thread.lane);
  const uint32_t row = (thread.warp * Lanes::kRows + Lanes::Row(lane)) % C::kTileRows;
  const uint32_t part = Lanes::Part(lane);
  const bool has_dims = thread.idx < C::kTileRows * kRowThreads;
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
  biased = math.RowExponent(row, biased);
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
      math.StoreQueryScale(row, __int_as_float((biased - kMaxExponent) << 23), factor);
    }
  }
  if (C::kHasRope && math.params.decode.kv_format == KvFormat::kE4m3) ReorderRope(math);
  hw::FenceProxyAsyncShared();
}

// The same order for the warpgroup's half of q_pe, which stays in bf16.
template <class M>
__device__ __forceinline__ void ReorderRope(const M& math) {
  using C = typename M::Config;
  const Thread& thread = math.thread;
  if (thread.idx >= C::kTileRows * C::kOwnRopeSteps) return;
  const int row = thread.idx % C::kTileRows;
  const int vector = (thread.wg * C::kOwnRopeSteps + thread.idx / C::kTileRows) * 2;
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

// The descriptor of the queries of a step, `chunk` and `step` of the cache's chunks.
template <class C>
__device__ __forceinline__ uint64_t QueriesOf(uint64_t q, int chunk, int step) {
  constexpr int kQueryChunkSteps = kChunkDims / kMmaK;
  const int query_chunk = chunk * (C::kLatentChunkDims / kChunkDims) + step / kQueryChunkSteps;
  return hw::AdvanceDescriptor(
      q, query_chunk * C::kQueryChunkBytes + step % kQueryChunkSteps * kMmaKBytes);
}

// Issues O^T += V^T P^T on the own latent chunks of the block at `math.kv`, and of the one behind
// it if kBlocks is 2. Their P's are in shared.p, from `first_p` on. `before_products` runs when the
// first fragments are made, and `after_block` when the warp has read a block's codes.
// Output::WaitValues waits for the products.
template <int kBlocks, class M, class BeforeProducts, class AfterBlock>
__device__ __forceinline__ void AccumulateCodes(M& math, int first_p,
                                                BeforeProducts before_products,
                                                AfterBlock after_block) {
  using C = typename M::Config;
  constexpr int kRuns = C::kRuns, kWords = kRunDims<C> / 4;
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
  if constexpr (C::kLoadsValuesAhead) load(0);
  math.FenceOut();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if constexpr (!C::kLoadsValuesAhead) {
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
      hw::WgmmaRS<__half, C::kTileRows, hw::Major::K>(set[own], p_run, math.out[own], true);
    }
    hw::WgmmaCommit();
    if (step % kBlockSteps == kBlockSteps - 1) after_block();
  }
}

}  // namespace jax_mla::decode::sm90
