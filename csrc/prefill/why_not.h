// Which calls the CUDA kernel takes.
#pragma once

#include <string>

#include "core/kv_format.h"

namespace jax_mla::prefill {

// Why a GPU of this compute capability (10 * major + minor) does not run the kernel on such a call;
// empty if it does.
std::string WhyNot(int compute_capability, DType dtype, int d_nope, int d_kpe, int d_v);

}  // namespace jax_mla::prefill
