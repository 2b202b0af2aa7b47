// The interface between the CPU handler (cpu.cc) and its vector kernels: cpu_kernel_impl.h compiled
// once for each instruction set (cpu_avx512.cc, ...).
//
// A *task* is one part of one sequence for one group of query rows. Row r = q_idx * num_heads + h:
// all rows of a sequence read the same KV stream. A task leaves a *partial*: what attention over
// the part's keys gives, not yet normalised, so that parts can be merged.
#pragma once

#include <cstdint>

#include "decode/params.h"

namespace jax_mla::decode {

// Rows of one task. Bounds the scratch of a thread and lets a converted KV tile serve many rows.
inline constexpr int32_t kMaxTaskRows = 64;

// Tokens that are converted to float32 at a time; parts are cut at multiples of it.
inline constexpr int32_t kTileTokens = 32;

// The head dimension is stored in blocks of this many elements, zero-padded.
inline constexpr int32_t kDimBlock = 16;

// Always inlined: the kernels' files must not leave a copy for their instruction set behind.
[[gnu::always_inline]] constexpr int32_t RoundUp(int32_t n, int32_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

struct CpuTask {
  int32_t seq_idx;
  int32_t seq_len;  // clamped to [0, max_seq_len]
  int32_t row_begin;
  int32_t num_rows;     // 1..kMaxTaskRows
  int32_t padded_rows;  // rounded up to the kernel's row_lanes
  int32_t token_begin;  // multiple of kTileTokens
  int32_t token_end;    // at most seq_len
  bool has_queries;     // the scratch still holds the queries of this sequence and these rows
};

// float32 arrays of one partial; row r is column r. Not normalised: divide acc by sum.
struct CpuPartial {
  float* acc;       // [RoundUp(d_ckv, kDimBlock), padded_rows]
  float* max_log2;  // [padded_rows], base-2 maximum of the scores; -inf if there was no key
  float* sum;       // [padded_rows], sum of 2^(score - max)
};

struct CpuKernel {
  const char* name;
  int32_t row_lanes;  // rows in one vector; the rows of a task are padded to a multiple
  void (*run)(const DecodeParams& params, const CpuTask& task, float* scratch,
              const CpuPartial& partial);
};

// Elements of the 64-byte aligned scratch that every thread brings along.
constexpr int64_t CpuScratchFloats(int32_t d_ckv, int32_t d_kpe, int32_t padded_rows) {
  const int64_t d_padded = int64_t{RoundUp(d_ckv, kDimBlock)} + RoundUp(d_kpe, kDimBlock);
  return d_padded * (padded_rows + kTileTokens) + int64_t{kTileTokens} * padded_rows;
}

extern const CpuKernel kCpuBaseline;  // whatever the compiler targets by default
#if defined(__x86_64__)
extern const CpuKernel kCpuAvx2;    // AVX2, FMA and F16C
extern const CpuKernel kCpuAvx512;  // AVX-512 F, BW, DQ and VL
#endif

}  // namespace jax_mla::decode
