// The paged cache as it crosses the FFI: one packed pool [..., d_ckv + d_kpe], or two split pools
// [..., d_ckv] and [..., d_kpe]. The last dimension may be larger; the rest of a row is padding. A
// pool is [num_pages, page_size, d] or [num_pages, page_size / pack, pack, d], which are the same
// bytes, and with layers it has num_layers in front. Both operations turn it into two streams here,
// so that no kernel knows which layout it was.
#pragma once

#include <cstdint>

#include "core/check.h"
#include "core/kv_format.h"
#include "core/operands.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla {

// What a call says of its cache.
struct KvSpec {
  KvFormat format;
  DType dtype;  // of the call
  int32_t d_ckv;
  int32_t d_kpe;   // 0: rows have no rotary part, and the pool is packed
  bool has_layer;  // whether the pools have layers, which their rank alone does not say
};

// That of a call with these parameters.
template <typename Params>
KvSpec SpecOf(const Params& p, bool has_layer) {
  return {.format = p.kv_format,
          .dtype = p.dtype,
          .d_ckv = p.d_ckv,
          .d_kpe = p.d_kpe,
          .has_layer = has_layer};
}

struct KvPool {
  MutableKvStream ckv;
  MutableKvStream kpe;
  bool is_split;
  int32_t num_layers;  // 1 for a pool without layers
  int32_t num_pages;
  int32_t page_size;
};

// The attribute kv_format.
xla::ffi::ErrorOr<KvFormat> ParseKvFormat(const Checker& check, std::string_view name);

// Reads the pools: the operand kv_pages, or kv_pages[0] and kv_pages[1].
xla::ffi::ErrorOr<KvPool> ParseKvPool(const Checker& check, Operands& operands, const KvSpec& spec);

// Checks that the pools come back in the same memory as the results from rets[first] on. XLA breaks
// this only by copying the whole pool first. Such a copy would cost the time of reading and writing
// the cache without a word, so it is an Internal error.
xla::ffi::Error CheckInPlace(const Checker& check, const KvPool& pool,
                             const xla::ffi::RemainingRets& rets, size_t first);

// Reads the operand kv_scale, [1 or batch, 2], to the members of `p` with these names.
template <typename Params>
xla::ffi::Error ParseKvScale(const Checker& check, Operands& operands, Params& p) {
  const auto kv_scale = operands["kv_scale"];
  MLA_RETURN_IF_ERROR(check.OneOrEach("kv_scale", kv_scale, p.batch, 2));
  p.kv_scale = kv_scale.template typed_data<float>();
  p.kv_scale_stride = kv_scale.dimensions()[0] == 1 ? 0 : 2;
  return xla::ffi::Error::Success();
}

// Reads the operands that say where a call's tokens lie: page_table [batch, max_pages_per_seq],
// layer [1] and page_begin [1]. They go to the members of `p` with the same names; p.batch is
// known.
template <typename Params>
xla::ffi::Error ParsePlace(const Checker& check, Operands& operands, Params& p) {
  MLA_RETURN_IF_ERROR(operands.Read("page_table", {p.batch, kAnyDim}, p.page_table));
  MLA_RETURN_IF_ERROR(operands.Read("layer", {1}, p.layer));
  MLA_RETURN_IF_ERROR(operands.Read("page_begin", {1}, p.page_begin));
  const int64_t max_pages = operands["page_table"].dimensions()[1];
  MLA_RETURN_IF_ERROR(check.FitsInt32("page_table", max_pages));
  p.max_pages_per_seq = static_cast<int32_t>(max_pages);
  return xla::ffi::Error::Success();
}

inline KvStream ReadOnly(const MutableKvStream& stream) {
  return {stream.base, stream.layer_stride, stream.page_stride, stream.token_stride};
}

}  // namespace jax_mla
