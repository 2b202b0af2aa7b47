// Makes bf16 of the codes of an FP8 cache, in shared memory, in the layout that wgmma reads. Roles
// and barriers: kernel.cuh.
//
// A copy group of latent chunks is 128 dims: two chunks of 64. Its codes are rows of 128 bytes, as
// long as the rows of a chunk and in the same swizzle, and TMA copies them to the place of the
// second chunk. So a token's codes lie where a half of its bf16 goes, and only the four lanes that
// have this token must have read all its codes before one of them writes. Codes of the rope chunk
// lie in that chunk.
//
// Each of the four warps converts its quarter of every copy group: 16 tokens, in two rounds of
// eight, four lanes each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/kv_format.h"
#include "decode/params.h"
#include "decode/sm90/common/tensor_map.h"
#include "decode/sm90/wide/params.cuh"
#include "decode/trace.cuh"
#include "gpu/codegen.cuh"
#include "gpu/pack.cuh"
#include "gpu/sm80.cuh"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::wide {

// One of the warps that convert.
template <class C>
struct Converter {
  static constexpr int kRowLanes = 4;  // that share a token's row
  static constexpr int kVectorBytes = 16;
  static constexpr int kLaneVectors = 2;  // of a row's codes
  static constexpr int kRoundTokens = kWarpThreads / kRowLanes;
  static constexpr int kRounds = kBlockN / kNumConverters / kRoundTokens;
  static constexpr int kRoundBytes = kRoundTokens * C::kRowBytes;
  static_assert(kRowLanes * kLaneVectors * kVectorBytes == DsMla::kTileDims,
                "a copy group has one scale");
  static_assert(C::kCkvCopyGroups <= kRowLanes, "a row's lanes hold its scales");

  const DecodeParams& params;
  const int32_t layer;
  // Where this lane's codes and bf16 lie, in bytes from a copy group: its first vector of codes,
  // its first vector of bf16, and the chunk to which the first vector of codes belongs.
  uint32_t source, target, first_chunk;
  uint32_t phases = 0;  // of codes.landed, one bit a ring block
  // Of this lane's row of each round, the tile scale of copy group lane % 4.
  float scales[kBlocksPerPair][kRounds];

  explicit __device__ Converter(const DecodeParams& decode_params)
      : params(decode_params), layer(__ldg(decode_params.layer)) {
    // The lanes of an odd row have their two vectors of codes in the other order: the rows of a
    // quarter-warp then never ask for the same banks.
    const uint32_t row = FirstToken(), swizzle = row % 8, odd = row % 2;
    const uint32_t column = threadIdx.x % kRowLanes;
    source = row * C::kRowBytes + ((column + odd * kRowLanes) ^ swizzle) * kVectorBytes;
    target = row * C::kRowBytes + (2 * column ^ swizzle) * kVectorBytes;
    first_chunk = odd * C::kChunkBytes;
  }
  // This lane's token of a block in the first round.
  static __device__ __forceinline__ uint32_t FirstToken() {
    const uint32_t thread = gpu::ThreadIndex() % kWarpgroupThreads;
    return thread / kWarpThreads * (kRounds * kRoundTokens) + thread % kWarpThreads / kRowLanes;
  }

  // Converts all blocks of the CTA.
  __device__ __forceinline__ void Run() {
#pragma unroll 1
    for (uint32_t pair = 0;; ++pair) {
      trace::Enter(Phase::kWaitItem);
      auto& codes = Shared<C>().codes;
      const uint32_t number = pair % C::kBlockPairNumbers;
      gpu::sm90::MbarrierWait(SharedAddress(&codes.told[number]), pair / C::kBlockPairNumbers & 1);
      const BlockPairPlace& place = codes.places[number];
      if (place.token[0] < 0) return;
      const bool has_both = place.token[1] >= 0;
      if (params.kv_format == KvFormat::kDsMla) LoadScales(place);
#pragma unroll 1
      for (int block = 0; block <= (has_both ? 1 : 0); ++block) {
        ConvertBlock(C::RingBlock(pair, block), block);
      }
    }
  }

