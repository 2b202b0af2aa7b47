// Prints which kernel csrc/decode/sm90/choice.cc chooses for a grid of calls, as tables in Markdown
// for docs/kernels/decode_sm90.md. Built and run by tools/which_kernel.py; needs no GPU.
#include <cstdint>
#include <cstdio>
#include <string>

#include "decode/params.h"
#include "decode/sm90/choice.h"

namespace jax_mla::decode::sm90 {
namespace {

constexpr int32_t kNumSms = 132, kPageSize = 64;  // an H200

struct Work {
  int32_t batch, tokens;
};
constexpr Work kWorks[] = {{1, 1024}, {1, 8192}, {8, 1024}, {8, 4096}, {32, 4096}, {128, 4096}};
constexpr int32_t kHeads[] = {8, 16, 24, 32, 64, 128};

// As in backend="sm90:name", where the kernel has such a name.
std::string NameOf(const KernelKey& key) {
  switch (key.kernel) {
    case KernelKind::kNarrow:
      return "narrow" + std::to_string(key.tile_rows) + (key.num_teams > 1 ? "x2" : "");
    case KernelKind::kPairs:
      return "pairs";
    case KernelKind::kCodes64:
      return "scores";
    case KernelKind::kWide:
      return "wide";
  }
  return "";
}

DecodeShape ShapeOf(int32_t num_heads, const Work& work, int32_t d_ckv, KvFormat format) {
  return {.dtype = DType::kBf16,
          .batch = work.batch,
          .q_len = 1,
          .num_heads = num_heads,
          .d_ckv = d_ckv,
          .d_kpe = d_ckv / 8,
          .page_size = kPageSize,
          .max_pages_per_seq = work.tokens / kPageSize,
          .max_seq_len = work.tokens,
          .num_splits = 0,
          .batch_invariant = false,
          .kv_format = format};
}

void PrintTable(const char* title, int32_t d_ckv, KvFormat format) {
  std::printf("| %s |", title);
  for (const Work& work : kWorks) std::printf(" %d x %d |", work.batch, work.tokens);
  std::printf(" rows alone |\n|---|");
  for (size_t i = 0; i <= std::size(kWorks); ++i) std::printf("---|");
  std::printf("\n");
  for (const int32_t heads : kHeads) {
    std::printf("| %d |", heads);
    for (const Work& work : kWorks) {
      const DecodeShape shape = ShapeOf(heads, work, d_ckv, format);
      std::printf(" %s |", NameOf(ChooseKernel(shape, nullptr, false, kNumSms)).c_str());
    }
    DecodeShape shape = ShapeOf(heads, kWorks[0], d_ckv, format);
    shape.batch_invariant = true;
    std::printf(" %s |\n", NameOf(ChooseKernel(shape, nullptr, false, kNumSms)).c_str());
  }
}

}  // namespace
}  // namespace jax_mla::decode::sm90

int main() {
  using jax_mla::KvFormat;
  using jax_mla::decode::sm90::PrintTable;
  PrintTable("heads, bf16, 512 + 64", 512, KvFormat::kPlain);
  std::printf("\n");
  PrintTable("heads, `fp8_e4m3`, 512 + 64", 512, KvFormat::kE4m3);
  std::printf("\n");
  PrintTable("heads, `fp8_e4m3`, 256 + 32", 256, KvFormat::kE4m3);
}
