// The FFI signature of target "jax_mla_decode", the same on every platform. It turns XLA's buffers
// and attributes into checked DecodeParams. Of the decode headers only this one, ragged_binding.h,
// choose_backend.h and cpu/run.h know the FFI.
//
// Operands: q_nope, q_pe, page_table, seq_lens, layer, page_begin, kv_scale if the format has one,
// q_scale with has_q_scale, then kv_pages, or ckv_pages and kpe_pages. Results: out, lse and, on
// CUDA, scratch (uint8).
#pragma once

#include <cstdint>
#include <string_view>

#include "core/check.h"
#include "core/kv_pool.h"
#include "decode/params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla::decode {

struct DecodeAttrs {
  float sm_scale;
  bool causal;
  int64_t num_splits;
  bool batch_invariant;
  std::string_view backend;    // empty: the first backend that takes the call
  bool has_layer;              // whether the pools have layers
  int64_t max_seq_len;         // bound of the lengths, 0 for the page table's
  std::string_view kv_format;  // see KvFormatName
  bool has_q_scale;
};

// Checks every rank, dimension and element type, so that backends can rely on them.
xla::ffi::ErrorOr<DecodeParams> ParseDecode(const xla::ffi::RemainingArgs& args,
                                            const xla::ffi::RemainingRets& rets,
                                            const DecodeAttrs& attrs);

// What ragged_binding.cc does in the same way: attributes, scales, pool and scratch become members
// of `p`. ParseScales takes NumScales operands from args[first] on. SetPool comes last: the bound
// of the lengths depends on the page table and on the page size.
xla::ffi::Error SetAttrs(const Checker& check, const DecodeAttrs& attrs, DecodeParams& p);
size_t NumScales(const DecodeParams& p, bool has_q_scale);
xla::ffi::Error ParseScales(const Checker& check, const xla::ffi::RemainingArgs& args, size_t first,
                            bool has_q_scale, DecodeParams& p);
void SetPool(const KvPool& pool, int64_t max_seq_len, DecodeParams& p);
xla::ffi::Error ParseScratch(const Checker& check, const xla::ffi::RemainingRets& rets,
                             size_t result_idx, DecodeParams& p);

}  // namespace jax_mla::decode

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_mla::decode::DecodeAttrs,
                                      ::xla::ffi::StructMember<float>("sm_scale"),
                                      ::xla::ffi::StructMember<bool>("causal"),
                                      ::xla::ffi::StructMember<int64_t>("num_splits"),
                                      ::xla::ffi::StructMember<bool>("batch_invariant"),
                                      ::xla::ffi::StructMember<std::string_view>("backend"),
                                      ::xla::ffi::StructMember<bool>("has_layer"),
                                      ::xla::ffi::StructMember<int64_t>("max_seq_len"),
                                      ::xla::ffi::StructMember<std::string_view>("kv_format"),
                                      ::xla::ffi::StructMember<bool>("has_q_scale"));
