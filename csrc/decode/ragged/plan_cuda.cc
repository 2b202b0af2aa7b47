// CUDA handler of "jax_mla_ragged_plan": the plan of a call of units, for the calls of
// "jax_mla_ragged" that take it. Stateless, like the handler of decode (decode/cuda.cc).
//
// Operands: seq_lens and, if sequences have different numbers of tokens, cu_q_lens and num_seqs.
// Result: the plan (uint8).
#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "core/call_counter.h"
#include "core/check.h"
#include "core/kv_pool.h"
#include "core/operands.h"
#include "decode/choose_backend.h"
#include "decode/ragged/launch.h"
#include "decode/schedule/unit_plan.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla::decode {

// The shape of the step, as the calls that take the plan have it.
struct PlanAttrs {
  std::string_view operands;  // see core/operands.h
  std::string_view dtype;
  int64_t num_tokens;
  int64_t q_len;  // 0 with cu_q_lens
  int64_t num_heads;
  int64_t d_ckv;
  int64_t d_kpe;
  int64_t page_size;
  int64_t max_pages_per_seq;
  int64_t max_seq_len;  // 0: see BoundOfLengths
  int64_t num_splits;
  bool batch_invariant;
  int64_t sliding_window;  // 0: none
  bool has_soft_cap;
  std::string_view backend;
  std::string_view kv_format;  // see KvFormatName
};

}  // namespace jax_mla::decode

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax_mla::decode::PlanAttrs, ::xla::ffi::StructMember<std::string_view>("operands"),
    ::xla::ffi::StructMember<std::string_view>("dtype"),
    ::xla::ffi::StructMember<int64_t>("num_tokens"), ::xla::ffi::StructMember<int64_t>("q_len"),
    ::xla::ffi::StructMember<int64_t>("num_heads"), ::xla::ffi::StructMember<int64_t>("d_ckv"),
    ::xla::ffi::StructMember<int64_t>("d_kpe"), ::xla::ffi::StructMember<int64_t>("page_size"),
    ::xla::ffi::StructMember<int64_t>("max_pages_per_seq"),
    ::xla::ffi::StructMember<int64_t>("max_seq_len"),
    ::xla::ffi::StructMember<int64_t>("num_splits"),
    ::xla::ffi::StructMember<bool>("batch_invariant"),
    ::xla::ffi::StructMember<int64_t>("sliding_window"),
    ::xla::ffi::StructMember<bool>("has_soft_cap"),
    ::xla::ffi::StructMember<std::string_view>("backend"),
    ::xla::ffi::StructMember<std::string_view>("kv_format"));

namespace jax_mla::decode {
namespace ffi = xla::ffi;

namespace {

CallCounter calls("ragged_plan_cuda");

constexpr std::string_view kTarget = "jax_mla_ragged_plan";

ffi::Error ParseShape(const Checker& check, const PlanAttrs& attrs, int64_t batch,
                      DecodeShape& shape) {
  const std::optional<DType> dtype = DTypeOf(attrs.dtype);
  if (!dtype) return check.Fail("dtype", "bfloat16, float16 or float32", attrs.dtype);
  const std::pair<int64_t, int32_t*> sizes[] = {{batch, &shape.batch},
                                                {attrs.q_len, &shape.q_len},
                                                {attrs.num_heads, &shape.num_heads},
                                                {attrs.d_ckv, &shape.d_ckv},
                                                {attrs.d_kpe, &shape.d_kpe},
                                                {attrs.page_size, &shape.page_size},
                                                {attrs.max_pages_per_seq, &shape.max_pages_per_seq},
                                                {attrs.num_splits, &shape.num_splits},
                                                {attrs.sliding_window, &shape.sliding_window}};
  for (const auto& [size, member] : sizes) {
    MLA_RETURN_IF_ERROR(check.FitsInt32("attributes", size));
    *member = static_cast<int32_t>(size);
  }
  shape.dtype = *dtype;
  shape.max_seq_len = BoundOfLengths(shape.max_pages_per_seq, shape.page_size, attrs.max_seq_len);
  shape.batch_invariant = attrs.batch_invariant;
  shape.has_soft_cap = attrs.has_soft_cap;
  const auto format = ParseKvFormat(check, attrs.kv_format);
  if (!format) return format.error();
  shape.kv_format = *format;
  return check.FitsInt32("num_tokens", attrs.num_tokens);
}

ffi::Error ParseTokens(const Checker& check, Operands& operands, const PlanAttrs& attrs,
                       ragged::StepTokens& tokens) {
  const ffi::AnyBuffer seq_lens = operands["seq_lens"];
  MLA_RETURN_IF_ERROR(check.Rank("seq_lens", seq_lens, 1));
  const int64_t batch = seq_lens.dimensions()[0];
  MLA_RETURN_IF_ERROR(check.FitsInt32("seq_lens", batch));
  tokens = {.seq_lens = nullptr,
            .cu_q_lens = nullptr,
            .num_seqs = nullptr,
            .batch = static_cast<int32_t>(batch),
            .q_len = static_cast<int32_t>(attrs.q_len),
            .num_tokens = static_cast<int32_t>(attrs.num_tokens)};
  MLA_RETURN_IF_ERROR(operands.Read("seq_lens", {batch}, tokens.seq_lens));
  if (attrs.q_len == 0) {
    MLA_RETURN_IF_ERROR(operands.Read("cu_q_lens", {batch + 1}, tokens.cu_q_lens));
    MLA_RETURN_IF_ERROR(operands.Read("num_seqs", {1}, tokens.num_seqs));
  }
  return operands.CheckUsed();
}

ffi::Error Handle(cudaStream_t stream, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> plan,
                  PlanAttrs attrs) {
  calls.Increment();
  const Checker check(kTarget);
  auto operands = Operands::Of(check, args, attrs.operands);
  if (!operands) return operands.error();
  ragged::StepTokens tokens{};
  MLA_RETURN_IF_ERROR(ParseTokens(check, *operands, attrs, tokens));
  DecodeShape shape{};
  MLA_RETURN_IF_ERROR(ParseShape(check, attrs, tokens.batch, shape));
  MLA_RETURN_IF_ERROR(
      CheckTableLimits(check, shape, UnitCallShape(shape, tokens.num_tokens).batch));
  const int64_t bytes = UnitPlanBytes(shape, tokens.num_tokens);
  MLA_RETURN_IF_ERROR(check.Tensor("plan", *plan, ffi::U8, {bytes}));
  if (bytes == 0 || tokens.num_tokens == 0 || shape.batch == 0 || shape.num_heads == 0) {
    return ffi::Error::Success();
  }
  const auto choice = ChooseBackend(check, shape, attrs.backend);
  if (!choice) return choice.error();
  const DecodeBackend& backend = *choice->backend;
  return LaunchResult(
      check, backend,
      ragged::MakePlan(tokens, plan->untyped_data(), choice->problem, backend, stream));
}

}  // namespace
}  // namespace jax_mla::decode

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMlaRaggedPlanCuda, jax_mla::decode::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attrs<jax_mla::decode::PlanAttrs>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
