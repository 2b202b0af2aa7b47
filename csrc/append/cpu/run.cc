// CPU handler of "jax_mla_append". A step appends few tokens, so one thread writes them all.
#include "append/cpu/run.h"

#include <algorithm>
#include <vector>

#include "append/binding.h"
#include "append/cpu/store_row.h"
#include "append/cpu/transform_row.h"
#include "core/call_counter.h"
#include "core/ragged.h"

namespace jax_mla::append {
namespace ffi = xla::ffi;

namespace {

CallCounter calls("append_cpu");

// The address of a row of the cache.
char* RowAddress(const MutableKvStream& pool, DType type, int64_t layer, int64_t page,
                 int64_t page_row) {
  const int64_t to =
      layer * pool.layer_stride + page * pool.page_stride + page_row * pool.token_stride;
  return static_cast<char*>(pool.base) + to * ElementBytes(type);
}

// The angles of a position; null if nothing is rotated.
const float* AnglesOf(const AppendParams& p, int32_t position) {
  if (p.rope_table == nullptr) return nullptr;
  return p.rope_table + int64_t{std::clamp(position, 0, p.num_rope_positions - 1)} * p.d_kpe;
}

// The place of a token by which it is rotated, any number. The tokens of its sequence end at
// `q_end`.
int32_t RotationPosition(const AppendParams& p, int32_t seq_idx, int32_t q_end, int32_t token) {
  if (p.positions != nullptr) return p.positions[token];
  return ClampedPosition(p.rope_lens[seq_idx], p.max_seq_len, q_end, token);
}

// A token and where it belongs.
struct PlacedToken {
  int32_t seq_idx;
  int32_t token;
  int32_t position;  // in its sequence
  int32_t rotation;  // the position whose angles it gets
};

// Writes a token to its place in a sequence, if there is one. `scratch` has room for what it is
// transformed into.
void Place(const AppendParams& p, const PlacedToken& place, char* scratch) {
  const auto [seq_idx, token, position, rotation] = place;
  const int64_t page_idx = position / p.page_size;
  if (position < 0 || page_idx >= p.max_pages_per_seq) return;
  const int64_t page =
      int64_t{p.page_table[int64_t{seq_idx} * p.max_pages_per_seq + page_idx]} - *p.page_begin;
  if (page < 0 || page >= p.num_pages) return;  // another device's page, or a wild id
  const int64_t layer = *p.layer, page_row = position % p.page_size;
  const DType kpe_type = KpeType(p.kv_format, p.dtype);
  char* ckv = RowAddress(p.ckv_pages, CkvType(p.kv_format, p.dtype), layer, page, page_row);
  char* kpe = RowAddress(p.kpe_pages, kpe_type, layer, page, page_row);
  Row ckv_row(p.ckv, p.dtype, token, p.d_ckv), kpe_row(p.kpe, p.dtype, token, p.d_kpe);
  if (p.norm_weight != nullptr) {
    NormRow(ckv_row, p.norm_weight, p.norm_eps, scratch);
    ckv_row.values = scratch;
  }
  if (const float* angles = AnglesOf(p, rotation); angles != nullptr) {
    char* rotated = scratch + int64_t{p.d_ckv} * ElementBytes(p.dtype);
    RotateRow(kpe_row, angles, p.rope_interleaved, rotated);
    kpe_row.values = rotated;
  }
  const KvScale scale = KvScaleOf(p, seq_idx);
  if (p.kv_format == KvFormat::kDsMla) {
    StoreDsMlaCkv(ckv_row, ckv);
  } else {
    StoreRow(ckv_row, CkvType(p.kv_format, p.dtype), scale.ckv, ckv);
  }
  if (p.d_kpe > 0) StoreRow(kpe_row, kpe_type, scale.kpe, kpe);
}

void RotateQuery(const AppendParams& p, int64_t token, int32_t position) {
  const float* angles = AnglesOf(p, position);
  for (int64_t head = 0; head < p.num_heads; ++head) {
    const int64_t idx = token * p.num_heads + head;
    char* to = static_cast<char*>(p.rotated_q_pe) + idx * p.d_kpe * ElementBytes(p.dtype);
    RotateRow(Row(p.q_pe, p.dtype, idx, p.d_kpe), angles, p.rope_interleaved, to);
  }
}

// Rotates the queries of all tokens whose positions are known, those without a place as well.
void RotateQueries(const AppendParams& p, int32_t num_seqs) {
  if (p.positions != nullptr) {
    for (int32_t t = 0; t < p.num_tokens; ++t) RotateQuery(p, t, p.positions[t]);
    return;
  }
  TokenRanges ranges(p);
  for (int32_t b = 0; b < num_seqs; ++b) {
    const TokenRange tokens = ranges.Next();
    for (int32_t t = tokens.begin; t < tokens.end; ++t) {
      RotateQuery(p, t, RotationPosition(p, b, tokens.end, t));
    }
  }
}

ffi::Error Handle(ffi::RemainingArgs args, ffi::RemainingRets rets, AppendAttrs attrs) {
  calls.Increment();
  const auto params = ParseAppend(args, rets, attrs);
  if (!params) return params.error();
  AppendOnCpu(*params);
  return ffi::Error::Success();
}

}  // namespace

void AppendOnCpu(const AppendParams& p) {
  const int32_t num_seqs = NumPresentSeqs(p.num_seqs, p.batch);
  if (p.q_pe != nullptr) RotateQueries(p, num_seqs);
  const bool has_transforms = p.norm_weight != nullptr || p.rope_table != nullptr;
  std::vector<char> scratch(has_transforms ? (int64_t{p.d_ckv} + p.d_kpe) * ElementBytes(p.dtype)
                                           : 0);
  if (*p.layer < 0 || *p.layer >= p.num_layers) return;  // of no layer is any page present
  TokenRanges ranges(p);
  for (int32_t b = 0; b < num_seqs; ++b) {
    const TokenRange tokens = ranges.Next();
    if (p.positions == nullptr && !IsWritable(p.seq_lens[b], p.max_seq_len)) continue;
    for (int32_t t = tokens.begin; t < tokens.end; ++t) {
      const int32_t position =
          p.positions != nullptr ? p.positions[t] : TokenPosition(p.seq_lens[b], tokens.end, t);
      const int32_t rotation = p.rope_table != nullptr ? RotationPosition(p, b, tokens.end, t) : 0;
      Place(p, {b, t, position, rotation}, scratch.data());
    }
  }
}

}  // namespace jax_mla::append

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxMlaAppendCpu, jax_mla::append::Handle,
    xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs<jax_mla::append::AppendAttrs>(),
    {xla::ffi::Traits::kCmdBufferCompatible});
