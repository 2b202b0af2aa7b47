// The FFI signature of target "jax_mla_append", shared by every platform: XLA buffers in, checked
// AppendParams out. The only append header that knows the FFI.
//
// operands: ckv, kpe, page_table, positions, layer, page_begin, then kv_pages or (ckv_pages,
// kpe_pages). results: the pool or pools, aliased to those operands.
#pragma once

#include "append/params.h"
#include "core/check.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla::append {

// Checks every rank, dimension and element type, and that each result is the memory of its operand:
// the write is in place or it is an Internal error.
xla::ffi::ErrorOr<AppendParams> ParseAppend(const xla::ffi::RemainingArgs& args,
                                            const xla::ffi::RemainingRets& rets);

}  // namespace jax_mla::append
