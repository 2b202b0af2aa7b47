// What a CUDA decode backend is. To add one: a folder whose backend.cc defines a DecodeBackend, its
// declaration below, and one line in kBackends (choose_backend.cc), the table in which they are
// tried in order.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string>
#include <string_view>

#include "append/params.h"
#include "decode/params.h"
#include "decode/schedule/plan.h"
#include "gpu/launch.h"

namespace jax_mla::decode {

// What a backend judges a call by: facts that are known without reading from the device.
struct DecodeProblem {
  const gpu::DeviceFacts& device;
  DecodeShape shape;
  // In backend="name:variant", what follows the colon: one of the backend's kernels, for tests.
  // Empty: the backend chooses.
  std::string_view variant;
  // The new rows of a step with one token a sequence, which the kernel has to write first. If they
  // have a q_pe, it also has to rotate the queries. Null: none.
  const append::AppendParams* new_rows = nullptr;

  int32_t num_rows() const { return shape.q_len * shape.num_heads; }
};

struct DecodeBackend {
  const char* name;
  // Why this backend does not take the call, as half a sentence ("needs ..., got ..."). "" if it
  // does.
  std::string (*why_not)(const DecodeProblem& problem);
  // Whether `launch` takes problem.new_rows.
  bool (*can_append)(const DecodeProblem& problem);
  // Enqueues all kernels of the call, the combine kernel included. Called only if why_not returned
  // "". Returns what went wrong, or "". It may run while the stream is captured, so it does not
  // allocate, synchronise or read from the device.
  std::string (*launch)(const DecodeParams& params, const DecodeProblem& problem,
                        cudaStream_t stream);
  // How `launch` splits a call of units (schedule/units.h), which are made before, for this
  // schedule.
  SplitPlan (*plan_units)(const DecodeParams& params, const DecodeProblem& problem);
  // Bytes of scratch of a call, whatever GPU runs it. Null: DecodeScratchBytes.
  int64_t (*scratch_bytes)(const DecodeShape& shape) = nullptr;
  // Why the backend runs only if backend= names it. Null: it may be chosen.
  const char* by_name_only = nullptr;
};

// The backends of this build, best first.
std::span<const DecodeBackend* const> CudaDecodeBackends();

extern const DecodeBackend kSm80Backend;   // sm80/backend.cc
extern const DecodeBackend kSm90Backend;   // sm90/backend.cc, if JAX_MLA_WITH_SM90A is defined
extern const DecodeBackend kSm100Backend;  // sm100/backend.cc, if JAX_MLA_WITH_SM100A is defined

}  // namespace jax_mla::decode
