// How a page of index keys is laid out: rows of numbers, or in FP8 the codes of all its keys, then
// their float32 scales. Plain C++, so that device code can include it.
#pragma once

#include <cstdint>

#include "core/kv_format.h"

namespace jax_mla {

// A key in FP8: so many codes, and a float32.
struct IndexFp8 {
  static constexpr int32_t kDim = 128;
  static constexpr int32_t kKeyBytes = kDim + 4;
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

}  // namespace jax_mla
