// ckv of one new token on its way into the cache, by one warp. A lane works on chunks.
#pragma once

#include <cstdint>

#include "append/append_token.cuh"
#include "append/chunk.cuh"
#include "append/params.h"
#include "core/fp8.h"
#include "core/kv_format.h"
#include "core/transform.h"
#include "gpu/codegen.cuh"
#include "gpu/round_fp8.cuh"

namespace jax_mla::append {

// The largest value of the 16 lanes that have a tile of DsMla.
__device__ __forceinline__ float TileMax(float value) {
  constexpr int kTileLanes = DsMla::kTileDims / kChunk;
#pragma unroll
  for (int other = kTileLanes / 2; other > 0; other /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, other));
  }
  return value;
}

// ckv of a token, and what becomes of it. `kDCkv`: d_ckv if it is known; 0: any.
// `kHoldsWeight`: whether the norm's weight is loaded with the row, and not when it is needed.
template <DType kDType, bool kIsVector, int kDCkv = 0, bool kHoldsWeight = true>
class CkvRow {
 public:
  // Chunks that a lane keeps: all, for 512 values and for a width that is known.
  static constexpr int kHeld = kDCkv > 0 ? kDCkv / (kChunk * kWarpThreads) : 2;
  static_assert(kDCkv % (kChunk * kWarpThreads) == 0, "every lane has the same number of chunks");

  __device__ __forceinline__ CkvRow(const AppendParams& p, int32_t token)
      : p_(p), token_(token), lane_(gpu::ThreadIndex() % kWarpThreads) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      Load(token, lane_ + k * kWarpThreads, held_[k]);
      if (kHoldsWeight && kDType != DType::kE4m3 && p.norm_weight != nullptr) {
        LoadWeight(lane_ + k * kWarpThreads, weight_[k]);
      }
    }
  }

  // Finds out by what Store has to multiply the row, besides the weight, to normalise it.
  __device__ __forceinline__ void FindFactor(float inverse_width) {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) AddSquares(held_[k], sum);
    ForEachOther([&](int32_t, const Chunk<kDType>& chunk) { AddSquares(chunk, sum); });
