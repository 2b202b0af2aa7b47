// Writes one new token to the cache, by one warp: its row is normalised and rotated where the call
// says so, and stored in the format of the cache.
//
// As in append_token.cuh, all that does not depend on the token's place is loaded before the place
// is known. A lane works on chunks of ckv, and on pairs of kpe: a pair is what is rotated, and 64
// values are one pair a lane.
#pragma once

#include <cstdint>

#include "append/append_token.cuh"
#include "append/chunk.cuh"
#include "append/params.h"
#include "core/fp8.h"
#include "core/kv_format.h"
#include "core/transform.h"
#include "gpu/codegen.cuh"

namespace jax_mla::append {

// The place of a token by which it is rotated, any number, in a call without positions.
__device__ __forceinline__ int32_t RotationPosition(const AppendParams& p, int32_t token,
                                                    int32_t seq) {
  return ClampedPosition(__ldg(p.rope_lens + seq), p.max_seq_len, TokensEnd(p, seq), token);
}

// The angles of a position: a row of the table.
__device__ __forceinline__ const float* AnglesOf(const AppendParams& p, int32_t position) {
  const int32_t row = max(0, min(position, p.num_rope_positions - 1));
  return p.rope_table + int64_t{row} * p.d_kpe;
}

// The largest value of the 16 lanes that have a tile of DsMla.
__device__ __forceinline__ float TileMax(float value) {
  constexpr int kTileLanes = DsMla::kTileDims / kChunk;
#pragma unroll
  for (int other = kTileLanes / 2; other > 0; other /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, other));
  }
  return value;
}

// ckv of a token, and what becomes of it.
template <DType kDType, bool kIsVector>
class CkvRow {
 public:
  static constexpr int kHeld = 2;  // chunks that a lane keeps: all, for 512 values

  __device__ __forceinline__ CkvRow(const AppendParams& p, int32_t token) : p_(p), token_(token) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      Load(token, Lane() + k * kWarpThreads, held_[k]);
      if (kDType != DType::kE4m3 && p.norm_weight != nullptr) {
        LoadFloats<kIsVector>(p.norm_weight, p.d_ckv, Lane() + k * kWarpThreads, weight_[k]);
      }
    }
  }

  // Divides the row by its root mean square and multiplies it by the weight. After each step it is
  // rounded to its type.
  __device__ __forceinline__ void Normalise(float inverse_width) {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) AddSquares(held_[k], sum);
    ForEachOther([&](int32_t, const Chunk<kDType>& chunk) { AddSquares(chunk, sum); });
