// The FFI signature of target "jax_mla_index_append", the same on every platform. It turns XLA's
// buffers into checked IndexAppendParams. No other header of this folder knows the FFI.
//
// Operands: k, page_table, positions, layer, page_begin, index_pages; cu_q_lens in a ragged call;
// norm_weight, norm_bias and rope_table for what keys go through.
// Result: the same pool, in the same memory.
#pragma once

#include <string_view>

#include "core/check.h"
#include "index_append/params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla::index_append {

struct IndexAppendAttrs {
  std::string_view operands;  // see core/operands.h
  bool has_layer;             // whether the pool has layers
  bool power_of_two_scales;
  float norm_eps;
  bool rope_interleaved;
  bool rope_last;
};

// Checks every rank, dimension and element type, and that the result is its operand's memory.
xla::ffi::ErrorOr<IndexAppendParams> ParseIndexAppend(const xla::ffi::RemainingArgs& args,
                                                      const xla::ffi::RemainingRets& rets,
                                                      const IndexAppendAttrs& attrs);

}  // namespace jax_mla::index_append

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_mla::index_append::IndexAppendAttrs,
                                      ::xla::ffi::StructMember<std::string_view>("operands"),
                                      ::xla::ffi::StructMember<bool>("has_layer"),
                                      ::xla::ffi::StructMember<bool>("power_of_two_scales"),
                                      ::xla::ffi::StructMember<float>("norm_eps"),
                                      ::xla::ffi::StructMember<bool>("rope_interleaved"),
                                      ::xla::ffi::StructMember<bool>("rope_last"));
