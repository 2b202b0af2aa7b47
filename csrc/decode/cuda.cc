// CUDA handler of "jax_mla_decode".
//
// The handler has no state: all that a call needs is in its operands and attributes. It enqueues
// kernels and does nothing besides (no allocation, no synchronisation, no read from the device), so
// XLA may record it in a command buffer and never call it again.
#include <cstdint>
#include <string>
#include <string_view>

#include "core/call_counter.h"
#include "decode/backend.h"
#include "decode/binding.h"
#include "decode/choose_backend.h"

namespace jax_mla::decode {
namespace ffi = xla::ffi;

namespace {

CallCounter calls("decode_cuda");

constexpr std::string_view kTarget = "jax_mla_decode";

// Limits that hold for every backend.
ffi::Error CheckLimits(const Checker& check, const DecodeParams& p) {
  constexpr int64_t kMaxSeqElements = int64_t{1} << 32;  // a merge counts vectors of 4 in 32 bits
  MLA_RETURN_IF_ERROR(CheckTableLimits(check, ShapeOf(p), p.batch));
  const int64_t seq_elements = int64_t{p.q_len} * p.num_heads * p.d_ckv;
  if (seq_elements > kMaxSeqElements) {
    return check.Fail("q_nope", "at most 2^32 elements a sequence", std::to_string(seq_elements));
  }
  return ffi::Error::Success();
}

ffi::Error Handle(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  DecodeAttrs attrs) {
  calls.Increment();
  const auto params = ParseDecode(args, rets, attrs);
  if (!params) return params.error();
  const Checker check(kTarget);
  MLA_RETURN_IF_ERROR(CheckLimits(check, *params));
  if (params->batch == 0 || params->q_len == 0 || params->num_heads == 0) {
    return ffi::Error::Success();
  }
  const auto choice = ChooseBackend(check, ShapeOf(*params), attrs.backend);
  if (!choice) return choice.error();
  MLA_RETURN_IF_ERROR(
      CheckScratch(check, *params, ScratchBytes(*choice->backend, choice->problem.shape)));
  MLA_RETURN_IF_ERROR(CheckAlignment(check, *params));
  return LaunchResult(check, *choice->backend,
                      choice->backend->launch(*params, choice->problem, stream));
}

}  // namespace
}  // namespace jax_mla::decode

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMlaDecodeCuda, jax_mla::decode::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<jax_mla::decode::DecodeAttrs>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
