#include "index/cpu/query.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/fp8.h"
#include "core/index_page.h"
#include "core/math.h"

namespace jax_mla::index::cpu {

namespace {

constexpr std::array<float, 256> MakeCodeValues() {
  std::array<float, 256> values = {};
  for (int32_t code = 0; code < 256; ++code) {
    values[code] = E4m3ToFloat(static_cast<uint8_t>(code));
  }
  return values;
}
constexpr std::array<float, 256> kCodeValues = MakeCodeValues();

int64_t NumHeadBlocks(const TopkParams& p) { return (p.num_heads + kHeadLanes - 1) / kHeadLanes; }

}  // namespace

void ToFloats(const void* from, DType type, int64_t count, float* to) {
  const auto* bits = static_cast<const uint16_t*>(from);
  const auto* codes = static_cast<const uint8_t*>(from);
  switch (type) {
    case DType::kBf16:
      for (int64_t i = 0; i < count; ++i) to[i] = Bf16ToFloat(bits[i]);
      return;
    case DType::kF16:
      for (int64_t i = 0; i < count; ++i) to[i] = F16ToFloat(bits[i]);
      return;
    case DType::kF32:
      std::memcpy(to, from, count * sizeof(float));
      return;
    case DType::kE4m3:
      for (int64_t i = 0; i < count; ++i) to[i] = kCodeValues[codes[i]];
      return;
  }
}

int64_t QueryFloats(const TopkParams& p) {
  return int64_t{p.d} * (NumHeadBlocks(p) * kHeadLanes + 1);
}

Query::Query(const TopkParams& p, int64_t token, float* scratch)
    : p_(p),
      weights_(p.weights + token * p.num_heads),
      heads_(scratch),
      key_(scratch + NumHeadBlocks(p) * kHeadLanes * p.d) {
  std::fill(heads_, key_, 0.0f);
  const int64_t row_bytes = int64_t{p.d} * ElementBytes(p.q_dtype);
  for (int32_t head = 0; head < p.num_heads; ++head) {
    const char* row = static_cast<const char*>(p.q) + (token * p.num_heads + head) * row_bytes;
    ToFloats(row, p.q_dtype, p.d, key_);
    float* to = heads_ + int64_t{head / kHeadLanes} * p.d * kHeadLanes + head % kHeadLanes;
    for (int32_t i = 0; i < p.d; ++i) to[int64_t{i} * kHeadLanes] = key_[i];
  }
}

float Query::Score(const char* page, int64_t page_row) const {
  if (p_.key_dtype == DType::kE4m3) {
    ToFloats(page + IndexCodesOffset(page_row), DType::kE4m3, p_.d, key_);
    float scale;
    std::memcpy(&scale, page + IndexScaleOffset(p_.page_size, page_row), sizeof(scale));
    return ScoreOfValues(key_) * scale;
  }
  const int64_t row_bytes = int64_t{p_.d} * ElementBytes(p_.key_dtype);
  ToFloats(page + page_row * row_bytes, p_.key_dtype, p_.d, key_);
  return ScoreOfValues(key_);
}

float Query::ScoreOfValues(const float* key) const {
  float score = 0.0f;
  for (int32_t first = 0; first < p_.num_heads; first += kHeadLanes) {
    const float* heads = heads_ + int64_t{first} * p_.d;
    float dots[kHeadLanes] = {};
    for (int32_t i = 0; i < p_.d; ++i) {
      for (int32_t j = 0; j < kHeadLanes; ++j) {
        dots[j] += key[i] * heads[int64_t{i} * kHeadLanes + j];
      }
    }
    const int32_t num_lanes = std::min(kHeadLanes, p_.num_heads - first);
    for (int32_t j = 0; j < num_lanes; ++j) {
      const float relu = dots[j] < 0.0f ? 0.0f : dots[j];  // a NaN stays one
      score += weights_[first + j] * relu;
    }
  }
  return score;
}

}  // namespace jax_mla::index::cpu
