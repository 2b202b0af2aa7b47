// The pool of index keys as it crosses the FFI: [num_pages, page_size, d] of numbers, or uint8
// [num_pages, page_size, 132], whose pages index_page.h describes. With layers it has num_layers in
// front.
#pragma once

#include <cstdint>

#include "core/check.h"
#include "core/index_page.h"
#include "core/kv_format.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla {

struct IndexPool {
  void* base;
  DType key_dtype;     // kE4m3: codes and scales
  int32_t num_layers;  // 1 for a pool without layers
  int32_t num_pages;
  int32_t page_size;
};

// Reads the pool, whose keys have `d` values.
xla::ffi::ErrorOr<IndexPool> ParseIndexPool(const Checker& check, const xla::ffi::AnyBuffer& buffer,
                                            bool has_layer, int32_t d);

}  // namespace jax_mla
