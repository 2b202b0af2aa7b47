// The FFI signature of targets "jax_mla_decode" and "jax_mla_ragged", the same on every platform.
// It turns XLA's buffers and attributes into checked parameters. "jax_mla_ragged" first writes the
// new rows of a step into the cache, and then attends. Of the decode headers only this one,
// choose_backend.h and cpu/run.h know the FFI.
//
// Operands of both: q_nope, page_table, seq_lens, layer, page_begin, and kv_pages or kv_pages[0]
// and kv_pages[1]; q_pe if rows have a rotary part; kv_scale if the format has one; q_scale if the
// queries are codes. Those of "jax_mla_ragged" besides: ckv, and kpe beside q_pe; cu_q_lens and
// num_seqs if the sequences have different numbers of tokens; norm_weight; rope_table and
// rope_lens; plan (uint8), the result of "jax_mla_ragged_plan", on CUDA. Results: out, lse, with
// new rows the pool or pools in the same memory, on CUDA scratch (uint8).
#pragma once

#include <cstdint>
#include <string_view>

#include "append/params.h"
#include "core/check.h"
#include "decode/params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla::decode {

struct DecodeAttrs {
  std::string_view operands;  // see core/operands.h
  float sm_scale;
  bool causal;  // always with new rows
  int64_t num_splits;
  bool batch_invariant;
  std::string_view backend;    // empty: the first backend that takes the call
  bool has_layer;              // whether the pools have layers
  int64_t max_seq_len;         // bound of the lengths, 0 for the page table's
  std::string_view kv_format;  // see KvFormatName
  int64_t sliding_window;      // 0: none
  float soft_cap;              // 0: none
  float norm_eps;              // with norm_weight
  bool rope_interleaved;       // with rope_table
};

struct RaggedParams {
  append::AppendParams append;  // runs first
  // Causal. If append has a q_pe, the queries have to be rotated: the handler finds memory for what
  // they become, which is append's rotated_q_pe and decode's q_pe.
  DecodeParams decode;
  void* plan;  // null without the operand
  int64_t plan_bytes;
};

// Both check every rank, dimension and element type, so that backends can rely on them, and that
// each pool result is its operand's memory.
xla::ffi::ErrorOr<DecodeParams> ParseDecode(const xla::ffi::RemainingArgs& args,
                                            const xla::ffi::RemainingRets& rets,
                                            const DecodeAttrs& attrs);
xla::ffi::ErrorOr<RaggedParams> ParseRagged(const xla::ffi::RemainingArgs& args,
                                            const xla::ffi::RemainingRets& rets,
                                            const DecodeAttrs& attrs);

}  // namespace jax_mla::decode

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax_mla::decode::DecodeAttrs, ::xla::ffi::StructMember<std::string_view>("operands"),
    ::xla::ffi::StructMember<float>("sm_scale"), ::xla::ffi::StructMember<bool>("causal"),
    ::xla::ffi::StructMember<int64_t>("num_splits"),
    ::xla::ffi::StructMember<bool>("batch_invariant"),
    ::xla::ffi::StructMember<std::string_view>("backend"),
    ::xla::ffi::StructMember<bool>("has_layer"), ::xla::ffi::StructMember<int64_t>("max_seq_len"),
    ::xla::ffi::StructMember<std::string_view>("kv_format"),
    ::xla::ffi::StructMember<int64_t>("sliding_window"),
    ::xla::ffi::StructMember<float>("soft_cap"), ::xla::ffi::StructMember<float>("norm_eps"),
    ::xla::ffi::StructMember<bool>("rope_interleaved"));