  // Begins to load the tile scales of a block pair, which is not there yet. Rows of an absent page
  // are 0, and so are their scales. From L2, because this kernel may have written the last row.
  __device__ __forceinline__ void LoadScales(const BlockPairPlace& place) {
    const KvStream& ckv = params.ckv;
#pragma unroll
    for (int block = 0; block < kBlocksPerPair; ++block) {
      const int32_t page = place.page[block];
      const uint32_t token = place.token[block] + FirstToken();
      const char* row =
          static_cast<const char*>(ckv.base) + layer * ckv.layer_stride + page * ckv.page_stride +
          uint64_t{token} * static_cast<uint32_t>(ckv.token_stride) + DsMla::kScalesOffset;
#pragma unroll
      for (int round = 0; round < kRounds; ++round) {
        const auto* tile_scales = reinterpret_cast<const float*>(
            row + round * kRoundTokens * static_cast<uint32_t>(ckv.token_stride));
        scales[block][round] =
            page != kOutside ? __ldcg(tile_scales + threadIdx.x % kRowLanes) : 0.0f;
      }
    }
  }

  __device__ __forceinline__ void ConvertBlock(int ring_block, int block) {
    uint32_t order = C::CopyGroupOrder(block);
#pragma unroll 1
    for (int i = 0; i < C::kNumCopyGroups; ++i, order >>= 4) {
      const int group = order & 15;
      if (!HasCodes<C>(params.kv_format, group)) continue;
      trace::Enter(Phase::kWaitKv);
      gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().codes.landed[ring_block][group]),
                              phases >> ring_block & 1);
      trace::Enter(Phase::kConvert);
      const uint32_t chunk =
          SharedAddress(Shared<C>().kv[ring_block][group * C::kChunksPerCopyGroup]);
      if (group == C::kKpeCopyGroup) {
        ConvertRope(chunk);
      } else if (params.kv_format == KvFormat::kDsMla) {
        float scale[kRounds];
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
          const float mine = block == 0 ? scales[0][round] : scales[1][round];
          scale[round] = __shfl_sync(kAllLanes, mine, group, kRowLanes);
        }
        ConvertLatent(chunk, [&](int round, float value) { return value * scale[round]; });
      } else {
        ConvertLatent(chunk, [](int, float value) { return value; });
      }
      gpu::sm90::FenceProxyAsyncShared();
      __syncwarp();
      if (threadIdx.x % kWarpThreads == 0) {
        gpu::sm90::MbarrierArrive(SharedAddress(&Shared<C>().kv_full[ring_block][group]));
      }
    }
    phases ^= 1u << ring_block;
  }

  template <class Scale>
  __device__ __forceinline__ void ConvertLatent(uint32_t chunk, Scale scale) const {
    uint4 codes[kRounds][kLaneVectors];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
#pragma unroll
      for (int i = 0; i < kLaneVectors; ++i) {
        codes[round][i] = gpu::LoadShared128(
            chunk + C::kChunkBytes + (source ^ i * kRowLanes * kVectorBytes) + round * kRoundBytes);
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kLaneVectors; ++i) {
      const uint32_t rows = chunk + (first_chunk ^ i * C::kChunkBytes);
#pragma unroll
      for (int round = 0; round < kRounds; ++round) {
        StoreVectors(rows + round * kRoundBytes, codes[round][i],
                     [&](float value) { return scale(round, value); });
      }
    }
  }

  // Rows of the rope chunk have at most four vectors of codes.
  __device__ __forceinline__ void ConvertRope(uint32_t chunk) const {
    constexpr uint32_t kSwap = C::kChunkBytes / (kRowLanes * kVectorBytes);
    const uint32_t rope_source = source ^ RecomputeHere(first_chunk) / kSwap;  // in order
    uint4 codes[kRounds];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      codes[round] = gpu::LoadShared128(chunk + rope_source + round * kRoundBytes);
    }
    __syncwarp();
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      StoreVectors(chunk + round * kRoundBytes, codes[round], [](float value) { return value; });
    }
  }

  // Four codes as two pairs of bf16.
  template <class Scale>
  static __device__ __forceinline__ uint2 Decode(uint32_t codes, Scale scale) {
    uint2 halves;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}"
        : "=r"(halves.x), "=r"(halves.y)
        : "r"(codes));
    const auto pair = [&](uint32_t half2) {
      const float2 values = __half22float2(reinterpret_cast<const __half2&>(half2));
      return gpu::Pack2<__nv_bfloat16>(scale(values.x), scale(values.y));
    };
    return {pair(halves.x), pair(halves.y)};
  }

  // Stores a vector of codes as two vectors of bf16.
  template <class Scale>
  __device__ __forceinline__ void StoreVectors(uint32_t rows, const uint4& vector,
                                               Scale scale) const {
    const uint32_t codes[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 low = Decode(codes[2 * half], scale), high = Decode(codes[2 * half + 1], scale);
      gpu::StoreShared128(rows + (target ^ half * kVectorBytes), {low.x, low.y, high.x, high.y});
    }
  }
};

}  // namespace jax_mla::decode::sm90::wide
