// CUDA handler of "jax_mla_ragged": the new rows are appended, and then attended. Stateless, like
// the handler of decode (decode/cuda.cc).
#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "append/append.h"
#include "core/call_counter.h"
#include "decode/choose_backend.h"
#include "decode/ragged/launch.h"
#include "decode/ragged_binding.h"
#include "decode/split/unit_plan.h"

namespace jax_mla::decode {
namespace ffi = xla::ffi;

namespace {

CallCounter calls("ragged_cuda");

constexpr std::string_view kTarget = "jax_mla_ragged";

ffi::Error CheckLimits(const Checker& check, const RaggedParams& p) {
  const DecodeShape shape = ShapeOf(p.decode);
  const int64_t rows = int64_t{p.decode.num_tokens} * p.decode.num_heads;
  if (rows > std::numeric_limits<int32_t>::max()) {
    return check.Fail("q_nope", "less than 2^31 rows of tokens and heads", std::to_string(rows));
  }
  const int64_t num_seqs =
      HasUnits(shape) ? UnitCallShape(shape, p.decode.num_tokens).batch : p.decode.batch;
  MLA_RETURN_IF_ERROR(CheckTableLimits(check, shape, num_seqs));
  return CheckScratch(check, p.decode, RaggedScratchBytes(shape, p.decode.num_tokens));
}

// Append copies rows in pieces as decode does.
ffi::Error CheckRows(const Checker& check, const append::AppendParams& p) {
  constexpr uintptr_t kPieceBytes = 16;
  if ((reinterpret_cast<uintptr_t>(p.ckv) | reinterpret_cast<uintptr_t>(p.kpe)) % kPieceBytes ==
      0) {
    return ffi::Error::Success();
  }
  return check.Fail("ckv, kpe", "addresses that are multiples of 16", "another one");
}

ffi::Error Handle(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  RaggedAttrs attrs) {
  calls.Increment();
  const auto params = ParseRagged(args, rets, attrs);
  if (!params) return params.error();
  const Checker check(kTarget);
  const DecodeParams& step = params->decode;
  MLA_RETURN_IF_ERROR(CheckLimits(check, *params));
  if (step.num_tokens == 0 || step.batch == 0 || step.num_heads == 0) return ffi::Error::Success();
  const DecodeShape shape = ShapeOf(step);
  const auto choice = ChooseBackend(check, shape, attrs.backend);
  if (!choice) return choice.error();
  MLA_RETURN_IF_ERROR(CheckAlignment(check, step));
  MLA_RETURN_IF_ERROR(CheckRows(check, params->append));
  const DecodeBackend& backend = *choice->backend;
  if (HasUnits(shape)) {
    return LaunchResult(check, backend,
                        ragged::Launch(params->append, step, choice->problem, backend, stream));
  }
  if (const cudaError_t error = append::LaunchAppend(params->append, stream);
      error != cudaSuccess) {
    return LaunchResult(check, backend, cudaGetErrorString(error));
  }
  return LaunchResult(check, backend, backend.launch(step, choice->problem, stream));
}

}  // namespace
}  // namespace jax_mla::decode

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMlaRaggedCuda, jax_mla::decode::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<jax_mla::decode::RaggedAttrs>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
