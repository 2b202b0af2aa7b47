// KV tiles of an FP8 cache. A tile's codes are copied to its stage, and the warp that copied them
// turns them into bf16 there, before the barrier that says that the tile is complete. So the rest
// of the kernel sees the tile of a plain cache.
//
// A row of a stage has twice as many bytes as its codes. Until the warp has read all of them, they
// lie in their own row, in the order of memory. Then the warp writes the row as bf16, swizzled.
// There are no bank conflicts in the copies nor in the conversion:
//   ckv  The codes lie in the first half of the row. The four scales of a row of kDsMla lie in the
//        second half, 16 bytes further in each row.
//   kpe  Codes lie in the first or the second half: so the codes of the rows that are converted
//        together lie in different banks. bf16 is copied to where it stays.
#pragma once

#include "core/kv_format.h"
#include "decode/params.h"
#include "decode/schedule/schedule.h"
#include "decode/sm80/config.h"
#include "gpu/codegen.cuh"
#include "gpu/fp8.cuh"
#include "gpu/sm80.cuh"

namespace jax_mla::decode::sm80 {

// The tokens of a tile that belong to this warp: kTokensPerWarp consecutive ones. A token is given
// by its number among them.
template <class C>
struct CodeTile {
  static constexpr int kPieceCodes = 8;  // a lane turns so many into one chunk of bf16
  static constexpr int kCkvPieces = C::kDCkv / kPieceCodes;
  static constexpr int kKpePieces = C::kDKpe / kPieceCodes;

  uint32_t ckv, kpe;  // shared addresses of the stage's rows
  int first_token;    // the warp's first, counted in the stage
  int lane;

  // The thread's index is read here, for each tile. If it came from Thread, the compiler would keep
  // what is derived from it over the whole loop, and spill.
  __device__ __forceinline__ explicit CodeTile(uint32_t stage)
      : ckv(stage), kpe(stage + C::kBlockN * C::kCkvRowBytes) {
    const uint32_t thread = gpu::ThreadIndex();
    first_token = static_cast<int>(thread / kWarpThreads) * C::kTokensPerWarp;
    lane = static_cast<int>(thread % kWarpThreads);
  }

  // Starts the copies. Lane i has the row of token i, counted over the layer's pages, and a
  // negative number if it is absent. An absent token becomes 0, with its scales.
  __device__ __forceinline__ void Copy(const DecodeParams& p, int32_t layer,
                                       int32_t lane_row) const {
    layer = static_cast<int32_t>(gpu::RecomputeHere(layer));  // else, addresses are kept, and spill
    const char* ckv_source = static_cast<const char*>(p.ckv.base) + layer * p.ckv.layer_stride;
    CopyRows<C::kDCkv / kChunkBytes>(
        ckv_source, p.ckv.token_stride, lane_row,
        [&](int token, int chunk) { return CkvCodes(token) + chunk * kChunkBytes; });
    if (p.kv_format == KvFormat::kDsMla) {
      CopyRows<1>(ckv_source + DsMla::kScalesOffset, p.ckv.token_stride, lane_row,
                  [&](int token, int) { return TileScales(token); });
    }
    if constexpr (C::kDKpe > 0) CopyKpe(p, layer, lane_row);
  }

  // Turns the tokens into bf16, once this thread's copies have landed. The whole warp calls it.
  __device__ __forceinline__ void Convert(KvFormat format) const {
    __syncwarp();  // the other lanes' copies have landed
    if constexpr (kCkvPieces < kWarpThreads) {
      ConvertShortRows<kCkvPieces>([&](int token) { return CkvCodes(token); },
                                   [&](int token, int piece) { return CkvChunk(token, piece); });
    } else if (C::kDCkv == DsMla::kDCkv && format == KvFormat::kDsMla) {
      ConvertCkv<true>();
    } else {
      ConvertCkv<false>();
    }
    if constexpr (C::kDKpe > 0) {
      if (format == KvFormat::kE4m3) {
        ConvertShortRows<kKpePieces>([&](int token) { return KpeCodes(token); },
                                     [&](int token, int piece) { return KpeChunk(token, piece); });
      }
    }
  }

 private:
  __device__ __forceinline__ void CopyKpe(const DecodeParams& p, int32_t layer,
                                          int32_t lane_row) const {
    const char* kpe_source = static_cast<const char*>(p.kpe.base);
    if (p.kv_format == KvFormat::kE4m3) {
      CopyRows<C::kDKpe / kChunkBytes>(
          kpe_source + layer * p.kpe.layer_stride, p.kpe.token_stride, lane_row,
          [&](int token, int chunk) { return KpeCodes(token) + chunk * kChunkBytes; });
    } else {
      CopyRows<C::kKpeRowBytes / kChunkBytes>(
          kpe_source + layer * p.kpe.layer_stride * C::kElementBytes,
          p.kpe.token_stride * C::kElementBytes, lane_row,
          [&](int token, int chunk) { return KpeChunk(token, chunk); });
    }
  }

