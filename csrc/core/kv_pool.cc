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

// What a pool must be.
struct PoolSpec {
  std::string_view name;
  ffi::DataType type;
  int64_t min_width;
  bool has_layer;
  int64_t width_multiple = 1;
};

ffi::Error CheckPool(const Checker& check, const ffi::AnyBuffer& pool, const PoolSpec& spec) {
  const Dims dims = pool.dimensions();
  const size_t page_rank = dims.size() - (spec.has_layer ? 1 : 0);
  const bool known_rank = page_rank == 3 || page_rank == 4;
  if (!known_rank || dims.back() < spec.min_width || dims.back() > kMaxWidth ||
      dims.back() % spec.width_multiple != 0 || pool.element_type() != spec.type) {
    const std::string multiple =
        spec.width_multiple > 1 ? ", a multiple of " + std::to_string(spec.width_multiple) : "";
    const std::string expected = FormatType(spec.type) + "[num_pages,page_size,d], or " +
                                 "page_size/pack,pack, " + (spec.has_layer ? "with" : "without") +
                                 " layers in front, d from " + std::to_string(spec.min_width) +
                                 " to " + std::to_string(kMaxWidth) + multiple;
    return check.Fail(spec.name, expected, FormatTensor(pool.element_type(), dims));
  }
  for (int64_t dim : dims) MLA_RETURN_IF_ERROR(check.FitsInt32(spec.name, dim));
  const int64_t page_size = SizesOf(dims, spec.has_layer).page_size;
  MLA_RETURN_IF_ERROR(check.FitsInt32(spec.name, page_size));
  if (page_size == 0) {
    return check.Fail(spec.name, "a page_size of at least 1",
                      FormatTensor(pool.element_type(), dims));
  }
  return ffi::Error::Success();
}

// `pool_elements`: elements of the pool that are one element of the stream.
MutableKvStream Stream(const ffi::AnyBuffer& pool, int64_t offset_bytes, const PoolSizes& sizes,
                       int64_t pool_elements = 1) {
  const int64_t token_stride = sizes.width / pool_elements;
  const int64_t page_stride = sizes.page_size * token_stride;
  return {
      .base = static_cast<char*>(pool.untyped_data()) + offset_bytes,
      // With two layers or more, the stride is smaller than the pool. With none, it could overflow.
      .layer_stride = sizes.num_layers > 1 ? sizes.num_pages * page_stride : 0,
      .page_stride = page_stride,
      .token_stride = token_stride,
  };
}

ffi::Error CheckFormat(const Checker& check, const KvSpec& spec, bool is_split) {
  const std::string name = KvFormatName(spec.format);
  if (spec.format == KvFormat::kE4m3KpeBf16 && !is_split) {
    return check.Fail("operands", "two split pools for kv_format " + name, "one packed pool");
  }
  if (spec.d_kpe == 0 && is_split) {
    return check.Fail("operands", "one packed pool for rows without rotary part",
                      "two split pools");
  }
  if (spec.format != KvFormat::kDsMla) return ffi::Error::Success();
  if (is_split) {
    return check.Fail("operands", "one packed pool for kv_format " + name, "two split pools");
  }
  if (spec.d_ckv != DsMla::kDCkv || spec.d_kpe != DsMla::kDKpe) {
    return check.Fail("q_nope, q_pe", "512 and 64 dimensions for kv_format " + name,
                      std::to_string(spec.d_ckv) + " and " + std::to_string(spec.d_kpe));
  }
  return ffi::Error::Success();
}

ffi::Error ParsePacked(const Checker& check, const ffi::AnyBuffer& buffer, const KvSpec& spec,
                       KvPool& pool) {
  const bool is_ds_mla = spec.format == KvFormat::kDsMla;
  const DType ckv_type = CkvType(spec.format, spec.dtype);
  MLA_RETURN_IF_ERROR(CheckPool(
      check, buffer,
      {.name = "kv_pages",
       .type = is_ds_mla ? ffi::DataType::U8 : ToFfi(ckv_type),
       .min_width = is_ds_mla ? int64_t{DsMla::kRowBytes} : int64_t{spec.d_ckv} + spec.d_kpe,
       .has_layer = spec.has_layer,
       .width_multiple = is_ds_mla ? DsMla::kRowAlignment : 1}));
  const PoolSizes sizes = SizesOf(buffer.dimensions(), spec.has_layer);
  pool.ckv = Stream(buffer, 0, sizes);
  pool.kpe = is_ds_mla ? Stream(buffer, DsMla::kKpeOffset, sizes, ElementBytes(DType::kBf16))
                       : Stream(buffer, int64_t{spec.d_ckv} * ElementBytes(ckv_type), sizes);
  return ffi::Error::Success();
}

