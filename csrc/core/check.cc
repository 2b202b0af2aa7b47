#include "core/check.h"

#include <limits>

namespace jax_mla {
namespace ffi = xla::ffi;

namespace {

std::string JoinDims(const int64_t* dims, size_t rank) {
  std::string text = "[";
  for (size_t i = 0; i < rank; ++i) {
    if (i > 0) text += ",";
    text += dims[i] == kAnyDim ? "*" : std::to_string(dims[i]);
  }
  return text + "]";
}

}  // namespace

std::string FormatType(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::BF16:
      return "bfloat16";
    case ffi::DataType::F16:
      return "float16";
    case ffi::DataType::F32:
      return "float32";
    case ffi::DataType::F64:
      return "float64";
    case ffi::DataType::S32:
      return "int32";
    case ffi::DataType::S64:
      return "int64";
    case ffi::DataType::U8:
      return "uint8";
    case ffi::DataType::S8:
      return "int8";
    case ffi::DataType::U32:
      return "uint32";
    case ffi::DataType::PRED:
      return "bool";
    case ffi::DataType::F8E4M3FN:
      return "float8_e4m3fn";
    default:
      return "XLA type " + std::to_string(static_cast<int>(dtype));
  }
}

std::string FormatTensor(ffi::DataType dtype, Dims dims) {
  if (dtype == ffi::DataType::INVALID) return "no operand";
  return FormatType(dtype) + JoinDims(dims.begin(), dims.size());
}

ffi::DataType ToFfi(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return ffi::DataType::BF16;
    case DType::kF16:
      return ffi::DataType::F16;
    case DType::kF32:
      return ffi::DataType::F32;
    case DType::kE4m3:
      return ffi::DataType::F8E4M3FN;
  }
  return ffi::DataType::INVALID;
}

std::optional<DType> FromFfi(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::BF16:
      return DType::kBf16;
    case ffi::DataType::F16:
      return DType::kF16;
    case ffi::DataType::F32:
      return DType::kF32;
    default:
      return std::nullopt;
  }
}

ffi::Error Checker::Fail(std::string_view tensor, std::string_view expected,
                         std::string_view got) const {
  std::string message(target_);
  message.append(": ").append(tensor).append(": expected ").append(expected);
  message.append(", got ").append(got);
  return ffi::Error::InvalidArgument(std::move(message));
}

ffi::Error Checker::Tensor(std::string_view name, const ffi::AnyBuffer& buffer, ffi::DataType dtype,
                           Dims dims) const {
  const Dims got = buffer.dimensions();
  bool matches = buffer.element_type() == dtype && got.size() == dims.size();
  for (size_t i = 0; matches && i < dims.size(); ++i) {
    matches = dims[i] == kAnyDim || dims[i] == got[i];
  }
  if (matches) return ffi::Error::Success();
  return Fail(name, FormatType(dtype) + JoinDims(dims.begin(), dims.size()),
              FormatTensor(buffer.element_type(), got));
}

ffi::Error Checker::OneOrEach(std::string_view name, const ffi::AnyBuffer& buffer, int64_t batch,
                              int64_t width) const {
  const Dims dims = buffer.dimensions();
  const bool is_one = dims.size() == 2 && dims[0] == 1;
  return Tensor(name, buffer, ffi::DataType::F32, {is_one ? 1 : batch, width});
}

ffi::Error Checker::Rank(std::string_view name, const ffi::AnyBuffer& buffer, size_t rank) const {
  if (buffer.dimensions().size() == rank) return ffi::Error::Success();
  return Fail(name, "rank " + std::to_string(rank),
              FormatTensor(buffer.element_type(), buffer.dimensions()));
}

ffi::Error Checker::Float(std::string_view name, const ffi::AnyBuffer& buffer) const {
  if (FromFfi(buffer.element_type()).has_value()) return ffi::Error::Success();
  return Fail(name, "bfloat16, float16 or float32",
              FormatTensor(buffer.element_type(), buffer.dimensions()));
}

ffi::Error Checker::Aligned(std::initializer_list<NamedAddress> buffers) const {
  for (const auto& [name, address] : buffers) {
    const uintptr_t offset_bytes = reinterpret_cast<uintptr_t>(address) % kPieceBytes;
    if (offset_bytes != 0) {
      return Fail(name, "an address that is a multiple of 16",
                  std::to_string(offset_bytes) + " bytes past one");
    }
  }
  return ffi::Error::Success();
}

ffi::Error Checker::FitsInt32(std::string_view what, int64_t value) const {
  if (value >= 0 && value <= std::numeric_limits<int32_t>::max()) return ffi::Error::Success();
  return Fail(what, "a size below 2^31", std::to_string(value));
}

}  // namespace jax_mla
