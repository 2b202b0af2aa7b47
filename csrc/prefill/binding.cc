#include "prefill/binding.h"

#include <string>

#include "core/operands.h"

namespace jax_mla::prefill {
namespace ffi = xla::ffi;

namespace {

constexpr std::string_view kTarget = "jax_mla_prefill";

enum Result : size_t { kOut, kLse, kScratch, kNumResults };

ffi::Error ParseTokens(const Checker& check, Operands& operands, PrefillParams& p) {
  const ffi::AnyBuffer q_nope = operands["q_nope"], q_pe = operands["q_pe"];
  const ffi::AnyBuffer k_nope = operands["k_nope"], kpe = operands["kpe"], v = operands["v"];
  MLA_RETURN_IF_ERROR(check.Float("q_nope", q_nope));
  MLA_RETURN_IF_ERROR(check.Rank("q_nope", q_nope, 3));
  MLA_RETURN_IF_ERROR(check.Rank("q_pe", q_pe, 3));
  MLA_RETURN_IF_ERROR(check.Rank("k_nope", k_nope, 3));
  const ffi::DataType type = q_nope.element_type();
  const int64_t num_queries = q_nope.dimensions()[0], num_heads = q_nope.dimensions()[1];
  const int64_t d_nope = q_nope.dimensions()[2], d_kpe = q_pe.dimensions()[2];
  const int64_t num_keys = k_nope.dimensions()[0];
  MLA_RETURN_IF_ERROR(check.Tensor("q_pe", q_pe, type, {num_queries, num_heads, d_kpe}));
  MLA_RETURN_IF_ERROR(check.Tensor("k_nope", k_nope, type, {num_keys, num_heads, d_nope}));
  MLA_RETURN_IF_ERROR(check.Tensor("kpe", kpe, type, {num_keys, d_kpe}));
  MLA_RETURN_IF_ERROR(check.Tensor("v", v, type, {num_keys, num_heads, kAnyDim}));
  // The kernel counts the row tiles of all heads in 32 bits.
  MLA_RETURN_IF_ERROR(check.FitsInt32("q_nope", num_queries * num_heads));
  MLA_RETURN_IF_ERROR(check.FitsInt32("k_nope", num_keys * num_heads));
  if (num_queries * num_heads == 0) {
    return check.Fail("q_nope", "at least one query and head",
                      FormatTensor(type, q_nope.dimensions()));
  }
  if (num_keys == 0) {
    return check.Fail("k_nope", "at least one key", FormatTensor(type, k_nope.dimensions()));
  }
  p.dtype = *FromFfi(type);
  p.q_nope = q_nope.untyped_data();
  p.q_pe = q_pe.untyped_data();
  p.k_nope = k_nope.untyped_data();
  p.kpe = kpe.untyped_data();
  p.v = v.untyped_data();
  p.num_queries = static_cast<int32_t>(num_queries);
  p.num_keys = static_cast<int32_t>(num_keys);
  p.num_heads = static_cast<int32_t>(num_heads);
  p.d_nope = static_cast<int32_t>(d_nope);
  p.d_kpe = static_cast<int32_t>(d_kpe);
  p.d_v = static_cast<int32_t>(v.dimensions()[2]);
  return ffi::Error::Success();
}

ffi::Error ParseBounds(const Checker& check, Operands& operands, PrefillParams& p) {
  MLA_RETURN_IF_ERROR(operands.Read("bounds", {4, kAnyDim}, p.q_begin));
  const int64_t num_seqs = operands["bounds"].dimensions()[1];
  MLA_RETURN_IF_ERROR(check.FitsInt32("bounds", num_seqs));
  p.num_seqs = static_cast<int32_t>(num_seqs);
  p.q_end = p.q_begin + p.num_seqs;
  p.k_begin = p.q_end + p.num_seqs;
  p.k_end = p.k_begin + p.num_seqs;
  return ffi::Error::Success();
}

ffi::Error ParseResults(const Checker& check, const ffi::RemainingRets& rets, PrefillParams& p) {
  if (rets.size() != kNumResults) {
    return check.Fail("results", std::to_string(kNumResults), std::to_string(rets.size()));
  }
  ffi::Result<ffi::AnyBuffer> out = *rets.get<ffi::AnyBuffer>(kOut);
  ffi::Result<ffi::AnyBuffer> lse = *rets.get<ffi::AnyBuffer>(kLse);
  ffi::Result<ffi::AnyBuffer> scratch = *rets.get<ffi::AnyBuffer>(kScratch);
  p.out_is_f32 = out->element_type() == ffi::F32;
  MLA_RETURN_IF_ERROR(check.Tensor("out", *out, p.out_is_f32 ? ffi::F32 : ToFfi(p.dtype),
                                   {p.num_queries, p.num_heads, p.d_v}));
  MLA_RETURN_IF_ERROR(check.Tensor("lse", *lse, ffi::F32, {p.num_queries, p.num_heads}));
  MLA_RETURN_IF_ERROR(check.Tensor("scratch", *scratch, ffi::U8, {sizeof(int32_t)}));
  p.out = out->untyped_data();
  p.lse = lse->typed_data<float>();
  p.next_item = static_cast<int32_t*>(scratch->untyped_data());
  return ffi::Error::Success();
}

ffi::Error Parse(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                 const PrefillAttrs& attrs, PrefillParams& p) {
  const Checker check(kTarget);
  auto operands = Operands::Of(check, args, attrs.operands);
  if (!operands) return operands.error();
  p.sm_scale = attrs.sm_scale;
  p.causal = attrs.causal;
  MLA_RETURN_IF_ERROR(ParseTokens(check, *operands, p));
  MLA_RETURN_IF_ERROR(ParseBounds(check, *operands, p));
  if (operands->Has("prior_out")) {
    MLA_RETURN_IF_ERROR(
        operands->Read("prior_out", {p.num_queries, p.num_heads, p.d_v}, p.prior_out));
    MLA_RETURN_IF_ERROR(operands->Read("prior_lse", {p.num_queries, p.num_heads}, p.prior_lse));
  }
  MLA_RETURN_IF_ERROR(ParseResults(check, rets, p));
  return operands->CheckUsed();
}

}  // namespace

ffi::ErrorOr<PrefillParams> ParsePrefill(const ffi::RemainingArgs& args,
                                         const ffi::RemainingRets& rets,
                                         const PrefillAttrs& attrs) {
  PrefillParams params = {};
  if (ffi::Error error = Parse(args, rets, attrs, params); error.failure())
    return ffi::Unexpected(error);
  return params;
}

}  // namespace jax_mla::prefill
