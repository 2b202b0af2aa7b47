#include "append/cpu/transform_row.h"

#include "core/transform.h"

namespace jax_mla::append {

namespace {

float SumOfSquares(const Row& row) {
  float sums[kNumSums] = {};
  for (int32_t i = 0; i < row.width; ++i) {
    float& sum = sums[i / kSumRun % kNumSums];
    sum = Sum(sum, Product(ValueAt(row, i), ValueAt(row, i)));
  }
  for (int32_t half = kNumSums / 2; half > 0; half /= 2) {
    for (int32_t j = 0; j < half; ++j) sums[j] = Sum(sums[j], sums[j + half]);
  }
  return sums[0];
}

}  // namespace

void NormRow(const Row& row, const float* weight, float eps, char* to) {
  const float inverse_width = 1.0f / static_cast<float>(row.width);
  const float factor = NormFactor(SumOfSquares(row), inverse_width, eps);
  const Row normed(to, row.dtype, 0, row.width);
  for (int32_t i = 0; i < row.width; ++i) {
    SetValue(to, row.dtype, i, Product(ValueAt(row, i), factor));
    SetValue(to, row.dtype, i, Product(ValueAt(normed, i), weight[i]));
  }
}

void RotateRow(const Row& row, const float* cos_sin, bool interleaved, char* to) {
  const int32_t num_pairs = row.width / 2;
  for (int32_t i = 0; i < num_pairs; ++i) {
    const PairPlace at = PlaceOfPair(i, num_pairs, interleaved);
    const ValuePair pair{ValueAt(row, at.first), ValueAt(row, at.second)};
    const ValuePair rotated = Rotated(pair, cos_sin[i], cos_sin[num_pairs + i]);
    SetValue(to, row.dtype, at.first, rotated.first);
    SetValue(to, row.dtype, at.second, rotated.second);
  }
}

}  // namespace jax_mla::append
