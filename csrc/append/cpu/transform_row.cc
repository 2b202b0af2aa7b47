#include "append/cpu/transform_row.h"

#include <cmath>

namespace jax_mla::append {

void NormRow(const Row& row, const float* weight, float eps, char* to) {
  float sum = 0.0f;
  for (int32_t i = 0; i < row.width; ++i) sum += ValueAt(row, i) * ValueAt(row, i);
  const float inverse = 1.0f / std::sqrt(sum / static_cast<float>(row.width) + eps);
  const Row normed(to, row.dtype, 0, row.width);
  for (int32_t i = 0; i < row.width; ++i) {
    SetValue(to, row.dtype, i, ValueAt(row, i) * inverse);
    SetValue(to, row.dtype, i, ValueAt(normed, i) * weight[i]);
  }
}

void RotateRow(const Row& row, const float* cos_sin, bool interleaved, char* to) {
  const int32_t num_pairs = row.width / 2;
  for (int32_t i = 0; i < num_pairs; ++i) {
    const int32_t first = interleaved ? 2 * i : i;
    const int32_t second = interleaved ? 2 * i + 1 : i + num_pairs;
    const float a = ValueAt(row, first), b = ValueAt(row, second);
    const float cos = cos_sin[i], sin = cos_sin[num_pairs + i];
    SetValue(to, row.dtype, first, a * cos - b * sin);
    SetValue(to, row.dtype, second, b * cos + a * sin);
  }
}

}  // namespace jax_mla::append
