// Vectors of float32 and conversions to them, with the compiler's vector extension. Only the files
// that are compiled for one instruction set include it, so it has internal linkage and uses no
// standard library (see kernel_impl.h).
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "core/kv_format.h"
#include "decode/cpu/kernel.h"

#define MLA_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define MLA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MLA_UNROLL _Pragma("GCC unroll 64")
#endif

namespace jax_mla::decode::cpu {
namespace {

constexpr float kInf = __builtin_inff();
constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147182f;

// Vectors of accumulators in registers: half of the register file, which is enough to hide the
// latency of the FMAs.
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

  // 2^x for x <= 0, with a relative error of 1e-7. 0 below the range of normal numbers; NaN for
  // NaN.
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

  // Its relative error is a few 2^-24 everywhere.
  static MLA_INLINE Float Tanh(Float x) {
    constexpr float kSmall = 0.3f, kLarge = 20.0f;  // from there on it is 1
    const Float square = x * x;
    Float series = Broadcast(-0x1.226e36p-7f);  // -1382 / 155925
    series = series * square + 0x1.664f48p-6f;  // 62 / 2835
    series = series * square - 0x1.ba1ba2p-5f;  // 17 / 315
    series = series * square + 0x1.111112p-3f;  // 2 / 15
    series = series * square - 0x1.555556p-2f;  // 1 / 3
    const Float small = x + x * square * series;
    const Float magnitude = x < 0.0f ? -x : x;
    const Float bounded = magnitude > kLarge ? Broadcast(kLarge) : magnitude;
    const Float large = 1.0f - 2.0f / (Exp2(bounded * (2.0f * kLog2E)) + 1.0f);
    return magnitude < kSmall ? small : (x < 0.0f ? -large : large);
  }
};

// Conversions to float32 work on vectors of one register.
#if defined(__AVX512F__)
constexpr int kConvertLanes = 16;
#elif defined(__AVX2__)
constexpr int kConvertLanes = 8;
#else
constexpr int kConvertLanes = 4;
#endif
using Convert = Simd<kConvertLanes>;
typedef uint8_t Byte __attribute__((vector_size(kConvertLanes * sizeof(uint8_t))));
typedef uint16_t Half __attribute__((vector_size(kConvertLanes * sizeof(uint16_t))));
typedef uint32_t Word __attribute__((vector_size(kConvertLanes * sizeof(uint32_t))));

MLA_INLINE Word Widen(Half x) {
#if defined(__AVX512F__)
  // GCC 12 would convert two halves and join them. The plain intrinsic gives a warning (an
  // uninitialised value), so this is the zero-masked one with a full mask.
  return (Word)_mm512_maskz_cvtepu16_epi32((__mmask16)-1, (__m256i)x);
#else
  return __builtin_convertvector(x, Word);
#endif
}

// Exact, also for denormals, and also in a thread that flushes denormals to zero.
MLA_INLINE Convert::Float HalfToFloat(Half x) {
#if defined(__AVX512F__)
  return (Convert::Float)_mm512_maskz_cvtph_ps((__mmask16)-1, (__m256i)x);
#elif defined(__F16C__)
  return (Convert::Float)_mm256_cvtph_ps((__m128i)x);
#else
  const Word words = Widen(x);
  const Word magnitude = words & 0x7fffu;
  const Convert::Float tiny =
      __builtin_convertvector((Convert::Int)magnitude, Convert::Float) * 0x1p-24f;
  Word bits = (magnitude << 13) + 0x38000000u;
  bits = magnitude >= 0x7c00u ? bits + 0x38000000u : bits;  // infinity and NaN
  bits = magnitude < 0x0400u ? (Word)tiny : bits;
  return (Convert::Float)(bits | (words & 0x8000u) << 16);
#endif
}

// The code of a finite number, shifted into the fields of float16, is that number times 2^-8. This
// is exact for denormals as well. The codes of NaN give 480 and -480.
MLA_INLINE Convert::Float E4m3ToFloat(Byte x) {
  const Half codes = __builtin_convertvector(x, Half);
  return HalfToFloat((codes & 0x7f) << 7 | (codes & 0x80) << 8) * 256.0f;
}

// Converts kDimChunk elements to float32.
template <DType kDType>
MLA_INLINE void ConvertDims(const char* from, float* to) {
  if constexpr (kDType == DType::kF32) {
    __builtin_memcpy(to, from, kDimChunk * sizeof(float));
    return;
  }
  if constexpr (kDType == DType::kE4m3) {
    MLA_UNROLL
    for (int i = 0; i < kDimChunk; i += kConvertLanes) {
      Byte raw;
      __builtin_memcpy(&raw, from + i, sizeof(raw));
      Convert::Store(to + i, E4m3ToFloat(raw));
    }
    return;
  }
  MLA_UNROLL
  for (int i = 0; i < kDimChunk; i += kConvertLanes) {
    Half raw;
    __builtin_memcpy(&raw, from + i * sizeof(uint16_t), sizeof(raw));
    const Convert::Float values =
        kDType == DType::kBf16 ? (Convert::Float)(Widen(raw) << 16) : HalfToFloat(raw);
    Convert::Store(to + i, values);
  }
}

// Converts the last `n` < kDimChunk elements of a token and adds zeros.
template <DType kDType>
MLA_INLINE void ConvertLastDims(const char* from, int64_t n, float* to) {
  char padded[kDimChunk * sizeof(float)] = {};
  __builtin_memcpy(padded, from, n * ElementBytes(kDType));
  ConvertDims<kDType>(padded, to);
}

}  // namespace
}  // namespace jax_mla::decode::cpu
