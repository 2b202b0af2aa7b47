// The FFI signature of target "jax_mla_ragged", the same on every platform: it writes the new rows
// of a step into the cache, and attends. It turns XLA's buffers and attributes into checked
// parameters of append and of decode.
//
// Operands: q_nope, q_pe, ckv, kpe, page_table, seq_lens, then cu_q_lens and num_seqs, then layer,
// page_begin, kv_scale if the format has one, q_scale with has_q_scale, norm_weight with has_norm,
// rope_table and rope_lens with has_rope, the plan (uint8) with has_plan, and kv_pages, or
// ckv_pages and kpe_pages. A uniform call (q_len > 0) has neither cu_q_lens nor num_seqs. Results:
// out, lse, then the pool or pools in the same memory and, on CUDA, scratch (uint8).
#pragma once

#include <cstdint>
#include <string_view>

#include "append/params.h"
#include "decode/params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla::decode {

struct RaggedAttrs {
  float sm_scale;
  int64_t q_len;  // tokens of every sequence; 0: cu_q_lens says how many
  int64_t num_splits;
  bool batch_invariant;
  std::string_view backend;    // empty: the first backend that takes the call
  bool has_layer;              // whether the pools have layers
  bool has_plan;               // whether there is a result of "jax_mla_ragged_plan" (CUDA)
  int64_t max_seq_len;         // bound of the lengths, 0 for the page table's
  std::string_view kv_format;  // see KvFormatName
  bool has_q_scale;
  bool has_norm;
  float norm_eps;
  bool has_rope;
  bool rope_interleaved;
};

struct RaggedParams {
  append::AppendParams append;  // runs first
  // Causal. If append has a q_pe, the queries have to be rotated: the handler finds memory for what
  // they become, which is append's rotated_q_pe and decode's q_pe.
  DecodeParams decode;
  void* plan;  // null without has_plan
  int64_t plan_bytes;
};

// Checks every rank, dimension and element type, and that each pool result is its operand's memory.
xla::ffi::ErrorOr<RaggedParams> ParseRagged(const xla::ffi::RemainingArgs& args,
                                            const xla::ffi::RemainingRets& rets,
                                            const RaggedAttrs& attrs);

}  // namespace jax_mla::decode

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax_mla::decode::RaggedAttrs, ::xla::ffi::StructMember<float>("sm_scale"),
    ::xla::ffi::StructMember<int64_t>("q_len"), ::xla::ffi::StructMember<int64_t>("num_splits"),
    ::xla::ffi::StructMember<bool>("batch_invariant"),
    ::xla::ffi::StructMember<std::string_view>("backend"),
    ::xla::ffi::StructMember<bool>("has_layer"), ::xla::ffi::StructMember<bool>("has_plan"),
    ::xla::ffi::StructMember<int64_t>("max_seq_len"),
    ::xla::ffi::StructMember<std::string_view>("kv_format"),
    ::xla::ffi::StructMember<bool>("has_q_scale"), ::xla::ffi::StructMember<bool>("has_norm"),
    ::xla::ffi::StructMember<float>("norm_eps"), ::xla::ffi::StructMember<bool>("has_rope"),
    ::xla::ffi::StructMember<bool>("rope_interleaved"));
