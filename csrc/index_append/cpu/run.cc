// CPU handler of "jax_mla_index_append". A step appends few tokens, so one thread writes them all.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/call_counter.h"
#include "core/fp8.h"
#include "core/index_page.h"
#include "core/math.h"
#include "core/ragged.h"
#include "core/transform.h"
#include "index_append/arithmetic.h"
#include "index_append/binding.h"

namespace jax_mla::index_append {
namespace ffi = xla::ffi;

namespace {

CallCounter calls("index_append_cpu");

float ValueAt(const char* row, DType type, int32_t i) {
  if (type == DType::kF32) {
    float value;
    std::memcpy(&value, row + int64_t{i} * sizeof(value), sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, row + int64_t{i} * sizeof(bits), sizeof(bits));
  return type == DType::kBf16 ? Bf16ToFloat(bits) : F16ToFloat(bits);
}

// The value in `type`, as a float.
float Rounded(float value, DType type) {
  if (type == DType::kF32) return value;
  return type == DType::kBf16 ? Bf16ToFloat(FloatToBf16(value)) : F16ToFloat(FloatToF16(value));
}

// The sum of values in the order of arithmetic.h; `value(i)` gives one.
template <typename Value>
float SumOf(int32_t count, Value value) {
  float sums[kNumLanes] = {};
  for (int32_t i = 0; i < count; ++i) {
    float& sum = sums[i / kRun % kNumLanes];
    sum = Sum(sum, value(i));
  }
  for (int32_t half = kNumLanes / 2; half > 0; half /= 2) {
    for (int32_t j = 0; j < half; ++j) sums[j] = Sum(sums[j], sums[j + half]);
  }
  return sums[0];
}

void Normalise(const IndexAppendParams& p, float* key) {
  const float inverse_width = 1.0f / static_cast<float>(p.d);
  const float mean = Product(SumOf(p.d, [&](int32_t i) { return key[i]; }), inverse_width);
  for (int32_t i = 0; i < p.d; ++i) key[i] = Sum(key[i], -mean);
  const float squares = SumOf(p.d, [&](int32_t i) { return Product(key[i], key[i]); });
  const float factor = NormFactor(squares, inverse_width, p.norm_eps);
  for (int32_t i = 0; i < p.d; ++i) {
    const float bias = p.norm_bias == nullptr ? 0.0f : p.norm_bias[i];
    key[i] = Rounded(Normed(key[i], factor, p.norm_weight[i], bias), p.dtype);
  }
}

void Rotate(const IndexAppendParams& p, int32_t position, float* key) {
  const int64_t row = std::clamp(position, 0, p.num_rope_positions - 1);
  const float* angles = p.rope_table + row * p.d_rope;
  float* part = key + (p.rope_last ? p.d - p.d_rope : 0);
  const int32_t num_pairs = p.d_rope / 2;
  for (int32_t i = 0; i < num_pairs; ++i) {
    const PairPlace at = PlaceOfPair(i, num_pairs, p.rope_interleaved);
    const ValuePair rotated =
        Rotated({part[at.first], part[at.second]}, angles[i], angles[num_pairs + i]);
    part[at.first] = Rounded(rotated.first, p.dtype);
    part[at.second] = Rounded(rotated.second, p.dtype);
  }
}

// Writes a key to its row of a page.
void Store(const IndexAppendParams& p, const float* key, char* page, int32_t page_row) {
  if (p.key_dtype != DType::kE4m3) {
    char* to = page + int64_t{page_row} * p.d * ElementBytes(p.key_dtype);
    for (int32_t i = 0; i < p.d; ++i) {
      if (p.key_dtype == DType::kF32) {
        std::memcpy(to + int64_t{i} * sizeof(float), key + i, sizeof(float));
      } else {
        const uint16_t bits =
            p.key_dtype == DType::kBf16 ? FloatToBf16(key[i]) : FloatToF16(key[i]);
        std::memcpy(to + int64_t{i} * sizeof(bits), &bits, sizeof(bits));
      }
    }
    return;
  }
  float largest = 0.0f;
  for (int32_t i = 0; i < p.d; ++i) {
    const float magnitude = std::fabs(key[i]);
    if (magnitude > largest) largest = magnitude;  // false for a NaN
  }
  const float scale = ScaleOf(largest, p.power_of_two_scales);
  const float inverse = Quotient(1.0f, scale);
  auto* codes = reinterpret_cast<uint8_t*>(page + IndexCodesOffset(page_row));
  for (int32_t i = 0; i < p.d; ++i) codes[i] = FloatToE4m3(Product(key[i], inverse));
  std::memcpy(page + IndexScaleOffset(p.page_size, page_row), &scale, sizeof(scale));
}

void AppendToken(const IndexAppendParams& p, int32_t seq_idx, int32_t token, float* key) {
  const int32_t position = p.positions[token];
  const int32_t page_idx = position / p.page_size;
  if (position < 0 || page_idx >= p.max_pages_per_seq) return;
  const int64_t page =
      int64_t{p.page_table[int64_t{seq_idx} * p.max_pages_per_seq + page_idx]} - *p.page_begin;
  if (page < 0 || page >= p.num_pages) return;  // another device's page, or a wild id
  const char* row = static_cast<const char*>(p.k) + int64_t{token} * p.d * ElementBytes(p.dtype);
  for (int32_t i = 0; i < p.d; ++i) key[i] = ValueAt(row, p.dtype, i);
  if (p.norm_weight != nullptr) Normalise(p, key);
  if (p.rope_table != nullptr) Rotate(p, position, key);
  const int64_t page_of_all = int64_t{*p.layer} * p.num_pages + page;
  char* to = static_cast<char*>(p.index_pages) +
             page_of_all * IndexPageBytes(p.key_dtype, p.d, p.page_size);
  Store(p, key, to, position % p.page_size);
}

ffi::Error Handle(ffi::RemainingArgs args, ffi::RemainingRets rets, IndexAppendAttrs attrs) {
  calls.Increment();
  const auto params = ParseIndexAppend(args, rets, attrs);
  if (!params) return params.error();
  const IndexAppendParams& p = *params;
  if (*p.layer < 0 || *p.layer >= p.num_layers) return ffi::Error::Success();
  std::vector<float> key(p.d);
  TokenRanges ranges(p);
  for (int32_t b = 0; b < p.batch; ++b) {
    const TokenRange tokens = ranges.Next();
    for (int32_t t = tokens.begin; t < tokens.end; ++t) AppendToken(p, b, t, key.data());
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jax_mla::index_append

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMlaIndexAppendCpu, jax_mla::index_append::Handle,
                              xla::ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<jax_mla::index_append::IndexAppendAttrs>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
