// The FFI signature of target "jax_mla_decode", the same on every platform. It turns XLA's buffers
// and attributes into checked DecodeParams. No other decode header knows the FFI.
//
// Operands: q_nope, q_pe, page_table, seq_lens, layer, page_begin, then kv_pages, or ckv_pages and
// kpe_pages. Results: out, lse and, on CUDA, scratch (uint8).
#pragma once

#include <cstdint>
#include <string_view>

#include "core/check.h"
#include "decode/params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla::decode {

struct DecodeAttrs {
  float sm_scale;
  bool causal;
  int64_t num_splits;
  bool batch_invariant;
  std::string_view backend;  // empty: the first backend that takes the call
  bool has_layer;            // whether the pools have layers
};

// Checks every rank, dimension and element type, so that backends can rely on them.
xla::ffi::ErrorOr<DecodeParams> ParseDecode(const xla::ffi::RemainingArgs& args,
                                            const xla::ffi::RemainingRets& rets,
                                            const DecodeAttrs& attrs);

}  // namespace jax_mla::decode

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_mla::decode::DecodeAttrs,
                                      ::xla::ffi::StructMember<float>("sm_scale"),
                                      ::xla::ffi::StructMember<bool>("causal"),
                                      ::xla::ffi::StructMember<int64_t>("num_splits"),
                                      ::xla::ffi::StructMember<bool>("batch_invariant"),
                                      ::xla::ffi::StructMember<std::string_view>("backend"),
                                      ::xla::ffi::StructMember<bool>("has_layer"));