ffi::Error ParseSplit(const Checker& check, const ffi::AnyBuffer& ckv, const ffi::AnyBuffer& kpe,
                      const KvSpec& spec, KvPool& pool) {
  MLA_RETURN_IF_ERROR(CheckPool(check, ckv,
                                {.name = "kv_pages[0]",
                                 .type = ToFfi(CkvType(spec.format, spec.dtype)),
                                 .min_width = spec.d_ckv,
                                 .has_layer = spec.has_layer}));
  MLA_RETURN_IF_ERROR(CheckPool(check, kpe,
                                {.name = "kv_pages[1]",
                                 .type = ToFfi(KpeType(spec.format, spec.dtype)),
                                 .min_width = spec.d_kpe,
                                 .has_layer = spec.has_layer}));
  const Dims dims = ckv.dimensions(), kpe_dims = kpe.dimensions();
  bool same_pages = kpe_dims.size() == dims.size();
  for (size_t i = 0; same_pages && i + 1 < dims.size(); ++i) same_pages = kpe_dims[i] == dims[i];
  if (!same_pages) {
    return check.Fail(
        "kv_pages[1]",
        "the layers, pages and page_size of kv_pages[0] " + FormatTensor(ckv.element_type(), dims),
        FormatTensor(kpe.element_type(), kpe_dims));
  }
  pool.ckv = Stream(ckv, 0, SizesOf(dims, spec.has_layer));
  pool.kpe = Stream(kpe, 0, SizesOf(kpe_dims, spec.has_layer));
  return ffi::Error::Success();
}

ffi::Error Parse(const Checker& check, Operands& operands, const KvSpec& spec, KvPool& pool) {
  pool.is_split = operands.Has("kv_pages[0]");
  MLA_RETURN_IF_ERROR(CheckFormat(check, spec, pool.is_split));
  const ffi::AnyBuffer buffer = operands[pool.is_split ? "kv_pages[0]" : "kv_pages"];
  MLA_RETURN_IF_ERROR(pool.is_split ? ParseSplit(check, buffer, operands["kv_pages[1]"], spec, pool)
                                    : ParsePacked(check, buffer, spec, pool));
  const PoolSizes sizes = SizesOf(buffer.dimensions(), spec.has_layer);
  pool.num_layers = static_cast<int32_t>(sizes.num_layers);
  pool.num_pages = static_cast<int32_t>(sizes.num_pages);
  pool.page_size = static_cast<int32_t>(sizes.page_size);
  return ffi::Error::Success();
}

}  // namespace

ffi::ErrorOr<KvFormat> ParseKvFormat(const Checker& check, std::string_view name) {
  if (const std::optional<KvFormat> format = KvFormatOf(name)) return *format;
  return ffi::Unexpected(check.Fail("kv_format", "a known format", name));
}

ffi::ErrorOr<KvPool> ParseKvPool(const Checker& check, Operands& operands, const KvSpec& spec) {
  KvPool pool = {};
  if (ffi::Error error = Parse(check, operands, spec, pool); error.failure()) {
    return ffi::Unexpected(error);
  }
  return pool;
}

ffi::Error CheckInPlace(const Checker& check, const KvPool& pool, const ffi::RemainingRets& rets,
                        size_t first) {
  const size_t num_pools = pool.is_split ? 2 : 1;
  if (rets.size() < first + num_pools) {
    return check.Fail("results", std::to_string(first + num_pools), std::to_string(rets.size()));
  }
  for (size_t i = 0; i < num_pools; ++i) {
    const void* operand = i == 0 ? pool.ckv.base : pool.kpe.base;
    if ((*rets.get<ffi::AnyBuffer>(first + i))->untyped_data() != operand) {
      return ffi::Error::Internal(std::string(check.target()) + ": pool result " +
                                  std::to_string(i) +
                                  ": expected the operand's memory, got another buffer; the call "
                                  "needs operand_output_aliases");
    }
  }
  return ffi::Error::Success();
}

}  // namespace jax_mla
