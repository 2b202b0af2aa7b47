// KV tiles of an FP8 cache. Rows are copied to a stage as they are, and turned into bf16 there by
// the warp that copied them. So the rest of the kernel knows no codes.
//
// A row of a stage has twice as many bytes as its codes. The codes lie in one part of it, in order,
// until the warp has read them all; then it writes the whole row, swizzled. Where, and by which
// lane, is chosen such that neither the copies nor the conversion have bank conflicts:
//   ckv  the first half of the row. In kDsMla its four scales follow, in the second half.
//   kpe  the first or second half. In 128 bytes of a stage, the rows that lie there come first as
//        rows; of the next 128 bytes the other halves are used. So codes of neighbouring rows lie
//        in different banks. kpe in bf16 is copied to where it stays.
#pragma once

#include "core/kv_format.h"
#include "decode/params.h"
#include "decode/sm80/config.h"
#include "decode/split/schedule.h"
#include "gpu/fp8.cuh"
#include "gpu/sm80.cuh"

namespace jax_mla::decode::sm80 {

// One warp's tokens of a tile: kTokensPerWarp consecutive ones.
template <class C>
struct CodeTile {
  static constexpr int kPieceCodes = 8;  // that a lane turns into a chunk of bf16 at a time
  static constexpr int kCkvPieces = C::kDCkv / kPieceCodes;
  static constexpr int kKpePieces = C::kDKpe / kPieceCodes;
  static constexpr int kScaleOffset = C::kDCkv;  // of the row's scales, in its row of the stage

  uint32_t ckv;  // shared address of the first token's row
  uint32_t kpe;
  int first_token;
  int lane;

  __device__ __forceinline__ CodeTile(uint32_t stage, int warp, int lane_)
      : first_token(warp * C::kTokensPerWarp), lane(lane_) {
    ckv = stage;
    kpe = stage + C::kBlockN * C::kCkvRowBytes;
  }

  // Issues the copies. Lane i gives the row of token i in the layer, negative if it is absent.
  // Absent tokens become zeros, and so do their scales.
  __device__ __forceinline__ void Copy(const DecodeParams& p, int32_t layer,
                                       int32_t lane_row) const {
    const char* ckv_rows = static_cast<const char*>(p.ckv.base) + layer * p.ckv.layer_stride;
    CopyRows<C::kDCkv / kChunkBytes>(
        ckv_rows, p.ckv.token_stride, lane_row,
        [&](int token, int chunk) { return CkvCodes(token) + chunk * kChunkBytes; });
    if (p.kv_format == KvFormat::kDsMla) {
      CopyRows<1>(ckv_rows + DsMla::kScalesOffset, p.ckv.token_stride, lane_row,
                  [&](int token, int) { return CkvCodes(token) + kScaleOffset; });
    }
    const char* kpe_rows = static_cast<const char*>(p.kpe.base);
    if (p.kv_format == KvFormat::kE4m3) {
      kpe_rows += layer * p.kpe.layer_stride;
      CopyRows<C::kDKpe / kChunkBytes>(
          kpe_rows, p.kpe.token_stride, lane_row,
          [&](int token, int chunk) { return KpeCodes(token) + chunk * kChunkBytes; });
    } else {
      kpe_rows += layer * p.kpe.layer_stride * C::kElementBytes;
      CopyRows<kKpePieces>(kpe_rows, p.kpe.token_stride * C::kElementBytes, lane_row,
                           [&](int token, int chunk) { return KpeChunk(token, chunk); });
    }
  }

  // Turns the tokens into bf16, once this thread's copies have landed. `kpe_scale` is Scales::kpe.
  __device__ __forceinline__ void Convert(KvFormat format, float kpe_scale) const {
    __syncwarp();  // the copies of the other lanes have landed too
    if constexpr (C::kDCkv == DsMla::kDCkv) {
      if (format == KvFormat::kDsMla) {
        ConvertCkv<true>();
      } else {
        ConvertCkv<false>();
      }
    } else {
      ConvertCkv<false>();
    }
    if (format == KvFormat::kE4m3 || kpe_scale != 1.0f) {
      ConvertKpe(format == KvFormat::kE4m3, kpe_scale);
    }
  }

