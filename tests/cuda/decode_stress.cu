// Random small decode calls against a float32 reference on the GPU, thousands a second: for races
// and corner cases that a suite of named cases cannot reach. Every cache row that is no key holds
// NaN and Inf, table entries that must not be used hold wild ids, outputs and scratch are poisoned,
// and every case runs three times and must repeat bit for bit.
//
//   nvcc -std=c++20 -O2 -gencode=arch=compute_90a,code=sm_90a -DJAX_MLA_WITH_CUDA
//   -DJAX_MLA_WITH_SM90A
//     -Icsrc -I<cutlass>/include tests/cuda/decode_stress.cu csrc/decode/schedule.cc
//     csrc/decode/combine.cu csrc/decode/sm90/*.cc csrc/decode/sm90/*/*.cu -o decode_stress
//   ./decode_stress 10000 [seed] [variant]
// Add -DMLA_CHAOS for random delays at every barrier (gpu/sm90.cuh). On failure the case's seed is
// printed: `./decode_stress 1 SEED` runs it alone. Linked against another backend: change kBackend.
// A little over 300 lines, so that it stays one file that can be carried to a GPU machine.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "decode/backend.h"
#include "decode/combine.h"

namespace {

using namespace jax_mla;          // NOLINT: a program, not a header
using namespace jax_mla::decode;  // NOLINT

constexpr const DecodeBackend& kBackend = kSm90Backend;
constexpr int kRepeats = 3;
constexpr double kMaxRelative = 6e-3;  // of a sequence's output; 16-bit P and output give 2e-3
constexpr double kMaxLse = 1e-4;
constexpr size_t kArenaBytes = size_t{2} << 30;
constexpr int kPageSizes[] = {1, 2, 4, 7, 8, 16, 20, 24, 32, 64, 96, 100, 128, 256};
constexpr int kWildIds[] = {2147480000, -1, -2147480000};

void Check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA error: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

__device__ uint32_t Hash(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdull;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ull;
  return static_cast<uint32_t>(x ^ (x >> 33));
}
__device__ float Gauss(uint64_t i) {
  const float u = (Hash(2 * i + 1) + 1.0f) * 2.3283064e-10f, v = Hash(2 * i) * 2.3283064e-10f;
  return sqrtf(-2.0f * logf(u)) * cospif(2.0f * v);
}

template <typename T>
__global__ void FillGauss(T* data, size_t size, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < size;
       i += size_t{gridDim.x} * blockDim.x) {
    data[i] = static_cast<T>(Gauss(i + (seed << 32)));
  }
}
__global__ void FillWords(uint32_t* data, size_t size, uint32_t word) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < size;
       i += size_t{gridDim.x} * blockDim.x) {
    data[i] = word;
  }
}

// Address of a token's row in a stream, or null if its page is not here.
template <typename T>
__device__ T* TokenRow(const DecodeParams& p, const KvStream& stream, int seq, int token) {
  const int64_t id = p.page_table[int64_t{seq} * p.max_pages_per_seq + token / p.page_size];
  const int64_t page = id - *p.page_begin;
  if (page < 0 || page >= p.num_pages) return nullptr;
  return static_cast<T*>(const_cast<void*>(stream.base)) + *p.layer * stream.layer_stride +
         page * stream.page_stride + token % p.page_size * stream.token_stride;
}
__device__ int Length(const DecodeParams& p, int seq) {
  return min(max(p.seq_lens[seq], 0), p.max_seq_len);
}

// Grid (tokens, batch): random keys, only where keys are.
template <typename T>
__global__ void FillKeys(DecodeParams p, uint64_t seed) {
  const int seq = blockIdx.y;
  for (int token = blockIdx.x; token < Length(p, seq); token += gridDim.x) {
    T* ckv = TokenRow<T>(p, p.ckv, seq, token);
    T* kpe = TokenRow<T>(p, p.kpe, seq, token);
    if (ckv == nullptr) continue;
    const uint64_t first = (seed << 40) + (uint64_t{blockIdx.y} << 26) + uint64_t(token) * 1024;
    for (int d = threadIdx.x; d < p.d_ckv; d += blockDim.x) ckv[d] = T(Gauss(first + d));
    for (int d = threadIdx.x; d < p.d_kpe; d += blockDim.x) kpe[d] = T(Gauss(first + 600 + d));
  }
}

