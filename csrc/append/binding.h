// The FFI signature of target "jax_mla_append", the same on every platform. It turns XLA's buffers
// into checked AppendParams. No other append header knows the FFI.
//
// Operands: ckv, kpe, page_table, positions, layer, page_begin, kv_scale if the format has one,
// norm_weight with has_norm, rope_table with has_rope, q_pe with has_q_pe, then kv_pages, or
// ckv_pages and kpe_pages. If ckv has no batch dimension, the call is ragged, and cu_q_lens follows
// positions. Results: q_pe with has_q_pe, and the same pool or pools, in the same memory.
#pragma once

#include <string_view>

#include "append/params.h"
#include "core/check.h"
#include "core/kv_pool.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla::append {

struct AppendAttrs {
  bool has_layer;              // whether the pools have layers
  std::string_view kv_format;  // see KvFormatName
  bool has_norm;
  float norm_eps;
  bool has_rope;
  bool rope_interleaved;
  bool has_q_pe;  // only with has_rope
};

// Checks every rank, dimension and element type, and that each result is its operand's memory.
xla::ffi::ErrorOr<AppendParams> ParseAppend(const xla::ffi::RemainingArgs& args,
                                            const xla::ffi::RemainingRets& rets,
                                            const AppendAttrs& attrs);

// The transforms of a call, as its attributes say them.
struct Transforms {
  bool has_norm;
  float norm_eps;
  bool has_rope;
  bool rope_interleaved;

  size_t num_operands() const { return size_t{has_norm} + size_t{has_rope}; }
};

// Reads norm_weight and rope_table, if there are such operands, from args[first] on.
xla::ffi::Error ParseTransforms(const Checker& check, const xla::ffi::RemainingArgs& args,
                                size_t first, const Transforms& transforms, AppendParams& p);

// Checks that rows of codes come only where the format stores both parts as codes.
xla::ffi::Error CheckRowType(const Checker& check, const AppendParams& p);

// The pool becomes members of `p`.
void SetPool(const KvPool& pool, AppendParams& p);

// Checks that the pools, which are the operands from args[first_pool] on, come back in the same
// memory as the results from rets[first_result] on. XLA breaks this only by copying the whole pool
// first. Such a copy would cost the time of reading and writing the cache without a word, so it is
// an Internal error.
xla::ffi::Error CheckInPlace(const Checker& check, const xla::ffi::RemainingArgs& args,
                             size_t first_pool, const xla::ffi::RemainingRets& rets,
                             size_t first_result);

}  // namespace jax_mla::append

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_mla::append::AppendAttrs,
                                      ::xla::ffi::StructMember<bool>("has_layer"),
                                      ::xla::ffi::StructMember<std::string_view>("kv_format"),
                                      ::xla::ffi::StructMember<bool>("has_norm"),
                                      ::xla::ffi::StructMember<float>("norm_eps"),
                                      ::xla::ffi::StructMember<bool>("has_rope"),
                                      ::xla::ffi::StructMember<bool>("rope_interleaved"),
                                      ::xla::ffi::StructMember<bool>("has_q_pe"));
