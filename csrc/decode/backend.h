// The ordered table of CUDA decode backends. To add one: a folder with a backend.cc that defines a
// DecodeBackend, one line in kBackends (cuda.cc).
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string>
#include <string_view>

#include "decode/params.h"
#include "gpu/launch.h"

namespace jax_mla::decode {

// One call as a backend judges it: static facts only, nothing that lives on the device.
struct DecodeProblem {
  const gpu::DeviceFacts& device;
  DecodeShape shape;
  // What followed the colon in backend="name:variant": forces one of a backend's kernels (tests).
  std::string_view variant;

  int32_t num_rows() const { return shape.q_len * shape.num_heads; }
};

struct DecodeBackend {
  const char* name;
  // "" if this backend serves the problem, else the reason, as half a sentence ("needs ..., got
  // ...").
  std::string (*why_not)(const DecodeProblem& problem);
  // Enqueues the whole call, combine included. Called only if why_not returned "". Returns "" or
  // what went wrong. May run during stream capture: no allocation, no synchronisation, no device
  // reads.
  std::string (*launch)(const DecodeParams& params, const DecodeProblem& problem,
                        cudaStream_t stream);
};

// All compiled-in backends, best first.
std::span<const DecodeBackend* const> CudaDecodeBackends();

extern const DecodeBackend kSm80Backend;  // sm80/backend.cc
extern const DecodeBackend kSm90Backend;  // sm90/backend.cc, if JAX_MLA_WITH_SM90A is defined

}  // namespace jax_mla::decode
