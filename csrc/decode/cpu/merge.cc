#include "decode/cpu/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/math.h"

namespace jax_mla::decode::cpu {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kLn2 = 0.693147181f;

template <typename T, T (*kConvert)(float)>
void WriteRow(const Partial& partial, int32_t row, int32_t padded_rows, float factor, T* out,
              int32_t d_ckv) {
  for (int64_t i = 0; i < d_ckv; ++i) {
    out[i] = kConvert(partial.acc[i * padded_rows + row] * factor);
  }
}

float Identity(float x) { return x; }

}  // namespace

void MergePartials(const Partial& first, int32_t num_parts, int64_t part_stride, int32_t d_ckv,
                   int32_t padded_rows) {
  float max_log2[kMaxTaskRows];
  for (int32_t r = 0; r < padded_rows; ++r) {
    float max = -kInf;
    for (int32_t part = 0; part < num_parts; ++part) {
      max = std::max(max, first.max_log2[part * part_stride + r]);
    }
    max_log2[r] = max;
  }
  for (int32_t part = 0; part < num_parts; ++part) {
    const int64_t offset = part * part_stride;
    float weight[kMaxTaskRows];
    for (int32_t r = 0; r < padded_rows; ++r) {
      // A part in which this row sees no token weighs nothing. exp2(-inf + inf) would be NaN.
      const float part_max = first.max_log2[offset + r];
      weight[r] = part_max == -kInf ? 0.0f : std::exp2(part_max - max_log2[r]);
      const float sum = first.sum[offset + r] * weight[r];
      first.sum[r] = part == 0 ? sum : first.sum[r] + sum;
    }
    for (int64_t i = 0; i < d_ckv; ++i) {
      const float* from = first.acc + offset + i * padded_rows;
      float* to = first.acc + i * padded_rows;
      for (int32_t r = 0; r < padded_rows; ++r) {
        to[r] = part == 0 ? from[r] * weight[r] : to[r] + from[r] * weight[r];
      }
    }
  }
  std::copy_n(max_log2, padded_rows, first.max_log2);
}

void WriteRows(const DecodeParams& p, const Task& task, const Partial& partial) {
  for (int32_t r = 0; r < task.num_rows; ++r) {
    const int64_t row = task.first_row + r;
    const float sum = partial.sum[r];
    const float factor = sum == 0.0f ? 0.0f : KvScaleOf(p, task.seq_idx).ckv / sum;
    p.lse[row] = sum == 0.0f ? -kInf : (partial.max_log2[r] + std::log2(sum)) * kLn2;
    switch (p.dtype) {
      case DType::kBf16:
        WriteRow<uint16_t, FloatToBf16>(partial, r, task.padded_rows, factor,
                                        static_cast<uint16_t*>(p.out) + row * p.d_ckv, p.d_ckv);
        break;
      case DType::kF16:
        WriteRow<uint16_t, FloatToF16>(partial, r, task.padded_rows, factor,
                                       static_cast<uint16_t*>(p.out) + row * p.d_ckv, p.d_ckv);
        break;
      case DType::kF32:
        WriteRow<float, Identity>(partial, r, task.padded_rows, factor,
                                  static_cast<float*>(p.out) + row * p.d_ckv, p.d_ckv);
        break;
      case DType::kE4m3:
        break;  // no type of a call
    }
  }
}

}  // namespace jax_mla::decode::cpu
