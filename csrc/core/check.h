// Checks on FFI buffers. A failed check is an InvalidArgument error. It names the target, the
// tensor, what was expected and what it got: "jax_mla_decode: page_table: expected int32[4,16], got
// int32[4,17]". Nothing here throws or aborts.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "core/kv_format.h"
#include "xla/ffi/api/ffi.h"

// Returns `expr`, an ffi::Error, from the enclosing function if it is a failure.
#define MLA_RETURN_IF_ERROR(expr)                                    \
  do {                                                               \
    if (::xla::ffi::Error mla_error = (expr); mla_error.failure()) { \
      return mla_error;                                              \
    }                                                                \
  } while (false)

namespace jax_mla {

// In a list of expected dimensions: this dimension may have any size.
inline constexpr int64_t kAnyDim = -1;

using Dims = xla::ffi::Span<const int64_t>;

// Types and shapes as JAX prints them: "bfloat16", "bfloat16[4,1,16,512]".
std::string FormatType(xla::ffi::DataType dtype);
std::string FormatTensor(xla::ffi::DataType dtype, Dims dims);

xla::ffi::DataType ToFfi(DType dtype);
// The element type of a call.
std::optional<DType> FromFfi(xla::ffi::DataType dtype);

// Kernels copy queries, rows, cache and results in pieces of so many bytes.
inline constexpr int32_t kPieceBytes = 16;

struct NamedAddress {
  std::string_view name;  // of the tensor, for the message
  const void* address;
};

// The checks of one target.
class Checker {
 public:
  explicit Checker(std::string_view target) : target_(target) {}

  xla::ffi::Error Fail(std::string_view tensor, std::string_view expected,
                       std::string_view got) const;

  // The buffer has exactly this type and these dimensions. kAnyDim matches any size.
  xla::ffi::Error Tensor(std::string_view name, const xla::ffi::AnyBuffer& buffer,
                         xla::ffi::DataType dtype, std::initializer_list<int64_t> dims) const {
    return Tensor(name, buffer, dtype, Dims(dims.begin(), dims.size()));
  }
  xla::ffi::Error Tensor(std::string_view name, const xla::ffi::AnyBuffer& buffer,
                         xla::ffi::DataType dtype, Dims dims) const;

  // The same of an array with up to two more dimensions for each token: [batch, q_len, *each] or,
  // in a ragged call, [num_tokens, *each]. The members of `p` with these names are known.
  template <typename Params>
  xla::ffi::Error OfTokens(std::string_view name, const xla::ffi::AnyBuffer& buffer,
                           xla::ffi::DataType dtype, const Params& p,
                           std::initializer_list<int64_t> each) const {
    std::array<int64_t, 4> dims = {p.batch, p.q_len};
    size_t rank = 2;
    if (p.cu_q_lens != nullptr) {
      dims[0] = p.num_tokens;
      rank = 1;
    }
    for (int64_t dim : each) dims[rank++] = dim;
    return Tensor(name, buffer, dtype, Dims(dims.data(), rank));
  }

  // The buffer is float32[1, width] or float32[batch, width].
  xla::ffi::Error OneOrEach(std::string_view name, const xla::ffi::AnyBuffer& buffer, int64_t batch,
                            int64_t width) const;

  xla::ffi::Error Rank(std::string_view name, const xla::ffi::AnyBuffer& buffer, size_t rank) const;

  // The buffer's type is bfloat16, float16 or float32.
  xla::ffi::Error Float(std::string_view name, const xla::ffi::AnyBuffer& buffer) const;

  // The addresses are multiples of kPieceBytes. XLA places its buffers on larger boundaries, so
  // this fails only if a caller passes an address inside a buffer.
  xla::ffi::Error Aligned(std::initializer_list<NamedAddress> buffers) const;

  // The size can be a 32-bit index.
  xla::ffi::Error FitsInt32(std::string_view what, int64_t value) const;

  std::string_view target() const { return target_; }

 private:
  std::string_view target_;
};

}  // namespace jax_mla
