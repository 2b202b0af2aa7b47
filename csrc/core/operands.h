// The operands of a call by name. XLA passes buffers by position; the attribute `operands` lists
// their names in the same order, separated by commas. Looking one up costs a few nanoseconds.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <type_traits>

#include "core/check.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla {

class Operands {
 public:
  static xla::ffi::ErrorOr<Operands> Of(const Checker& check, const xla::ffi::RemainingArgs& args,
                                        std::string_view names);

  bool Has(std::string_view name) const { return Find(name) < size_; }

  // The operand, which counts as used. A missing one has neither a type nor dimensions, so that
  // every check of it fails.
  xla::ffi::AnyBuffer operator[](std::string_view name);

  // Points `data` to the operand, an array of T with these dimensions.
  template <typename T>
  xla::ffi::Error Read(std::string_view name, std::initializer_list<int64_t> dims, const T*& data) {
    static_assert(std::is_same_v<T, int32_t> || std::is_same_v<T, float>, "add its XLA type here");
    const xla::ffi::AnyBuffer buffer = (*this)[name];
    const auto type = std::is_same_v<T, float> ? xla::ffi::F32 : xla::ffi::S32;
    MLA_RETURN_IF_ERROR(check_.Tensor(name, buffer, type, dims));
    data = buffer.template typed_data<T>();
    return xla::ffi::Error::Success();
  }

  // Fails if a call has an operand that it does not use.
  xla::ffi::Error CheckUsed() const;

 private:
  static constexpr size_t kMaxOperands = 32;

  Operands(const Checker& check, const xla::ffi::RemainingArgs& args)
      : check_(check), args_(args) {}

  // The position, or size_ if there is no such operand.
  size_t Find(std::string_view name) const;

  Checker check_;
  xla::ffi::RemainingArgs args_;
  std::array<std::string_view, kMaxOperands> names_;
  size_t size_ = 0;
  uint32_t used_ = 0;  // bit i: names_[i] was looked up
};

}  // namespace jax_mla