// One sequence, summed over the runs of a case.
struct Verdict {
  double error, norm;  // squared
  int bad;             // NaN, wrong -inf, non-zero empty rows, large LSE errors
};

// Grid (rows, batch): one row of the reference, compared with the backend's.
template <typename T>
__global__ void Compare(DecodeParams p, float* all_scores, int max_len, Verdict* verdicts) {
  const int rows = p.q_len * p.num_heads, seq = blockIdx.y;
  const int64_t row = int64_t{seq} * rows + blockIdx.x;
  const int len = Length(p, seq), query = blockIdx.x / p.num_heads;
  const int visible = p.causal ? max(len - p.q_len + query + 1, 0) : len;
  const T* q_nope = static_cast<const T*>(p.q_nope) + row * p.d_ckv;
  const T* q_pe = static_cast<const T*>(p.q_pe) + row * p.d_kpe;
  float* scores = all_scores + row * max_len;
  for (int token = threadIdx.x; token < visible; token += blockDim.x) {
    const T* ckv = TokenRow<T>(p, p.ckv, seq, token);
    const T* kpe = TokenRow<T>(p, p.kpe, seq, token);
    float score = -INFINITY;
    if (ckv != nullptr) {
      score = 0.0f;
      for (int d = 0; d < p.d_ckv; ++d) score += float(q_nope[d]) * float(ckv[d]);
      for (int d = 0; d < p.d_kpe; ++d) score += float(q_pe[d]) * float(kpe[d]);
      score *= p.sm_scale;
    }
    scores[token] = score;
  }
  __syncthreads();
  float top = -INFINITY, sum = 0.0f;
  for (int token = 0; token < visible; ++token) top = fmaxf(top, scores[token]);
  for (int token = 0; token < visible; ++token) {
    sum += top == -INFINITY ? 0.0f : expf(scores[token] - top);
  }
  double error = 0.0, norm = 0.0;
  int bad = 0;
  for (int d = threadIdx.x; d < p.d_ckv; d += blockDim.x) {
    float expected = 0.0f;
    for (int token = 0; token < visible && sum > 0.0f; ++token) {
      const T* ckv = TokenRow<T>(p, p.ckv, seq, token);
      if (ckv != nullptr) expected += expf(scores[token] - top) / sum * float(ckv[d]);
    }
    const float got = float(static_cast<const T*>(p.out)[row * p.d_ckv + d]);
    bad += !(got == got) || (sum == 0.0f && got != 0.0f);
    error += double(got - expected) * (got - expected);
    norm += double(expected) * expected;
  }
  if (threadIdx.x == 0) {
    const float got = p.lse[row], expected = sum > 0.0f ? top + logf(sum) : -INFINITY;
    bad += sum > 0.0f ? !(fabsf(got - expected) <= kMaxLse * (1.0f + 0.05f * fabsf(expected)))
                      : got != -INFINITY;
  }
  atomicAdd(&verdicts[seq].error, error);
  atomicAdd(&verdicts[seq].norm, norm);
  if (bad != 0) atomicAdd(&verdicts[seq].bad, bad);
}

__global__ void CountDifferences(const uint16_t* a, const uint16_t* b, size_t size, int* count) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < size;
       i += size_t{gridDim.x} * blockDim.x) {
    if (a[i] != b[i]) atomicAdd(count, 1);
  }
}

