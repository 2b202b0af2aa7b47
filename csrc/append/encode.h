// Append where a row is not written as it came: it is normalised or rotated first, or stored in
// another format. The queries of the tokens can be rotated in the same launch.
#pragma once

#include <cuda_runtime_api.h>

#include "append/params.h"

namespace jax_mla::append {

// Whether the call is one of these.
inline bool HasEncoding(const AppendParams& p) {
  return p.kv_format != KvFormat::kPlain || p.norm_weight != nullptr || p.rope_table != nullptr;
}

// Whether all rows are cut into vectors, and lie at multiples of them.
bool IsVector(const AppendParams& p);

// Enqueues the kernel for a call that is. For every element type, format and width.
cudaError_t LaunchEncode(const AppendParams& params, cudaStream_t stream);

}  // namespace jax_mla::append
