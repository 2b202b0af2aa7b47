#include "append/binding.h"

#include <string>

namespace jax_mla::append {
namespace ffi = xla::ffi;

namespace {

constexpr std::string_view kTarget = "jax_mla_append";

// Positions of the operands. Only a ragged call has cu_q_lens; the operands behind it then come one
// place later.
enum Operand : size_t { kCkv, kKpe, kPageTable, kPositions, kLayer, kPageBegin, kNumFixed };
constexpr size_t kCuQLens = kLayer;

// New rows are numbers, or e4m3 codes.
ffi::Error CheckRowElement(const Checker& check, const ffi::AnyBuffer& ckv) {
  if (ckv.element_type() == ToFfi(DType::kE4m3)) return ffi::Error::Success();
  return check.Float("ckv", ckv);
}

ffi::Error ParseTokens(const Checker& check, const ffi::RemainingArgs& args, AppendParams& p) {
  const ffi::AnyBuffer ckv = *args.get<ffi::AnyBuffer>(kCkv);
  const ffi::AnyBuffer kpe = *args.get<ffi::AnyBuffer>(kKpe);
  const ffi::AnyBuffer positions = *args.get<ffi::AnyBuffer>(kPositions);
  MLA_RETURN_IF_ERROR(CheckRowElement(check, ckv));
  MLA_RETURN_IF_ERROR(check.Rank("ckv", ckv, 3));
  const Dims dims = ckv.dimensions();
  MLA_RETURN_IF_ERROR(check.Tensor("kpe", kpe, ckv.element_type(), {dims[0], dims[1], kAnyDim}));
  MLA_RETURN_IF_ERROR(check.Tensor("positions", positions, ffi::S32, {dims[0], dims[1]}));
  for (int64_t dim : {dims[0], dims[1], dims[0] * dims[1]}) {
    MLA_RETURN_IF_ERROR(check.FitsInt32("ckv", dim));
  }
  p.batch = static_cast<int32_t>(dims[0]);
  p.q_len = static_cast<int32_t>(dims[1]);
  p.num_tokens = p.batch * p.q_len;
  return ffi::Error::Success();
}

ffi::Error ParseRaggedTokens(const Checker& check, const ffi::RemainingArgs& args,
                             AppendParams& p) {
  const ffi::AnyBuffer ckv = *args.get<ffi::AnyBuffer>(kCkv);
  const ffi::AnyBuffer kpe = *args.get<ffi::AnyBuffer>(kKpe);
  const ffi::AnyBuffer page_table = *args.get<ffi::AnyBuffer>(kPageTable);
  const ffi::AnyBuffer positions = *args.get<ffi::AnyBuffer>(kPositions);
  const ffi::AnyBuffer cu_q_lens = *args.get<ffi::AnyBuffer>(kCuQLens);
  MLA_RETURN_IF_ERROR(CheckRowElement(check, ckv));
  const int64_t num_tokens = ckv.dimensions()[0];
  MLA_RETURN_IF_ERROR(check.Tensor("kpe", kpe, ckv.element_type(), {num_tokens, kAnyDim}));
  MLA_RETURN_IF_ERROR(check.Tensor("positions", positions, ffi::S32, {num_tokens}));
  MLA_RETURN_IF_ERROR(check.Rank("page_table", page_table, 2));
  const int64_t batch = page_table.dimensions()[0];
  MLA_RETURN_IF_ERROR(check.Tensor("cu_q_lens", cu_q_lens, ffi::S32, {batch + 1}));
  MLA_RETURN_IF_ERROR(check.FitsInt32("ckv", num_tokens));
  MLA_RETURN_IF_ERROR(check.FitsInt32("page_table", batch));
  p.batch = static_cast<int32_t>(batch);
  p.num_tokens = static_cast<int32_t>(num_tokens);
  p.cu_q_lens = cu_q_lens.typed_data<int32_t>();
  return ffi::Error::Success();
}

ffi::Error ParseRows(const Checker& check, const ffi::RemainingArgs& args, AppendParams& p) {
  const ffi::AnyBuffer ckv = *args.get<ffi::AnyBuffer>(kCkv);
  const ffi::AnyBuffer kpe = *args.get<ffi::AnyBuffer>(kKpe);
  for (int64_t dim : {ckv.dimensions().back(), kpe.dimensions().back()}) {
    MLA_RETURN_IF_ERROR(check.FitsInt32("ckv", dim));
  }
  p.dtype = FromFfi(ckv.element_type()).value_or(DType::kE4m3);
  p.d_ckv = static_cast<int32_t>(ckv.dimensions().back());
  p.d_kpe = static_cast<int32_t>(kpe.dimensions().back());
  p.ckv = ckv.untyped_data();
  p.kpe = kpe.untyped_data();
  p.positions = args.get<ffi::AnyBuffer>(kPositions)->typed_data<int32_t>();
  return ffi::Error::Success();
}

// The rotary part of the queries, args[idx], and where it goes, rets[0].
ffi::Error ParseQuery(const Checker& check, const ffi::RemainingArgs& args, size_t idx,
                      const ffi::RemainingRets& rets, AppendParams& p) {
  const ffi::AnyBuffer q_pe = *args.get<ffi::AnyBuffer>(idx);
  const Dims dims = q_pe.dimensions();
  const int64_t num_heads = dims.size() < 2 ? 0 : dims[dims.size() - 2];
  if (p.rope_table == nullptr) return check.Fail("operands", "rope_table with q_pe", "none");
  MLA_RETURN_IF_ERROR(check.FitsInt32("q_pe", num_heads));
  MLA_RETURN_IF_ERROR(
      p.cu_q_lens == nullptr
          ? check.Tensor("q_pe", q_pe, ToFfi(p.dtype), {p.batch, p.q_len, kAnyDim, p.d_kpe})
          : check.Tensor("q_pe", q_pe, ToFfi(p.dtype), {p.num_tokens, kAnyDim, p.d_kpe}));
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
  const bool is_ragged =
      args.size() > kCkv && args.get<ffi::AnyBuffer>(kCkv)->dimensions().size() == 2;
  const auto format = ParseKvFormat(check, attrs.kv_format);
  if (!format) return format.error();
  p.kv_format = *format;
  const size_t shift = is_ragged ? 1 : 0;
  const size_t kv_scale = kNumFixed + shift;
  const size_t first_transform = kv_scale + (HasScale(p.kv_format) ? 1 : 0);
  const Transforms transforms{attrs.has_norm, attrs.norm_eps, attrs.has_rope,
                              attrs.rope_interleaved};
  const size_t q_pe = first_transform + transforms.num_operands();
  const size_t first_pool = q_pe + (attrs.has_q_pe ? 1 : 0);
  if (args.size() <= first_pool) {
    return check.Fail("operands",
                      std::to_string(first_pool) + " tensors and one packed or two split pools",
                      std::to_string(args.size()));
  }
  MLA_RETURN_IF_ERROR(is_ragged ? ParseRaggedTokens(check, args, p) : ParseTokens(check, args, p));
  MLA_RETURN_IF_ERROR(ParseRows(check, args, p));
  MLA_RETURN_IF_ERROR(ParsePlace(check, args, kPageTable, kLayer + shift, kPageBegin + shift, p));
  if (HasScale(p.kv_format)) MLA_RETURN_IF_ERROR(ParseKvScale(check, args, kv_scale, p));
  MLA_RETURN_IF_ERROR(ParseTransforms(check, args, first_transform, transforms, p));
  if (attrs.has_q_pe) MLA_RETURN_IF_ERROR(ParseQuery(check, args, q_pe, rets, p));
  MLA_RETURN_IF_ERROR(CheckRowType(check, p));
  const auto pool = ParseKvPool(check, args, first_pool, SpecOf(p, attrs.has_layer));
  if (!pool) return pool.error();
  MLA_RETURN_IF_ERROR(CheckInPlace(check, args, first_pool, rets, attrs.has_q_pe ? 1 : 0));
  SetPool(*pool, p);
  return ffi::Error::Success();
}

}  // namespace

ffi::ErrorOr<AppendParams> ParseAppend(const ffi::RemainingArgs& args,
                                       const ffi::RemainingRets& rets, const AppendAttrs& attrs) {
  AppendParams params = {};
  if (ffi::Error error = Parse(args, rets, attrs, params); error.failure())
    return ffi::Unexpected(error);
  return params;
}

ffi::Error ParseTransforms(const Checker& check, const ffi::RemainingArgs& args, size_t first,
                           const Transforms& transforms, AppendParams& p) {
  if (transforms.has_norm) {
    const ffi::AnyBuffer weight = *args.get<ffi::AnyBuffer>(first++);
    MLA_RETURN_IF_ERROR(check.Tensor("norm_weight", weight, ffi::F32, {p.d_ckv}));
    p.norm_weight = weight.typed_data<float>();
    p.norm_eps = transforms.norm_eps;
  }
  if (!transforms.has_rope) return ffi::Error::Success();
  const ffi::AnyBuffer table = *args.get<ffi::AnyBuffer>(first);
  MLA_RETURN_IF_ERROR(check.Tensor("rope_table", table, ffi::F32, {kAnyDim, p.d_kpe}));
  const int64_t num_positions = table.dimensions()[0];
  MLA_RETURN_IF_ERROR(check.FitsInt32("rope_table", num_positions));
  if (num_positions == 0 || p.d_kpe % 2 != 0) {
    return check.Fail("rope_table", "at least one position and an even width",
                      FormatTensor(table.element_type(), table.dimensions()));
  }
  p.rope_table = table.typed_data<float>();
  p.num_rope_positions = static_cast<int32_t>(num_positions);
  p.rope_interleaved = transforms.rope_interleaved;
  return ffi::Error::Success();
}

ffi::Error CheckRowType(const Checker& check, const AppendParams& p) {
  const bool has_transforms = p.norm_weight != nullptr || p.rope_table != nullptr;
  if (p.dtype != DType::kE4m3 || (p.kv_format == KvFormat::kE4m3 && !has_transforms)) {
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

ffi::Error CheckInPlace(const Checker& check, const ffi::RemainingArgs& args, size_t first_pool,
                        const ffi::RemainingRets& rets, size_t first_result) {
  const size_t num_pools = args.size() - first_pool;
  if (rets.size() < first_result + num_pools) {
    return check.Fail("results", std::to_string(first_result + num_pools),
                      std::to_string(rets.size()));
  }
  for (size_t i = 0; i < num_pools; ++i) {
    const ffi::AnyBuffer operand = *args.get<ffi::AnyBuffer>(first_pool + i);
    ffi::Result<ffi::AnyBuffer> result = *rets.get<ffi::AnyBuffer>(first_result + i);
    if (result->untyped_data() != operand.untyped_data()) {
      return ffi::Error::Internal(std::string(check.target()) + ": pool result " +
                                  std::to_string(i) +
                                  ": expected the operand's memory, got another buffer; the call "
                                  "needs operand_output_aliases");
    }
  }
  return ffi::Error::Success();
}

}  // namespace jax_mla::append
