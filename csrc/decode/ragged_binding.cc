#include "decode/ragged_binding.h"

#include <string>

#include "append/binding.h"
#include "core/kv_pool.h"
#include "decode/binding.h"

namespace jax_mla::decode {
namespace ffi = xla::ffi;

namespace {

constexpr std::string_view kTarget = "jax_mla_ragged";

// Positions of the operands and results. Only a ragged call has the operands of RaggedOperand;
// those of LastOperand come behind them, then the scales, the plan if there is one, and the pools.
enum Operand : size_t { kQNope, kQPe, kCkv, kKpe, kPageTable, kSeqLens, kNumCommon };
enum RaggedOperand : size_t { kCuQLens = kNumCommon, kNumSeqs, kNumRagged };
enum LastOperand : size_t { kLayer, kPageBegin, kNumLast };
enum Output : size_t { kOut, kLse, kNumOutputs };

// The rows of the step: queries, and what is written to the cache.
ffi::Error ParseTokens(const Checker& check, const ffi::RemainingArgs& args, RaggedParams& p) {
  const ffi::AnyBuffer q_nope = *args.get<ffi::AnyBuffer>(kQNope);
  const ffi::AnyBuffer q_pe = *args.get<ffi::AnyBuffer>(kQPe);
  const ffi::AnyBuffer ckv = *args.get<ffi::AnyBuffer>(kCkv);
  const ffi::AnyBuffer kpe = *args.get<ffi::AnyBuffer>(kKpe);
  MLA_RETURN_IF_ERROR(check.Float("q_nope", q_nope));
  MLA_RETURN_IF_ERROR(check.Rank("q_nope", q_nope, 3));
  const Dims q = q_nope.dimensions();
  const ffi::DataType dtype = q_nope.element_type();
  MLA_RETURN_IF_ERROR(check.Tensor("q_pe", q_pe, dtype, {q[0], q[1], kAnyDim}));
  const int64_t d_kpe = q_pe.dimensions()[2];
  const bool has_codes = ckv.element_type() == ToFfi(DType::kE4m3);
  const ffi::DataType row_dtype = has_codes ? ToFfi(DType::kE4m3) : dtype;
  MLA_RETURN_IF_ERROR(check.Tensor("ckv", ckv, row_dtype, {q[0], q[2]}));
  MLA_RETURN_IF_ERROR(check.Tensor("kpe", kpe, row_dtype, {q[0], d_kpe}));
  for (int64_t dim : {q[0], q[1], q[2], d_kpe, q[0] * q[1]}) {
    MLA_RETURN_IF_ERROR(check.FitsInt32("q_nope", dim));
  }
  p.decode.dtype = *FromFfi(dtype);
  p.append.dtype = has_codes ? DType::kE4m3 : p.decode.dtype;
  p.decode.num_tokens = p.append.num_tokens = static_cast<int32_t>(q[0]);
  p.decode.num_heads = static_cast<int32_t>(q[1]);
  p.decode.d_ckv = p.append.d_ckv = static_cast<int32_t>(q[2]);
  p.decode.d_kpe = p.append.d_kpe = static_cast<int32_t>(d_kpe);
  p.decode.q_nope = q_nope.untyped_data();
  p.decode.q_pe = q_pe.untyped_data();
  p.append.ckv = ckv.untyped_data();
  p.append.kpe = kpe.untyped_data();
  return ffi::Error::Success();
}

// How many sequences there are, and which of the tokens are theirs. `q_len` is 0 in a ragged call.
ffi::Error ParseSequences(const Checker& check, const ffi::RemainingArgs& args, int64_t q_len,
                          RaggedParams& p) {
  const ffi::AnyBuffer page_table = *args.get<ffi::AnyBuffer>(kPageTable);
  const ffi::AnyBuffer seq_lens = *args.get<ffi::AnyBuffer>(kSeqLens);
  MLA_RETURN_IF_ERROR(check.Rank("page_table", page_table, 2));
  const int64_t batch = page_table.dimensions()[0];
  MLA_RETURN_IF_ERROR(check.FitsInt32("page_table", batch));
  MLA_RETURN_IF_ERROR(check.FitsInt32("q_len", q_len));
  MLA_RETURN_IF_ERROR(check.Tensor("seq_lens", seq_lens, ffi::S32, {batch}));
  p.decode.batch = p.append.batch = static_cast<int32_t>(batch);
  p.decode.q_len = p.append.q_len = static_cast<int32_t>(q_len);
  p.decode.seq_lens = p.append.seq_lens = seq_lens.typed_data<int32_t>();
  if (q_len > 0) {
    if (batch * q_len == p.decode.num_tokens) return ffi::Error::Success();
    return check.Fail("q_nope", std::to_string(batch * q_len) + " tokens, q_len for each sequence",
                      std::to_string(p.decode.num_tokens));
  }
  const ffi::AnyBuffer cu_q_lens = *args.get<ffi::AnyBuffer>(kCuQLens);
  const ffi::AnyBuffer num_seqs = *args.get<ffi::AnyBuffer>(kNumSeqs);
  MLA_RETURN_IF_ERROR(check.Tensor("cu_q_lens", cu_q_lens, ffi::S32, {batch + 1}));
  MLA_RETURN_IF_ERROR(check.Tensor("num_seqs", num_seqs, ffi::S32, {1}));
  p.decode.cu_q_lens = p.append.cu_q_lens = cu_q_lens.typed_data<int32_t>();
  p.decode.num_seqs = p.append.num_seqs = num_seqs.typed_data<int32_t>();
  return ffi::Error::Success();
}

// The operands from args[first] on that say what the rows and queries go through first.
ffi::Error ParseTransforms(const Checker& check, const ffi::RemainingArgs& args, size_t first,
                           const append::Transforms& transforms, RaggedParams& p) {
  append::AppendParams& append = p.append;
  MLA_RETURN_IF_ERROR(append::ParseTransforms(check, args, first, transforms, append));
  if (!transforms.has_rope) return ffi::Error::Success();
  const ffi::AnyBuffer lens = *args.get<ffi::AnyBuffer>(first + transforms.num_operands());
  MLA_RETURN_IF_ERROR(check.Tensor("rope_lens", lens, ffi::S32, {append.batch}));
  append.rope_lens = lens.typed_data<int32_t>();
  append.q_pe = p.decode.q_pe;
  append.num_heads = p.decode.num_heads;
  return ffi::Error::Success();
}

ffi::Error ParseOutputs(const Checker& check, const ffi::RemainingRets& rets, size_t num_pools,
                        DecodeParams& p) {
  const size_t scratch = kNumOutputs + num_pools;
  if (rets.size() != scratch && rets.size() != scratch + 1) {
    return check.Fail("results", "out, lse, the pools and optional scratch",
                      std::to_string(rets.size()));
  }
  ffi::Result<ffi::AnyBuffer> out = *rets.get<ffi::AnyBuffer>(kOut);
  ffi::Result<ffi::AnyBuffer> lse = *rets.get<ffi::AnyBuffer>(kLse);
  MLA_RETURN_IF_ERROR(
      check.Tensor("out", *out, ToFfi(p.dtype), {p.num_tokens, p.num_heads, p.d_ckv}));
  MLA_RETURN_IF_ERROR(check.Tensor("lse", *lse, ffi::F32, {p.num_tokens, p.num_heads}));
  p.out = out->untyped_data();
  p.lse = lse->typed_data<float>();
  return rets.size() > scratch ? ParseScratch(check, rets, scratch, p) : ffi::Error::Success();
}

ffi::Error Parse(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                 const RaggedAttrs& attrs, RaggedParams& p) {
  const Checker check(kTarget);
  const size_t first_last = attrs.q_len > 0 ? size_t{kNumCommon} : size_t{kNumRagged};
  const auto format = ParseKvFormat(check, attrs.kv_format);
  if (!format) return format.error();
  p.decode.kv_format = p.append.kv_format = *format;
  const size_t first_scale = first_last + kNumLast;
  if (attrs.has_rope && attrs.has_q_scale) {
    return check.Fail("rope_table", "none with q_scale, whose queries are codes", "one");
  }
  const append::Transforms transforms{attrs.has_norm, attrs.norm_eps, attrs.has_rope,
                                      attrs.rope_interleaved};
  const size_t first_transform = first_scale + NumScales(p.decode, attrs.has_q_scale);
  const size_t plan =
      first_transform + transforms.num_operands() + (attrs.has_rope ? 1 : 0);  // rope_lens
  const size_t first_pool = plan + (attrs.has_plan ? 1 : 0);
  if (args.size() <= first_pool) {
    return check.Fail("operands",
                      std::to_string(first_pool) + " tensors and one packed or two split pools",
                      std::to_string(args.size()));
  }
  MLA_RETURN_IF_ERROR(ParseTokens(check, args, p));
  MLA_RETURN_IF_ERROR(ParseSequences(check, args, attrs.q_len, p));
  MLA_RETURN_IF_ERROR(ParseOutputs(check, rets, args.size() - first_pool, p.decode));
  MLA_RETURN_IF_ERROR(SetAttrs(check,
                               {.sm_scale = attrs.sm_scale,
                                .causal = true,
                                .num_splits = attrs.num_splits,
                                .batch_invariant = attrs.batch_invariant,
                                .backend = attrs.backend,
                                .has_layer = attrs.has_layer,
                                .max_seq_len = attrs.max_seq_len,
                                .kv_format = attrs.kv_format,
                                .has_q_scale = attrs.has_q_scale},
                               p.decode));
  MLA_RETURN_IF_ERROR(ParseScales(check, args, first_scale, attrs.has_q_scale, p.decode));
  MLA_RETURN_IF_ERROR(ParseTransforms(check, args, first_transform, transforms, p));
  MLA_RETURN_IF_ERROR(append::CheckRowType(check, p.append));
  if (attrs.has_plan) {
    const ffi::AnyBuffer buffer = *args.get<ffi::AnyBuffer>(plan);
    MLA_RETURN_IF_ERROR(check.Tensor("plan", buffer, ffi::U8, {kAnyDim}));
    p.plan = buffer.untyped_data();
    p.plan_bytes = buffer.dimensions()[0];
  }
  const size_t layer = first_last + kLayer, page_begin = first_last + kPageBegin;
  MLA_RETURN_IF_ERROR(ParsePlace(check, args, kPageTable, layer, page_begin, p.decode));
  const auto pool = ParseKvPool(check, args, first_pool, SpecOf(p.decode, attrs.has_layer));
  if (!pool) return pool.error();
  MLA_RETURN_IF_ERROR(append::CheckInPlace(check, args, first_pool, rets, kNumOutputs));
  SetPool(*pool, attrs.max_seq_len, p.decode);
  p.append.page_table = p.decode.page_table;
  p.append.layer = p.decode.layer;
  p.append.page_begin = p.decode.page_begin;
  p.append.max_pages_per_seq = p.decode.max_pages_per_seq;
  p.append.max_seq_len = p.decode.max_seq_len;
  p.append.kv_scale = p.decode.kv_scale;
  p.append.kv_scale_stride = p.decode.kv_scale_stride;
  append::SetPool(*pool, p.append);
  return ffi::Error::Success();
}

}  // namespace

ffi::ErrorOr<RaggedParams> ParseRagged(const ffi::RemainingArgs& args,
                                       const ffi::RemainingRets& rets, const RaggedAttrs& attrs) {
  RaggedParams params = {};
  if (ffi::Error error = Parse(args, rets, attrs, params); error.failure()) {
    return ffi::Unexpected(error);
  }
  return params;
}

}  // namespace jax_mla::decode
