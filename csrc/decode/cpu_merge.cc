#include "decode/cpu_merge.h"

#include <cmath>
#include <limits>

#include "core/math.h"

namespace jax_mla::decode {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kLn2 = 0.693147181f;

template <typename T, T (*kConvert)(float)>
void WriteRow(const CpuPartial& partial, int32_t row, int32_t padded_rows, float factor, T* out,
              int32_t d_ckv) {
  for (int64_t i = 0; i < d_ckv; ++i) {
    out[i] = kConvert(partial.acc[i * padded_rows + row] * factor);
  }
}

float Identity(float x) { return x; }

}  // namespace

void MergePartials(std::span<const CpuPartial> parts, int32_t d_ckv, int32_t padded_rows) {
  float max_log2[kMaxTaskRows];
  for (int32_t r = 0; r < padded_rows; ++r) {
    float max = -kInf;
    for (const CpuPartial& part : parts) max = part.max_log2[r] > max ? part.max_log2[r] : max;
    max_log2[r] = max;
  }
  const CpuPartial& into = parts.front();
  for (size_t p = 0; p < parts.size(); ++p) {
    const CpuPartial& part = parts[p];
    float weight[kMaxTaskRows];
    for (int32_t r = 0; r < padded_rows; ++r) {
      // A part without a key for this row is empty: its weight must not become exp2(-inf + inf).
      weight[r] = part.max_log2[r] == -kInf ? 0.0f : std::exp2(part.max_log2[r] - max_log2[r]);
      const float sum = part.sum[r] * weight[r];
      into.sum[r] = p == 0 ? sum : into.sum[r] + sum;
    }
    for (int64_t i = 0; i < d_ckv; ++i) {
      const float* from = part.acc + i * padded_rows;
      float* to = into.acc + i * padded_rows;
      for (int32_t r = 0; r < padded_rows; ++r) {
        to[r] = p == 0 ? from[r] * weight[r] : to[r] + from[r] * weight[r];
      }
    }
  }
  for (int32_t r = 0; r < padded_rows; ++r) into.max_log2[r] = max_log2[r];
}

void WriteRows(const DecodeParams& p, const CpuTask& task, const CpuPartial& partial) {
  const int64_t first_row = int64_t{task.seq_idx} * p.q_len * p.num_heads + task.row_begin;
  for (int32_t r = 0; r < task.num_rows; ++r) {
    const int64_t row = first_row + r;
    const float sum = partial.sum[r];
    const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
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
    }
  }
}

}  // namespace jax_mla::decode
