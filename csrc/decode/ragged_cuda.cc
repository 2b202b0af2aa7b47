// CUDA handler of "jax_mla_ragged". There are no CUDA kernels for ragged batches yet.
#include "decode/ragged_binding.h"

namespace jax_mla::decode {
namespace ffi = xla::ffi;

namespace {

ffi::Error Handle(ffi::RemainingArgs args, ffi::RemainingRets rets, RaggedAttrs attrs) {
  const auto params = ParseRagged(args, rets, attrs);
  if (!params) return params.error();
  return ffi::Error(
      ffi::ErrorCode::kUnimplemented,
      "jax_mla_ragged: platform: expected cpu, got cuda, for which there is no kernel "
      "yet; backend=\"reference\" runs there, but slowly");
}

}  // namespace
}  // namespace jax_mla::decode

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxMlaRaggedCuda, jax_mla::decode::Handle,
    xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs<jax_mla::decode::RaggedAttrs>(),
    {xla::ffi::Traits::kCmdBufferCompatible});
