// CPU handler of "jax_mla_decode".
#include "core/call_counter.h"
#include "decode/backend_answers.h"
#include "decode/binding.h"
#include "decode/cpu/dispatch.h"
#include "decode/cpu/run.h"

namespace jax_mla::decode {
namespace cpu {
namespace ffi = xla::ffi;

namespace {

CallCounter calls("decode_cpu");

ffi::Error Handle(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  DecodeAttrs attrs) {
  calls.Increment();
  const auto params = ParseDecode(args, rets, attrs);
  if (!params) return params.error();
  const auto kernel = FindKernel("jax_mla_decode", attrs.backend);
  if (!kernel) return kernel.error();
  return Run("jax_mla_decode", *params, **kernel, pool);
}

}  // namespace
}  // namespace cpu

// The CPU backend takes calls of every shape.
std::vector<BackendAnswer> CpuBackends(const DecodeShape&) {
  return {{.name = "cpu", .reason = cpu::WhyNoKernel()}};
}

}  // namespace jax_mla::decode

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMlaDecodeCpu, jax_mla::decode::cpu::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<jax_mla::decode::DecodeAttrs>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
