// Traces one decode call of the "sm90" backend (bf16 queries, 512 + 64 dims, one packed pool of
// random pages), and times it. tools/trace_decode.sh builds and runs it; tools/trace_to_perfetto.py
// reads what it writes. Without -DJAX_MLA_TRACE it only times: the difference is what tracing
// costs.
//
//   decode_trace DUMP HEADS BATCH LENGTH [Q_LEN [PAGE_SIZE [VARIANT [KV_FORMAT [QUERIES]]]]]
//
// LENGTH: of all sequences, or one of each, with commas. VARIANT may be "". KV_FORMAT: bf16
// (default), fp8_e4m3 or fp8_ds_mla. QUERIES: bf16 (default), or e4m3 with an FP8 cache. The call
// is repeated over caches of 400 MB and more in a CUDA graph, as in a model's layers; the dump
// holds the last one. Dump: a line of JSON, then every track: its header, then its events.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "decode/backend.h"
#include "decode/schedule/plan.h"
#include "decode/trace.cuh"

namespace {

using namespace jax_mla;          // NOLINT: a program, not a header
using namespace jax_mla::decode;  // NOLINT

constexpr int kDimCkv = 512, kDimKpe = 64, kDimQk = kDimCkv + kDimKpe;
constexpr int64_t kCacheBytes = 400 << 20;  // more than the L2 cache holds
constexpr int kTimedReplays = 15;

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

template <typename T>
T* Allocate(size_t size) {
  T* result = nullptr;
  Check(cudaMalloc(&result, size * sizeof(T)), "cudaMalloc");
  return result;
}

template <typename T>
T* Copy(const std::vector<T>& values) {
  T* result = Allocate<T>(values.size());
  Check(cudaMemcpy(result, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
        "cudaMemcpy");
  return result;
}

// Of `batch` sequences, from one for all or a list with commas.
std::vector<int32_t> Lengths(const char* list, size_t batch) {
  std::vector<int32_t> lengths;
  for (char* at = const_cast<char*>(list); lengths.empty() || *at == ',';) {
    lengths.push_back(static_cast<int32_t>(std::strtol(at + (*at == ','), &at, 10)));
  }
  if (lengths.size() == 1) lengths.resize(batch, lengths[0]);
  if (lengths.size() == batch) return lengths;
  std::fprintf(stderr, "LENGTH: expected one or %zu, got %zu\n", batch, lengths.size());
  std::exit(2);
}

// About normal, variance 1.
__device__ float RandomNormal(int64_t i) {
  uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
  x ^= x >> 32;
  float sum = 0.0f;
  for (int byte = 0; byte < 8; ++byte) sum += static_cast<float>(x >> (8 * byte) & 255);
  return (sum - 8 * 127.5f) / 209.0f;
}
// What codes stand for, if `are_codes`.
__global__ void FillRandom(__nv_bfloat16* data, int64_t size, bool are_codes) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * blockDim.x) {
    float x = RandomNormal(i);
    if (are_codes) x = static_cast<float>(__nv_fp8_e4m3(x));
    data[i] = __float2bfloat16(x);
  }
}

constexpr float kScale = 1.0f / 64;  // of codes: a random value is up to 4 of them

__host__ __device__ int RowBytes(KvFormat format) {
  return format == KvFormat::kDsMla  ? DsMla::kRowBytes
         : format == KvFormat::kE4m3 ? kDimQk
                                     : kDimQk * 2;
}
// Rows of the format, a CTA for each.
__global__ void FillRows(uint8_t* rows, KvFormat format) {
  const int row_bytes = RowBytes(format);
  for (int i = threadIdx.x; i < kDimQk; i += blockDim.x) {
    uint8_t* row = rows + int64_t{blockIdx.x} * row_bytes;
    const float x = RandomNormal(int64_t{blockIdx.x} * kDimQk + i);
    if (format == KvFormat::kPlain) {
      reinterpret_cast<__nv_bfloat16*>(row)[i] = __float2bfloat16(x);
    } else if (format == KvFormat::kE4m3 || i < kDimCkv) {
      row[i] = __nv_cvt_float_to_fp8(x / kScale, __NV_SATFINITE, __NV_E4M3);
    } else {
      reinterpret_cast<__nv_bfloat16*>(row + DsMla::kKpeOffset)[i - kDimCkv] = __float2bfloat16(x);
    }
    if (format == KvFormat::kDsMla && i % DsMla::kTileDims == 0 && i < kDimCkv) {
      reinterpret_cast<float*>(row + DsMla::kScalesOffset)[i / DsMla::kTileDims] = kScale;
    }
  }
}