  __device__ __forceinline__ uint32_t CkvCodes(int token) const {
    return ckv + (first_token + token) * C::kCkvRowBytes;
  }
  __device__ __forceinline__ uint32_t TileScales(int token) const {
    return CkvCodes(token) + C::kDCkv + token * kChunkBytes;
  }
  __device__ __forceinline__ uint32_t CkvChunk(int token, int chunk) const {
    return ckv + gpu::SwizzledOffset<C::kCkvRowBytes>(first_token + token, chunk);
  }
  __device__ __forceinline__ uint32_t KpeCodes(int token) const {
    constexpr int kBankBytes = 128;  // of all banks
    const int half = token / (kBankBytes / C::kKpeRowBytes) % 2;
    return kpe + (first_token + token) * C::kKpeRowBytes + half * (C::kKpeRowBytes / 2);
  }
  __device__ __forceinline__ uint32_t KpeChunk(int token, int chunk) const {
    return kpe + gpu::SwizzledOffset<C::kKpeRowBytes>(first_token + token, chunk);
  }

  // Copies kChunks chunks of each token from `source`, where row 0 is, to target(token, chunk).
  template <int kChunks, class Target>
  __device__ __forceinline__ void CopyRows(const char* source, int64_t row_bytes, int32_t lane_row,
                                           const Target& target) const {
    constexpr int kTokenLanes = kChunks < kWarpThreads ? kChunks : kWarpThreads;
    constexpr int kTokensPerCopy = kWarpThreads / kTokenLanes;
#pragma unroll 2
    for (int i = 0; i < C::kTokensPerWarp; i += kTokensPerCopy) {
      const int token = i + lane / kTokenLanes;
      const int32_t row = __shfl_sync(kAllLanes, lane_row, token);
      if (token >= C::kTokensPerWarp) continue;
#pragma unroll
      for (int chunk = lane % kTokenLanes; chunk < kChunks; chunk += kTokenLanes) {
        gpu::CopyAsync16(target(token, chunk),
                         source + MaxI32(row, 0) * row_bytes + chunk * kChunkBytes, row >= 0);
      }
    }
  }

  // Lane i converts pieces i and, if there are so many, i + 32 of each row.
  template <bool kHasTileScales>
  __device__ __forceinline__ void ConvertCkv() const {
    // Whose codes are in registers.
    constexpr int kHeldTokens = kHasTileScales || C::kTokensPerWarp < 4 ? 2 : 4;
    constexpr int kLanePieces = kCkvPieces / kWarpThreads;
    static_assert(C::kTokensPerWarp % kHeldTokens == 0 && kCkvPieces % kWarpThreads == 0,
                  "a warp converts whole rows, a few at a time");
#pragma unroll 1
    for (int first = 0; first < C::kTokensPerWarp; first += kHeldTokens) {
      uint2 codes[kHeldTokens][kLanePieces];
      float scales[kHeldTokens][kLanePieces];
#pragma unroll
      for (int i = 0; i < kHeldTokens; ++i) {
#pragma unroll
        for (int k = 0; k < kLanePieces; ++k) {
          const int piece = lane + k * kWarpThreads;
          codes[i][k] = gpu::LoadShared64(CkvCodes(first + i) + piece * kPieceCodes);
          if constexpr (kHasTileScales) {
            const int tile = piece / (DsMla::kTileDims / kPieceCodes);
            scales[i][k] = __uint_as_float(gpu::LoadShared32(TileScales(first + i) + tile * 4));
          }
        }
      }
      __syncwarp();  // all lanes have read these rows
#pragma unroll
      for (int i = 0; i < kHeldTokens; ++i) {
#pragma unroll
        for (int k = 0; k < kLanePieces; ++k) {
          uint4 values = Decode(codes[i][k]);
          if constexpr (kHasTileScales) {
            const gpu::SplitScale scale(scales[i][k]);
            values = {scale.Times(values.x), scale.Times(values.y), scale.Times(values.z),
                      scale.Times(values.w)};
          }
          gpu::StoreShared128(CkvChunk(first + i, lane + k * kWarpThreads), values);
        }
      }
    }
  }

  // Rows of fewer pieces than a warp has lanes, which share those of as many tokens as make one for
  // each. The codes of a token lie at codes_of(token), a chunk of bf16 at chunk_of(token, piece).
  template <int kPieces, class Codes, class Chunk>
  __device__ __forceinline__ void ConvertShortRows(const Codes& codes_of,
                                                   const Chunk& chunk_of) const {
    constexpr int kHeldTokens = kWarpThreads / kPieces;
    const int piece = lane % kPieces;
#pragma unroll 1
    for (int first = 0; first < C::kTokensPerWarp; first += kHeldTokens) {
      const int token = first + lane / kPieces;
      const bool exists = C::kTokensPerWarp % kHeldTokens == 0 || token < C::kTokensPerWarp;
      uint2 codes = {};
      if (exists) codes = gpu::LoadShared64(codes_of(token) + piece * kPieceCodes);
      __syncwarp();  // all lanes have read these rows
      if (exists) gpu::StoreShared128(chunk_of(token, piece), Decode(codes));
    }
  }

  static __device__ __forceinline__ uint4 Decode(uint2 codes) {
    const uint2 low = gpu::DecodeE4m3(codes.x), high = gpu::DecodeE4m3(codes.y);
    return {low.x, low.y, high.x, high.y};
  }
};

}  // namespace jax_mla::decode::sm80
