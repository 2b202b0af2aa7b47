// Runs the CUDA decode backends and append without JAX, on small cases against a CPU reference:
// what tests/test_cuda_sanitizer.py puts under compute-sanitizer. Exit status 1 if a result is
// wrong.
//
//   instances=$(python tools/kernel_instances.py DIR csrc/decode/sm80)
//   nvcc -std=c++20 -gencode=arch=compute_90,code=sm_90 -DJAX_MLA_WITH_CUDA -Icsrc
//     --expt-relaxed-constexpr tests/cuda_driver.cu csrc/decode/sm80/backend.cc $instances
//     csrc/decode/merge/combine.cu csrc/decode/schedule/plan.cc csrc/append/{append,encode}.cu
//     csrc/gpu/launch.cc csrc/append/cpu/{transform,store}_row.cc
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "append/append.h"
#include "append/cpu/store_row.h"
#include "append/cpu/transform_row.h"
#include "decode/backend.h"
#include "decode/schedule/plan.h"

using namespace jax_mla;  // NOLINT: a test program

namespace {

using Bf16 = __nv_bfloat16;

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// A device array with a host copy.
template <typename T>
struct Array {
  std::vector<T> host;
  T* device = nullptr;

  explicit Array(size_t size, T value = T{}) : host(size, value) {
    Check(cudaMalloc(&device, std::max<size_t>(size, 1) * sizeof(T)), "cudaMalloc");
  }
  explicit Array(const std::vector<T>& values) : Array(values.size()) {
    host = values;
    Push();
  }
  Array(const Array&) = delete;
  ~Array() { cudaFree(device); }
  void Push() {
    Check(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "push");
  }
  void Pull() {
    Check(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost), "pull");
  }
};

struct Case {
  std::vector<int32_t> seq_lens;
  int32_t num_heads;
  int32_t q_len = 1;
  int32_t page_size = 64;
  int32_t num_splits = 0;
  const char* variant = "";
};

std::vector<Bf16> RandomRows(size_t size, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  std::vector<Bf16> values(size);
  for (Bf16& x : values) x = __float2bfloat16(normal(rng));
  return values;
}

// Largest error of out, relative to the largest value of the row, and of lse, over the batch.
double WorstError(const decode::DecodeParams& p, const Case& c, const Array<Bf16>& q_nope,
                  const Array<Bf16>& q_pe, const Array<Bf16>& pool, const Array<int32_t>& table,
                  const Array<Bf16>& out, const Array<float>& lse) {
  const int width = p.d_ckv + p.d_kpe, rows = p.q_len * p.num_heads;
  double worst = 0;
  for (int b = 0; b < p.batch; ++b) {
    for (int r = 0; r < rows; ++r) {
      const int end = c.seq_lens[b] - p.q_len + 1 + r / p.num_heads;
      std::vector<double> sum(p.d_ckv, 0.0);
      double max = -std::numeric_limits<double>::infinity(), total = 0;
      for (int t = 0; t < end; ++t) {
        const Bf16* key = &pool.host[(size_t{static_cast<size_t>(
                                          table.host[b * p.max_pages_per_seq + t / p.page_size])} *
                                          p.page_size +
                                      t % p.page_size) *
                                     width];
        double s = 0;
        for (int d = 0; d < width; ++d) {
          const size_t row = size_t{static_cast<size_t>(b)} * rows + r;
          const Bf16 q =
              d < p.d_ckv ? q_nope.host[row * p.d_ckv + d] : q_pe.host[row * p.d_kpe + d - p.d_ckv];
          s += double{__bfloat162float(q)} * __bfloat162float(key[d]);
        }
        s *= p.sm_scale;
        const double new_max = std::max(max, s), scale = std::exp(max - new_max);
        const double weight = std::exp(s - new_max);
        for (int d = 0; d < p.d_ckv; ++d)
          sum[d] = sum[d] * scale + weight * __bfloat162float(key[d]);
        total = total * scale + weight;
        max = new_max;
      }
      const size_t row = size_t{static_cast<size_t>(b)} * rows + r;
      double row_max = 1e-6, row_error = 0;
      for (int d = 0; d < p.d_ckv; ++d) {
        const double want = total > 0 ? sum[d] / total : 0;
        row_max = std::max(row_max, std::abs(want));
        const double got = __bfloat162float(out.host[row * p.d_ckv + d]);
        row_error = std::isnan(got) ? INFINITY : std::max(row_error, std::abs(got - want));
      }
      worst = std::max(worst, row_error / row_max);
      const float got = lse.host[row];
      if (end <= 0) {
        if (!(std::isinf(got) && got < 0)) return INFINITY;
      } else {
        const double error = std::abs(got - (max + std::log(total)));
        worst = std::isnan(error) ? INFINITY : std::max(worst, error);
      }
    }
  }
  return worst;
}

