// What Python may ask before it lowers a call: which backends would take it, and the scratch it
// needs.
#pragma once

#include <string>
#include <vector>

#include "decode/params.h"

namespace jax_mla::decode {

struct BackendAnswer {
  std::string name;
  std::string reason;  // why it declines; empty if it would run
};

// The platform's backends in the order in which they are tried.
std::vector<BackendAnswer> CpuBackends(const DecodeShape& shape);

#ifdef JAX_MLA_WITH_CUDA
// `compute_capability` is 10 * major + minor (90 for Hopper) of the GPU that JAX runs on; 0: none.
std::vector<BackendAnswer> CudaBackends(const DecodeShape& shape, int compute_capability);
#endif

}  // namespace jax_mla::decode
