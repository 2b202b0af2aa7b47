// What the CUDA handlers of decode and of ragged calls share: the choice of a backend, and checks.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "core/check.h"
#include "decode/backend.h"
#include "decode/params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla::decode {

struct BackendChoice {
  const DecodeBackend* backend;
  DecodeProblem problem;
};

// The first backend that takes the call, among those that the attribute backend= allows. An error
// if there is none; it gives the reason of each.
xla::ffi::ErrorOr<BackendChoice> ChooseBackend(const Checker& check, const DecodeShape& shape,
                                               std::string_view attribute);

// Bytes of scratch of a call that this backend runs.
int64_t ScratchBytes(const DecodeBackend& backend, const DecodeShape& shape);

// What a backend's launch returned, as the handler's result.
xla::ffi::Error LaunchResult(const Checker& check, const DecodeBackend& backend,
                             const std::string& error);

xla::ffi::Error CheckAlignment(const Checker& check, const DecodeParams& params);

// The schedule numbers tokens and blocks in 32 bits. `num_seqs`: of the schedule.
xla::ffi::Error CheckTableLimits(const Checker& check, const DecodeShape& shape, int64_t num_seqs);

xla::ffi::Error CheckScratch(const Checker& check, const DecodeParams& params, int64_t bytes);

}  // namespace jax_mla::decode
