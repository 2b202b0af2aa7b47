// CUDA handler of "jax_mla_append". It has no state, and all it does is enqueue one kernel.
#include <cuda_runtime_api.h>

#include <string>

#include "append/append.h"
#include "append/binding.h"
#include "core/call_counter.h"

namespace jax_mla::append {
namespace ffi = xla::ffi;

namespace {

CallCounter calls("append_cuda");

ffi::Error Handle(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  AppendAttrs attrs) {
  calls.Increment();
  const auto params = ParseAppend(args, rets, attrs);
  if (!params) return params.error();
  if (const cudaError_t error = LaunchAppend(*params, stream); error != cudaSuccess) {
    return ffi::Error::Internal(std::string("jax_mla_append: ") + cudaGetErrorString(error));
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jax_mla::append

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMlaAppendCuda, jax_mla::append::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<jax_mla::append::AppendAttrs>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
