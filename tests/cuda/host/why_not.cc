// Why "sm90" declines calls, on a machine without a GPU: tests/test_why_not.py builds and runs it.
// It takes lines of dtype, d_ckv, d_kpe, format ("-": plain), page size, heads, num_splits and
// variant
// ("-": none) and prints a reason for each, which is empty where the call is taken.
#include <iostream>
#include <string>

#include "append/encode.h"
#include "core/kv_format.h"
#include "decode/backend.h"
#include "decode/sm90/codes64/launch.h"
#include "decode/sm90/narrow/launch.h"
#include "decode/sm90/pairs/launch.h"
#include "decode/sm90/wide/launch.h"

namespace jax_mla::append {
bool IsVector(const AppendParams&) { return true; }  // of new rows, for which nobody asks here
}  // namespace jax_mla::append

namespace jax_mla::decode::sm90 {
// The kernels are not compiled here.
template <class C>
std::string narrow::Launch(const DecodeParams&, const DecodeProblem&, cudaStream_t) {
  return "";
}
template <class C>
std::string pairs::Launch(const DecodeParams&, const DecodeProblem&, cudaStream_t) {
  return "";
}
template <class C>
std::string codes64::Launch(const DecodeParams&, const DecodeProblem&, cudaStream_t) {
  return "";
}
template <class C>
std::string wide::Launch(const DecodeParams&, const DecodeProblem&, cudaStream_t) {
  return "";
}
}  // namespace jax_mla::decode::sm90

#include "decode/sm90/kernels.cc"

int main() {
  using namespace jax_mla;
  constexpr int kMaxTokens = 4096;
  gpu::DeviceFacts device{};
  device.cc_major = 9, device.num_sms = 132;
  std::string dtype, format, variant;
  int d_ckv, d_kpe, page_size, num_heads, num_splits;
  while (std::cin >> dtype >> d_ckv >> d_kpe >> format >> page_size >> num_heads >> num_splits >>
         variant) {
    if (variant == "-") variant.clear();
    const decode::DecodeProblem problem{
        .device = device,
        .shape = {.dtype = DTypeOf(dtype).value(),
                  .batch = 8,
                  .q_len = 1,
                  .num_heads = num_heads,
                  .d_ckv = d_ckv,
                  .d_kpe = d_kpe,
                  .page_size = page_size,
                  .max_pages_per_seq = kMaxTokens / page_size,
                  .max_seq_len = kMaxTokens,
                  .num_splits = num_splits,
                  .batch_invariant = false,
                  .kv_format = KvFormatOf(format == "-" ? "" : format).value()},
        .variant = variant};
    std::cout << decode::kSm90Backend.why_not(problem) << "\n";
  }
}
