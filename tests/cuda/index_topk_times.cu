// Times of index_topk on this GPU, of its scores and of its choice. Each line is the median over
// replays of a CUDA graph whose calls go through the layers of a pool: at least 400 MB of keys
// where a layer is small, random pages, gaussian values.
//
//   as index_topk_stress.cu says, with this file in its place
//   ./a.out [substring of a case's name]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "arena.h"
#include "index/choose_backend.h"
#include "index/launch.h"
#include "index/sm80/launch.h"
#include "index/sm90/launch.h"
#include "index_case.cuh"

namespace {

using namespace jax_mla;                // NOLINT: a program, not a header
using namespace jax_mla::index;         // NOLINT
using namespace jax_mla::index::check;  // NOLINT
using decode::stress::Arena;
using decode::stress::Check;

constexpr int kPageSize = 64;
constexpr int64_t kPoolBytes = int64_t{440} << 20;
constexpr int kMaxLayers = 96;

struct Shape {
  int batch, q_len, seq_len, num_heads, k;
  DType dtype;
  int scratch_mib;
  int capacity;  // tokens that the page table has room for; 0: seq_len
};

// Random codes or bf16; scales near 1.
__global__ void FillPool(uint8_t* pool, int64_t num_pages, int page_size, DType dtype) {
  const int64_t page_bytes = IndexPageBytes(dtype, kDim, page_size);
  for (int64_t page = blockIdx.x; page < num_pages; page += gridDim.x) {
    uint8_t* base = pool + page * page_bytes;
    for (int i = threadIdx.x; i < page_size * kDim; i += blockDim.x) {
      StoreElement(base, dtype, i, Gauss(page * page_size * kDim + i));
    }
    if (dtype != DType::kE4m3) continue;
    auto* scales = reinterpret_cast<float*>(base + page_size * kDim);
    for (int i = threadIdx.x; i < page_size; i += blockDim.x) {
      scales[i] = 0.5f + (Hash(page * page_size + i) % 1024) / 1024.0f;
    }
  }
}

template <class Enqueue>
double MedianUs(int num_calls, Enqueue enqueue) {
  cudaStream_t stream;
  Check(cudaStreamCreate(&stream));
  for (int i = 0; i < std::min(num_calls, 3); ++i) enqueue(i, stream);
  Check(cudaStreamSynchronize(stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < num_calls; ++i) enqueue(i, stream);
  Check(cudaStreamEndCapture(stream, &graph));
  Check(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t start, stop;
  Check(cudaEventCreate(&start));
  Check(cudaEventCreate(&stop));
  std::vector<double> times;
  for (int replay = 0; replay < 7; ++replay) {
    Check(cudaEventRecord(start, stream));
    Check(cudaGraphLaunch(exec, stream));
    Check(cudaEventRecord(stop, stream));
    Check(cudaStreamSynchronize(stream));
    float ms;
    Check(cudaEventElapsedTime(&ms, start, stop));
    if (replay > 0) times.push_back(1000.0 * ms / num_calls);
  }
  std::sort(times.begin(), times.end());
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  cudaStreamDestroy(stream);
  return times[times.size() / 2];
}

void MustBeEmpty(const std::string& problem) {
  if (problem.empty()) return;
  std::printf("ERROR %s\n", problem.c_str());
  std::exit(1);
}

void Time(Arena& arena, const gpu::DeviceFacts& device, const std::string& name, const Shape& s) {
  arena.Reset();
  const int capacity = std::max(s.capacity, s.seq_len);
  const int pages_each = (s.seq_len + kPageSize - 1) / kPageSize;
  const int columns = (capacity + kPageSize - 1) / kPageSize;
  TopkParams p{};
  p.batch = s.batch;
  p.q_len = s.q_len;
  p.num_tokens = s.batch * s.q_len;
  p.num_heads = s.num_heads;
  p.d = kDim;
  p.k = s.k;
  p.max_pages_per_seq = columns;
  p.num_pages = s.batch * pages_each;
  p.page_size = kPageSize;
  p.max_seq_len = capacity;
  p.q_dtype = p.key_dtype = s.dtype;
  const int64_t layer_bytes = p.num_pages * IndexPageBytes(s.dtype, kDim, kPageSize);
  p.num_layers = static_cast<int>(std::clamp<int64_t>(kPoolBytes / layer_bytes + 1, 1, kMaxLayers));
  auto* pool = arena.Take<uint8_t>(layer_bytes * p.num_layers);
  FillPool<<<4096, 256>>>(pool, int64_t{p.num_pages} * p.num_layers, kPageSize, s.dtype);
  p.index_pages = pool;
  std::vector<int> ids(p.num_pages), table(size_t(s.batch) * columns, -1), layers(p.num_layers);
  std::iota(ids.begin(), ids.end(), 0);
  std::mt19937 rng(1);
  std::shuffle(ids.begin(), ids.end(), rng);
  for (int i = 0; i < p.num_pages; ++i) {
    table[size_t(i / pages_each) * columns + i % pages_each] = ids[i];
  }
  std::iota(layers.begin(), layers.end(), 0);
  p.page_table = arena.Copy(table);
  p.seq_lens = arena.Copy(std::vector<int>(s.batch, s.seq_len));
  const int* layer = arena.Copy(layers);
  p.layer = layer;
  p.page_begin = arena.Copy(std::vector<int>{0});
  const int64_t rows = int64_t{p.num_tokens} * s.num_heads;
  void* q = arena.Take<uint8_t>(rows * kDim * 2);
  FillElements<<<1024, 256>>>(q, s.dtype, rows * kDim, Values::kGauss, 1);
  auto* weights = arena.Take<float>(rows);
  FillWeights<<<1024, 256>>>(weights, rows, Values::kGauss, 2);
  p.q = q;
  p.weights = weights;
  p.indices = arena.Take<int32_t>(int64_t{p.num_tokens} * s.k);
  p.lens = arena.Take<int32_t>(p.num_tokens);
  p.scratch_bytes = ScratchBytes(p.num_tokens, p.max_seq_len, p.k, false);
  if (s.scratch_mib != 0) {
    p.scratch_bytes = std::min<int64_t>(p.scratch_bytes, int64_t{s.scratch_mib} << 20);
  }
  p.scratch = arena.Take<uint8_t>(p.scratch_bytes);
  Check(cudaDeviceSynchronize());
  const double work = double(p.num_tokens) * s.seq_len;
  const int num_calls = work > 1e8 ? 2 : work > 2e7 ? 3 : std::min(p.num_layers, 48) < 8 ? 8 : 48;
  const auto call_of = [&](int i) {
    TopkParams call = p;
    call.layer = layer + i % p.num_layers;
    return call;
  };
  // As RunCuda deals out slabs.
  const bool has_scores = p.max_seq_len > p.k;
  const auto for_slabs = [&](auto use) {
    int rows_each =
        has_scores ? SlabRows(p.num_tokens, p.max_seq_len, p.scratch_bytes) : p.num_tokens;
    const int num_slabs = (p.num_tokens + rows_each - 1) / rows_each;
    rows_each = (p.num_tokens + num_slabs - 1) / num_slabs;
    for (int begin = 0; begin < p.num_tokens; begin += rows_each) {
      use(Slab{begin, std::min(rows_each, p.num_tokens - begin), static_cast<uint32_t*>(p.scratch),
               ScoreStride(p.max_seq_len)});
    }
    return num_slabs;
  };
  const double all = MedianUs(num_calls, [&](int i, cudaStream_t stream) {
    MustBeEmpty(RunCuda(call_of(i), "", device, stream));
  });
  const double scores = !has_scores ? 0.0 : MedianUs(num_calls, [&](int i, cudaStream_t stream) {
    for_slabs([&](const Slab& slab) {
      MustBeEmpty(sm90::LaunchScores(call_of(i), slab, device, stream));
    });
  });
  const double choice = MedianUs(num_calls, [&](int i, cudaStream_t stream) {
    for_slabs([&](const Slab& slab) { Check(LaunchChoose(call_of(i), slab, device, stream)); });
  });
  const double tera = 2e-6 * work * s.num_heads * kDim / scores;
  const double key_tb = 1e-6 * s.batch * IndexPageBytes(s.dtype, kDim, s.seq_len) / scores;
  std::printf("%-34s all %9.2f  scores %9.2f (%.0f TFLOP/s, %.2f TB/s)  choice %9.2f  slabs %d\n",
              name.c_str(), all, scores, tera, key_tb, choice, for_slabs([](const Slab&) {}));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string wanted = argc > 1 ? argv[1] : "";
  cudaError_t error;
  const gpu::DeviceFacts* device = gpu::GetCurrentDeviceFacts(&error);
  Check(error);
  Arena arena(size_t{4} << 30);
  const auto time = [&](const std::string& name, const Shape& shape) {
    if (name.find(wanted) != std::string::npos) Time(arena, *device, name, shape);
  };
  constexpr DType kCodes = DType::kE4m3, kBf16 = DType::kBf16;
  for (int heads : {64, 32}) {
    const std::string suffix = " heads " + std::to_string(heads);
    time("1 x 2k" + suffix, {1, 1, 2048, heads, 2048, kCodes});
    time("1 x 2k of 32k" + suffix, {1, 1, 2048, heads, 2048, kCodes, 0, 32768});
    time("1 x 4k" + suffix, {1, 1, 4096, heads, 2048, kCodes});
    time("1 x 32k" + suffix, {1, 1, 32768, heads, 2048, kCodes});
    time("1 x 128k" + suffix, {1, 1, 131072, heads, 2048, kCodes});
    time("32 x 32k" + suffix, {32, 1, 32768, heads, 2048, kCodes});
    time("128 x 8k" + suffix, {128, 1, 8192, heads, 2048, kCodes});
    time("128 x 32k" + suffix, {128, 1, 32768, heads, 2048, kCodes});
  }
  time("32 x 32k, 2 queries", {32, 2, 32768, 64, 2048, kCodes});
  time("32 x 32k bf16", {32, 1, 32768, 64, 2048, kBf16});
  time("128 x 8k bf16", {128, 1, 8192, 64, 2048, kBf16});
  for (int heads : {32, 64}) {
    for (int behind : {8192, 32768, 131072}) {
      for (int mib : {256, 64}) {
        time("4096 behind " + std::to_string(behind / 1024) + "k heads " + std::to_string(heads) +
                 " scratch " + std::to_string(mib),
             {1, 4096, behind + 4096, heads, 2048, kCodes, mib});
      }
    }
  }
  time("4096 behind 8k of 128k", {1, 4096, 8192 + 4096, 64, 2048, kCodes, 0, 131072 + 4096});
  time("4096 behind 8k bf16", {1, 4096, 8192 + 4096, 64, 2048, kBf16});
  return 0;
}
