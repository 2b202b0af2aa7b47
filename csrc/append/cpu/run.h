// Append on the CPU, which the ragged decode handler runs too.
#pragma once

#include "append/params.h"

namespace jax_mla::append {

// Writes all new tokens to their pages.
void AppendOnCpu(const AppendParams& params);

}  // namespace jax_mla::append
