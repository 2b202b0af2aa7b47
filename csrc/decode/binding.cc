#include "decode/binding.h"

#include <string>

#include "append/binding.h"
#include "core/kv_pool.h"
#include "core/operands.h"

namespace jax_mla::decode {
namespace ffi = xla::ffi;

namespace {

// Positions of the results.
enum Output : size_t { kOut, kLse, kNumOutputs };

// How many tokens there are, and which sequences they belong to.
ffi::Error ParseTokens(const Checker& check, Operands& operands, DecodeParams& p) {
  const bool is_ragged = operands.Has("cu_q_lens");
  const ffi::AnyBuffer q_nope = operands["q_nope"], page_table = operands["page_table"];
  MLA_RETURN_IF_ERROR(check.Float("q_nope", q_nope));
  MLA_RETURN_IF_ERROR(check.Rank("q_nope", q_nope, is_ragged ? 3 : 4));
  MLA_RETURN_IF_ERROR(check.Rank("page_table", page_table, 2));
  const Dims q = q_nope.dimensions();
  for (int64_t dim : q) MLA_RETURN_IF_ERROR(check.FitsInt32("q_nope", dim));
  const int64_t batch = is_ragged ? page_table.dimensions()[0] : q[0];
  const int64_t q_len = is_ragged ? 0 : q[1];
  const int64_t num_tokens = is_ragged ? q[0] : batch * q_len;
  MLA_RETURN_IF_ERROR(check.FitsInt32("page_table", batch));
  MLA_RETURN_IF_ERROR(check.FitsInt32("q_nope", num_tokens));
  p.batch = static_cast<int32_t>(batch);
  p.q_len = static_cast<int32_t>(q_len);
  p.num_tokens = static_cast<int32_t>(num_tokens);
  if (is_ragged) {
    MLA_RETURN_IF_ERROR(operands.Read("cu_q_lens", {batch + 1}, p.cu_q_lens));
    MLA_RETURN_IF_ERROR(operands.Read("num_seqs", {1}, p.num_seqs));
  }
  MLA_RETURN_IF_ERROR(operands.Read("seq_lens", {batch}, p.seq_lens));
  return ParsePlace(check, operands, p);
}

ffi::Error ParseQueries(const Checker& check, Operands& operands, DecodeParams& p) {
  const ffi::AnyBuffer q_nope = operands["q_nope"];
  const Dims q = q_nope.dimensions();
  const int64_t num_heads = q[q.size() - 2];
  if (operands.Has("q_pe")) {
    const ffi::AnyBuffer q_pe = operands["q_pe"];
    const ffi::DataType dtype = q_nope.element_type();
    MLA_RETURN_IF_ERROR(check.OfTokens("q_pe", q_pe, dtype, p, {num_heads, kAnyDim}));
    const int64_t d_kpe = q_pe.dimensions().back();
    MLA_RETURN_IF_ERROR(check.FitsInt32("q_pe", d_kpe));
    p.d_kpe = static_cast<int32_t>(d_kpe);
    p.q_pe = q_pe.untyped_data();
  }
  MLA_RETURN_IF_ERROR(check.FitsInt32("q_nope", q[q.size() - 3] * num_heads));  // of a sequence
  p.dtype = *FromFfi(q_nope.element_type());
  p.num_heads = static_cast<int32_t>(num_heads);
  p.d_ckv = static_cast<int32_t>(q.back());
  p.q_nope = q_nope.untyped_data();
  return ffi::Error::Success();
}

ffi::Error ParseScales(const Checker& check, Operands& operands, DecodeParams& p) {
  if (HasScale(p.kv_format)) MLA_RETURN_IF_ERROR(ParseKvScale(check, operands, p));
  if (!operands.Has("q_scale")) return ffi::Error::Success();
  if (p.kv_format == KvFormat::kPlain) return check.Fail("q_scale", "an FP8 cache", "another");
  const ffi::AnyBuffer q_scale = operands["q_scale"];
  MLA_RETURN_IF_ERROR(check.OneOrEach("q_scale", q_scale, p.batch, 1));
  p.q_scale = q_scale.typed_data<float>();
  p.q_scale_stride = q_scale.dimensions()[0] == 1 ? 0 : 1;
  return ffi::Error::Success();
}

ffi::Error SetAttrs(const Checker& check, const DecodeAttrs& attrs, DecodeParams& p) {
  MLA_RETURN_IF_ERROR(check.FitsInt32("num_splits", attrs.num_splits));
  p.sm_scale = attrs.sm_scale;
  p.causal = attrs.causal;
  p.batch_invariant = attrs.batch_invariant;
  p.num_splits = static_cast<int32_t>(attrs.num_splits);
  if (attrs.sliding_window < 0 || attrs.sliding_window > kMaxWindow) {
    return check.Fail("sliding_window", "0 to 2^30", std::to_string(attrs.sliding_window));
  }
  p.sliding_window = static_cast<int32_t>(attrs.sliding_window);
  p.soft_cap = attrs.soft_cap;
  const auto format = ParseKvFormat(check, attrs.kv_format);
  if (!format) return format.error();
  p.kv_format = *format;
  return ffi::Error::Success();
}

void SetPool(const KvPool& pool, int64_t max_seq_len, DecodeParams& p) {
  p.ckv = ReadOnly(pool.ckv);
  p.kpe = ReadOnly(pool.kpe);
  p.num_layers = pool.num_layers;
  p.num_pages = pool.num_pages;
  p.page_size = pool.page_size;
  // Comes last, because it depends on the page table and on the page size.
  p.max_seq_len = BoundOfLengths(p.max_pages_per_seq, p.page_size, max_seq_len);
}

// All operands that both targets have.
ffi::ErrorOr<KvPool> ParseAttention(const Checker& check, Operands& operands,
                                    const DecodeAttrs& attrs, DecodeParams& p) {
  auto parse = [&]() -> ffi::Error {
    MLA_RETURN_IF_ERROR(SetAttrs(check, attrs, p));
    MLA_RETURN_IF_ERROR(ParseTokens(check, operands, p));
    MLA_RETURN_IF_ERROR(ParseQueries(check, operands, p));
    return ParseScales(check, operands, p);
  };
  if (ffi::Error error = parse(); error.failure()) return ffi::Unexpected(error);
  auto pool = ParseKvPool(check, operands, SpecOf(p, attrs.has_layer));
  if (pool) SetPool(*pool, attrs.max_seq_len, p);
  return pool;
}

ffi::Error ParseOutputs(const Checker& check, const ffi::RemainingRets& rets, size_t num_pools,
                        DecodeParams& p) {
  const size_t scratch_idx = kNumOutputs + num_pools;
  if (rets.size() != scratch_idx && rets.size() != scratch_idx + 1) {
    return check.Fail("results",
                      num_pools == 0 ? "out, lse and optional scratch"
                                     : "out, lse, the pools and optional scratch",
                      std::to_string(rets.size()));
  }
  ffi::Result<ffi::AnyBuffer> out = *rets.get<ffi::AnyBuffer>(kOut);
  ffi::Result<ffi::AnyBuffer> lse = *rets.get<ffi::AnyBuffer>(kLse);
  MLA_RETURN_IF_ERROR(check.OfTokens("out", *out, ToFfi(p.dtype), p, {p.num_heads, p.d_ckv}));
  MLA_RETURN_IF_ERROR(check.OfTokens("lse", *lse, ffi::F32, p, {p.num_heads}));
  p.out = out->untyped_data();
  p.lse = lse->typed_data<float>();
  if (rets.size() == scratch_idx) return ffi::Error::Success();
  ffi::Result<ffi::AnyBuffer> scratch = *rets.get<ffi::AnyBuffer>(scratch_idx);
  if (scratch->element_type() != ffi::U8) {
    return check.Fail("scratch", "uint8",
                      FormatTensor(scratch->element_type(), scratch->dimensions()));
  }
  p.scratch = scratch->untyped_data();
  p.scratch_bytes = static_cast<int64_t>(scratch->size_bytes());
  return ffi::Error::Success();
}

// The new rows, and what they and the queries go through first.
ffi::Error ParseNewRows(const Checker& check, Operands& operands, const DecodeAttrs& attrs,
                        const KvPool& pool, RaggedParams& params) {
  const DecodeParams& p = params.decode;
  append::AppendParams& append = params.append;
  append = {.page_table = p.page_table,
            .layer = p.layer,
            .page_begin = p.page_begin,
            .batch = p.batch,
            .q_len = p.q_len,
            .max_pages_per_seq = p.max_pages_per_seq,
            .seq_lens = p.seq_lens,
            .cu_q_lens = p.cu_q_lens,
            .num_seqs = p.num_seqs,
            .num_tokens = p.num_tokens,
            .max_seq_len = p.max_seq_len,
            .kv_format = p.kv_format,
            .kv_scale_stride = p.kv_scale_stride,
            .kv_scale = p.kv_scale,
            .norm_eps = attrs.norm_eps,
            .rope_interleaved = attrs.rope_interleaved};
  append::SetPool(pool, append);
  const bool has_codes = operands["ckv"].element_type() == ToFfi(DType::kE4m3);
  MLA_RETURN_IF_ERROR(append::ParseRows(
      check, operands,
      {.dtype = ToFfi(has_codes ? DType::kE4m3 : p.dtype), .d_ckv = p.d_ckv, .d_kpe = p.d_kpe},
      append));
  if (append.rope_table == nullptr) return ffi::Error::Success();
  if (p.q_scale != nullptr) {
    return check.Fail("rope_table", "none with q_scale, whose queries are codes", "one");
  }
  append.q_pe = p.q_pe;
  append.num_heads = p.num_heads;
  return operands.Read("rope_lens", {p.batch}, append.rope_lens);
}

ffi::Error Parse(const Checker& check, const ffi::RemainingArgs& args,
                 const ffi::RemainingRets& rets, const DecodeAttrs& attrs, DecodeParams& p) {
  auto operands = Operands::Of(check, args, attrs.operands);
  if (!operands) return operands.error();
  if (operands->Has("cu_q_lens")) return check.Fail("cu_q_lens", "new rows with it", "none");
  const auto pool = ParseAttention(check, *operands, attrs, p);
  if (!pool) return pool.error();
  MLA_RETURN_IF_ERROR(ParseOutputs(check, rets, 0, p));
  return operands->CheckUsed();
}

ffi::Error Parse(const Checker& check, const ffi::RemainingArgs& args,
                 const ffi::RemainingRets& rets, const DecodeAttrs& attrs, RaggedParams& p) {
  auto operands = Operands::Of(check, args, attrs.operands);
  if (!operands) return operands.error();
  if (!attrs.causal) return check.Fail("causal", "true with new rows", "false");
  const auto pool = ParseAttention(check, *operands, attrs, p.decode);
  if (!pool) return pool.error();
  MLA_RETURN_IF_ERROR(check.FitsInt32("q_nope", int64_t{p.decode.num_tokens} * p.decode.num_heads));
  MLA_RETURN_IF_ERROR(ParseOutputs(check, rets, pool->is_split ? 2 : 1, p.decode));
  MLA_RETURN_IF_ERROR(CheckInPlace(check, *pool, rets, kNumOutputs));
  MLA_RETURN_IF_ERROR(ParseNewRows(check, *operands, attrs, *pool, p));
  if (operands->Has("plan")) {
    const ffi::AnyBuffer plan = (*operands)["plan"];
    MLA_RETURN_IF_ERROR(check.Tensor("plan", plan, ffi::U8, {kAnyDim}));
    p.plan = plan.untyped_data();
    p.plan_bytes = plan.dimensions()[0];
  }
  return operands->CheckUsed();
}

template <typename Params>
ffi::ErrorOr<Params> ParseCall(std::string_view target, const ffi::RemainingArgs& args,
                               const ffi::RemainingRets& rets, const DecodeAttrs& attrs) {
  Params params = {};
  if (ffi::Error error = Parse(Checker(target), args, rets, attrs, params); error.failure()) {
    return ffi::Unexpected(error);
  }
  return params;
}

}  // namespace

ffi::ErrorOr<DecodeParams> ParseDecode(const ffi::RemainingArgs& args,
                                       const ffi::RemainingRets& rets, const DecodeAttrs& attrs) {
  return ParseCall<DecodeParams>("jax_mla_decode", args, rets, attrs);
}

ffi::ErrorOr<RaggedParams> ParseRagged(const ffi::RemainingArgs& args,
                                       const ffi::RemainingRets& rets, const DecodeAttrs& attrs) {
  return ParseCall<RaggedParams>("jax_mla_ragged", args, rets, attrs);
}

}  // namespace jax_mla::decode
