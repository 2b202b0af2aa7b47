#include "index_append/binding.h"

#include <string>

#include "core/index_pool.h"
#include "core/kv_pool.h"

namespace jax_mla::index_append {
namespace ffi = xla::ffi;

namespace {

constexpr std::string_view kTarget = "jax_mla_index_append";

// Positions of the operands. Only a ragged call has cu_q_lens; the operands behind it then come one
// place later. The transforms and the pool follow.
enum Operand : size_t { kK, kPageTable, kPositions, kLayer, kPageBegin, kNumFixed };
constexpr size_t kCuQLens = kLayer;

ffi::Error ParseTokens(const Checker& check, const ffi::RemainingArgs& args, bool is_ragged,
                       IndexAppendParams& p) {
  const ffi::AnyBuffer k = *args.get<ffi::AnyBuffer>(kK);
  const ffi::AnyBuffer page_table = *args.get<ffi::AnyBuffer>(kPageTable);
  const ffi::AnyBuffer positions = *args.get<ffi::AnyBuffer>(kPositions);
  MLA_RETURN_IF_ERROR(check.Float("k", k));
  MLA_RETURN_IF_ERROR(check.Rank("k", k, is_ragged ? 2 : 3));
  MLA_RETURN_IF_ERROR(check.Rank("page_table", page_table, 2));
  const Dims dims = k.dimensions();
  const int64_t batch = page_table.dimensions()[0];
  const int64_t num_tokens = is_ragged ? dims[0] : dims[0] * dims[1];
  for (int64_t dim : dims) MLA_RETURN_IF_ERROR(check.FitsInt32("k", dim));
  for (int64_t dim : {batch, num_tokens}) MLA_RETURN_IF_ERROR(check.FitsInt32("k", dim));
  if (is_ragged) {
    const ffi::AnyBuffer cu_q_lens = *args.get<ffi::AnyBuffer>(kCuQLens);
    MLA_RETURN_IF_ERROR(check.Tensor("positions", positions, ffi::S32, {dims[0]}));
    MLA_RETURN_IF_ERROR(check.Tensor("cu_q_lens", cu_q_lens, ffi::S32, {batch + 1}));
    p.cu_q_lens = cu_q_lens.typed_data<int32_t>();
  } else {
    MLA_RETURN_IF_ERROR(check.Tensor("positions", positions, ffi::S32, {dims[0], dims[1]}));
    MLA_RETURN_IF_ERROR(check.Tensor("page_table", page_table, ffi::S32, {dims[0], kAnyDim}));
    p.q_len = static_cast<int32_t>(dims[1]);
  }
  p.k = k.untyped_data();
  p.positions = positions.typed_data<int32_t>();
  p.dtype = *FromFfi(k.element_type());
  p.batch = static_cast<int32_t>(batch);
  p.num_tokens = static_cast<int32_t>(num_tokens);
  p.d = static_cast<int32_t>(dims.back());
  return ffi::Error::Success();
}

ffi::Error ParseTransforms(const Checker& check, const ffi::RemainingArgs& args, size_t first,
                           const IndexAppendAttrs& attrs, IndexAppendParams& p) {
  if (attrs.has_norm) {
    const ffi::AnyBuffer weight = *args.get<ffi::AnyBuffer>(first++);
    MLA_RETURN_IF_ERROR(check.Tensor("norm_weight", weight, ffi::F32, {p.d}));
    p.norm_weight = weight.typed_data<float>();
    p.norm_eps = attrs.norm_eps;
  }
  if (attrs.has_bias) {
    const ffi::AnyBuffer bias = *args.get<ffi::AnyBuffer>(first++);
    MLA_RETURN_IF_ERROR(check.Tensor("norm_bias", bias, ffi::F32, {p.d}));
    p.norm_bias = bias.typed_data<float>();
  }
  if (!attrs.has_rope) return ffi::Error::Success();
  const ffi::AnyBuffer table = *args.get<ffi::AnyBuffer>(first);
  MLA_RETURN_IF_ERROR(check.Tensor("rope_table", table, ffi::F32, {kAnyDim, kAnyDim}));
  const int64_t num_positions = table.dimensions()[0], width = table.dimensions()[1];
  MLA_RETURN_IF_ERROR(check.FitsInt32("rope_table", num_positions));
  if (num_positions == 0 || width == 0 || width % 2 != 0 || width > p.d) {
    return check.Fail("rope_table", "at least one position and an even width, at most that of k",
                      FormatTensor(table.element_type(), table.dimensions()));
  }
  p.rope_table = table.typed_data<float>();
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
  const bool is_ragged = args.size() > kK && args.get<ffi::AnyBuffer>(kK)->dimensions().size() == 2;
  const size_t shift = is_ragged ? 1 : 0;
  const size_t first_transform = kNumFixed + shift;
  const size_t pool_idx =
      first_transform + size_t{attrs.has_norm} + size_t{attrs.has_bias} + size_t{attrs.has_rope};
  if (args.size() != pool_idx + 1) {
    return check.Fail("operands", std::to_string(pool_idx + 1), std::to_string(args.size()));
  }
  if (attrs.has_bias && !attrs.has_norm) {
    return check.Fail("norm_bias", "none without norm_weight", "one");
  }
  MLA_RETURN_IF_ERROR(ParseTokens(check, args, is_ragged, p));
  MLA_RETURN_IF_ERROR(ParsePlace(check, args, kPageTable, kLayer + shift, kPageBegin + shift, p));
  MLA_RETURN_IF_ERROR(ParseTransforms(check, args, first_transform, attrs, p));
  const ffi::AnyBuffer buffer = *args.get<ffi::AnyBuffer>(pool_idx);
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
  return ffi::Error::Success();
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
