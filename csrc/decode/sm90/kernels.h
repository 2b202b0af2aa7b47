// The table of Hopper's decode kernels: a row for each row of the files from which they are
// compiled (instances.inc).
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string>

#include "decode/backend.h"
#include "decode/sm90/kernel_key.h"

namespace jax_mla::decode::sm90 {

struct Kernel {
  KernelKey key;
  bool takes_units;  // schedule/units.h
  bool appends;      // new rows of a step with one token a sequence
  std::string (*launch)(const DecodeParams&, const DecodeProblem&, cudaStream_t);
};

std::span<const Kernel> Kernels();

// Null: there is none.
const Kernel* FindKernel(const KernelKey& key);

}  // namespace jax_mla::decode::sm90
