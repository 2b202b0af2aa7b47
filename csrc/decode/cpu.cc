// CPU handler of "jax_mla_decode".
#include <cmath>
#include <limits>
#include <vector>

#include "core/call_counter.h"
#include "core/math.h"
#include "decode/binding.h"
#include "decode/query.h"

namespace jax_mla::decode {
namespace ffi = xla::ffi;

namespace {

CallCounter calls("decode_cpu");

float Load(const void* base, int64_t i, DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return Bf16ToFloat(static_cast<const uint16_t*>(base)[i]);
    case DType::kF16:
      return F16ToFloat(static_cast<const uint16_t*>(base)[i]);
    case DType::kF32:
      break;
  }
  return static_cast<const float*>(base)[i];
}

void Store(void* base, int64_t i, DType dtype, float x) {
  switch (dtype) {
    case DType::kBf16:
      static_cast<uint16_t*>(base)[i] = FloatToBf16(x);
      return;
    case DType::kF16:
      static_cast<uint16_t*>(base)[i] = FloatToF16(x);
      return;
    case DType::kF32:
      static_cast<float*>(base)[i] = x;
  }
}

void DecodeRow(const DecodeParams& p, int64_t b, int64_t i, int64_t h) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const int64_t row = (b * p.q_len + i) * p.num_heads + h;
  const int64_t layer = *p.layer;
  const bool has_layer = layer >= 0 && layer < p.num_layers;
  const int64_t len = std::min(std::max(p.seq_lens[b], 0), p.max_seq_len);
  const int64_t end = !has_layer ? 0 : p.causal ? std::min(len, len - p.q_len + i + 1) : len;
  std::vector<float> acc(p.d_ckv, 0.0f);
  float max = -kInf, sum = 0.0f;
  for (int64_t t = 0; t < end; ++t) {
    const int64_t page =
        int64_t{p.page_table[b * p.max_pages_per_seq + t / p.page_size]} - *p.page_begin;
    if (page < 0 || page >= p.num_pages) continue;
    const int64_t at = layer * p.ckv.layer_stride + page * p.ckv.page_stride +
                       t % p.page_size * p.ckv.token_stride;
    const int64_t at_kpe = layer * p.kpe.layer_stride + page * p.kpe.page_stride +
                           t % p.page_size * p.kpe.token_stride;
    float s = 0.0f;
    for (int64_t d = 0; d < p.d_ckv; ++d) {
      s += Load(p.q_nope, row * p.d_ckv + d, p.dtype) * Load(p.ckv.base, at + d, p.dtype);
    }
    for (int64_t d = 0; d < p.d_kpe; ++d) {
      s += Load(p.q_pe, row * p.d_kpe + d, p.dtype) * Load(p.kpe.base, at_kpe + d, p.dtype);
    }
    s *= p.sm_scale;
    const float new_max = std::max(max, s);
    const float scale = max == -kInf ? 0.0f : std::exp(max - new_max);
    const float weight = std::exp(s - new_max);
    sum = sum * scale + weight;
    for (int64_t d = 0; d < p.d_ckv; ++d) {
      acc[d] = acc[d] * scale + weight * Load(p.ckv.base, at + d, p.dtype);
    }
    max = new_max;
  }
  for (int64_t d = 0; d < p.d_ckv; ++d) {
    Store(p.out, row * p.d_ckv + d, p.dtype, sum == 0.0f ? 0.0f : acc[d] / sum);
  }
  p.lse[row] = sum == 0.0f ? -kInf : max + std::log(sum);
}

ffi::Error Handle(ffi::RemainingArgs args, ffi::RemainingRets rets, DecodeAttrs attrs) {
  calls.Increment();
  const auto params = ParseDecode(args, rets, attrs);
  if (!params) return params.error();
  for (int64_t b = 0; b < params->batch; ++b) {
    for (int64_t i = 0; i < params->q_len; ++i) {
      for (int64_t h = 0; h < params->num_heads; ++h) DecodeRow(*params, b, i, h);
    }
  }
  return ffi::Error::Success();
}

}  // namespace

std::vector<BackendAnswer> CpuBackends(const DecodeShape&) {
  return {{.name = "cpu", .reason = ""}};
}

}  // namespace jax_mla::decode

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxMlaDecodeCpu, jax_mla::decode::Handle,
    xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs<jax_mla::decode::DecodeAttrs>(),
    {xla::ffi::Traits::kCmdBufferCompatible});
