// A chunk: eight neighbouring values of a row, which one lane works on. It is what is one vector of
// 16 bytes in the 16-bit types, and 8 bytes as codes.
//
// kIsVector: rows and addresses are multiples of the vectors. Otherwise values are loaded and
// stored one by one, and the last chunk of a row may have less than eight.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "core/kv_format.h"
#include "core/transform.h"
#include "gpu/element.h"
#include "gpu/pack.cuh"

namespace jax_mla::append {

inline constexpr int kChunk = kSumRun;  // values

// One value as it lies in memory.
template <DType kDType>
using Bits = std::conditional_t<kDType == DType::kF32, uint32_t,
                                std::conditional_t<kDType == DType::kE4m3, uint8_t, uint16_t>>;

template <DType kDType>
__device__ __forceinline__ float ToFloat(Bits<kDType> bits) {
  static_assert(kDType != DType::kE4m3, "codes are not computed with");
  if constexpr (kDType == DType::kF32) {
    return __uint_as_float(bits);
  } else {
    return gpu::Unpack2<gpu::Element<kDType>>(bits).x;
  }
}

// Rounds to nearest even.
template <DType kDType>
__device__ __forceinline__ Bits<kDType> FromFloat(float x) {
  static_assert(kDType != DType::kE4m3, "see gpu/round_fp8.cuh");
  if constexpr (kDType == DType::kF32) {
    return __float_as_uint(x);
  } else {
    return static_cast<Bits<kDType>>(gpu::Pack2<gpu::Element<kDType>>(x, 0.0f));
  }
}

template <DType kDType>
struct Chunk {
  static constexpr int kWords = kChunk * ElementBytes(kDType) / 4;
  uint32_t words[kWords] = {};
};

template <DType kDType>
__device__ __forceinline__ void ToFloats(const Chunk<kDType>& chunk, float (&values)[kChunk]) {
  if constexpr (kDType == DType::kF32) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) values[i] = __uint_as_float(chunk.words[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; i += 2) {
      const float2 pair = gpu::Unpack2<gpu::Element<kDType>>(chunk.words[i / 2]);
      values[i] = pair.x, values[i + 1] = pair.y;
    }
  }
}

// Rounds to nearest even.
template <DType kDType>
__device__ __forceinline__ void FromFloats(const float (&values)[kChunk], Chunk<kDType>& chunk) {
  if constexpr (kDType == DType::kF32) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) chunk.words[i] = __float_as_uint(values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; i += 2) {
      chunk.words[i / 2] = gpu::Pack2<gpu::Element<kDType>>(values[i], values[i + 1]);
    }
  }
}

// Loads chunk `idx` of a row with `width` values. What it has no value for stays as it is.
template <bool kIsVector, DType kDType>
__device__ __forceinline__ void LoadChunk(const Bits<kDType>* row, int32_t width, int32_t idx,
                                          Chunk<kDType>& chunk) {
  const Bits<kDType>* from = row + idx * kChunk;
  const int32_t count = width - idx * kChunk;
  if (count <= 0) return;
  if constexpr (!kIsVector) {
    constexpr int kPerWord = 4 / sizeof(Bits<kDType>);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const uint32_t bits = i < count ? static_cast<uint32_t>(__ldg(from + i)) : 0;
      chunk.words[i / kPerWord] |= bits << (i % kPerWord * 8 * sizeof(Bits<kDType>));
    }
  } else if constexpr (kDType == DType::kE4m3) {
    const uint2 loaded = __ldg(reinterpret_cast<const uint2*>(from));
    chunk.words[0] = loaded.x, chunk.words[1] = loaded.y;
  } else {
#pragma unroll
    for (int i = 0; i < Chunk<kDType>::kWords; i += 4) {
      const uint4 loaded = __ldg(reinterpret_cast<const uint4*>(from) + i / 4);
      chunk.words[i] = loaded.x, chunk.words[i + 1] = loaded.y;
      chunk.words[i + 2] = loaded.z, chunk.words[i + 3] = loaded.w;
    }
  }
}

template <bool kIsVector, DType kDType>
__device__ __forceinline__ void StoreChunk(const Chunk<kDType>& chunk, Bits<kDType>* row,
                                           int32_t width, int32_t idx) {
  Bits<kDType>* to = row + idx * kChunk;
  const int32_t count = width - idx * kChunk;
  if (count <= 0) return;
  if constexpr (!kIsVector) {
    constexpr int kPerWord = 4 / sizeof(Bits<kDType>);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const uint32_t word = chunk.words[i / kPerWord];
      if (i < count) {
        to[i] = static_cast<Bits<kDType>>(word >> (i % kPerWord * 8 * sizeof(Bits<kDType>)));
      }
    }
  } else if constexpr (kDType == DType::kE4m3) {
    __stcs(reinterpret_cast<uint2*>(to), make_uint2(chunk.words[0], chunk.words[1]));
  } else {
#pragma unroll
    for (int i = 0; i < Chunk<kDType>::kWords; i += 4) {
      __stcs(
          reinterpret_cast<uint4*>(to) + i / 4,
          make_uint4(chunk.words[i], chunk.words[i + 1], chunk.words[i + 2], chunk.words[i + 3]));
    }
  }
}

// Loads eight floats of an array of `count` of them, from place `idx * kChunk` on.
template <bool kIsVector>
__device__ __forceinline__ void LoadFloats(const float* array, int32_t count, int32_t idx,
                                           float (&values)[kChunk]) {
  Chunk<DType::kF32> chunk;
  LoadChunk<kIsVector, DType::kF32>(reinterpret_cast<const uint32_t*>(array), count, idx, chunk);
  ToFloats(chunk, values);
}

}  // namespace jax_mla::append
