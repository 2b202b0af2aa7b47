#include "prefill/binding.h"

#include <string>

namespace jax_mla::prefill {
namespace ffi = xla::ffi;

namespace {

constexpr std::string_view kTarget = "jax_mla_prefill";

enum Operand : size_t { kQNope, kQPe, kKNope, kKpe, kV, kBounds, kPriorOut, kPriorLse };
enum Result : size_t { kOut, kLse, kScratch, kNumResults };

ffi::Error ParseTokens(const Checker& check, const ffi::RemainingArgs& args, PrefillParams& p) {
  const ffi::AnyBuffer q_nope = *args.get<ffi::AnyBuffer>(kQNope);
  const ffi::AnyBuffer q_pe = *args.get<ffi::AnyBuffer>(kQPe);
  const ffi::AnyBuffer k_nope = *args.get<ffi::AnyBuffer>(kKNope);
  const ffi::AnyBuffer kpe = *args.get<ffi::AnyBuffer>(kKpe);
  const ffi::AnyBuffer v = *args.get<ffi::AnyBuffer>(kV);
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

ffi::Error ParseBounds(const Checker& check, const ffi::RemainingArgs& args, PrefillParams& p) {
  const ffi::AnyBuffer bounds = *args.get<ffi::AnyBuffer>(kBounds);
  MLA_RETURN_IF_ERROR(check.Tensor("bounds", bounds, ffi::S32, {4, kAnyDim}));
  MLA_RETURN_IF_ERROR(check.FitsInt32("bounds", bounds.dimensions()[1]));
  p.num_seqs = static_cast<int32_t>(bounds.dimensions()[1]);
  p.q_begin = bounds.typed_data<int32_t>();
  p.q_end = p.q_begin + p.num_seqs;
  p.k_begin = p.q_end + p.num_seqs;
  p.k_end = p.k_begin + p.num_seqs;
  return ffi::Error::Success();
}

ffi::Error ParsePrior(const Checker& check, const ffi::RemainingArgs& args, PrefillParams& p) {
  const ffi::AnyBuffer out = *args.get<ffi::AnyBuffer>(kPriorOut);
  const ffi::AnyBuffer lse = *args.get<ffi::AnyBuffer>(kPriorLse);
  MLA_RETURN_IF_ERROR(
      check.Tensor("prior_out", out, ffi::F32, {p.num_queries, p.num_heads, p.d_v}));
  MLA_RETURN_IF_ERROR(check.Tensor("prior_lse", lse, ffi::F32, {p.num_queries, p.num_heads}));
  p.prior_out = out.typed_data<float>();
  p.prior_lse = lse.typed_data<float>();
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
  const size_t num_operands = attrs.has_prior ? kPriorLse + 1 : kBounds + 1;
  if (args.size() != num_operands) {
    return check.Fail("operands", std::to_string(num_operands), std::to_string(args.size()));
  }
  p.sm_scale = attrs.sm_scale;
  p.causal = attrs.causal;
  MLA_RETURN_IF_ERROR(ParseTokens(check, args, p));
  MLA_RETURN_IF_ERROR(ParseBounds(check, args, p));
  if (attrs.has_prior) MLA_RETURN_IF_ERROR(ParsePrior(check, args, p));
  return ParseResults(check, rets, p);
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
