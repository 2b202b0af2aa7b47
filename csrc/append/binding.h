// The FFI signature of target "jax_mla_append", the same on every platform. It turns XLA's buffers
// into checked AppendParams. No other append header knows the FFI.
//
// Operands: ckv, page_table, positions, layer, page_begin, and kv_pages or kv_pages[0] and
// kv_pages[1]; kpe if rows have a rotary part; cu_q_lens in a ragged call; kv_scale if the format
// has one; norm_weight and rope_table for what rows go through, and with rope_table perhaps q_pe.
// Results: q_pe if there is one, and the same pool or pools, in the same memory.
#pragma once

#include <string_view>

#include "append/params.h"
#include "core/check.h"
#include "core/kv_pool.h"
#include "core/operands.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla::append {

struct AppendAttrs {
  std::string_view operands;   // see core/operands.h
  bool has_layer;              // whether the pools have layers
  std::string_view kv_format;  // see KvFormatName
  float norm_eps;
  bool rope_interleaved;
};

// Checks every rank, dimension and element type, and that each result is its operand's memory.
xla::ffi::ErrorOr<AppendParams> ParseAppend(const xla::ffi::RemainingArgs& args,
                                            const xla::ffi::RemainingRets& rets,
                                            const AppendAttrs& attrs);

// What the rows of a call must be, where more is known than that their parts have the same type.
struct RowSpec {
  xla::ffi::DataType dtype;
  int64_t d_ckv = kAnyDim;
  int64_t d_kpe = kAnyDim;
};

// Reads ckv, and kpe unless rows have no rotary part, and what they go through: norm_weight and
// rope_table, if there are such operands. The tokens of `p`, its format, norm_eps and
// rope_interleaved are known.
xla::ffi::Error ParseRows(const Checker& check, Operands& operands, const RowSpec& spec,
                          AppendParams& p);

// The pool becomes members of `p`.
void SetPool(const KvPool& pool, AppendParams& p);

}  // namespace jax_mla::append

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_mla::append::AppendAttrs,
                                      ::xla::ffi::StructMember<std::string_view>("operands"),
                                      ::xla::ffi::StructMember<bool>("has_layer"),
                                      ::xla::ffi::StructMember<std::string_view>("kv_format"),
                                      ::xla::ffi::StructMember<float>("norm_eps"),
                                      ::xla::ffi::StructMember<bool>("rope_interleaved"));
