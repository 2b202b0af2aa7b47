// The kernel in front of the decode kernel of a call of units: it appends the new rows, unless
// append's own kernel does it, and clears the results of padding.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "append/params.h"

namespace jax_mla::decode::ragged {

struct RowsParams {
  append::AppendParams append;  // without positions; says which tokens a sequence has
  void* out;
  float* lse;
  int32_t num_heads;
};

cudaError_t LaunchRows(const RowsParams& params, bool appends, cudaStream_t stream);

}  // namespace jax_mla::decode::ragged
