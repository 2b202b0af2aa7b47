// The FFI signature of target "jax_mla_append", the same on every platform. It turns XLA's buffers
// into checked AppendParams. No other append header knows the FFI.
//
// Operands: ckv, kpe, page_table, positions, layer, page_begin, then kv_pages, or ckv_pages and
// kpe_pages. Results: the same pool or pools, in the same memory. Attribute: has_layer, whether the
// pools have layers.
#pragma once

#include "append/params.h"
#include "core/check.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla::append {

// Checks every rank, dimension and element type, and that each result is its operand's memory. If
// it is not, the write would not be in place: an Internal error.
xla::ffi::ErrorOr<AppendParams> ParseAppend(const xla::ffi::RemainingArgs& args,
                                            const xla::ffi::RemainingRets& rets, bool has_layer);

}  // namespace jax_mla::append
