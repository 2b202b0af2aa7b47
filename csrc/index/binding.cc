#include "index/binding.h"

#include <limits>
#include <string>

#include "core/index_pool.h"
#include "core/kv_pool.h"
#include "core/operands.h"

namespace jax_mla::index {
namespace ffi = xla::ffi;

namespace {

constexpr std::string_view kTarget = "jax_mla_index_topk";

enum Output : size_t { kIndices, kLens, kNumOutputs };

ffi::Error ParseQueries(const Checker& check, Operands& operands, TopkParams& p) {
  const ffi::AnyBuffer q = operands["q"];
  const bool is_code = q.element_type() == ToFfi(DType::kE4m3);
  if (!is_code) MLA_RETURN_IF_ERROR(check.Float("q", q));
  MLA_RETURN_IF_ERROR(check.Rank("q", q, 3));
  const Dims dims = q.dimensions();
  MLA_RETURN_IF_ERROR(operands.Read("weights", {dims[0], dims[1]}, p.weights));
  for (int64_t dim : {dims[0], dims[1], dims[2], dims[0] * dims[1]}) {
    MLA_RETURN_IF_ERROR(check.FitsInt32("q", dim));
  }
  p.q = q.untyped_data();
  p.q_dtype = is_code ? DType::kE4m3 : *FromFfi(q.element_type());
  p.num_tokens = static_cast<int32_t>(dims[0]);
  p.num_heads = static_cast<int32_t>(dims[1]);
  p.d = static_cast<int32_t>(dims[2]);
  return ffi::Error::Success();
}

// How many sequences there are, and which of the tokens are theirs.
ffi::Error ParseSequences(const Checker& check, Operands& operands, int64_t q_len, TopkParams& p) {
  const ffi::AnyBuffer page_table = operands["page_table"];
  MLA_RETURN_IF_ERROR(check.Rank("page_table", page_table, 2));
  const int64_t batch = page_table.dimensions()[0];
  MLA_RETURN_IF_ERROR(check.FitsInt32("page_table", batch));
  MLA_RETURN_IF_ERROR(check.FitsInt32("q_len", q_len));
  MLA_RETURN_IF_ERROR(operands.Read("seq_lens", {batch}, p.seq_lens));
  p.batch = static_cast<int32_t>(batch);
  p.q_len = static_cast<int32_t>(q_len);
  if (q_len > 0) {
    if (batch * q_len == p.num_tokens) return ffi::Error::Success();
    return check.Fail("q", std::to_string(batch * q_len) + " tokens, q_len for each sequence",
                      std::to_string(p.num_tokens));
  }
  MLA_RETURN_IF_ERROR(operands.Read("cu_q_lens", {batch + 1}, p.cu_q_lens));
  return operands.Read("num_seqs", {1}, p.num_seqs);
}

ffi::Error ParseKeys(const Checker& check, const ffi::AnyBuffer& buffer, const TopkAttrs& attrs,
                     TopkParams& p) {
  const auto pool = ParseIndexPool(check, buffer, attrs.has_layer, p.d);
  if (!pool) return pool.error();
  p.index_pages = pool->base;
  p.key_dtype = pool->key_dtype;
  p.num_layers = pool->num_layers;
  p.num_pages = pool->num_pages;
  p.page_size = pool->page_size;
  const int64_t places = int64_t{p.max_pages_per_seq} * p.page_size;
  // Sizes that kernels add up in 32 bits; the public function allows fewer.
  if (places > std::numeric_limits<int32_t>::max() / 2) {
    return check.Fail("page_table", "places for at most 2^30 tokens a sequence",
                      std::to_string(places));
  }
  const bool is_bounded = attrs.max_seq_len > 0 && attrs.max_seq_len < places;
  p.max_seq_len = static_cast<int32_t>(is_bounded ? attrs.max_seq_len : places);
  return ffi::Error::Success();
}

ffi::Error ParseResults(const Checker& check, const ffi::RemainingRets& rets,
                        const TopkAttrs& attrs, TopkParams& p) {
  const size_t scratch = kNumOutputs + (attrs.return_scores ? 1 : 0);
  if (rets.size() != scratch && rets.size() != scratch + 1) {
    return check.Fail("results", std::to_string(scratch) + " and optional scratch",
                      std::to_string(rets.size()));
  }
  ffi::Result<ffi::AnyBuffer> indices = *rets.get<ffi::AnyBuffer>(kIndices);
  ffi::Result<ffi::AnyBuffer> lens = *rets.get<ffi::AnyBuffer>(kLens);
  MLA_RETURN_IF_ERROR(check.Tensor("indices", *indices, ffi::S32, {p.num_tokens, p.k}));
  MLA_RETURN_IF_ERROR(check.Tensor("lens", *lens, ffi::S32, {p.num_tokens}));
  p.indices = indices->typed_data<int32_t>();
  p.lens = lens->typed_data<int32_t>();
  if (attrs.return_scores) {
    ffi::Result<ffi::AnyBuffer> scores = *rets.get<ffi::AnyBuffer>(kNumOutputs);
    MLA_RETURN_IF_ERROR(check.Tensor("scores", *scores, ffi::F32, {p.num_tokens, p.k}));
    p.scores = scores->typed_data<float>();
  }
  if (rets.size() == scratch) return ffi::Error::Success();
  ffi::Result<ffi::AnyBuffer> buffer = *rets.get<ffi::AnyBuffer>(scratch);
  MLA_RETURN_IF_ERROR(check.Tensor("scratch", *buffer, ffi::U8, {kAnyDim}));
  p.scratch = buffer->untyped_data();
  p.scratch_bytes = buffer->dimensions()[0];
  return ffi::Error::Success();
}

ffi::Error Parse(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                 const TopkAttrs& attrs, TopkParams& p) {
  const Checker check(kTarget);
  auto operands = Operands::Of(check, args, attrs.operands);
  if (!operands) return operands.error();
  MLA_RETURN_IF_ERROR(check.FitsInt32("k", attrs.k));
  if (attrs.k == 0) return check.Fail("k", "at least 1", "0");
  p.k = static_cast<int32_t>(attrs.k);
  p.return_positions = attrs.return_positions;
  MLA_RETURN_IF_ERROR(ParseQueries(check, *operands, p));
  MLA_RETURN_IF_ERROR(ParseSequences(check, *operands, attrs.q_len, p));
  MLA_RETURN_IF_ERROR(ParsePlace(check, *operands, p));
  MLA_RETURN_IF_ERROR(ParseKeys(check, (*operands)["index_pages"], attrs, p));
  MLA_RETURN_IF_ERROR(ParseResults(check, rets, attrs, p));
  return operands->CheckUsed();
}

}  // namespace

ffi::ErrorOr<TopkParams> ParseTopk(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                   const TopkAttrs& attrs) {
  TopkParams params = {};
  if (ffi::Error error = Parse(args, rets, attrs, params); error.failure()) {
    return ffi::Unexpected(error);
  }
  return params;
}

}  // namespace jax_mla::index
