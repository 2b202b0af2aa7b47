// kpe of one new token on its way into the cache, by one warp. A lane works on pairs of values,
// which are what is rotated: 64 values are one pair a lane.
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

// The angles of a position: a row of the table.
__device__ __forceinline__ const float* AnglesOf(const AppendParams& p, int32_t position) {
  const int32_t row = max(0, min(position, p.num_rope_positions - 1));
  return p.rope_table + int64_t{row} * p.d_kpe;
}

// kpe of a token: pairs of values, the last of them alone if there is an odd number. `kDKpe`: d_kpe
// if it is known; 0: any.
template <DType kDType, int kDKpe = 0>
class KpeRow {
 public:
  __device__ __forceinline__ KpeRow(const AppendParams& p, int32_t token)
      : p_(p),
        token_(token),
        lane_(gpu::ThreadIndex() % kWarpThreads),
        num_pairs_((Width() + 1) / 2) {
    held_ = Load(token, lane_);
  }

  // Loads the angles of this lane's first pair; where the width is known, lanes without a pair get
  // those of the lanes with one, in turn.
  __device__ __forceinline__ void LoadAngles(int32_t position) {
    position_ = position;
    held_cos_sin_ = CosSin(position, kDKpe > 0 ? lane_ % num_pairs_ : lane_);
  }
  __device__ __forceinline__ float2 angles() const { return held_cos_sin_; }

  // Writes the row to `to` in the cache, rotated if the call has a table. `inverse`: of the scale
  // of kpe, if the format has one.
  __device__ __forceinline__ void Store(char* to, float inverse) const {
    StoreOne(lane_, held_, held_cos_sin_, to, inverse);
    if constexpr (kDKpe > 0) return;  // a pair a lane
    const int32_t token = gpu::RecomputeHere(token_), position = gpu::RecomputeHere(position_);
#pragma unroll 1
    for (int32_t i = lane_ + kWarpThreads; i < num_pairs_; i += kWarpThreads) {
      StoreOne(i, Load(token, i), CosSin(position, i), to, inverse);
    }
  }

 private:
  static_assert(kDKpe <= 2 * kWarpThreads && kDKpe % 2 == 0,
                "a warp has a pair of the row in each lane, or in fewer");

  __device__ __forceinline__ int32_t Width() const { return kDKpe > 0 ? kDKpe : p_.d_kpe; }

  struct Pair {
    Bits<kDType> first = 0, second = 0;
  };

  __device__ __forceinline__ PairPlace PlaceOf(int32_t i) const {
    return PlaceOfPair(i, num_pairs_, p_.rope_interleaved);
  }

  __device__ __forceinline__ Pair Load(int32_t token, int32_t i) const {
    const auto* row = static_cast<const Bits<kDType>*>(p_.kpe) + int64_t{token} * Width();
    const PairPlace at = PlaceOf(i);
    Pair pair;
    if (i < num_pairs_) {
      pair.first = __ldg(row + at.first);
      if (at.second < Width()) pair.second = __ldg(row + at.second);
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
    if (at.second < Width()) StoreValue(pair.second, to, at.second, inverse);
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
  int32_t lane_;
  int32_t position_ = 0;
  int32_t num_pairs_;
  Pair held_;
  float2 held_cos_sin_ = {};
};

}  // namespace jax_mla::append
