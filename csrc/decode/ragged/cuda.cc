// CUDA handler of "jax_mla_ragged": the new rows are appended, and then attended. Stateless, like
// the handler of decode (decode/cuda.cc).
#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "append/append.h"
#include "core/call_counter.h"
#include "decode/binding.h"
#include "decode/choose_backend.h"
#include "decode/ragged/launch.h"
#include "decode/schedule/unit_plan.h"

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
  const int64_t plan_bytes = UnitPlanBytes(shape, p.decode.num_tokens);
  if (p.plan_bytes != plan_bytes) {
    return check.Fail("plan", std::to_string(plan_bytes) + " bytes", std::to_string(p.plan_bytes));
  }
  return CheckScratch(check, p.decode, RaggedScratchBytes(shape, p.decode.num_tokens));
}

// The front of the scratch becomes the place of the rotated queries, if there are any.
ffi::Error PlaceRotatedQueries(const Checker& check, RaggedParams& p) {
  if (p.append.q_pe == nullptr) return ffi::Error::Success();
  const int64_t bytes = RotatedQueryBytes(ShapeOf(p.decode), p.decode.num_tokens);
  MLA_RETURN_IF_ERROR(CheckScratch(check, p.decode, bytes));
  p.append.rotated_q_pe = p.decode.scratch;
  p.decode.q_pe = p.decode.scratch;
  p.decode.scratch = static_cast<char*>(p.decode.scratch) + bytes;
  p.decode.scratch_bytes -= bytes;
  return ffi::Error::Success();
}

ffi::Error Handle(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  DecodeAttrs attrs) {
  calls.Increment();
  auto params = ParseRagged(args, rets, attrs);
  if (!params) return params.error();
  const Checker check(kTarget);
  MLA_RETURN_IF_ERROR(PlaceRotatedQueries(check, *params));
  const DecodeParams& step = params->decode;
  MLA_RETURN_IF_ERROR(CheckLimits(check, *params));
  if (step.num_tokens == 0 || step.batch == 0 || step.num_heads == 0) return ffi::Error::Success();
  const DecodeShape shape = ShapeOf(step);
  const auto choice = ChooseBackend(check, shape, attrs.backend);
  if (!choice) return choice.error();
  MLA_RETURN_IF_ERROR(CheckAlignment(check, step));
  MLA_RETURN_IF_ERROR(check.Aligned({{"ckv", params->append.ckv}, {"kpe", params->append.kpe}}));
  const DecodeBackend& backend = *choice->backend;
  if (HasUnits(shape)) {
    return LaunchResult(
        check, backend,
        ragged::Launch(params->append, step, params->plan, choice->problem, backend, stream));
  }
  DecodeProblem problem = choice->problem;
  problem.new_rows = &params->append;
  if (backend.can_append(problem)) {
    if (params->append.q_pe != nullptr) params->decode.q_pe = params->append.q_pe;
  } else {
    problem.new_rows = nullptr;
    const cudaError_t error = append::LaunchAppend(params->append, stream);
    if (error != cudaSuccess) return LaunchResult(check, backend, cudaGetErrorString(error));
  }
  return LaunchResult(check, backend, backend.launch(step, problem, stream));
}

}  // namespace
}  // namespace jax_mla::decode

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMlaRaggedCuda, jax_mla::decode::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<jax_mla::decode::DecodeAttrs>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
