#include "core/kv_pool.h"

#include <string>

namespace jax_mla {
namespace ffi = xla::ffi;

namespace {

ffi::Error CheckPool(const Checker& check, std::string_view name, const ffi::AnyBuffer& pool,
                     DType dtype, int64_t width) {
  const Dims dims = pool.dimensions();
  const bool known_rank = dims.size() == 3 || dims.size() == 4;
  if (!known_rank || dims.back() != width || pool.element_type() != ToFfi(dtype)) {
    const std::string expected = std::string(DTypeName(dtype)) + "[num_pages,page_size," +
                                 std::to_string(width) + "], with or without layers in front";
    return check.Fail(name, expected, FormatTensor(pool.element_type(), dims));
  }
  for (int64_t dim : dims) MLA_RETURN_IF_ERROR(check.FitsInt32(name, dim));
  if (dims[dims.size() - 2] == 0) {
    return check.Fail(name, "a page_size of at least 1", FormatTensor(pool.element_type(), dims));
  }
  return ffi::Error::Success();
}

MutableKvStream Stream(const ffi::AnyBuffer& pool, int64_t offset_bytes) {
  const Dims dims = pool.dimensions();
  const size_t rank = dims.size();
  const int64_t page_stride = dims[rank - 2] * dims[rank - 1];
  // With two layers or more, the stride is smaller than the pool. With none, it could overflow.
  const bool has_stride = rank == 4 && dims[0] > 1;
  return {
      .base = static_cast<char*>(pool.untyped_data()) + offset_bytes,
      .layer_stride = has_stride ? dims[1] * page_stride : 0,
      .page_stride = page_stride,
      .token_stride = dims[rank - 1],
  };
}

}  // namespace

ffi::ErrorOr<KvPool> ParseKvPool(const Checker& check, const ffi::RemainingArgs& args, size_t first,
                                 DType dtype, int32_t d_ckv, int32_t d_kpe) {
  const bool is_split = args.size() == first + 2;
  if (!is_split && args.size() != first + 1) {
    return ffi::Unexpected(
        check.Fail("operands", std::to_string(first) + " tensors and one packed or two split pools",
                   std::to_string(args.size())));
  }
  const auto pool = args.get<ffi::AnyBuffer>(first);
  if (!pool) return ffi::Unexpected(pool.error());
  const std::string_view name = is_split ? "ckv_pages" : "kv_pages";
  const int64_t width = is_split ? d_ckv : int64_t{d_ckv} + d_kpe;
  if (ffi::Error error = CheckPool(check, name, *pool, dtype, width); error.failure()) {
    return ffi::Unexpected(error);
  }

  KvPool result;
  const Dims dims = pool->dimensions();
  result.num_layers = dims.size() == 4 ? static_cast<int32_t>(dims[0]) : 1;
  result.num_pages = static_cast<int32_t>(dims[dims.size() - 3]);
  result.page_size = static_cast<int32_t>(dims[dims.size() - 2]);
  result.ckv = Stream(*pool, 0);
  if (!is_split) {
    result.kpe = Stream(*pool, int64_t{d_ckv} * ElementBytes(dtype));
    return result;
  }

  const auto kpe_pool = args.get<ffi::AnyBuffer>(first + 1);
  if (!kpe_pool) return ffi::Unexpected(kpe_pool.error());
  if (ffi::Error error = CheckPool(check, "kpe_pages", *kpe_pool, dtype, d_kpe); error.failure()) {
    return ffi::Unexpected(error);
  }
  const Dims kpe_dims = kpe_pool->dimensions();
  bool same_pages = kpe_dims.size() == dims.size();
  for (size_t i = 0; same_pages && i + 1 < dims.size(); ++i) same_pages = kpe_dims[i] == dims[i];
  if (!same_pages) {
    return ffi::Unexpected(check.Fail(
        "kpe_pages",
        "the layers, pages and page_size of ckv_pages " + FormatTensor(ToFfi(dtype), dims),
        FormatTensor(ToFfi(dtype), kpe_dims)));
  }
  result.kpe = Stream(*kpe_pool, 0);
  return result;
}

}  // namespace jax_mla