bool RunDecode(const decode::DecodeBackend& backend, const Case& c) {
  std::mt19937 rng(7);
  const int batch = static_cast<int>(c.seq_lens.size());
  const int longest = *std::max_element(c.seq_lens.begin(), c.seq_lens.end());
  decode::DecodeParams p{};
  p.batch = batch;
  p.q_len = c.q_len;
  p.num_heads = c.num_heads;
  p.d_ckv = 512;
  p.d_kpe = 64;
  p.page_size = c.page_size;
  p.max_pages_per_seq = (longest + c.page_size - 1) / c.page_size + 1;
  p.num_layers = 1;
  p.num_pages = batch * p.max_pages_per_seq;
  p.max_seq_len = p.max_pages_per_seq * c.page_size;
  p.sm_scale = 0.0722f;
  p.causal = true;
  p.num_splits = c.num_splits;
  p.dtype = DType::kBf16;

  const int width = p.d_ckv + p.d_kpe;
  const size_t rows = size_t{static_cast<size_t>(batch)} * c.q_len * c.num_heads;
  Array<Bf16> q_nope(RandomRows(rows * p.d_ckv, rng)), q_pe(RandomRows(rows * p.d_kpe, rng));
  Array<Bf16> pool(RandomRows(size_t{static_cast<size_t>(p.num_pages)} * c.page_size * width, rng));
  std::vector<int32_t> ids(p.num_pages);
  for (int i = 0; i < p.num_pages; ++i) ids[i] = i;
  std::shuffle(ids.begin(), ids.end(), rng);
  Array<int32_t> table(ids), seq_lens(c.seq_lens), zero(std::vector<int32_t>{0});
  Array<Bf16> out(rows * p.d_ckv);
  Array<float> lse(rows);
  p.q_nope = q_nope.device;
  p.q_pe = q_pe.device;
  p.page_table = table.device;
  p.seq_lens = seq_lens.device;
  p.layer = p.page_begin = zero.device;
  const int64_t page_stride = int64_t{c.page_size} * width;
  p.ckv = {pool.device, 0, page_stride, width};
  p.kpe = {pool.device + p.d_ckv, 0, page_stride, width};
  p.out = out.device;
  p.lse = lse.device;
  const decode::DecodeShape shape = decode::ShapeOf(p);
  Array<uint8_t> scratch(decode::DecodeScratchBytes(shape));
  p.scratch = scratch.device;
  p.scratch_bytes = static_cast<int64_t>(scratch.host.size());

  cudaError_t query_error;
  const gpu::DeviceFacts* device = gpu::GetCurrentDeviceFacts(&query_error);
  Check(query_error, "device");
  const decode::DecodeProblem problem{*device, shape, c.variant};
  std::string error = backend.why_not(problem);
  if (error.empty()) error = backend.launch(p, problem, nullptr);
  double worst = INFINITY;
  if (error.empty()) {
    Check(cudaDeviceSynchronize(), "decode");
    out.Pull();
    lse.Pull();
    worst = WorstError(p, c, q_nope, q_pe, pool, table, out, lse);
  }
  constexpr double kTolerance = 0.02;  // bf16 P and output, relative to the row's largest value
  const bool ok = worst < kTolerance;
  std::printf("%s %s heads %d q_len %d page %d splits %d %s: error %.4f %s\n", ok ? "ok  " : "FAIL",
              backend.name, c.num_heads, c.q_len, c.page_size, c.num_splits, c.variant, worst,
              error.c_str());
  return ok;
}

bool RunAppend() {
  std::mt19937 rng(3);
  constexpr int kTokens = 40, kPage = 16, kCkv = 512, kKpe = 64, kWidth = kCkv + kKpe;
  Array<Bf16> ckv(RandomRows(kTokens * kCkv, rng)), kpe(RandomRows(kTokens * kKpe, rng));
  Array<Bf16> pool(RandomRows(8 * kPage * kWidth, rng));
  std::vector<int32_t> slots(kTokens);
  for (int i = 0; i < kTokens; ++i) slots[i] = i % 7 == 3 ? -1 : i;
  Array<int32_t> positions(slots), table(std::vector<int32_t>{5, 2, 7, 0}),
      zero(std::vector<int32_t>{0});
  append::AppendParams p{};
  p.ckv = ckv.device;
  p.kpe = kpe.device;
  p.page_table = table.device;
  p.positions = positions.device;
  p.layer = p.page_begin = zero.device;
  p.ckv_pages = {pool.device, 0, kPage * kWidth, kWidth};
  p.kpe_pages = {pool.device + kCkv, 0, kPage * kWidth, kWidth};
  p.batch = 1;
  p.q_len = kTokens;
  p.num_tokens = kTokens;
  p.d_ckv = kCkv;
  p.d_kpe = kKpe;
  p.max_pages_per_seq = 4;
  p.num_layers = 1;
  p.num_pages = 8;
  p.page_size = kPage;
  p.dtype = DType::kBf16;
  Check(append::LaunchAppend(p, nullptr), "append");
  Check(cudaDeviceSynchronize(), "append");
  pool.Pull();
  bool ok = true;
  for (int i = 0; i < kTokens; ++i) {
    if (slots[i] < 0) continue;
    const Bf16* row = &pool.host[(table.host[i / kPage] * kPage + i % kPage) * kWidth];
    ok = ok && std::equal(row, row + kCkv, &ckv.host[i * kCkv], [](Bf16 a, Bf16 b) {
           return __bfloat162float(a) == __bfloat162float(b);
         });
  }
  std::printf("%s append\n", ok ? "ok  " : "FAIL");
  return ok;
}

