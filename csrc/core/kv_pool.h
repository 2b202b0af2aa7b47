// The paged cache as it crosses the FFI: one packed pool [..., d_ckv + d_kpe], or the two split
// ones [..., d_ckv] and [..., d_kpe], of rank 3 [num_pages, page_size, d] or with layers in front.
// Both operations turn it into two address streams here, so no kernel knows which form it was.
#pragma once

#include <cstdint>

#include "core/check.h"
#include "core/kv_format.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla {

struct KvPool {
  MutableKvStream ckv;
  MutableKvStream kpe;
  int32_t num_layers;  // 1 for a pool without layers
  int32_t num_pages;
  int32_t page_size;
};

// Reads the pool operands args[first], and args[first + 1] if there is one.
xla::ffi::ErrorOr<KvPool> ParseKvPool(const Checker& check, const xla::ffi::RemainingArgs& args,
                                      size_t first, DType dtype, int32_t d_ckv, int32_t d_kpe);

inline KvStream ReadOnly(const MutableKvStream& stream) {
  return {stream.base, stream.layer_stride, stream.page_stride, stream.token_stride};
}

}  // namespace jax_mla
