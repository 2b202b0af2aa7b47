// Element types and cache addressing shared by every operation and platform. Plain C++: device code
// includes it too.
#pragma once

#include <cstdint>

namespace jax_mla {

// Element type of queries, cache and outputs of one call (they are all the same type).
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

// One half of the latent cache (ckv or kpe) as an address: element (layer, page, slot, i) lies at
// base + layer * layer_stride + page * page_stride + slot * token_stride + i.
// Strides are in elements and always 64-bit: pools pass 4 GiB. Packed and split pools differ only
// here: a packed pool is two streams with equal strides and kpe.base = ckv.base + d_ckv elements.
template <typename Pointer>
struct BasicKvStream {
  Pointer base;
  int64_t layer_stride;  // 0 for a pool without layers
  int64_t page_stride;
  int64_t token_stride;
};

using KvStream = BasicKvStream<const void*>;
using MutableKvStream = BasicKvStream<void*>;

}  // namespace jax_mla
