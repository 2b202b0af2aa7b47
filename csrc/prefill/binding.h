// The FFI signature of target "jax_mla_prefill". It turns XLA's buffers into checked PrefillParams.
// No other prefill header knows the FFI.
//
// Operands: q_nope, q_pe, k_nope, kpe, v, bounds (int32[4, num_seqs]: q_begin, q_end, k_begin,
// k_end), and perhaps prior_out and prior_lse. Results: out, lse and scratch. A float32 out and lse
// may be the memory of prior_out and prior_lse.
#pragma once

#include <string_view>

#include "core/check.h"
#include "prefill/params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla::prefill {

struct PrefillAttrs {
  std::string_view operands;  // see core/operands.h
  float sm_scale;
  bool causal;
};

// Checks every rank, dimension and element type.
xla::ffi::ErrorOr<PrefillParams> ParsePrefill(const xla::ffi::RemainingArgs& args,
                                              const xla::ffi::RemainingRets& rets,
                                              const PrefillAttrs& attrs);

}  // namespace jax_mla::prefill

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_mla::prefill::PrefillAttrs,
                                      ::xla::ffi::StructMember<std::string_view>("operands"),
                                      ::xla::ffi::StructMember<float>("sm_scale"),
                                      ::xla::ffi::StructMember<bool>("causal"));