// One call a cache, recorded once and replayed.
class Calls {
 public:
  Calls(const DecodeProblem& problem, const std::vector<int32_t>& lengths, bool has_query_codes)
      : problem_(problem) {
    const DecodeShape& s = problem.shape;
    const int seq_pages = s.max_pages_per_seq;
    const int64_t row_bytes = RowBytes(s.kv_format);
    const int64_t call_bytes = row_bytes * s.batch * seq_pages * s.page_size;
    num_ = static_cast<int>(std::max<int64_t>(2, (kCacheBytes + call_bytes - 1) / call_bytes));
    params_.batch = s.batch;
    params_.q_len = s.q_len;
    params_.num_heads = s.num_heads;
    params_.d_ckv = kDimCkv;
    params_.d_kpe = kDimKpe;
    params_.page_size = s.page_size;
    params_.max_pages_per_seq = seq_pages;
    params_.max_seq_len = s.max_seq_len;
    params_.num_layers = 1;
    params_.num_pages = num_ * s.batch * seq_pages;
    params_.dtype = s.dtype;
    params_.causal = true;
    params_.sm_scale = 0.0721688f;
    const int64_t tokens = int64_t{params_.num_pages} * s.page_size;
    auto* pool = Allocate<uint8_t>(tokens * row_bytes);
    FillRows<<<tokens, 64>>>(pool, s.kv_format);
    const int64_t ckv_width = row_bytes / ElementBytes(CkvType(s.kv_format, s.dtype));
    const int64_t kpe_width = row_bytes / ElementBytes(KpeType(s.kv_format, s.dtype));
    const int64_t kpe_offset = s.kv_format == KvFormat::kDsMla
                                   ? DsMla::kKpeOffset
                                   : kDimCkv * ElementBytes(CkvType(s.kv_format, s.dtype));
    params_.ckv = {pool, tokens * ckv_width, s.page_size * ckv_width, ckv_width};
    params_.kpe = {pool + kpe_offset, tokens * kpe_width, s.page_size * kpe_width, kpe_width};
    params_.kv_format = s.kv_format;
    if (HasScale(s.kv_format)) params_.kv_scale = Copy(std::vector<float>{kScale, kScale});
    const int64_t rows = int64_t{s.batch} * problem.num_rows();
    auto* q = Allocate<__nv_bfloat16>(rows * kDimQk);
    FillRandom<<<64, 256>>>(q, rows * kDimQk, has_query_codes);
    if (has_query_codes) params_.q_scale = Copy(std::vector<float>{1.0f});
    params_.q_nope = q;
    params_.q_pe = q + rows * kDimCkv;
    params_.out = Allocate<__nv_bfloat16>(rows * kDimCkv);
    params_.lse = Allocate<float>(rows);
    params_.scratch_bytes = DecodeScratchBytes(s);
    params_.scratch = Allocate<char>(params_.scratch_bytes);
    params_.layer = params_.page_begin = Copy(std::vector<int32_t>{0});
    params_.seq_lens = Copy(lengths);
    std::vector<int32_t> pages(params_.num_pages);
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), std::mt19937_64(1));
    tables_ = Copy(pages);
  }

  void Record(cudaStream_t stream) {
    cudaGraph_t graph;
    Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int call = 0; call < num_; ++call) {
      params_.page_table = tables_ + int64_t{call} * params_.batch * params_.max_pages_per_seq;
      const std::string error = kSm90Backend.launch(params_, problem_, stream);
      if (error.empty()) continue;
      std::fprintf(stderr, "%s\n", error.c_str());
      std::exit(1);
    }
    Check(cudaStreamEndCapture(stream, &graph), "capture");
    Check(cudaGraphInstantiate(&graph_, graph, 0), "cudaGraphInstantiate");
  }

#if defined(JAX_MLA_TRACE)
  void Trace(const trace::Buffer& buffer) { params_.trace = buffer; }
#endif

  void Replay(cudaStream_t stream) const { Check(cudaGraphLaunch(graph_, stream), "replay"); }

  // Median time of a call.
  float TimeUs(cudaStream_t stream) const {
    cudaEvent_t begin, end;
    Check(cudaEventCreate(&begin), "event");
    Check(cudaEventCreate(&end), "event");
    std::vector<float> times_ms(kTimedReplays);
    for (float& time_ms : times_ms) {
      Check(cudaEventRecord(begin, stream), "event");
      Replay(stream);
      Check(cudaEventRecord(end, stream), "event");
      Check(cudaEventSynchronize(end), "decode");
      Check(cudaEventElapsedTime(&time_ms, begin, end), "event");
    }
    std::nth_element(times_ms.begin(), times_ms.begin() + kTimedReplays / 2, times_ms.end());
    return times_ms[kTimedReplays / 2] * 1e3f / num_;
  }

 private:
  const DecodeProblem& problem_;
  DecodeParams params_{};
  int num_ = 0;
  int32_t* tables_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
};

#if defined(JAX_MLA_TRACE)

constexpr int kMaxTracedCtas = 1088;

