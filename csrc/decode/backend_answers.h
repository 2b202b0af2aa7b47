// Which backends would take a call: what Python asks when it lowers one, and what
// jax_mla.backends() shows.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
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

// The answers for a GPU of which only the compute capability is known, whatever this machine has.
std::vector<BackendAnswer> DescribedBackends(const DecodeShape& shape, int compute_capability);

// The backends that run only if backend= names them, and why.
std::vector<std::pair<std::string, std::string>> CudaBackendsByName();

// Bytes of the scratch result of a decode call with this attribute backend=, whatever GPU runs it.
int64_t CudaScratchBytes(const DecodeShape& shape, std::string_view attribute);
#endif

}  // namespace jax_mla::decode
