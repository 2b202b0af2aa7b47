#include "index_append/binding.h"

#include <string>

#include "core/index_pool.h"
#include "core/kv_pool.h"
#include "core/operands.h"

namespace jax_mla::index_append {
namespace ffi = xla::ffi;

namespace {

constexpr std::string_view kTarget = "jax_mla_index_append";

ffi::Error ParseTokens(const Checker& check, Operands& operands, IndexAppendParams& p) {
  const bool is_ragged = operands.Has("cu_q_lens");
  const ffi::AnyBuffer k = operands["k"], page_table = operands["page_table"];
  MLA_RETURN_IF_ERROR(check.Float("k", k));
  MLA_RETURN_IF_ERROR(check.Rank("k", k, is_ragged ? 2 : 3));
  MLA_RETURN_IF_ERROR(check.Rank("page_table", page_table, 2));
  const Dims dims = k.dimensions();
  const int64_t batch = is_ragged ? page_table.dimensions()[0] : dims[0];
  const int64_t num_tokens = is_ragged ? dims[0] : dims[0] * dims[1];
  for (int64_t dim : dims) MLA_RETURN_IF_ERROR(check.FitsInt32("k", dim));
  for (int64_t dim : {batch, num_tokens}) MLA_RETURN_IF_ERROR(check.FitsInt32("k", dim));
  p.k = k.untyped_data();
  p.dtype = *FromFfi(k.element_type());
  p.batch = static_cast<int32_t>(batch);
  p.q_len = is_ragged ? 0 : static_cast<int32_t>(dims[1]);
  p.num_tokens = static_cast<int32_t>(num_tokens);
  p.d = static_cast<int32_t>(dims.back());
  if (!is_ragged) return operands.Read("positions", {dims[0], dims[1]}, p.positions);
  MLA_RETURN_IF_ERROR(operands.Read("cu_q_lens", {batch + 1}, p.cu_q_lens));
  return operands.Read("positions", {dims[0]}, p.positions);
}

ffi::Error ParseTransforms(const Checker& check, Operands& operands, const IndexAppendAttrs& attrs,
                           IndexAppendParams& p) {
  if (operands.Has("norm_weight")) {
    MLA_RETURN_IF_ERROR(operands.Read("norm_weight", {p.d}, p.norm_weight));
    p.norm_eps = attrs.norm_eps;
  }
  if (operands.Has("norm_bias")) {
    if (p.norm_weight == nullptr) {
      return check.Fail("norm_bias", "none without norm_weight", "one");
    }
    MLA_RETURN_IF_ERROR(operands.Read("norm_bias", {p.d}, p.norm_bias));
  }
  if (!operands.Has("rope_table")) return ffi::Error::Success();
  MLA_RETURN_IF_ERROR(operands.Read("rope_table", {kAnyDim, kAnyDim}, p.rope_table));
  const Dims dims = operands["rope_table"].dimensions();
  const int64_t num_positions = dims[0], width = dims[1];
  MLA_RETURN_IF_ERROR(check.FitsInt32("rope_table", num_positions));
  if (num_positions == 0 || width == 0 || width % 2 != 0 || width > p.d) {
    return check.Fail("rope_table", "at least one position and an even width, at most that of k",
                      FormatTensor(ffi::F32, dims));
  }
  p.num_rope_positions = static_cast<int32_t>(num_positions);
  p.d_rope = static_cast<int32_t>(width);
  p.rope_interleaved = attrs.rope_interleaved;
  p.rope_last = attrs.rope_last;
  return ffi::Error::Success();
}

// The pool comes back in the same memory. XLA breaks this only by copying the whole pool first,
// which costs the time of reading and writing it without a word.
ffi::Error CheckInPlace(const Checker& check, const ffi::AnyBuffer& operand,
                        const ffi::RemainingRets& rets) {
  if (rets.size() != 1) return check.Fail("results", "1", std::to_string(rets.size()));
  ffi::Result<ffi::AnyBuffer> result = *rets.get<ffi::AnyBuffer>(0);
  if (result->untyped_data() == operand.untyped_data()) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(check.target()) +
                              ": index_pages: expected the result in the operand's memory, got "
                              "another buffer; the call needs operand_output_aliases");
}

ffi::Error Parse(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                 const IndexAppendAttrs& attrs, IndexAppendParams& p) {
  const Checker check(kTarget);
  auto operands = Operands::Of(check, args, attrs.operands);
  if (!operands) return operands.error();
  MLA_RETURN_IF_ERROR(ParseTokens(check, *operands, p));
  MLA_RETURN_IF_ERROR(ParsePlace(check, *operands, p));
  MLA_RETURN_IF_ERROR(ParseTransforms(check, *operands, attrs, p));
  const ffi::AnyBuffer buffer = (*operands)["index_pages"];
  const auto pool = ParseIndexPool(check, buffer, attrs.has_layer, p.d);
  if (!pool) return pool.error();
  if (pool->key_dtype != DType::kE4m3 && pool->key_dtype != p.dtype) {
    return check.Fail("index_pages", std::string(DTypeName(p.dtype)) + " as in k, or uint8",
                      FormatTensor(buffer.element_type(), buffer.dimensions()));
  }
  MLA_RETURN_IF_ERROR(CheckInPlace(check, buffer, rets));
  p.index_pages = pool->base;
  p.key_dtype = pool->key_dtype;
  p.num_layers = pool->num_layers;
  p.num_pages = pool->num_pages;
  p.page_size = pool->page_size;
  p.power_of_two_scales = attrs.power_of_two_scales;
  return operands->CheckUsed();
}

}  // namespace

ffi::ErrorOr<IndexAppendParams> ParseIndexAppend(const ffi::RemainingArgs& args,
                                                 const ffi::RemainingRets& rets,
                                                 const IndexAppendAttrs& attrs) {
  IndexAppendParams params = {};
  if (ffi::Error error = Parse(args, rets, attrs, params); error.failure()) {
    return ffi::Unexpected(error);
  }
  return params;
}

}  // namespace jax_mla::index_append
