// Which backends would take a call: what Python asks when it lowers one, and what
// jax_mla.backends() shows.
#pragma once

#include <string>
#include <vector>

#include "decode/params.h"

namespace jax_mla::decode {

struct BackendAnswer {
  std::string name;
  std::string reason;  // why the backend declines; empty if it would run
};

// The platform's backends in the order in which they are tried.
std::vector<BackendAnswer> CpuBackends(const DecodeShape& shape);

#ifdef JAX_MLA_WITH_CUDA
// `compute_capability` is 10 * major + minor of the GPU that JAX runs on (90 for Hopper), or 0
// without a GPU.
std::vector<BackendAnswer> CudaBackends(const DecodeShape& shape, int compute_capability);
#endif

}  // namespace jax_mla::decode
