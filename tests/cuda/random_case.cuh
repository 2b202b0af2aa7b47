// What the stresses of decode and of steps have in common: options, a pool full of poison, scales,
// and the loop over cases.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>

#include "arena.h"
#include "decode/params.h"
#include "decode_reference.cuh"
#include "draw.h"
#include "gpu/launch.h"

namespace jax_mla::decode::stress {

inline constexpr double kMaxRelative = 6e-3;  // of an output; 16-bit P and output give 2e-3
inline constexpr uint32_t kNanWord = 0x7fc00000u;
inline constexpr uint32_t kNanPair = 0x7fff7fffu;  // in either 16-bit type

struct Options {
  gpu::DeviceFacts device;
  std::string kernels;  // which ones, in the program's words; empty: it chooses
  int longest;          // sequence
};

// How the rows of a pool lie.
struct PoolLayout {
  bool is_split;
  int64_t num_layers, num_tokens;  // of a layer
  int64_t ckv_bytes, kpe_bytes;    // of a row; a packed pool has the first alone
  int64_t kpe_offset;              // bytes, in the row of a packed pool

  // Bytes.
  size_t size() const { return num_layers * num_tokens * (ckv_bytes + (is_split ? kpe_bytes : 0)); }
  // Makes `p` read the pool at `base`.
  void Place(char* base, DecodeParams& p) const {
    const auto stream = [&](char* first, int64_t row_bytes, DType dtype) {
      const int64_t width = row_bytes / ElementBytes(dtype);
      return KvStream{first, num_tokens * width, p.page_size * width, width};
    };
    p.ckv = stream(base, ckv_bytes, CkvType(p.kv_format, p.dtype));
    p.kpe = stream(base + (is_split ? num_layers * num_tokens * ckv_bytes : kpe_offset),
                   is_split ? kpe_bytes : ckv_bytes, KpeType(p.kv_format, p.dtype));
  }
};

inline PoolLayout DrawLayout(Draw& draw, const DecodeParams& p) {
  const bool is_ds_mla = p.kv_format == KvFormat::kDsMla;
  const bool may_split = !is_ds_mla && p.d_kpe > 0;
  const bool is_split = p.kv_format == KvFormat::kE4m3KpeBf16 || (may_split && draw.Below(2) != 0);
  const int64_t padding = draw.OneIn(3) ? 16 + 16 * draw.Below(12) : 0;
  const int64_t ckv = int64_t{p.d_ckv} * ElementBytes(CkvType(p.kv_format, p.dtype));
  const int64_t kpe = int64_t{p.d_kpe} * ElementBytes(KpeType(p.kv_format, p.dtype));
  const int64_t kpe_offset = is_ds_mla ? DsMla::kKpeOffset : ckv;
  return {.is_split = is_split,
          .num_layers = p.num_layers,
          .num_tokens = int64_t{p.num_pages} * p.page_size,
          .ckv_bytes = (is_split ? ckv : kpe_offset + kpe) + padding,
          .kpe_bytes = kpe + padding,
          .kpe_offset = kpe_offset};
}

// Fills the bytes of a pool with what no result may depend on: NaN and infinity, or codes of NaN.
template <typename T>
void PoisonPool(void* pool, size_t size) {
  constexpr uint32_t kNanAndInf = std::is_same_v<T, __half> ? 0x7e00fc00u : 0x7fff7f80u;
  FillWords<<<256, 256>>>(static_cast<uint32_t*>(pool), size / 4, kNanAndInf);
}

template <typename T>
constexpr DType DTypeOf() {
  return std::is_same_v<T, __half> ? DType::kF16 : DType::kBf16;
}

// Draws the softmax's scale, and what cached values are multiplied by: partial results in float16
// have to be scaled where O is far from 1.
template <typename T>
float DrawMagnitude(Draw& draw, DecodeParams& p) {
  const int log2 = std::is_same_v<T, __half> ? 10 : 60;
  const float magnitude = !draw.OneIn(4) ? 1.0f : std::ldexp(1.0f, draw.OneIn(2) ? log2 : -log2);
  p.sm_scale = (draw.OneIn(8) ? 0.5f : draw.OneIn(16) ? -0.07f : 0.0721688f) / magnitude;
  return magnitude;
}

inline std::string Text(const char* name, int64_t value) { return name + std::to_string(value); }

// `program [cases [seed [kernels [longest]]]]`. Calls run(arena, options, draw, seed, type) for
// each case, where `type` is a value of the element type. It returns what is wrong, or "". Returns
// the exit status. `longest` is given under compute-sanitizer.
template <class RunCase>
int RunCases(int argc, char** argv, size_t arena_bytes, RunCase run) {
  const int num_cases = argc > 1 ? std::atoi(argv[1]) : 1000;
  const uint64_t first_seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  cudaDeviceProp properties;
  Check(cudaGetDeviceProperties(&properties, 0));
  const Options options{{0, properties.major, properties.minor, properties.multiProcessorCount,
                         static_cast<int32_t>(properties.sharedMemPerBlockOptin)},
                        argc > 3 ? argv[3] : "",
                        argc > 4 ? std::atoi(argv[4]) : INT_MAX};
  Arena arena(arena_bytes, /*is_exact=*/argc > 4);
  int num_failures = 0;
  for (int i = 0; i < num_cases && num_failures < 20; ++i) {
    const uint64_t seed = first_seed + i;
    Draw draw(seed);
    const std::string problem = draw.Below(2) ? run(arena, options, draw, seed, __half{})
                                              : run(arena, options, draw, seed, __nv_bfloat16{});
    if (problem.empty()) continue;
    std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), problem.c_str());
    std::fflush(stdout);
    ++num_failures;
  }
  std::printf("%d cases, %d failures\n", num_cases, num_failures);
  return num_failures == 0 ? 0 : 1;
}

}  // namespace jax_mla::decode::stress
