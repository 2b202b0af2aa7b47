// The FFI signature of target "jax_mla_index_append", the same on every platform. It turns XLA's
// buffers into checked IndexAppendParams. No other header of this folder knows the FFI.
//
// Operands: k, page_table, positions, cu_q_lens if k has no batch dimension, layer, page_begin,
// norm_weight with has_norm, norm_bias with has_bias, rope_table with has_rope, index_pages.
// Result: the same pool, in the same memory.
#pragma once

#include "core/check.h"
#include "index_append/params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla::index_append {

struct IndexAppendAttrs {
  bool has_layer;  // whether the pool has layers
  bool power_of_two_scales;
  bool has_norm;
  bool has_bias;  // only with has_norm
  float norm_eps;
  bool has_rope;
  bool rope_interleaved;
  bool rope_last;
};

// Checks every rank, dimension and element type, and that the result is its operand's memory.
xla::ffi::ErrorOr<IndexAppendParams> ParseIndexAppend(const xla::ffi::RemainingArgs& args,
                                                      const xla::ffi::RemainingRets& rets,
                                                      const IndexAppendAttrs& attrs);

}  // namespace jax_mla::index_append

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_mla::index_append::IndexAppendAttrs,
                                      ::xla::ffi::StructMember<bool>("has_layer"),
                                      ::xla::ffi::StructMember<bool>("power_of_two_scales"),
                                      ::xla::ffi::StructMember<bool>("has_norm"),
                                      ::xla::ffi::StructMember<bool>("has_bias"),
                                      ::xla::ffi::StructMember<float>("norm_eps"),
                                      ::xla::ffi::StructMember<bool>("has_rope"),
                                      ::xla::ffi::StructMember<bool>("rope_interleaved"),
                                      ::xla::ffi::StructMember<bool>("rope_last"));
