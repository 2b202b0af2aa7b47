// Element types and cache addresses, for every operation and platform. Plain C++, so that device
// code can include it.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace jax_mla {

// Element type of a call: its queries, cache and outputs all have the same one.
enum class DType : uint8_t { kBf16, kF16, kF32 };

constexpr int32_t ElementBytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

constexpr const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
    case DType::kF32:
      return "float32";
  }
  return "unknown";
}

constexpr std::optional<DType> DTypeOf(std::string_view name) {
  for (DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
    if (name == DTypeName(dtype)) return dtype;
  }
  return std::nullopt;
}

// Where ckv or kpe of the cache lies: element i of row `row` of a page is at
// base + layer * layer_stride + page * page_stride + row * token_stride + i.
// Strides are in elements. They are 64-bit, because pools are larger than 4 GiB. Packed and split
// pools differ only here: a packed pool is two streams with equal strides, and its kpe.base is
// ckv.base + d_ckv elements.
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
