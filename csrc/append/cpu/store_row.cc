#include "append/cpu/store_row.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/fp8.h"
#include "core/math.h"

namespace jax_mla::append {

namespace {

// Element `i` of a row that is not e4m3.
float ValueAt(const Row& row, int32_t i) {
  if (row.dtype == DType::kF32) {
    float value;
    std::memcpy(&value, row.values + i * sizeof(value), sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, row.values + i * sizeof(bits), sizeof(bits));
  return row.dtype == DType::kBf16 ? Bf16ToFloat(bits) : F16ToFloat(bits);
}

void StoreCodes(const Row& row, float scale, uint8_t* to) {
  if (row.dtype == DType::kE4m3) {
    for (int32_t i = 0; i < row.width; ++i) {
      to[i] = WithoutNan(static_cast<uint8_t>(row.values[i]));
    }
    return;
  }
  const float inverse = 1.0f / scale;
  for (int32_t i = 0; i < row.width; ++i) to[i] = FloatToE4m3(ValueAt(row, i) * inverse);
}

}  // namespace

void StoreRow(const Row& row, DType type, float scale, char* to) {
  if (type == DType::kE4m3) {
    StoreCodes(row, scale, reinterpret_cast<uint8_t*>(to));
  } else if (type == row.dtype) {
    std::memcpy(to, row.values, int64_t{row.width} * ElementBytes(type));
  } else {  // kpe in bf16, of a call in another type
    for (int32_t i = 0; i < row.width; ++i) {
      const uint16_t bits = FloatToBf16(ValueAt(row, i));
      std::memcpy(to + i * sizeof(bits), &bits, sizeof(bits));
    }
  }
}

void StoreDsMlaCkv(const Row& row, char* to) {
  for (int32_t tile = 0; tile < DsMla::kDCkv / DsMla::kTileDims; ++tile) {
    const int32_t begin = tile * DsMla::kTileDims, end = begin + DsMla::kTileDims;
    float max_magnitude = 0.0f;
    for (int32_t i = begin; i < end; ++i) {
      max_magnitude = std::fmax(max_magnitude, std::fabs(ValueAt(row, i)));  // passes over NaN
    }
    const float scale = DsMlaScale(max_magnitude);
    for (int32_t i = begin; i < end; ++i) {
      to[i] = std::bit_cast<char>(FloatToE4m3(ValueAt(row, i) * (1.0f / scale)));
    }
    std::memcpy(to + DsMla::kScalesOffset + tile * sizeof(scale), &scale, sizeof(scale));
  }
}

}  // namespace jax_mla::append
