// Vectors of float32 and conversions to them, on the compiler's vector extension. Included only by
// the files that are compiled for one instruction set: internal linkage, no standard library (see
// cpu_kernel_impl.h).
#pragma once

#include <cstdint>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "core/kv_format.h"
#include "decode/cpu_kernel.h"

#define MLA_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define MLA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MLA_UNROLL _Pragma("GCC unroll 64")
#endif

namespace jax_mla::decode {
namespace {

constexpr float kInf = __builtin_inff();
constexpr float kLog2E = 1.44269504f;

// Accumulator registers of a register block: half of the register file, enough to hide the latency
// of the FMAs.
#if defined(__AVX512F__)
constexpr int kNumAccumulators = 16;
#else
constexpr int kNumAccumulators = 8;
#endif

template <int kLanes>
struct Simd {
  typedef float Float __attribute__((vector_size(kLanes * sizeof(float))));
  typedef int32_t Int __attribute__((vector_size(kLanes * sizeof(float))));

  static MLA_INLINE Float Load(const float* from) {
    Float v;
    __builtin_memcpy(&v, from, sizeof(v));
    return v;
  }
  static MLA_INLINE void Store(float* to, Float v) { __builtin_memcpy(to, &v, sizeof(v)); }
  static MLA_INLINE Int Load(const int32_t* from) {
    Int v;
    __builtin_memcpy(&v, from, sizeof(v));
    return v;
  }
  static MLA_INLINE Float Broadcast(float x) { return x - Float{}; }

  // 2^x for x <= 0, relative error 1e-7; 0 below the normal range, NaN for NaN.
  static MLA_INLINE Float Exp2(Float x) {
    constexpr float kMinExponent = -126.0f;
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const Float y = x < kMinExponent ? Broadcast(kMinExponent) : x;
    const Float shifted = y + kRound;
    const Float f = y - (shifted - kRound);
    Float p = Broadcast(0x1.44e956p-13f);
    p = p * f + 0x1.5f082p-10f;
    p = p * f + 0x1.3b2b54p-7f;
    p = p * f + 0x1.c6af5ep-5f;
    p = p * f + 0x1.ebfbdcp-3f;
    p = p * f + 0x1.62e430p-1f;
    p = p * f + 1.0f;
    const Int n = (Int)shifted - 0x4b400000;  // bits of kRound
    const Float scale = (Float)((n + 127) << 23);
    return x < kMinExponent ? Float{} : p * scale;
  }
};

using Block = Simd<kDimBlock>;
typedef uint16_t Half16 __attribute__((vector_size(kDimBlock * sizeof(uint16_t))));
typedef uint32_t Word16 __attribute__((vector_size(kDimBlock * sizeof(uint32_t))));

// f16 in the low halves of words -> float32, in integer arithmetic: the thread may flush denormals.
MLA_INLINE Block::Float HalfToFloat(Word16 x) {
  const Word16 sign = (x & 0x8000u) << 16;
  const Word16 magnitude = x & 0x7fffu;
  const Block::Float tiny = __builtin_convertvector((Block::Int)magnitude, Block::Float) * 0x1p-24f;
  Word16 bits = (magnitude << 13) + 0x38000000u;
  bits = magnitude >= 0x7c00u ? bits + 0x38000000u : bits;  // infinity and NaN
  bits = magnitude < 0x0400u ? (Word16)tiny : bits;
  return (Block::Float)(bits | sign);
}

MLA_INLINE Word16 Widen(Half16 x) {
#if defined(__AVX512F__)
  // GCC 12 would convert halves and join them. Zero-masked: the plain form warns (uninitialised).
  return (Word16)_mm512_maskz_cvtepu16_epi32((__mmask16)-1, (__m256i)x);
#else
  return __builtin_convertvector(x, Word16);
#endif
}

// kDimBlock elements as float32.
template <DType kDType>
MLA_INLINE Block::Float LoadBlock(const char* from) {
  if constexpr (kDType == DType::kF32) {
    Block::Float values;
    __builtin_memcpy(&values, from, sizeof(values));
    return values;
  } else {
    Half16 raw;
    __builtin_memcpy(&raw, from, sizeof(raw));
    const Word16 words = Widen(raw);
    return kDType == DType::kBf16 ? (Block::Float)(words << 16) : HalfToFloat(words);
  }
}

// The last `n` < kDimBlock elements of a row, then zeros.
template <DType kDType>
MLA_INLINE Block::Float LoadPartialBlock(const char* from, int64_t n) {
  char padded[kDimBlock * sizeof(float)] = {};
  __builtin_memcpy(padded, from, n * ElementBytes(kDType));
  return LoadBlock<kDType>(padded);
}

}  // namespace
}  // namespace jax_mla::decode