void WriteDump(const char* path, const DecodeShape& shape, const std::string& length,
               const std::string& variant, const trace::Buffer& buffer) {
  std::FILE* file = std::fopen(path, "wb");
  if (file == nullptr) {
    std::perror(path);
    std::exit(1);
  }
  auto list = [&](const char* name, auto& names) {
    std::fprintf(file, ", \"%s\": [", name);
    for (const char* const& each : names) {
      std::fprintf(file, "%s\"%s\"", &each == &names[0] ? "" : ", ", each);
    }
    std::fprintf(file, "]");
  };
  std::fprintf(file, "{\"call\": \"%s%d x %s, %d heads, q_len %d, page size %d\"",
               variant.empty() ? "" : (variant + " ").c_str(), shape.batch, length.c_str(),
               shape.num_heads, shape.q_len, shape.page_size);
  list("phases", kPhaseNames);
  list("roles", kTraceRoleNames);
  std::fprintf(file, "}\n");
  const int num_tracks = trace::kNumRegions * buffer.num_ctas * trace::kMaxWarps;
  std::vector<trace::Header> headers(num_tracks);
  Check(cudaMemcpy2D(headers.data(), sizeof(trace::Header), buffer.tracks, trace::kTrackBytes,
                     sizeof(trace::Header), num_tracks, cudaMemcpyDeviceToHost),
        "dump");
  for (int track = 0; track < num_tracks; ++track) {
    const trace::Header& header = headers[track];
    if (header.num_events == 0) continue;
    std::vector<trace::Event> events(header.num_events);
    Check(cudaMemcpy(events.data(),
                     buffer.tracks + int64_t{track} * trace::kTrackBytes + sizeof(header),
                     events.size() * sizeof(trace::Event), cudaMemcpyDeviceToHost),
          "dump");
    std::fwrite(&header, sizeof(header), 1, file);
    std::fwrite(events.data(), sizeof(trace::Event), events.size(), file);
  }
  std::fclose(file);
}

#endif  // JAX_MLA_TRACE

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) {
    std::fprintf(stderr,
                 "%s DUMP HEADS BATCH LENGTH [Q_LEN [PAGE_SIZE [VARIANT [KV_FORMAT [QUERIES]]]]]\n",
                 argv[0]);
    return 2;
  }
  const int heads = std::atoi(argv[2]), batch = std::atoi(argv[3]);
  const int q_len = argc > 5 ? std::atoi(argv[5]) : 1;
  const int page_size = argc > 6 ? std::atoi(argv[6]) : 64;
  const std::string variant = argc > 7 ? argv[7] : "";
  const std::string format_name = argc > 8 && argv[8] != std::string("bf16") ? argv[8] : "";
  const std::optional<KvFormat> format = KvFormatOf(format_name);
  if (!format || *format == KvFormat::kE4m3KpeBf16) {
    std::fprintf(stderr, "KV_FORMAT: expected bf16, fp8_e4m3 or fp8_ds_mla, got %s\n", argv[8]);
    return 2;
  }
  const bool has_query_codes = argc > 9 && argv[9] == std::string("e4m3");
  const std::vector<int32_t> lengths = Lengths(argv[4], batch);
  const auto [shortest, longest] = std::ranges::minmax(lengths);
  const std::string length =
      (shortest < longest ? std::to_string(shortest) + " to " : "") + std::to_string(longest);
  cudaDeviceProp properties;
  Check(cudaGetDeviceProperties(&properties, 0), "device");
  const gpu::DeviceFacts device{0, properties.major, properties.minor,
                                properties.multiProcessorCount,
                                static_cast<int32_t>(properties.sharedMemPerBlockOptin)};
  const int seq_pages = (longest + page_size - 1) / page_size;
  const DecodeProblem problem{device,
                              {.dtype = DType::kBf16,
                               .batch = batch,
                               .q_len = q_len,
                               .num_heads = heads,
                               .d_ckv = kDimCkv,
                               .d_kpe = kDimKpe,
                               .page_size = page_size,
                               .max_pages_per_seq = seq_pages,
                               .max_seq_len = seq_pages * page_size,
                               .kv_format = *format,
                               .has_query_codes = has_query_codes},
                              variant};
  if (const std::string reason = kSm90Backend.why_not(problem); !reason.empty()) {
    std::fprintf(stderr, "%s\n", reason.c_str());
    return 1;
  }
  cudaStream_t stream;
  Check(cudaStreamCreate(&stream), "stream");
  Calls calls(problem, lengths, has_query_codes);
  calls.Record(stream);
  calls.Replay(stream);
  std::printf("%d x %s, %d heads, q_len %d: %.2f us", batch, length.c_str(), heads, q_len,
              calls.TimeUs(stream));
#if defined(JAX_MLA_TRACE)
  trace::Buffer buffer{nullptr, kMaxTracedCtas};
  const size_t bytes =
      size_t{trace::kNumRegions} * kMaxTracedCtas * trace::kMaxWarps * trace::kTrackBytes;
  buffer.tracks = Allocate<uint8_t>(bytes);
  Check(cudaMemset(buffer.tracks, 0, bytes), "memset");
  calls.Trace(buffer);
  calls.Record(stream);
  std::printf(" with hooks, %.2f us while tracing", calls.TimeUs(stream));
  WriteDump(argv[1], problem.shape, length, variant, buffer);
#endif
  std::printf("\n");
  return 0;
}