#pragma unroll
    for (int other = kNumSums / 2; other > 0; other /= 2) {
      sum = Sum(sum, __shfl_xor_sync(0xffffffffu, sum, other));
    }
    factor_ = NormFactor(sum, inverse_width, p_.norm_eps);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) Scale(weight_[k], held_[k]);
  }

  // Writes the row to `to` in the cache. `scale` counts if the format has one.
  __device__ __forceinline__ void Store(char* to, float scale) {
    const float inverse = 1.0f / scale;
#pragma unroll
    for (int k = 0; k < kHeld; ++k)
      StoreOne<true>(Lane() + k * kWarpThreads, held_[k], to, inverse);
    ForEachOther([&](int32_t idx, Chunk<kDType>& chunk) {
      if (p_.norm_weight != nullptr) {
        float weight[kChunk];
        LoadFloats<kIsVector>(p_.norm_weight, p_.d_ckv, idx, weight);
        Scale(weight, chunk);
      }
      StoreOne<false>(idx, chunk, to, inverse);
    });
  }

 private:
  static __device__ __forceinline__ int32_t Lane() { return threadIdx.x % kWarpThreads; }

  __device__ __forceinline__ void Load(int32_t token, int32_t idx, Chunk<kDType>& chunk) const {
    const auto* row = static_cast<const Bits<kDType>*>(p_.ckv) + int64_t{token} * p_.d_ckv;
    LoadChunk<kIsVector, kDType>(row, p_.d_ckv, idx, chunk);
  }

  // Calls `fun(idx, chunk)` for the chunks of this lane that it does not hold.
  template <class Fun>
  __device__ __forceinline__ void ForEachOther(Fun fun) const {
    // The address is computed here, so that it takes no registers before.
    const int32_t token = gpu::RecomputeHere(token_);
#pragma unroll 1
    for (int32_t idx = Lane() + kHeld * kWarpThreads; idx * kChunk < p_.d_ckv;
         idx += kWarpThreads) {
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
      StoreChunk<kIsVector, kDType>(codes, reinterpret_cast<uint8_t*>(to), p_.d_ckv, idx);
    } else if (p_.kv_format == KvFormat::kPlain) {
      StoreChunk<kIsVector, kDType>(chunk, reinterpret_cast<Bits<kDType>*>(to), p_.d_ckv, idx);
    } else {
      float values[kChunk];
      ToFloats(chunk, values);
      if (kIsHeld && p_.kv_format == KvFormat::kDsMla) inverse = StoreTileScale(idx, values, to);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) values[i] = Product(values[i], inverse);
      Chunk<DType::kE4m3> codes;
      codes.words[0] = gpu::E4m3Codes(values[0], values[1], values[2], values[3]);
      codes.words[1] = gpu::E4m3Codes(values[4], values[5], values[6], values[7]);
      StoreChunk<kIsVector, DType::kE4m3>(codes, reinterpret_cast<uint8_t*>(to), p_.d_ckv, idx);
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
  Chunk<kDType> held_[kHeld];
  float weight_[kHeld][kChunk];
  float factor_ = 1.0f;
};

// kpe of a token: pairs of values, the last of them alone if there is an odd number.
template <DType kDType>
class KpeRow {
 public:
  __device__ __forceinline__ KpeRow(const AppendParams& p, int32_t token)
      : p_(p), token_(token), num_pairs_((p.d_kpe + 1) / 2) {
    held_ = Load(token, Lane());
  }

  // Loads the angles of this lane's first pair.
  __device__ __forceinline__ void LoadAngles(int32_t position) {
    position_ = position;
    held_cos_sin_ = CosSin(position, Lane());
  }

  __device__ __forceinline__ void Store(char* to, float scale) const {
    const float inverse = 1.0f / scale;
    StoreOne(Lane(), held_, held_cos_sin_, to, inverse);
    const int32_t token = gpu::RecomputeHere(token_), position = gpu::RecomputeHere(position_);
#pragma unroll 1
    for (int32_t i = Lane() + kWarpThreads; i < num_pairs_; i += kWarpThreads) {
      StoreOne(i, Load(token, i), CosSin(position, i), to, inverse);
    }
  }

 private:
  struct Pair {
    Bits<kDType> first = 0, second = 0;
  };

  static __device__ __forceinline__ int32_t Lane() { return threadIdx.x % kWarpThreads; }

  __device__ __forceinline__ PairPlace PlaceOf(int32_t i) const {
    return PlaceOfPair(i, num_pairs_, p_.rope_interleaved);
  }

  __device__ __forceinline__ Pair Load(int32_t token, int32_t i) const {
    const auto* row = static_cast<const Bits<kDType>*>(p_.kpe) + int64_t{token} * p_.d_kpe;
    const PairPlace at = PlaceOf(i);
    Pair pair;
    if (i < num_pairs_) {
      pair.first = __ldg(row + at.first);
      if (at.second < p_.d_kpe) pair.second = __ldg(row + at.second);
    }
    return pair;
  }

  __device__ __forceinline__ float2 CosSin(int32_t position, int32_t i) const {
    if (p_.rope_table == nullptr || i >= num_pairs_) return {};
    const float* angles = AnglesOf(p_, position);
    return {__ldg(angles + i), __ldg(angles + num_pairs_ + i)};
  }

