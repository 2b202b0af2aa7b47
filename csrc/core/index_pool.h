// The pool of index keys as it crosses the FFI: [num_pages, page_size, d] of numbers, or uint8
// [num_pages, page_size, 132], whose page holds first the codes of all its keys and then their
// float32 scales. With layers it has num_layers in front.
#pragma once

#include <cstdint>

#include "core/check.h"
#include "core/kv_format.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla {

// A key in FP8: so many codes, and a float32.
struct IndexFp8 {
  static constexpr int32_t kDim = 128;
  static constexpr int32_t kKeyBytes = kDim + 4;
};

struct IndexPool {
  void* base;
  DType key_dtype;     // kE4m3: codes and scales
  int32_t num_layers;  // 1 for a pool without layers
  int32_t num_pages;
  int32_t page_size;
};

// Bytes of a page.
constexpr int64_t IndexPageBytes(DType key_dtype, int32_t d, int32_t page_size) {
  const int32_t key_bytes =
      key_dtype == DType::kE4m3 ? IndexFp8::kKeyBytes : d * ElementBytes(key_dtype);
  return int64_t{page_size} * key_bytes;
}

// Where a key in FP8 lies in its page.
constexpr int64_t IndexCodesOffset(int64_t page_row) { return page_row * IndexFp8::kDim; }
constexpr int64_t IndexScaleOffset(int32_t page_size, int64_t page_row) {
  return int64_t{page_size} * IndexFp8::kDim + page_row * int64_t{sizeof(float)};
}

// Reads the pool, whose keys have `d` values.
xla::ffi::ErrorOr<IndexPool> ParseIndexPool(const Checker& check, const xla::ffi::AnyBuffer& buffer,
                                            bool has_layer, int32_t d);

}  // namespace jax_mla
