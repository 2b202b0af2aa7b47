// Writes one row to the cache on the host, in the format of the cache.
#pragma once

#include "append/cpu/row.h"
#include "core/kv_format.h"

namespace jax_mla::append {

// Writes the row as `type` to `to`, divided by `scale` if `type` is e4m3 and the row is not.
void StoreRow(const Row& row, DType type, float scale, char* to);

// Writes ckv and its scales as a row of DsMla has them.
void StoreDsMlaCkv(const Row& row, char* to);

}  // namespace jax_mla::append
