// What happens to a task's partial after the kernel: parts are merged, rows are normalised,
// converted and written.
#pragma once

#include <cstdint>

#include "decode/cpu/kernel.h"
#include "decode/params.h"

namespace jax_mla::decode {

// Merges the partials of one row group into the first one, in their order. Part i lies
// i * part_stride elements after it.
void MergePartials(const CpuPartial& first, int32_t num_parts, int64_t part_stride, int32_t d_ckv,
                   int32_t padded_rows);

// Writes a task's rows of `out` and `lse`. A row with no key gets 0 and -inf.
void WriteRows(const DecodeParams& params, const CpuTask& task, const CpuPartial& partial);

}  // namespace jax_mla::decode
