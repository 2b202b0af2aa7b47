// Rotates the rotary parts of a token's queries. Lanes of several warps share them.
//
// Where the width allows, a lane takes two chunks of a head, of which one lies as far in the first
// half of the row as the other in the second half. So they hold both values of eight pairs,
// whichever values are a pair. Otherwise a lane takes one pair.
#pragma once

#include <cstdint>

#include "append/append_token.cuh"
#include "append/chunk.cuh"
#include "append/kpe_row.cuh"
#include "append/params.h"
#include "core/transform.h"

namespace jax_mla::append {

// Lanes that share a head.
MLA_HOST_DEVICE int32_t LanesPerHead(int32_t d_kpe, bool is_vector) {
  return is_vector ? d_kpe / (2 * kChunk) : d_kpe / 2;
}

// Four floats of the table go to values[0] to values[3].
__device__ __forceinline__ void LoadAngles(const float* angles, float* values) {
  const float4 loaded = __ldg(reinterpret_cast<const float4*>(angles));
  values[0] = loaded.x, values[1] = loaded.y, values[2] = loaded.z, values[3] = loaded.w;
}

template <DType kDType>
__device__ __forceinline__ void RotateChunks(const AppendParams& p, const float* angles,
                                             int64_t row, int32_t share) {
  const int32_t other = share + LanesPerHead(p.d_kpe, true), num_pairs = p.d_kpe / 2;
  const Bits<kDType>* from = static_cast<const Bits<kDType>*>(p.q_pe) + row * p.d_kpe;
  Bits<kDType>* to = static_cast<Bits<kDType>*>(p.rotated_q_pe) + row * p.d_kpe;
  Chunk<kDType> low, high;
  LoadChunk<true, kDType>(from, p.d_kpe, share, low);
  LoadChunk<true, kDType>(from, p.d_kpe, other, high);
  // A chunk has the first values of eight pairs, or both of four.
  const int32_t begin = p.rope_interleaved ? share * 4 : share * kChunk;
  const int32_t middle = p.rope_interleaved ? other * 4 : begin + 4;
  float cos[kChunk], sin[kChunk], a[kChunk], b[kChunk];
  LoadAngles(angles + begin, cos);
  LoadAngles(angles + middle, cos + 4);
  LoadAngles(angles + num_pairs + begin, sin);
  LoadAngles(angles + num_pairs + middle, sin + 4);
  ToFloats(low, a);
  ToFloats(high, b);
  if (p.rope_interleaved) {
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      const ValuePair x = Rotated({a[2 * i], a[2 * i + 1]}, cos[i], sin[i]);
      const ValuePair y = Rotated({b[2 * i], b[2 * i + 1]}, cos[4 + i], sin[4 + i]);
      a[2 * i] = x.first, a[2 * i + 1] = x.second;
      b[2 * i] = y.first, b[2 * i + 1] = y.second;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const ValuePair x = Rotated({a[i], b[i]}, cos[i], sin[i]);
      a[i] = x.first, b[i] = x.second;
    }
  }
  FromFloats(a, low);
  FromFloats(b, high);
  StoreChunk<true, kDType>(low, to, p.d_kpe, share);
  StoreChunk<true, kDType>(high, to, p.d_kpe, other);
}

template <DType kDType>
__device__ __forceinline__ void RotatePair(const AppendParams& p, const float* angles, int64_t row,
                                           int32_t share) {
  const int32_t num_pairs = p.d_kpe / 2;
  const PairPlace at = PlaceOfPair(share, num_pairs, p.rope_interleaved);
  const Bits<kDType>* from = static_cast<const Bits<kDType>*>(p.q_pe) + row * p.d_kpe;
  Bits<kDType>* to = static_cast<Bits<kDType>*>(p.rotated_q_pe) + row * p.d_kpe;
  const ValuePair rotated =
      Rotated({ToFloat<kDType>(__ldg(from + at.first)), ToFloat<kDType>(__ldg(from + at.second))},
              __ldg(angles + share), __ldg(angles + num_pairs + share));
  to[at.first] = FromFloat<kDType>(rotated.first);
  to[at.second] = FromFloat<kDType>(rotated.second);
}

// Rotates what lane `idx` of those that share the token has. Called by all lanes of a warp, of
// which the last ones may have nothing.
template <DType kDType, bool kIsVector>
__device__ __forceinline__ void RotateQueries(const AppendParams& p, int32_t token, int32_t idx) {
  int32_t position;
  if (p.positions != nullptr) {
    position = __ldg(p.positions + token);
  } else {
    const int32_t seq = PlaceOf(p, token).seq_idx;
    if (seq == kNoSequence) return;  // nobody reads the query of padding
    position = RotationPosition(p, token, seq);
  }
  const float* angles = AnglesOf(p, position);
  gpu::PdlLaunchDependents();
  const int32_t lanes_per_head = LanesPerHead(p.d_kpe, kIsVector);
  const int32_t head = idx / lanes_per_head;
  if (head >= p.num_heads) return;
  const int64_t row = int64_t{token} * p.num_heads + head;
  if constexpr (kIsVector) {
    RotateChunks<kDType>(p, angles, row, idx - head * lanes_per_head);
  } else {
    RotatePair<kDType>(p, angles, row, idx - head * lanes_per_head);
  }
}

}  // namespace jax_mla::append
