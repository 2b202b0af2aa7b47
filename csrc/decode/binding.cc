#include "decode/binding.h"

#include <string>

namespace jax_mla::decode {
namespace ffi = xla::ffi;

namespace {

constexpr std::string_view kTarget = "jax_mla_decode";

// Positions of the operands and results.
enum Operand : size_t { kQNope, kQPe, kPageTable, kSeqLens, kLayer, kPageBegin, kNumFixed };
enum Output : size_t { kOut, kLse, kNumOutputs, kScratch = kNumOutputs };

ffi::Error ParseQueries(const Checker& check, const ffi::RemainingArgs& args, DecodeParams& p) {
  const ffi::AnyBuffer q_nope = *args.get<ffi::AnyBuffer>(kQNope);
  const ffi::AnyBuffer q_pe = *args.get<ffi::AnyBuffer>(kQPe);
  MLA_RETURN_IF_ERROR(check.Float("q_nope", q_nope));
  MLA_RETURN_IF_ERROR(check.Rank("q_nope", q_nope, 4));
  const Dims q = q_nope.dimensions();
  const ffi::DataType dtype = q_nope.element_type();
  MLA_RETURN_IF_ERROR(check.Tensor("q_pe", q_pe, dtype, {q[0], q[1], q[2], kAnyDim}));
  const int64_t d_kpe = q_pe.dimensions()[3];
  for (int64_t dim : {q[0], q[1], q[2], q[3], d_kpe}) {
    MLA_RETURN_IF_ERROR(check.FitsInt32("q_nope", dim));
  }
  for (int64_t product : {q[0] * q[1], q[1] * q[2]}) {
    MLA_RETURN_IF_ERROR(check.FitsInt32("q_nope", product));
  }
  p.dtype = *FromFfi(dtype);
  p.batch = static_cast<int32_t>(q[0]);
  p.q_len = static_cast<int32_t>(q[1]);
  p.num_tokens = p.batch * p.q_len;
  p.num_heads = static_cast<int32_t>(q[2]);
  p.d_ckv = static_cast<int32_t>(q[3]);
  p.d_kpe = static_cast<int32_t>(d_kpe);
  p.q_nope = q_nope.untyped_data();
  p.q_pe = q_pe.untyped_data();
  return ffi::Error::Success();
}

ffi::Error ParseIndices(const Checker& check, const ffi::RemainingArgs& args, DecodeParams& p) {
  const ffi::AnyBuffer seq_lens = *args.get<ffi::AnyBuffer>(kSeqLens);
  MLA_RETURN_IF_ERROR(check.Tensor("seq_lens", seq_lens, ffi::S32, {p.batch}));
  p.seq_lens = seq_lens.typed_data<int32_t>();
  return ParsePlace(check, args, kPageTable, kLayer, kPageBegin, p);
}

ffi::Error ParseOutputs(const Checker& check, const ffi::RemainingRets& rets, DecodeParams& p) {
  if (rets.size() != kNumOutputs && rets.size() != kScratch + 1) {
    return check.Fail("results", "out, lse and optional scratch", std::to_string(rets.size()));
  }
  ffi::Result<ffi::AnyBuffer> out = *rets.get<ffi::AnyBuffer>(kOut);
  ffi::Result<ffi::AnyBuffer> lse = *rets.get<ffi::AnyBuffer>(kLse);
  MLA_RETURN_IF_ERROR(
      check.Tensor("out", *out, ToFfi(p.dtype), {p.batch, p.q_len, p.num_heads, p.d_ckv}));
  MLA_RETURN_IF_ERROR(check.Tensor("lse", *lse, ffi::F32, {p.batch, p.q_len, p.num_heads}));
  p.out = out->untyped_data();
  p.lse = lse->typed_data<float>();
  return rets.size() > kScratch ? ParseScratch(check, rets, kScratch, p) : ffi::Error::Success();
}

ffi::Error Parse(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                 const DecodeAttrs& attrs, DecodeParams& p) {
  const Checker check(kTarget);
  if (args.size() <= kNumFixed) {
    return check.Fail("operands", "6 tensors and one packed or two split pools",
                      std::to_string(args.size()));
  }
  MLA_RETURN_IF_ERROR(ParseQueries(check, args, p));
  MLA_RETURN_IF_ERROR(ParseIndices(check, args, p));
  MLA_RETURN_IF_ERROR(ParseOutputs(check, rets, p));
  MLA_RETURN_IF_ERROR(SetAttrs(check, attrs, p));
  const size_t first_pool = kNumFixed + NumScales(p, attrs.has_q_scale);
  if (args.size() <= first_pool) {
    return check.Fail("operands", "scales and pools", std::to_string(args.size()));
  }
  MLA_RETURN_IF_ERROR(ParseScales(check, args, kNumFixed, attrs.has_q_scale, p));
  const auto pool = ParseKvPool(check, args, first_pool, SpecOf(p, attrs.has_layer));
  if (!pool) return pool.error();
  SetPool(*pool, attrs.max_seq_len, p);
  return ffi::Error::Success();
}

}  // namespace

ffi::ErrorOr<DecodeParams> ParseDecode(const ffi::RemainingArgs& args,
                                       const ffi::RemainingRets& rets, const DecodeAttrs& attrs) {
  DecodeParams params = {};
  if (ffi::Error error = Parse(args, rets, attrs, params); error.failure()) {
    return ffi::Unexpected(error);
  }
  return params;
}

ffi::Error SetAttrs(const Checker& check, const DecodeAttrs& attrs, DecodeParams& p) {
  MLA_RETURN_IF_ERROR(check.FitsInt32("num_splits", attrs.num_splits));
  p.sm_scale = attrs.sm_scale;
  p.causal = attrs.causal;
  p.batch_invariant = attrs.batch_invariant;
  p.num_splits = static_cast<int32_t>(attrs.num_splits);
  const auto format = ParseKvFormat(check, attrs.kv_format);
  if (!format) return format.error();
  p.kv_format = *format;
  return ffi::Error::Success();
}

size_t NumScales(const DecodeParams& p, bool has_q_scale) {
  return (HasScale(p.kv_format) ? 1 : 0) + (has_q_scale ? 1 : 0);
}

ffi::Error ParseScales(const Checker& check, const ffi::RemainingArgs& args, size_t first,
                       bool has_q_scale, DecodeParams& p) {
  if (HasScale(p.kv_format)) MLA_RETURN_IF_ERROR(ParseKvScale(check, args, first++, p));
  if (!has_q_scale) return ffi::Error::Success();
  if (p.kv_format == KvFormat::kPlain) return check.Fail("q_scale", "an FP8 cache", "another");
  const ffi::AnyBuffer q_scale = *args.get<ffi::AnyBuffer>(first);
  MLA_RETURN_IF_ERROR(check.OneOrEach("q_scale", q_scale, p.batch, 1));
  p.q_scale = q_scale.typed_data<float>();
  p.q_scale_stride = q_scale.dimensions()[0] == 1 ? 0 : 1;
  return ffi::Error::Success();
}

void SetPool(const KvPool& pool, int64_t max_seq_len, DecodeParams& p) {
  p.ckv = ReadOnly(pool.ckv);
  p.kpe = ReadOnly(pool.kpe);
  p.num_layers = pool.num_layers;
  p.num_pages = pool.num_pages;
  p.page_size = pool.page_size;
  p.max_seq_len = BoundOfLengths(p.max_pages_per_seq, p.page_size, max_seq_len);
}

ffi::Error ParseScratch(const Checker& check, const ffi::RemainingRets& rets, size_t result_idx,
                        DecodeParams& p) {
  ffi::Result<ffi::AnyBuffer> scratch = *rets.get<ffi::AnyBuffer>(result_idx);
  if (scratch->element_type() != ffi::U8) {
    return check.Fail("scratch", "uint8",
                      FormatTensor(scratch->element_type(), scratch->dimensions()));
  }
  p.scratch = scratch->untyped_data();
  p.scratch_bytes = static_cast<int64_t>(scratch->size_bytes());
  return ffi::Error::Success();
}

}  // namespace jax_mla::decode
