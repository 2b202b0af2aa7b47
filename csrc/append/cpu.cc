// CPU handler of "jax_mla_append". A step appends few tokens, so one thread copies them all.
#include "append/cpu.h"

#include <cstring>

#include "append/binding.h"
#include "core/call_counter.h"
#include "core/ragged.h"

namespace jax_mla::append {
namespace ffi = xla::ffi;

namespace {

CallCounter calls("append_cpu");

// Copies the `width` elements of token `token` to a row of a page.
void Store(const MutableKvStream& pool, int64_t layer, int64_t page, int64_t page_row,
           const void* tokens, int64_t token, int64_t width, int64_t element_bytes) {
  const int64_t to =
      layer * pool.layer_stride + page * pool.page_stride + page_row * pool.token_stride;
  std::memcpy(static_cast<char*>(pool.base) + to * element_bytes,
              static_cast<const char*>(tokens) + token * width * element_bytes,
              width * element_bytes);
}

// Copies a token to its place in a sequence, if there is one.
void Place(const AppendParams& p, int64_t seq_idx, int64_t token, int32_t position) {
  const int64_t page_idx = position / p.page_size;
  if (position < 0 || page_idx >= p.max_pages_per_seq) return;
  const int64_t page =
      int64_t{p.page_table[seq_idx * p.max_pages_per_seq + page_idx]} - *p.page_begin;
  if (page < 0 || page >= p.num_pages) return;  // another device's page, or a wild id
  const int64_t layer = *p.layer, page_row = position % p.page_size;
  const int64_t element_bytes = ElementBytes(p.dtype);
  Store(p.ckv_pages, layer, page, page_row, p.ckv, token, p.d_ckv, element_bytes);
  Store(p.kpe_pages, layer, page, page_row, p.kpe, token, p.d_kpe, element_bytes);
}

ffi::Error Handle(ffi::RemainingArgs args, ffi::RemainingRets rets, bool has_layer) {
  calls.Increment();
  const auto params = ParseAppend(args, rets, has_layer);
  if (!params) return params.error();
  AppendOnCpu(*params);
  return ffi::Error::Success();
}

}  // namespace

void AppendOnCpu(const AppendParams& p) {
  if (*p.layer < 0 || *p.layer >= p.num_layers) return;  // of no layer is any page present
  const int32_t num_seqs = NumPresentSeqs(p.num_seqs, p.batch);
  TokenRanges ranges(p);
  for (int32_t b = 0; b < num_seqs; ++b) {
    const TokenRange tokens = ranges.Next();
    if (p.positions == nullptr && !IsWritable(p.seq_lens[b], p.max_seq_len)) continue;
    for (int32_t t = tokens.begin; t < tokens.end; ++t) {
      const int32_t position =
          p.positions != nullptr ? p.positions[t] : TokenPosition(p.seq_lens[b], tokens.end, t);
      Place(p, b, t, position);
    }
  }
}

}  // namespace jax_mla::append

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxMlaAppendCpu, jax_mla::append::Handle,
    xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<bool>("has_layer"),
    {xla::ffi::Traits::kCmdBufferCompatible});