class Arena {
 public:
  Arena() { Check(cudaMalloc(&base_, kArenaBytes)); }
  void Reset() { used_ = 0; }
  template <typename T>
  T* Take(size_t size) {
    T* result = reinterpret_cast<T*>(base_ + used_);
    used_ += (size * sizeof(T) + 511) / 256 * 256;
    if (used_ > kArenaBytes) std::abort();
    return result;
  }
  template <typename T>
  T* Copy(const std::vector<T>& values) {
    T* result = Take<T>(values.size());
    Check(cudaMemcpy(result, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return result;
  }

 private:
  char* base_ = nullptr;
  size_t used_ = 0;
};

// Draws one case, runs it and returns what went wrong ("" if nothing).
template <typename T>
std::string RunCase(std::mt19937_64& rng, Arena& arena, const gpu::DeviceFacts& device,
                    const std::string& variant, uint64_t seed) {
  auto below = [&](int n) { return static_cast<int>(rng() % n); };
  arena.Reset();
  const bool is_mini = below(3) == 0, is_split = below(2), long_batch = below(20) == 0;
  DecodeParams p{};
  p.q_len = below(2) ? 1 : 1 + below(4);
  p.num_heads = std::max(1, (1 + below(variant == "wide" ? 128 : 32)) / p.q_len);
  p.batch = long_batch ? 140 + below(100) : 1 + below(12);
  p.d_ckv = is_mini ? 256 : 512;
  p.d_kpe = is_mini ? 32 : 64;
  p.page_size = variant == "wide" ? 8 << below(6) : kPageSizes[below(std::size(kPageSizes))];
  p.dtype = std::is_same_v<T, __half> ? DType::kF16 : DType::kBf16;
  p.causal = below(4) != 0;
  p.sm_scale = below(8) ? 0.0721688f : 0.5f;
  p.num_splits = below(3) ? 0 : 1 + below(8);
  p.batch_invariant = below(8) == 0;
  p.num_layers = 1 + below(3);

  const int longest = long_batch ? 130 : below(4) == 0 ? 1500 : below(4) == 0 ? 70 : 400;
  std::vector<int> lens(p.batch);
  int num_used = 0;
  for (int& len : lens) {
    len = below(longest + 1);
    num_used += (len + p.page_size - 1) / p.page_size;
    p.max_pages_per_seq = std::max(p.max_pages_per_seq, (len + p.page_size - 1) / p.page_size);
  }
  p.max_pages_per_seq += 1 + below(3);
  p.max_seq_len = p.max_pages_per_seq * p.page_size;
  p.num_pages = num_used + 1 + below(4);
  const int page_begin = below(2) ? 0 : below(100), layer = below(p.num_layers);
  std::vector<int> order(p.num_pages), table(size_t(p.batch) * p.max_pages_per_seq);
  std::iota(order.begin(), order.end(), page_begin);
  std::shuffle(order.begin(), order.end(), rng);
  const int wild_percent = below(3) ? 0 : 30;
  for (size_t i = 0, next = 0; i < table.size(); ++i) {
    const int seq = i / p.max_pages_per_seq, index = i % p.max_pages_per_seq;
    const bool is_used = index * p.page_size < lens[seq] && below(100) >= wild_percent;
    table[i] = is_used ? order[next++] : kWildIds[below(std::size(kWildIds))];
  }

  const size_t rows = size_t(p.batch) * p.q_len * p.num_heads;
  const int64_t d_qk = p.d_ckv + p.d_kpe, tokens = int64_t{p.num_pages} * p.page_size;
  const size_t pool_size = p.num_layers * tokens * d_qk;
  T* pool = arena.Take<T>(pool_size);
  auto stream = [&](T* base, int64_t width) {
    return KvStream{base, tokens * width, p.page_size * width, width};
  };
  p.ckv = stream(pool, is_split ? p.d_ckv : d_qk);
  p.kpe = is_split ? stream(pool + p.num_layers * tokens * p.d_ckv, p.d_kpe)
                   : stream(pool + p.d_ckv, d_qk);
  FillWords<<<256, 256>>>(reinterpret_cast<uint32_t*>(pool), pool_size / 2,
                          p.dtype == DType::kF16 ? 0x7e00fc00u : 0x7fff7f80u);  // NaN and Inf
  T* q = arena.Take<T>(rows * d_qk);
  FillGauss<<<64, 256>>>(q, rows * d_qk, seed);
  p.q_nope = q;
  p.q_pe = q + rows * p.d_ckv;
  p.page_table = arena.Copy(table);
  p.seq_lens = arena.Copy(lens);
  p.layer = arena.Copy(std::vector<int>{layer});
  p.page_begin = arena.Copy(std::vector<int>{page_begin});
  FillKeys<T><<<dim3(64, p.batch), 128>>>(p, seed);
  const DecodeProblem problem{device,
                              {p.dtype, p.batch, p.q_len, p.num_heads, p.d_ckv, p.d_kpe,
                               p.page_size, p.max_pages_per_seq, p.num_splits, p.batch_invariant},
                              variant};
  p.scratch_bytes = DecodeScratchBytes(problem.shape);
  p.scratch = arena.Take<char>(p.scratch_bytes);
  if (std::string reason = kBackend.why_not(problem); !reason.empty()) return reason;

  T* first_out = arena.Take<T>(rows * p.d_ckv);
  std::vector<Verdict> verdicts(p.batch);
  Verdict* device_verdicts = arena.Copy(verdicts);
  int* differences = arena.Copy(std::vector<int>{0});
  float* scores = arena.Take<float>(rows * (longest + 1));
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    T* out = repeat == 0 ? first_out : arena.Take<T>(rows * p.d_ckv);
    p.out = out;
    p.lse = arena.Take<float>(rows);
    FillWords<<<64, 256>>>(reinterpret_cast<uint32_t*>(out), rows * p.d_ckv / 2, 0x7fff7fffu);
    FillWords<<<64, 256>>>(static_cast<uint32_t*>(p.scratch), p.scratch_bytes / 4, 0x7fc00000u);
    if (std::string error = kBackend.launch(p, problem, nullptr); !error.empty()) return error;
    Compare<T>
        <<<dim3(p.q_len * p.num_heads, p.batch), 128>>>(p, scores, longest + 1, device_verdicts);
    CountDifferences<<<64, 256>>>(reinterpret_cast<uint16_t*>(first_out),
                                  reinterpret_cast<uint16_t*>(out), rows * p.d_ckv, differences);
  }
  int num_differences = 0;
  Check(cudaMemcpy(&num_differences, differences, sizeof(int), cudaMemcpyDeviceToHost));
  Check(cudaMemcpy(verdicts.data(), device_verdicts, p.batch * sizeof(Verdict),
                   cudaMemcpyDeviceToHost));
  if (num_differences != 0) return std::to_string(num_differences) + " elements do not repeat";
  for (int seq = 0; seq < p.batch; ++seq) {
    const double relative = std::sqrt(verdicts[seq].error / std::max(verdicts[seq].norm, 1e-30));
    if (verdicts[seq].bad != 0 || (verdicts[seq].norm > 0 && !(relative < kMaxRelative))) {
      return "sequence " + std::to_string(seq) + ": relative error " + std::to_string(relative) +
             ", " + std::to_string(verdicts[seq].bad) + " bad values";
    }
  }
  return "";
}

}  // namespace

int main(int argc, char** argv) {
  const int num_cases = argc > 1 ? std::atoi(argv[1]) : 1000;
  const uint64_t first_seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  const std::string variant = argc > 3 ? argv[3] : "";
  cudaDeviceProp properties;
  Check(cudaGetDeviceProperties(&properties, 0));
  const gpu::DeviceFacts device{0, properties.major, properties.minor,
                                properties.multiProcessorCount,
                                static_cast<int32_t>(properties.sharedMemPerBlockOptin)};
  Arena arena;
  int num_failures = 0;
  for (int i = 0; i < num_cases; ++i) {
    const uint64_t seed = first_seed + i;
    std::mt19937_64 rng(seed);
    const std::string problem = rng() % 2
                                    ? RunCase<__half>(rng, arena, device, variant, seed)
                                    : RunCase<__nv_bfloat16>(rng, arena, device, variant, seed);
    if (problem.empty()) continue;
    std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), problem.c_str());
    if (++num_failures == 20) break;
  }
  std::printf("%d cases, %d failures\n", num_cases, num_failures);
  return num_failures == 0 ? 0 : 1;
}