#pragma unroll
    for (int other = kNumSums / 2; other > 0; other /= 2) {
      sum = Sum(sum, __shfl_xor_sync(0xffffffffu, sum, other));
    }
    factor_ = NormFactor(sum, inverse_width, p_.norm_eps);
  }

  // Writes the row to `to` in the cache, normalised if the call has a weight. `inverse`: of the
  // scale of ckv, if the format has one.
  __device__ __forceinline__ void Store(char* to, float inverse) {
    // A decode kernel, which knows the width, executes this once and cold: there its second chunk
    // goes through the code that the first one has fetched.
    constexpr int kUnroll = kDCkv > 0 ? 1 : kHeld;
#pragma unroll kUnroll
    for (int k = 0; k < kHeld; ++k) {
      const int32_t idx = lane_ + k * kWarpThreads;
      if (p_.norm_weight != nullptr) {
        if constexpr (!kHoldsWeight) LoadWeight(idx, weight_[0]);
        Scale(weight_[0], held_[0]);
      }
      StoreOne<true>(idx, held_[0], to, inverse);
      NextHeld();
    }
    ForEachOther([&](int32_t idx, Chunk<kDType>& chunk) {
      if (p_.norm_weight != nullptr) {
        float weight[kChunk];
        LoadWeight(idx, weight);
        Scale(weight, chunk);
      }
      StoreOne<false>(idx, chunk, to, inverse);
    });
  }

 private:
  __device__ __forceinline__ int32_t Width() const { return kDCkv > 0 ? kDCkv : p_.d_ckv; }

  __device__ __forceinline__ void Load(int32_t token, int32_t idx, Chunk<kDType>& chunk) const {
    const auto* row = static_cast<const Bits<kDType>*>(p_.ckv) + int64_t{token} * Width();
    LoadChunk<kIsVector, kDType>(row, Width(), idx, chunk);
  }

  __device__ __forceinline__ void LoadWeight(int32_t idx, float (&weight)[kChunk]) const {
    LoadFloats<kIsVector>(p_.norm_weight, Width(), idx, weight);
  }

  // Moves the held chunks to the front, and drops the first one.
  __device__ __forceinline__ void NextHeld() {
#pragma unroll
    for (int k = 0; k + 1 < kHeld; ++k) {
      held_[k] = held_[k + 1];
#pragma unroll
      for (int i = 0; i < kChunk; ++i) weight_[k][i] = weight_[k + 1][i];
    }
  }

  // Calls `fun(idx, chunk)` for the chunks of this lane that it does not hold.
  template <class Fun>
  __device__ __forceinline__ void ForEachOther(Fun fun) const {
    if constexpr (kDCkv > 0) return;
    // The address is computed here, so that it takes no registers before.
    const int32_t token = gpu::RecomputeHere(token_);
#pragma unroll 1
    for (int32_t idx = lane_ + kHeld * kWarpThreads; idx * kChunk < Width(); idx += kWarpThreads) {
      Chunk<kDType> chunk;
      Load(token, idx, chunk);
      fun(idx, chunk);
    }
  }

  static __device__ __forceinline__ void AddSquares(const Chunk<kDType>& chunk, float& sum) {
    if constexpr (kDType != DType::kE4m3) {
      float values[kChunk];
      ToFloats(chunk, values);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        // The square of a 16-bit value is exact, so one rounding is what two are.
        sum = kDType == DType::kF32 ? Sum(sum, Product(values[i], values[i]))
                                    : __fmaf_rn(values[i], values[i], sum);
      }
    }
  }

  // Normalises a chunk. After each product it is rounded to its type.
  __device__ __forceinline__ void Scale(const float (&weight)[kChunk], Chunk<kDType>& chunk) const {
    if constexpr (kDType != DType::kE4m3) {
      float values[kChunk];
      ToFloats(chunk, values);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) values[i] = Product(values[i], factor_);
      FromFloats(values, chunk);
      ToFloats(chunk, values);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) values[i] = Product(values[i], weight[i]);
      FromFloats(values, chunk);
    }
  }

  // kIsHeld: whether it is one of the chunks that all lanes have. A row of DsMla has no others.
  template <bool kIsHeld>
  __device__ __forceinline__ void StoreOne(int32_t idx, const Chunk<kDType>& chunk, char* to,
                                           float inverse) const {
    if constexpr (kDType == DType::kE4m3) {
      Chunk<kDType> codes;
#pragma unroll
      for (int i = 0; i < codes.kWords; ++i) codes.words[i] = WithoutNans(chunk.words[i]);
      StoreChunk<kIsVector, kDType>(codes, reinterpret_cast<uint8_t*>(to), Width(), idx);
    } else if (p_.kv_format == KvFormat::kPlain) {
      StoreChunk<kIsVector, kDType>(chunk, reinterpret_cast<Bits<kDType>*>(to), Width(), idx);
    } else {
      float values[kChunk];
      ToFloats(chunk, values);
      if (kIsHeld && p_.kv_format == KvFormat::kDsMla) inverse = StoreTileScale(idx, values, to);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) values[i] = Product(values[i], inverse);
      Chunk<DType::kE4m3> codes;
      codes.words[0] = gpu::E4m3Codes(values[0], values[1], values[2], values[3]);
      codes.words[1] = gpu::E4m3Codes(values[4], values[5], values[6], values[7]);
      StoreChunk<kIsVector, DType::kE4m3>(codes, reinterpret_cast<uint8_t*>(to), Width(), idx);
    }
  }

  // Chooses the scale of this lane's tile and writes it. Returns its reciprocal.
  static __device__ __forceinline__ float StoreTileScale(int32_t idx, const float (&values)[kChunk],
                                                         char* to) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) largest = fmaxf(largest, fabsf(values[i]));  // drops a NaN
    const float scale = DsMlaScale(TileMax(largest));
    const int32_t first = idx * kChunk;
    if (first % DsMla::kTileDims == 0) {
      reinterpret_cast<float*>(to + DsMla::kScalesOffset)[first / DsMla::kTileDims] = scale;
    }
    return DsMlaInverse(scale);
  }

  const AppendParams& p_;
  int32_t token_;
  int32_t lane_;
  Chunk<kDType> held_[kHeld];
  float weight_[kHeld][kChunk];
  float factor_ = 1.0f;
};

}  // namespace jax_mla::append
