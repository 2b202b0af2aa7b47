// What the CPU handler (backend.cc) and its vector kernels agree on. kernel_impl.h is the kernel's
// one source; kernel_avx512.cc, kernel_avx2.cc and kernel_baseline.cc compile it for one
// instruction set each.
//
// A *task* is one part of one sequence for one row tile. Query row r = q_idx * num_heads + h, and
// all query rows of a sequence read the same KV stream. A task leaves a *partial result*: attention
// over the part's tokens, not yet normalised, so that the parts of a sequence can be merged.
#pragma once

#include <cstdint>

#include "decode/params.h"

namespace jax_mla::decode::cpu {

// The most query rows of a row tile. It bounds a thread's scratch, but is large enough that a KV
// tile that has been converted to float32 serves many rows.
inline constexpr int32_t kMaxTaskRows = 64;

// Tokens of a KV tile, which is converted to float32 as a whole. Parts are cut at multiples of it.
inline constexpr int32_t kTileTokens = 32;

// Latent and rope dimensions are stored in chunks of this many elements, the last one zero-padded.
inline constexpr int32_t kDimChunk = 16;

// Always inlined, because the linker keeps one copy of an inline function for all files, and that
// copy must not be one that was compiled for AVX-512.
[[gnu::always_inline]] constexpr int32_t RoundUp(int32_t n, int32_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

struct Task {
  int32_t seq_idx;
  int32_t seq_len;      // clamped to [0, max_seq_len]
  int32_t q_len;        // query tokens of the sequence
  int64_t first_row;    // the task's first query row among those of the whole call
  int32_t row_begin;    // the same among those of the sequence
  int32_t num_rows;     // 1 to kMaxTaskRows
  int32_t padded_rows;  // num_rows, rounded up to a multiple of the kernel's row_lanes
  int32_t token_begin;  // multiple of kTileTokens
  int32_t token_end;    // at most seq_len
  bool has_queries;     // the thread's scratch already holds the queries of these rows
};

// A partial result. Query row r is column r of each array. The output is acc / sum.
struct Partial {
  float* acc;       // [RoundUp(d_ckv, kDimChunk), padded_rows]
  float* max_log2;  // [padded_rows], maximum of the scores in log2 units; -inf without a token
  float* sum;       // [padded_rows], sum of 2^(score - max)
};

struct Kernel {
  const char* name;
  int32_t row_lanes;  // query rows in one vector
  void (*run)(const DecodeParams& params, const Task& task, float* scratch, const Partial& partial);
};

// Floats of a thread's scratch, which is 64-byte aligned: the queries, a KV tile and its scores.
constexpr int64_t ScratchFloats(int32_t d_ckv, int32_t d_kpe, int32_t padded_rows) {
  const int64_t d_padded = int64_t{RoundUp(d_ckv, kDimChunk)} + RoundUp(d_kpe, kDimChunk);
  return d_padded * (padded_rows + kTileTokens) + int64_t{kTileTokens} * padded_rows;
}

extern const Kernel kBaseline;  // what the compiler targets by default
#if defined(__x86_64__)
extern const Kernel kAvx2;    // AVX2, FMA and F16C
extern const Kernel kAvx512;  // AVX-512 F, BW, DQ and VL
#endif

}  // namespace jax_mla::decode::cpu
