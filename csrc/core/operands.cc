#include "core/operands.h"

#include <string>

namespace jax_mla {
namespace ffi = xla::ffi;

ffi::ErrorOr<Operands> Operands::Of(const Checker& check, const ffi::RemainingArgs& args,
                                    std::string_view names) {
  Operands operands(check, args);
  for (std::string_view rest = names; !rest.empty() && operands.size_ < kMaxOperands;) {
    const size_t comma = rest.find(',');
    operands.names_[operands.size_++] = rest.substr(0, comma);
    rest.remove_prefix(comma == std::string_view::npos ? rest.size() : comma + 1);
  }
  if (operands.size_ == args.size()) return operands;
  return ffi::Unexpected(
      check.Fail("operands", std::to_string(args.size()) + " names, one for each buffer", names));
}

ffi::AnyBuffer Operands::operator[](std::string_view name) {
  static const XLA_FFI_Buffer kNone = {.struct_size = XLA_FFI_Buffer_STRUCT_SIZE,
                                       .extension_start = nullptr,
                                       .dtype = XLA_FFI_DataType_INVALID,
                                       .data = nullptr,
                                       .rank = 0,
                                       .dims = nullptr};
  const size_t i = Find(name);
  if (i == size_) return ffi::AnyBuffer(&kNone);
  used_ |= uint32_t{1} << i;
  return *args_.get<ffi::AnyBuffer>(i);
}

ffi::Error Operands::CheckUsed() const {
  for (size_t i = 0; i < size_; ++i) {
    if ((used_ >> i & 1) == 0) return check_.Fail(names_[i], "no such operand in this call", "one");
  }
  return ffi::Error::Success();
}

size_t Operands::Find(std::string_view name) const {
  size_t i = 0;
  while (i < size_ && names_[i] != name) ++i;
  return i;
}

}  // namespace jax_mla
