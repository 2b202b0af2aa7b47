#include "append/binding.h"

#include <string>

namespace jax_mla::append {
namespace ffi = xla::ffi;

namespace {

constexpr std::string_view kTarget = "jax_mla_append";

// How many tokens there are, and which sequences they belong to.
ffi::Error ParseTokens(const Checker& check, Operands& operands, AppendParams& p) {
  const bool is_ragged = operands.Has("cu_q_lens");
  const ffi::AnyBuffer ckv = operands["ckv"], page_table = operands["page_table"];
  MLA_RETURN_IF_ERROR(check.Rank("ckv", ckv, is_ragged ? 2 : 3));
  MLA_RETURN_IF_ERROR(check.Rank("page_table", page_table, 2));
  const Dims dims = ckv.dimensions();
  const int64_t batch = is_ragged ? page_table.dimensions()[0] : dims[0];
  const int64_t q_len = is_ragged ? 0 : dims[1];
  const int64_t num_tokens = is_ragged ? dims[0] : batch * q_len;
  MLA_RETURN_IF_ERROR(check.FitsInt32("page_table", batch));
  for (int64_t dim : {q_len, num_tokens}) MLA_RETURN_IF_ERROR(check.FitsInt32("ckv", dim));
  p.batch = static_cast<int32_t>(batch);
  p.q_len = static_cast<int32_t>(q_len);
  p.num_tokens = static_cast<int32_t>(num_tokens);
  if (is_ragged) MLA_RETURN_IF_ERROR(operands.Read("cu_q_lens", {batch + 1}, p.cu_q_lens));
  const ffi::AnyBuffer positions = operands["positions"];
  MLA_RETURN_IF_ERROR(check.OfTokens("positions", positions, ffi::S32, p, {}));
  p.positions = positions.typed_data<int32_t>();
  return ffi::Error::Success();
}

ffi::Error ParseTransforms(const Checker& check, Operands& operands, AppendParams& p) {
  if (operands.Has("norm_weight")) {
    MLA_RETURN_IF_ERROR(operands.Read("norm_weight", {p.d_ckv}, p.norm_weight));
  }
  if (!operands.Has("rope_table")) return ffi::Error::Success();
  MLA_RETURN_IF_ERROR(operands.Read("rope_table", {kAnyDim, p.d_kpe}, p.rope_table));
  const int64_t num_positions = operands["rope_table"].dimensions()[0];
  MLA_RETURN_IF_ERROR(check.FitsInt32("rope_table", num_positions));
  if (num_positions == 0 || p.d_kpe == 0 || p.d_kpe % 2 != 0) {
    return check.Fail("rope_table", "at least one position and an even width",
                      FormatTensor(ffi::F32, operands["rope_table"].dimensions()));
  }
  p.num_rope_positions = static_cast<int32_t>(num_positions);
  return ffi::Error::Success();
}

// The rotary part of the queries, and where it goes, rets[0].
ffi::Error ParseQuery(const Checker& check, Operands& operands, const ffi::RemainingRets& rets,
                      AppendParams& p) {
  const ffi::AnyBuffer q_pe = operands["q_pe"];
  if (p.rope_table == nullptr) return check.Fail("operands", "rope_table with q_pe", "none");
  MLA_RETURN_IF_ERROR(check.OfTokens("q_pe", q_pe, ToFfi(p.dtype), p, {kAnyDim, p.d_kpe}));
  const int64_t num_heads = q_pe.dimensions()[q_pe.dimensions().size() - 2];
  MLA_RETURN_IF_ERROR(check.FitsInt32("q_pe", num_heads));
  if (rets.size() == 0) return check.Fail("results", "q_pe and the pools", "none");
  ffi::Result<ffi::AnyBuffer> rotated = *rets.get<ffi::AnyBuffer>(0);
  if (rotated->element_type() != q_pe.element_type() ||
      rotated->element_count() != q_pe.element_count()) {
    return check.Fail("results", "q_pe as in the operands",
                      FormatTensor(rotated->element_type(), rotated->dimensions()));
  }
  p.q_pe = q_pe.untyped_data();
  p.rotated_q_pe = rotated->untyped_data();
  p.num_heads = static_cast<int32_t>(num_heads);
  return ffi::Error::Success();
}

ffi::Error Parse(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                 const AppendAttrs& attrs, AppendParams& p) {
  const Checker check(kTarget);
  auto operands = Operands::Of(check, args, attrs.operands);
  if (!operands) return operands.error();
  const auto format = ParseKvFormat(check, attrs.kv_format);
  if (!format) return format.error();
  p.kv_format = *format;
  p.norm_eps = attrs.norm_eps;
  p.rope_interleaved = attrs.rope_interleaved;
  MLA_RETURN_IF_ERROR(ParseTokens(check, *operands, p));
  MLA_RETURN_IF_ERROR(ParseRows(check, *operands, {.dtype = (*operands)["ckv"].element_type()}, p));
  MLA_RETURN_IF_ERROR(ParsePlace(check, *operands, p));
  if (HasScale(p.kv_format)) MLA_RETURN_IF_ERROR(ParseKvScale(check, *operands, p));
  const bool has_query = operands->Has("q_pe");
  if (has_query) MLA_RETURN_IF_ERROR(ParseQuery(check, *operands, rets, p));
  const auto pool = ParseKvPool(check, *operands, SpecOf(p, attrs.has_layer));
  if (!pool) return pool.error();
  MLA_RETURN_IF_ERROR(CheckInPlace(check, *pool, rets, has_query ? 1 : 0));
  SetPool(*pool, p);
  return operands->CheckUsed();
}

}  // namespace

ffi::ErrorOr<AppendParams> ParseAppend(const ffi::RemainingArgs& args,
                                       const ffi::RemainingRets& rets, const AppendAttrs& attrs) {
  AppendParams params = {};
  if (ffi::Error error = Parse(args, rets, attrs, params); error.failure())
    return ffi::Unexpected(error);
  return params;
}

ffi::Error ParseRows(const Checker& check, Operands& operands, const RowSpec& spec,
                     AppendParams& p) {
  const ffi::AnyBuffer ckv = operands["ckv"];
  const bool has_codes = spec.dtype == ToFfi(DType::kE4m3);
  if (!has_codes) MLA_RETURN_IF_ERROR(check.Float("ckv", ckv));
  MLA_RETURN_IF_ERROR(check.OfTokens("ckv", ckv, spec.dtype, p, {spec.d_ckv}));
  const int64_t d_ckv = ckv.dimensions().back();
  MLA_RETURN_IF_ERROR(check.FitsInt32("ckv", d_ckv));
  p.dtype = FromFfi(spec.dtype).value_or(DType::kE4m3);
  p.d_ckv = static_cast<int32_t>(d_ckv);
  p.ckv = ckv.untyped_data();
  const bool may_lack_kpe = spec.d_kpe == kAnyDim || spec.d_kpe == 0;
  if (operands.Has("kpe") || !may_lack_kpe) {
    const ffi::AnyBuffer kpe = operands["kpe"];
    MLA_RETURN_IF_ERROR(check.OfTokens("kpe", kpe, spec.dtype, p, {spec.d_kpe}));
    const int64_t d_kpe = kpe.dimensions().back();
    MLA_RETURN_IF_ERROR(check.FitsInt32("kpe", d_kpe));
    p.d_kpe = static_cast<int32_t>(d_kpe);
    p.kpe = kpe.untyped_data();
  }
  MLA_RETURN_IF_ERROR(ParseTransforms(check, operands, p));
  const bool has_transforms = p.norm_weight != nullptr || p.rope_table != nullptr;
  if (!has_codes || (p.kv_format == KvFormat::kE4m3 && !has_transforms)) {
    return ffi::Error::Success();
  }
  return check.Fail("ckv", "bfloat16, float16 or float32", DTypeName(p.dtype));
}

void SetPool(const KvPool& pool, AppendParams& p) {
  p.ckv_pages = pool.ckv;
  p.kpe_pages = pool.kpe;
  p.num_layers = pool.num_layers;
  p.num_pages = pool.num_pages;
  p.page_size = pool.page_size;
}

}  // namespace jax_mla::append
