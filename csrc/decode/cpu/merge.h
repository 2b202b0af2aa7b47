// What happens to partial results after the kernel: parts are merged, and rows are normalised,
// converted and written.
#pragma once

#include <cstdint>

#include "decode/cpu/kernel.h"
#include "decode/params.h"

namespace jax_mla::decode::cpu {

// Merges the partial results of one row tile into the first one, in the order of the parts. Part i
// lies i * part_stride floats after the first one.
void MergePartials(const Partial& first, int32_t num_parts, int64_t part_stride, int32_t d_ckv,
                   int32_t padded_rows);

// Writes a task's rows of `out` and `lse`. A row that sees no token gets 0 and -inf.
void WriteRows(const DecodeParams& params, const Task& task, const Partial& partial);

}  // namespace jax_mla::decode::cpu
