#include "core/kv_pool.h"

#include <string>

namespace jax_mla {
namespace ffi = xla::ffi;

namespace {

// The kernels compute the bytes of a block of rows in 32 bits.
constexpr int64_t kMaxWidth = int64_t{1} << 20;

// The sizes of a pool, whatever its rank.
struct PoolSizes {
  int64_t num_layers;  // 1 for a pool without layers
  int64_t num_pages;
  int64_t page_size;
  int64_t width;
};

// The pool's rank is known to be right.
PoolSizes SizesOf(Dims dims, bool has_layer) {
  const size_t pages = has_layer ? 1 : 0;  // the dimension num_pages
  int64_t page_size = 1;
  for (size_t i = pages + 1; i + 1 < dims.size(); ++i) page_size *= dims[i];
  return {.num_layers = has_layer ? dims[0] : 1,
          .num_pages = dims[pages],
          .page_size = page_size,
          .width = dims.back()};
}

ffi::Error CheckPool(const Checker& check, std::string_view name, const ffi::AnyBuffer& pool,
                     DType dtype, int64_t min_width, bool has_layer) {
  const Dims dims = pool.dimensions();
  const size_t page_rank = dims.size() - (has_layer ? 1 : 0);
  const bool known_rank = page_rank == 3 || page_rank == 4;
  if (!known_rank || dims.back() < min_width || dims.back() > kMaxWidth ||
      pool.element_type() != ToFfi(dtype)) {
    const std::string expected = std::string(DTypeName(dtype)) + "[num_pages,page_size,d], or " +
                                 "page_size/pack,pack, " + (has_layer ? "with" : "without") +
                                 " layers in front, d from " + std::to_string(min_width) + " to " +
                                 std::to_string(kMaxWidth);
    return check.Fail(name, expected, FormatTensor(pool.element_type(), dims));
  }
  for (int64_t dim : dims) MLA_RETURN_IF_ERROR(check.FitsInt32(name, dim));
  const int64_t page_size = SizesOf(dims, has_layer).page_size;
  MLA_RETURN_IF_ERROR(check.FitsInt32(name, page_size));
  if (page_size == 0) {
    return check.Fail(name, "a page_size of at least 1", FormatTensor(pool.element_type(), dims));
  }
  return ffi::Error::Success();
}

MutableKvStream Stream(const ffi::AnyBuffer& pool, int64_t offset_bytes, const PoolSizes& sizes) {
  const int64_t page_stride = sizes.page_size * sizes.width;
  return {
      .base = static_cast<char*>(pool.untyped_data()) + offset_bytes,
      // With two layers or more, the stride is smaller than the pool. With none, it could overflow.
      .layer_stride = sizes.num_layers > 1 ? sizes.num_pages * page_stride : 0,
      .page_stride = page_stride,
      .token_stride = sizes.width,
  };
}

}  // namespace

ffi::ErrorOr<KvPool> ParseKvPool(const Checker& check, const ffi::RemainingArgs& args, size_t first,
                                 DType dtype, int32_t d_ckv, int32_t d_kpe, bool has_layer) {
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
  if (ffi::Error error = CheckPool(check, name, *pool, dtype, width, has_layer); error.failure()) {
    return ffi::Unexpected(error);
  }

  KvPool result;
  const Dims dims = pool->dimensions();
  const PoolSizes sizes = SizesOf(dims, has_layer);
  result.num_layers = static_cast<int32_t>(sizes.num_layers);
  result.num_pages = static_cast<int32_t>(sizes.num_pages);
  result.page_size = static_cast<int32_t>(sizes.page_size);
  result.ckv = Stream(*pool, 0, sizes);
  if (!is_split) {
    result.kpe = Stream(*pool, int64_t{d_ckv} * ElementBytes(dtype), sizes);
    return result;
  }

  const auto kpe_pool = args.get<ffi::AnyBuffer>(first + 1);
  if (!kpe_pool) return ffi::Unexpected(kpe_pool.error());
  if (ffi::Error error = CheckPool(check, "kpe_pages", *kpe_pool, dtype, d_kpe, has_layer);
      error.failure()) {
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
  result.kpe = Stream(*kpe_pool, 0, SizesOf(kpe_dims, has_layer));
  return result;
}

}  // namespace jax_mla
