#include "append/cpu/store_row.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "core/fp8.h"

namespace jax_mla::append {

namespace {

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
    for (int32_t i = 0; i < row.width; ++i) SetValue(to, type, i, ValueAt(row, i));
  }
}

void StoreDsMlaCkv(const Row& row, char* to) {
  for (int32_t tile = 0; tile < DsMla::kDCkv / DsMla::kTileDims; ++tile) {
    const int32_t begin = tile * DsMla::kTileDims, end = begin + DsMla::kTileDims;
    float max_magnitude = 0.0f;
    for (int32_t i = begin; i < end; ++i) {
      const float magnitude = std::fabs(ValueAt(row, i));
      if (magnitude > max_magnitude) max_magnitude = magnitude;  // false for a NaN
    }
    const float scale = DsMlaScale(max_magnitude);
    for (int32_t i = begin; i < end; ++i) {
      to[i] = std::bit_cast<char>(FloatToE4m3(ValueAt(row, i) * DsMlaInverse(scale)));
    }
    std::memcpy(to + DsMla::kScalesOffset + tile * sizeof(scale), &scale, sizeof(scale));
  }
}

}  // namespace jax_mla::append