 private:
  __device__ __forceinline__ uint32_t CkvCodes(int token) const {
    return ckv + (first_token + token) * C::kCkvRowBytes;
  }
  __device__ __forceinline__ uint32_t KpeCodes(int token) const {
    constexpr int kRowsOf128Bytes = 128 / C::kKpeRowBytes;
    const int half = token / kRowsOf128Bytes % 2;
    return kpe + (first_token + token) * C::kKpeRowBytes + half * (C::kKpeRowBytes / 2);
  }
  __device__ __forceinline__ uint32_t KpeChunk(int token, int chunk) const {
    return kpe + gpu::SwizzledOffset<C::kKpeRowBytes>(first_token + token, chunk);
  }

  // Copies kChunks chunks of each token from `source`, which has row 0, to target(token, chunk).
  template <int kChunks, class Target>
  __device__ __forceinline__ void CopyRows(const char* source, int64_t row_bytes, int32_t lane_row,
                                           const Target& target) const {
    constexpr int kTokensPerCopy = kWarpThreads / kChunks;
    const int chunk = lane % kChunks;
#pragma unroll 2
    for (int i = 0; i < C::kTokensPerWarp; i += kTokensPerCopy) {
      const int token = i + lane / kChunks;
      const int32_t row = __shfl_sync(kAllLanes, lane_row, token);
      if (token >= C::kTokensPerWarp) continue;
      gpu::CopyAsync16(target(token, chunk),
                       source + MaxI32(row, 0) * row_bytes + chunk * kChunkBytes, row >= 0);
    }
  }

  // Lane l converts pieces l and l + 32 of a row. A few tokens are in registers at a time.
  template <bool kHasTileScales>
  __device__ __forceinline__ void ConvertCkv() const {
    constexpr int kHeldTokens = 4;
    constexpr int kLanePieces = kCkvPieces / kWarpThreads;
    constexpr int kTilePieces = DsMla::kTileDims / kPieceCodes;
    static_assert(C::kTokensPerWarp % kHeldTokens == 0 && kCkvPieces % kWarpThreads == 0);
#pragma unroll 1
    for (int first = 0; first < C::kTokensPerWarp; first += kHeldTokens) {
      uint2 codes[kHeldTokens][kLanePieces];
      float scales[kHeldTokens][kLanePieces];
#pragma unroll
      for (int i = 0; i < kHeldTokens; ++i) {
#pragma unroll
        for (int k = 0; k < kLanePieces; ++k) {
          const int piece = lane + k * kWarpThreads;
          const uint32_t row = CkvCodes(first + i);
          codes[i][k] = gpu::LoadShared64(row + piece * kPieceCodes);
          if constexpr (kHasTileScales) {
            scales[i][k] = __uint_as_float(
                gpu::LoadShared32(row + kScaleOffset + piece / kTilePieces * sizeof(float)));
          }
        }
      }
      __syncwarp();  // every lane has read these rows
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
          const int chunk = lane + k * kWarpThreads;
          gpu::StoreShared128(
              ckv + gpu::SwizzledOffset<C::kCkvRowBytes>(first_token + first + i, chunk), values);
        }
      }
    }
  }

  __device__ __forceinline__ void ConvertKpe(bool is_codes, float scale) const {
    constexpr int kHeldTokens = kWarpThreads / kKpePieces;
    const int piece = lane % kKpePieces;
#pragma unroll 1
    for (int first = 0; first < C::kTokensPerWarp; first += kHeldTokens) {
      const int token = first + lane / kKpePieces;
      const bool exists = token < C::kTokensPerWarp;
      const uint32_t target = KpeChunk(token, piece);
      uint4 values = {};
      if (exists) {
        values = is_codes ? Decode(gpu::LoadShared64(KpeCodes(token) + piece * kPieceCodes))
                          : gpu::LoadShared128(target);
      }
      __syncwarp();  // every lane has read these rows
      if (exists) {
        gpu::StoreShared128(target,
                            {gpu::ScaleBf16x2(values.x, scale), gpu::ScaleBf16x2(values.y, scale),
                             gpu::ScaleBf16x2(values.z, scale), gpu::ScaleBf16x2(values.w, scale)});
      }
    }
  }

  static __device__ __forceinline__ uint4 Decode(uint2 codes) {
    const uint2 low = gpu::DecodeE4m3(codes.x), high = gpu::DecodeE4m3(codes.y);
    return {low.x, low.y, high.x, high.y};
  }
};

}  // namespace jax_mla::decode::sm80
