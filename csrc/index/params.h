// All that index_topk is told about one call, and how much scratch it needs. Plain C++ (no FFI, no
// CUDA); pointers are device pointers on CUDA and host pointers on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/index_page.h"
#include "core/kv_format.h"

namespace jax_mla::index {

inline constexpr int32_t kDim = IndexFp8::kDim;  // of an index key and of an index query, on CUDA
inline constexpr int32_t kMaxHeads = 64;         // index heads
// Entries of a result's row. GLM-5.3 asks for most: 2176.
inline constexpr int32_t kMaxTopk = 4096;

struct TopkParams {
  // Operands; arrays are row-major and contiguous.
  const void* q;              // q_dtype[num_tokens, num_heads, kDim]
  const float* weights;       // [num_tokens, num_heads]
  const int32_t* page_table;  // [batch, max_pages_per_seq], global page ids
  const int32_t* seq_lens;    // [batch], tokens, the new ones included; any value: clamp
  const int32_t* cu_q_lens;   // [batch + 1], see core/ragged.h; null: q_len tokens a sequence
  const int32_t* num_seqs;    // [1], sequences beyond it are absent; null: all are present
  const int32_t* layer;       // [1], which layer of the pool; in no other layer is a key
  const int32_t* page_begin;  // [1], global id of the pool's page 0 (context parallelism)
  const void* index_pages;    // [num_layers, num_pages, IndexPageBytes] bytes

  // Results.
  int32_t* indices;  // [num_tokens, k], ascending, then -1
  int32_t* lens;     // [num_tokens], how many of them count
  // [num_tokens, k], the scores of these tokens, or 0 where a query sees at most k; null: not
  // wanted. Undefined behind the valid entries.
  float* scores;

  // Device scratch, uninitialised: ScratchBytes. Null on the CPU.
  void* scratch;
  int64_t scratch_bytes;

  int32_t batch;
  int32_t q_len;  // 0 with cu_q_lens
  int32_t num_tokens;
  int32_t num_heads;
  int32_t d;  // kDim on CUDA
  int32_t k;
  int32_t max_pages_per_seq;
  int32_t num_layers;     // 1 for a pool without layers
  int32_t num_pages;      // of this pool: local ids are [0, num_pages)
  int32_t page_size;      // tokens
  int32_t max_seq_len;    // what seq_lens are clamped to, at most max_pages_per_seq * page_size
  DType q_dtype;          // kBf16 or kE4m3
  DType key_dtype;        // kBf16 or kE4m3
  bool return_positions;  // places in the sequence, not slots
};

// Where a query stands: which sequence it belongs to, and how many tokens of it the query sees.
struct alignas(16) QueryPlace {
  int32_t seq_idx;      // kNoSequence: it is padding
  int32_t num_visible;  // may be 0 or less
  int32_t idx;          // of the query among the new tokens of its sequence
  int32_t num_behind;   // queries of the sequence behind it
};

// ---- Scratch: the places of the queries of a ragged call, and then the scores of a slab. Queries
// are served in slabs, as many at once as the scratch holds scores of.

// Bytes of the scores of a slab, unless one query needs more.
inline constexpr int64_t kMaxScoreBytes = int64_t{256} << 20;
// Queries of a slab. The score kernels hold 16 bytes for each of them in shared memory.
inline constexpr int32_t kMaxSlabRows = 1024;

// Scores from one query's to the next's.
constexpr int64_t ScoreStride(int64_t max_seq_len) { return (max_seq_len + 127) / 128 * 128; }

constexpr int64_t PlaceBytes(int32_t num_tokens, bool is_ragged) {
  const int64_t bytes = is_ragged ? int64_t{num_tokens} * int64_t{sizeof(QueryPlace)} : 0;
  return (bytes + 255) / 256 * 256;
}

// Queries of a slab, if there are `score_bytes` for their scores.
inline int32_t SlabRows(int32_t num_tokens, int64_t max_seq_len, int64_t score_bytes) {
  const int64_t most = score_bytes / (ScoreStride(max_seq_len) * int64_t{sizeof(uint32_t)});
  return static_cast<int32_t>(
      std::clamp<int64_t>(most, 1, std::min<int32_t>(std::max(num_tokens, 1), kMaxSlabRows)));
}

// What a call on CUDA needs. Where no query can see more than k tokens, no score is computed.
inline int64_t ScratchBytes(int32_t num_tokens, int64_t max_seq_len, int32_t k, bool is_ragged) {
  const int64_t places = PlaceBytes(num_tokens, is_ragged);
  if (max_seq_len <= k) return std::max<int64_t>(places, 256);
  const int64_t rows = SlabRows(num_tokens, max_seq_len, kMaxScoreBytes);
  return places + rows * ScoreStride(max_seq_len) * int64_t{sizeof(uint32_t)};
}

}  // namespace jax_mla::index
