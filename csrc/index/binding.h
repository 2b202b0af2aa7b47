// The FFI signature of target "jax_mla_index_topk", the same on every platform. It turns XLA's
// buffers into checked TopkParams. No other header of this folder knows the FFI.
//
// Operands: q, weights, page_table, seq_lens, layer, page_begin and index_pages; cu_q_lens and
// num_seqs unless q_len says how many tokens each sequence has. Results: indices, lens,
// scores with return_scores and, on CUDA, scratch (uint8).
#pragma once

#include <cstdint>
#include <string_view>

#include "core/check.h"
#include "index/params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla::index {

struct TopkAttrs {
  std::string_view operands;  // see core/operands.h
  int64_t k;
  int64_t q_len;  // 0 with cu_q_lens
  bool has_layer;
  bool return_positions;
  bool return_scores;
  int64_t max_seq_len;       // bound of the lengths, 0 for the page table's
  std::string_view backend;  // empty: the first backend that takes the call
};

// Checks every rank, dimension and element type.
xla::ffi::ErrorOr<TopkParams> ParseTopk(const xla::ffi::RemainingArgs& args,
                                        const xla::ffi::RemainingRets& rets,
                                        const TopkAttrs& attrs);

}  // namespace jax_mla::index

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_mla::index::TopkAttrs,
                                      ::xla::ffi::StructMember<std::string_view>("operands"),
                                      ::xla::ffi::StructMember<int64_t>("k"),
                                      ::xla::ffi::StructMember<int64_t>("q_len"),
                                      ::xla::ffi::StructMember<bool>("has_layer"),
                                      ::xla::ffi::StructMember<bool>("return_positions"),
                                      ::xla::ffi::StructMember<bool>("return_scores"),
                                      ::xla::ffi::StructMember<int64_t>("max_seq_len"),
                                      ::xla::ffi::StructMember<std::string_view>("backend"));
