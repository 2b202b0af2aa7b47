// Element types, cache formats and cache addresses, for every operation and platform. Plain C++, so
// that device code can include it.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace jax_mla {

// Element types. A call computes in one of the first three; the last one is only stored.
enum class DType : uint8_t { kBf16, kF16, kF32, kE4m3 };

constexpr int32_t ElementBytes(DType dtype) {
  return dtype == DType::kF32 ? 4 : dtype == DType::kE4m3 ? 1 : 2;
}

constexpr const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
    case DType::kF32:
      return "float32";
    case DType::kE4m3:
      return "float8_e4m3fn";
  }
  return "unknown";
}

// The element type of a call.
constexpr std::optional<DType> DTypeOf(std::string_view name) {
  for (DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
    if (name == DTypeName(dtype)) return dtype;
  }
  return std::nullopt;
}

// How the cache stores a token. docs/cache_layouts.md has the bytes.
enum class KvFormat : uint8_t {
  kPlain,        // ckv and kpe in the element type of the call
  kE4m3,         // both in e4m3, times a scale each
  kE4m3KpeBf16,  // ckv in e4m3, times a scale; kpe in bf16, in a pool of its own
  kDsMla,        // 656 bytes: ckv in e4m3, a scale for each 128 of them, kpe in bf16
};

// Python's names: kv_cache.stored_format.
constexpr const char* KvFormatName(KvFormat format) {
  switch (format) {
    case KvFormat::kPlain:
      return "";
    case KvFormat::kE4m3:
      return "fp8_e4m3";
    case KvFormat::kE4m3KpeBf16:
      return "fp8_e4m3+bf16";
    case KvFormat::kDsMla:
      return "fp8_ds_mla";
  }
  return "unknown";
}

constexpr std::optional<KvFormat> KvFormatOf(std::string_view name) {
  for (KvFormat format :
       {KvFormat::kPlain, KvFormat::kE4m3, KvFormat::kE4m3KpeBf16, KvFormat::kDsMla}) {
    if (name == KvFormatName(format)) return format;
  }
  return std::nullopt;
}

// What the portable kernels have to tell apart when they are compiled. Which FP8 format it is, they
// ask at run time.
enum class KvStorage : uint8_t { kPlain, kFp8 };

constexpr KvStorage StorageOf(KvFormat format) {
  return format == KvFormat::kPlain ? KvStorage::kPlain : KvStorage::kFp8;
}

// Whether the operand kv_scale belongs to the format.
constexpr bool HasScale(KvFormat format) {
  return format == KvFormat::kE4m3 || format == KvFormat::kE4m3KpeBf16;
}

// In which type the cache of a call in `dtype` stores ckv and kpe.
constexpr DType CkvType(KvFormat format, DType dtype) {
  return format == KvFormat::kPlain ? dtype : DType::kE4m3;
}
constexpr DType KpeType(KvFormat format, DType dtype) {
  switch (format) {
    case KvFormat::kPlain:
      return dtype;
    case KvFormat::kE4m3:
      return DType::kE4m3;
    case KvFormat::kE4m3KpeBf16:
    case KvFormat::kDsMla:
      return DType::kBf16;
  }
  return dtype;
}

// The scales by which codes are multiplied, of both parts of a token.
struct KvScale {
  float ckv = 1.0f;
  float kpe = 1.0f;
};

// Those of a sequence. `p` has kv_scale and kv_scale_stride. Always inlined: see
// decode/cpu/kernel.h.
template <class Params>
[[gnu::always_inline]] inline KvScale KvScaleOf(const Params& p, int64_t seq_idx) {
  if (p.kv_scale == nullptr) return {};
  const float* scales = p.kv_scale + seq_idx * p.kv_scale_stride;
  return {scales[0], scales[1]};
}

// A row of kDsMla: ckv, then a float32 scale for each tile of it, then kpe. The value is the code
// times the scale of its tile.
struct DsMla {
  static constexpr int32_t kDCkv = 512;
  static constexpr int32_t kDKpe = 64;
  static constexpr int32_t kTileDims = 128;
  static constexpr int32_t kScalesOffset = kDCkv;  // bytes
  static constexpr int32_t kKpeOffset = kScalesOffset + kDCkv / kTileDims * 4;
  static constexpr int32_t kRowBytes = kKpeOffset + kDKpe * 2;
  static constexpr int32_t kRowAlignment = 16;  // of a wider row
};

// Where ckv or kpe of the cache lies: element i of row `row` of a page is at
// base + layer * layer_stride + page * page_stride + row * token_stride + i.
// Strides are in elements of the stream. They are 64-bit, because pools are larger than 4 GiB.
// Packed and split pools differ only here: a packed pool is two streams with equal strides, and its
// kpe.base is ckv.base + d_ckv elements. If d_kpe is 0 nothing is read there.
template <typename Pointer>
struct BasicKvStream {
  Pointer base;
  int64_t layer_stride;  // 0 for a pool of one layer, and for one without layers
  int64_t page_stride;
  int64_t token_stride;  // the width of a row, padding included
};

using KvStream = BasicKvStream<const void*>;
using MutableKvStream = BasicKvStream<void*>;

}  // namespace jax_mla
