#include "core/index_pool.h"

#include <optional>
#include <string>

namespace jax_mla {
namespace ffi = xla::ffi;

namespace {

ffi::Error Parse(const Checker& check, const ffi::AnyBuffer& buffer, bool has_layer, int32_t d,
                 IndexPool& pool) {
  const Dims dims = buffer.dimensions();
  const bool is_fp8 = buffer.element_type() == ffi::DataType::U8;
  const std::optional<DType> plain = FromFfi(buffer.element_type());
  const int64_t width = is_fp8 ? int64_t{IndexFp8::kKeyBytes} : int64_t{d};
  const bool fits = (is_fp8 ? d == IndexFp8::kDim : plain.has_value()) &&
                    dims.size() == (has_layer ? 4u : 3u) && dims.back() == width;
  if (!fits) {
    const std::string layers = has_layer ? "num_layers," : "";
    return check.Fail("index_pages",
                      "uint8[" + layers + "num_pages,page_size,132] for keys of 128 values, or " +
                          "floats[" + layers + "num_pages,page_size," + std::to_string(d) + "]",
                      FormatTensor(buffer.element_type(), dims));
  }
  for (int64_t dim : dims) MLA_RETURN_IF_ERROR(check.FitsInt32("index_pages", dim));
  const size_t pages = has_layer ? 1 : 0;
  if (dims[pages + 1] == 0) {
    return check.Fail("index_pages", "a page_size of at least 1",
                      FormatTensor(buffer.element_type(), dims));
  }
  pool = {.base = buffer.untyped_data(),
          .key_dtype = is_fp8 ? DType::kE4m3 : *plain,
          .num_layers = has_layer ? static_cast<int32_t>(dims[0]) : 1,
          .num_pages = static_cast<int32_t>(dims[pages]),
          .page_size = static_cast<int32_t>(dims[pages + 1])};
  return ffi::Error::Success();
}

}  // namespace

ffi::ErrorOr<IndexPool> ParseIndexPool(const Checker& check, const ffi::AnyBuffer& buffer,
                                       bool has_layer, int32_t d) {
  IndexPool pool = {};
  if (ffi::Error error = Parse(check, buffer, has_layer, d, pool); error.failure()) {
    return ffi::Unexpected(error);
  }
  return pool;
}

}  // namespace jax_mla
