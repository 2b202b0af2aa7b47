// CPU handler of "jax_mla_ragged": writes the new rows of all sequences, then attends.
#include <vector>

#include "append/cpu/run.h"
#include "core/call_counter.h"
#include "decode/binding.h"
#include "decode/cpu/run.h"
#include "decode/schedule/unit_plan.h"

namespace jax_mla::decode::cpu {
namespace ffi = xla::ffi;

namespace {

CallCounter calls("ragged_cpu");

constexpr char kTarget[] = "jax_mla_ragged";

ffi::Error Handle(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  DecodeAttrs attrs) {
  calls.Increment();
  auto params = ParseRagged(args, rets, attrs);
  if (!params) return params.error();
  const auto kernel = FindKernel(kTarget, attrs.backend);
  if (!kernel) return kernel.error();
  std::vector<char> rotated;
  if (params->append.q_pe != nullptr) {
    rotated.resize(RotatedQueryBytes(ShapeOf(params->decode), params->decode.num_tokens));
    params->append.rotated_q_pe = rotated.data();
    params->decode.q_pe = rotated.data();
  }
  append::AppendOnCpu(params->append);
  return Run(kTarget, params->decode, **kernel, pool);
}

}  // namespace
}  // namespace jax_mla::decode::cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMlaRaggedCpu, jax_mla::decode::cpu::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<jax_mla::decode::DecodeAttrs>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
