// A row of numbers, or of e4m3 codes, of any element type.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/kv_format.h"
#include "core/math.h"

namespace jax_mla::append {

// One row of the new tokens.
struct Row {
  // Row `idx` of `rows`.
  Row(const void* rows, DType dtype, int64_t idx, int32_t width)
      : values(static_cast<const char*>(rows) + idx * width * ElementBytes(dtype)),
        dtype(dtype),
        width(width) {}

  const char* values;
  DType dtype;
  int32_t width;
};

// Element `i` of a row that is not e4m3.
inline float ValueAt(const Row& row, int32_t i) {
  if (row.dtype == DType::kF32) {
    float value;
    std::memcpy(&value, row.values + i * sizeof(value), sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, row.values + i * sizeof(bits), sizeof(bits));
  return row.dtype == DType::kBf16 ? Bf16ToFloat(bits) : F16ToFloat(bits);
}

// Rounds `value` to `type`, which is not e4m3, and writes it to element `i` of `to`.
inline void SetValue(char* to, DType type, int32_t i, float value) {
  if (type == DType::kF32) {
    std::memcpy(to + i * sizeof(value), &value, sizeof(value));
    return;
  }
  const uint16_t bits = type == DType::kBf16 ? FloatToBf16(value) : FloatToF16(value);
  std::memcpy(to + i * sizeof(bits), &bits, sizeof(bits));
}

}  // namespace jax_mla::append