// Raw rows and queries go to a cache of fp8_ds_mla. Compared with the CPU's rows, bit for bit.
bool RunEncode() {
  std::mt19937 rng(4);
  constexpr int kTokens = 40, kHeads = 5, kPage = 16, kCkv = 512, kKpe = 64;
  constexpr int kRowBytes = DsMla::kRowBytes;
  Array<Bf16> ckv(RandomRows(kTokens * kCkv, rng)), kpe(RandomRows(kTokens * kKpe, rng));
  Array<Bf16> q_pe(RandomRows(kTokens * kHeads * kKpe, rng)), rotated(kTokens * kHeads * kKpe);
  rotated.Push();
  std::vector<float> random(kCkv + kTokens * kKpe);
  for (float& x : random) x = std::normal_distribution<float>()(rng);
  Array<float> weight(std::vector<float>(random.begin(), random.begin() + kCkv)),
      angles(std::vector<float>(random.begin() + kCkv, random.end()));
  Array<uint8_t> pool(3 * kPage * kRowBytes);
  pool.Push();
  Array<int32_t> seq_lens(std::vector<int32_t>{kTokens}), table(std::vector<int32_t>{1, 2, 0}),
      zero(std::vector<int32_t>{0});
  append::AppendParams p{};
  p.ckv = ckv.device;
  p.kpe = kpe.device;
  p.page_table = table.device;
  p.seq_lens = p.rope_lens = seq_lens.device;
  p.layer = p.page_begin = zero.device;
  p.ckv_pages = {pool.device, 0, kPage * kRowBytes, kRowBytes};
  p.kpe_pages = {pool.device + DsMla::kKpeOffset, 0, kPage * kRowBytes / 2, kRowBytes / 2};
  p.batch = p.num_layers = 1;
  p.q_len = p.num_tokens = p.num_rope_positions = p.max_seq_len = kTokens;
  p.d_ckv = kCkv;
  p.d_kpe = kKpe;
  p.max_pages_per_seq = p.num_pages = 3;
  p.page_size = kPage;
  p.dtype = DType::kBf16;
  p.kv_format = KvFormat::kDsMla;
  p.norm_weight = weight.device;
  p.norm_eps = 1e-6f;
  p.rope_table = angles.device;
  p.q_pe = q_pe.device;
  p.rotated_q_pe = rotated.device;
  p.num_heads = kHeads;
  Check(append::LaunchAppend(p, nullptr), "encode");
  Check(cudaDeviceSynchronize(), "encode");
  pool.Pull();
  rotated.Pull();
  bool ok = true;
  const auto is_same = [&](const void* got, const std::vector<char>& want) {
    ok = ok && std::memcmp(got, want.data(), want.size()) == 0;
  };
  for (int i = 0; i < kTokens; ++i) {
    const float* cos_sin = &angles.host[i * kKpe];
    std::vector<char> normed(kCkv * 2), turned(kKpe * 2), row(DsMla::kKpeOffset);
    append::NormRow({ckv.host.data(), p.dtype, i, kCkv}, weight.host.data(), p.norm_eps,
                    normed.data());
    append::StoreDsMlaCkv({normed.data(), p.dtype, 0, kCkv}, row.data());
    const uint8_t* got = &pool.host[(table.host[i / kPage] * kPage + i % kPage) * kRowBytes];
    is_same(got, row);
    append::RotateRow({kpe.host.data(), p.dtype, i, kKpe}, cos_sin, false, turned.data());
    is_same(got + DsMla::kKpeOffset, turned);
    for (int q = i * kHeads; q < (i + 1) * kHeads; ++q) {
      append::RotateRow({q_pe.host.data(), p.dtype, q, kKpe}, cos_sin, false, turned.data());
      is_same(&rotated.host[q * kKpe], turned);
    }
  }
  std::printf("%s append of raw rows\n", ok ? "ok  " : "FAIL");
  return ok;
}

}  // namespace

int main() {
  std::vector<const decode::DecodeBackend*> backends = {&decode::kSm80Backend};
#ifdef JAX_MLA_WITH_SM90A
  backends.push_back(&decode::kSm90Backend);
#endif
  std::vector<Case> cases = {
      {{1, 64, 130, 0}, 16},
      {{700}, 16},                // split over many workers
      {{300, 5}, 20, 2, 16},      // 40 rows, causal
      {{129, 200}, 32, 1, 1},     // one token a page
      {{200, 70}, 64, 1, 64, 3},  // fixed splits
      {{66}, 128},                // two row tiles
  };
  bool ok = RunAppend();
  ok = RunEncode() && ok;
  for (const decode::DecodeBackend* backend : backends) {
    for (Case c : cases) {
      ok = RunDecode(*backend, c) && ok;
      if (backend != &decode::kSm80Backend) continue;
      for (const char* variant : {"163kb", "99kb"}) {
        c.variant = variant;
        ok = RunDecode(*backend, c) && ok;
      }
    }
  }
  return ok ? 0 : 1;
}
