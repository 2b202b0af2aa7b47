#include "append/binding.h"

#include <string>

#include "core/kv_pool.h"

namespace jax_mla::append {
namespace ffi = xla::ffi;

namespace {

constexpr std::string_view kTarget = "jax_mla_append";

// Positions of the operands.
enum Operand : size_t { kCkv, kKpe, kPageTable, kPositions, kLayer, kPageBegin, kNumFixed };

ffi::Error ParseTokens(const Checker& check, const ffi::RemainingArgs& args, AppendParams& p) {
  const ffi::AnyBuffer ckv = *args.get<ffi::AnyBuffer>(kCkv);
  const ffi::AnyBuffer kpe = *args.get<ffi::AnyBuffer>(kKpe);
  MLA_RETURN_IF_ERROR(check.Float("ckv", ckv));
  MLA_RETURN_IF_ERROR(check.Rank("ckv", ckv, 3));
  const Dims dims = ckv.dimensions();
  MLA_RETURN_IF_ERROR(check.Tensor("kpe", kpe, ckv.element_type(), {dims[0], dims[1], kAnyDim}));
  const int64_t d_kpe = kpe.dimensions()[2];
  for (int64_t dim : {dims[0], dims[1], dims[2], d_kpe}) {
    MLA_RETURN_IF_ERROR(check.FitsInt32("ckv", dim));
  }
  MLA_RETURN_IF_ERROR(check.FitsInt32("ckv", dims[0] * dims[1]));
  p.dtype = *FromFfi(ckv.element_type());
  p.batch = static_cast<int32_t>(dims[0]);
  p.q_len = static_cast<int32_t>(dims[1]);
  p.d_ckv = static_cast<int32_t>(dims[2]);
  p.d_kpe = static_cast<int32_t>(d_kpe);
  p.ckv = ckv.untyped_data();
  p.kpe = kpe.untyped_data();
  return ffi::Error::Success();
}

ffi::Error ParseIndices(const Checker& check, const ffi::RemainingArgs& args, AppendParams& p) {
  const ffi::AnyBuffer positions = *args.get<ffi::AnyBuffer>(kPositions);
  MLA_RETURN_IF_ERROR(check.Tensor("positions", positions, ffi::S32, {p.batch, p.q_len}));
  p.positions = positions.typed_data<int32_t>();
  return ParsePlace(check, args, kPageTable, kLayer, kPageBegin, p);
}

// Each result must be its operand's memory. XLA breaks this only by copying the whole pool first.
// Such a copy would cost the time of reading and writing the cache without a word, so it is an
// error.
ffi::Error CheckInPlace(const Checker& check, const ffi::RemainingArgs& args,
                        const ffi::RemainingRets& rets) {
  const size_t num_pools = args.size() - kNumFixed;
  if (rets.size() != num_pools) {
    return check.Fail("results", std::to_string(num_pools) + " pools", std::to_string(rets.size()));
  }
  for (size_t i = 0; i < num_pools; ++i) {
    const ffi::AnyBuffer operand = *args.get<ffi::AnyBuffer>(kNumFixed + i);
    ffi::Result<ffi::AnyBuffer> result = *rets.get<ffi::AnyBuffer>(i);
    if (result->untyped_data() != operand.untyped_data()) {
      return ffi::Error::Internal(std::string(check.target()) + ": pool result " +
                                  std::to_string(i) +
                                  ": expected the operand's memory, got another buffer; the call "
                                  "needs operand_output_aliases");
    }
  }
  return ffi::Error::Success();
}

ffi::Error Parse(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, bool has_layer,
                 AppendParams& p) {
  const Checker check(kTarget);
  if (args.size() <= kNumFixed) {
    return check.Fail("operands", "6 tensors and one packed or two split pools",
                      std::to_string(args.size()));
  }
  MLA_RETURN_IF_ERROR(ParseTokens(check, args, p));
  MLA_RETURN_IF_ERROR(ParseIndices(check, args, p));
  const auto pool = ParseKvPool(check, args, kNumFixed, p.dtype, p.d_ckv, p.d_kpe, has_layer);
  if (!pool) return pool.error();
  MLA_RETURN_IF_ERROR(CheckInPlace(check, args, rets));
  p.ckv_pages = pool->ckv;
  p.kpe_pages = pool->kpe;
  p.num_layers = pool->num_layers;
  p.num_pages = pool->num_pages;
  p.page_size = pool->page_size;
  return ffi::Error::Success();
}

}  // namespace

ffi::ErrorOr<AppendParams> ParseAppend(const ffi::RemainingArgs& args,
                                       const ffi::RemainingRets& rets, bool has_layer) {
  AppendParams params = {};
  if (ffi::Error error = Parse(args, rets, has_layer, params); error.failure())
    return ffi::Unexpected(error);
  return params;
}

}  // namespace jax_mla::append
