// Which calls of index_topk a GPU takes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/kv_format.h"

namespace jax_mla::index {

// What is known of a call when it is lowered.
struct TopkShape {
  DType q_dtype;
  DType key_dtype;
  int32_t num_heads;
  int32_t d;
  int32_t k;
  int32_t page_size;
};

// Why no backend runs such a call on a GPU of this compute capability (10 * major + minor); empty
// if one does. `backend` is the attribute of that name: only the named one counts, if it names one.
std::string WhyNot(const TopkShape& shape, int compute_capability, std::string_view backend);

}  // namespace jax_mla::index