  __device__ __forceinline__ void StoreOne(int32_t i, Pair pair, float2 cos_sin, char* to,
                                           float inverse) const {
    if (i >= num_pairs_) return;
    if constexpr (kDType != DType::kE4m3) {
      if (p_.rope_table != nullptr) {
        const ValuePair rotated = Rotated(
            {ToFloat<kDType>(pair.first), ToFloat<kDType>(pair.second)}, cos_sin.x, cos_sin.y);
        pair = {FromFloat<kDType>(rotated.first), FromFloat<kDType>(rotated.second)};
      }
    }
    const PairPlace at = PlaceOf(i);
    StoreValue(pair.first, to, at.first, inverse);
    if (at.second < p_.d_kpe) StoreValue(pair.second, to, at.second, inverse);
  }

  __device__ __forceinline__ void StoreValue(Bits<kDType> bits, char* to, int32_t i,
                                             float inverse) const {
    if constexpr (kDType == DType::kE4m3) {
      reinterpret_cast<uint8_t*>(to)[i] = WithoutNan(bits);
    } else {
      const DType type = KpeType(p_.kv_format, kDType);
      if (type == kDType) {
        reinterpret_cast<Bits<kDType>*>(to)[i] = bits;
      } else if (type == DType::kE4m3) {
        const float value = Product(ToFloat<kDType>(bits), inverse);
        reinterpret_cast<uint8_t*>(to)[i] = gpu::E4m3Code(value);
      } else {
        reinterpret_cast<uint16_t*>(to)[i] = FromFloat<DType::kBf16>(ToFloat<kDType>(bits));
      }
    }
  }

  const AppendParams& p_;
  int32_t token_;
  int32_t position_ = 0;
  int32_t num_pairs_;
  Pair held_;
  float2 held_cos_sin_ = {};
};

// The address of a row of the cache, whose elements have `element_bytes`.
__device__ __forceinline__ char* RowAddress(const MutableKvStream& pool, const gpu::RowPlace& place,
                                            int32_t element_bytes) {
  const int64_t to = place.layer * pool.layer_stride + place.page * pool.page_stride +
                     place.row * pool.token_stride;
  return static_cast<char*>(pool.base) + to * element_bytes;
}

// Called by all lanes.
template <DType kDType, bool kIsVector>
__device__ __forceinline__ void EncodeToken(const AppendParams& p, float inverse_width,
                                            int32_t token) {
  const int32_t layer = __ldg(p.layer), page_begin = __ldg(p.page_begin);
  int32_t position = p.positions == nullptr ? 0 : __ldg(p.positions + token);
  CkvRow<kDType, kIsVector> ckv(p, token);
  KpeRow<kDType> kpe(p, token);
  const int32_t seq = SequenceOf(p, token);
  if (seq == kNoSequence) return;
  int32_t rotation = position;
  if (p.positions == nullptr) {
    position = PositionOf(p, token, seq);
    if (p.rope_table != nullptr) rotation = RotationPosition(p, token, seq);
  }
  if (position < 0 || layer < 0 || layer >= p.num_layers) return;
  const int32_t page_idx = position / p.page_size;
  if (page_idx >= p.max_pages_per_seq) return;
  const int32_t page_id = __ldg(p.page_table + int64_t{seq} * p.max_pages_per_seq + page_idx);
  if (p.rope_table != nullptr) kpe.LoadAngles(rotation);
  gpu::PdlLaunchDependents();
  float2 scale = {1.0f, 1.0f};
  if (p.kv_scale != nullptr) {
    const float* scales = p.kv_scale + int64_t{seq} * p.kv_scale_stride;
    scale = {__ldg(scales), __ldg(scales + 1)};
  }
  if (p.norm_weight != nullptr) ckv.Normalise(inverse_width);
  const int64_t page = int64_t{page_id} - page_begin;
  if (page < 0 || page >= p.num_pages) return;  // another device's page, or a wild id
  const gpu::RowPlace place{layer, static_cast<int32_t>(page), position - page_idx * p.page_size};
  ckv.Store(RowAddress(p.ckv_pages, place, ElementBytes(CkvType(p.kv_format, kDType))), scale.x);
  kpe.Store(RowAddress(p.kpe_pages, place, ElementBytes(KpeType(p.kv_format, kDType))), scale.y);
}

}  // namespace jax_mla::append
