// The portable score kernel: for each query of a slab and each token that it sees, the sum over
// index heads of weights * relu(q . k), as a key (key.cuh). Every page size, bf16 or FP8 keys, bf16
// or FP8 queries; products are of bf16, which holds every code exactly.
//
// A warp multiplies 16 tokens by the heads of a window's queries (mma.sync). It takes the keys from
// global memory to registers at once: since a sum over dimensions may be in any order, each thread
// loads 16 successive bytes, and the queries in shared memory are read in the same order. A thread
// adds up the heads in the order of Hopper's kernel.
//
// Roles: none; 8 warps, each with 16 tokens of one of two tiles. Shared memory: 57 KB, or 37 KB if
// a query has at most 32 heads.
#include "gpu/fp8.cuh"
#include "gpu/launch.h"
#include "gpu/sm80.cuh"
#include "index/key.cuh"
#include "index/slab_work.cuh"
#include "index/sm80/launch.h"

namespace jax_mla::index::sm80 {
namespace {

constexpr int kNumThreads = 256;
constexpr int kWarpThreads = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kWarpTokens = 16;
constexpr int kTiles = kNumThreads / kWarpThreads * kWarpTokens / kTileTokens;  // at a time
constexpr int kHeadBlock = 8;                                                   // N of an mma
constexpr int kPairs = 4;  // of mmas, 32 dimensions each
// Bytes from one head's query to the next's. With these 64 more, no two threads that load at once
// want the same banks.
constexpr int kQueryStride = kDim * 2 + 64;
constexpr int kMaxQueries = 2;  // of a window

struct SharedMemory {
  SlabWork work;
  float weights[kMaxQueries][kMaxHeads];
  alignas(16) uint8_t queries[kMaxQueries * kMaxHeads * kQueryStride];
};

__device__ __forceinline__ SharedMemory& Shared() {
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  return *reinterpret_cast<SharedMemory*>(shared_bytes);
}

// Whether one of four codes is NaN.
__device__ __forceinline__ bool HasNan(uint32_t codes) {
  return (((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) != 0;
}

// Four elements of a query as bf16.
__device__ __forceinline__ uint2 LoadFour(const TopkParams& p, int64_t element) {
  if (p.q_dtype == DType::kBf16) {
    return *reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(p.q) + element);
  }
  const uint32_t codes =
      *reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(p.q) + element);
  uint2 values = gpu::DecodeE4m3(codes);
  constexpr uint32_t kNan = 0x7fc0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if ((codes >> 8 * i & 0x7f) == 0x7f) (i < 2 ? values.x : values.y) |= kNan << i % 2 * 16;
  }
  return values;
}

// Queries and weights of a window; heads that pad a block are 0.
__device__ __forceinline__ void LoadQueries(const TopkParams& p, int32_t first_query,
                                            const Window& window, int padded_heads) {
  constexpr int kFours = kDim / 4;
  const int num_rows = window.num_queries * padded_heads;
  for (int i = threadIdx.x; i < num_rows * kFours; i += kNumThreads) {
    const int row = i / kFours, four = i % kFours;
    const int query = row / padded_heads, head = row % padded_heads;
    uint2 values{0, 0};
    if (head < p.num_heads) {
      values = LoadFour(p, ((int64_t{first_query} + query) * p.num_heads + head) * kDim + 4 * four);
    }
    *reinterpret_cast<uint2*>(Shared().queries + row * kQueryStride + four * 8) = values;
  }
  for (int i = threadIdx.x; i < num_rows; i += kNumThreads) {
    const int query = i / padded_heads, head = i % padded_heads;
    Shared().weights[query][head] =
        head < p.num_heads ? p.weights[(int64_t{first_query} + query) * p.num_heads + head] : 0.0f;
  }
}

// A token's key, as far as a thread holds it: of each 32 dimensions 8, from 8 * quad on.
template <DType kKeys>
struct KeyRow {
  const uint8_t* page = nullptr;  // null: it is not in the pool
  int32_t row = 0;                // in the page

  // A token behind the window's last one has no key either.
  __device__ __forceinline__ KeyRow(const TopkParams& p, const Pages& pages, int32_t position,
                                    int32_t num_tokens) {
    if (position >= num_tokens) return;
    const int32_t idx = position / p.page_size;
    const int32_t local = pages.Local(pages.Id(idx));
    if (local < 0) return;
    row = position - idx * p.page_size;
    page = static_cast<const uint8_t*>(p.index_pages) +
           (int64_t{*p.layer} * p.num_pages + local) * IndexPageBytes(kKeys, kDim, p.page_size);
  }

  // Two pairs of bf16 for each of two products.
  __device__ __forceinline__ uint4 Load(int pair, int quad, bool& has_nan) const {
    if (page == nullptr) return {0, 0, 0, 0};
    if constexpr (kKeys == DType::kBf16) {
      return *reinterpret_cast<const uint4*>(page + row * (kDim * 2) + pair * 64 + quad * 16);
    } else {
      // Pages of an odd number of tokens begin at multiples of 4 bytes.
      const auto* codes =
          reinterpret_cast<const uint32_t*>(page + row * kDim + pair * 32 + quad * 8);
      const uint32_t first = codes[0], second = codes[1];
      has_nan |= HasNan(first) || HasNan(second);
      const uint2 low = gpu::DecodeE4m3(first), high = gpu::DecodeE4m3(second);
      return {low.x, low.y, high.x, high.y};
    }
  }
  __device__ __forceinline__ float Scale(const TopkParams& p) const {
    if (kKeys == DType::kBf16 || page == nullptr) return 1.0f;
    return reinterpret_cast<const float*>(page + p.page_size * kDim)[row];
  }
};

// The keys of 16 tokens for all queries of the window.
template <DType kKeys>
__device__ __forceinline__ void ScoreTokens(const TopkParams& p, const Slab& slab, const Walk& walk,
                                            const Pages& pages, int32_t first_position,
                                            int padded_heads) {
  const int lane = threadIdx.x % kWarpThreads, quad = lane % 4;
  const int32_t position = first_position + lane / 4;
  const KeyRow<kKeys> rows[2] = {{p, pages, position, walk.window.num_tokens()},
                                 {p, pages, position + 8, walk.window.num_tokens()}};
  uint32_t keys[2 * kPairs][4];
  bool has_nan[2] = {false, false};
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 values = rows[i].Load(pair, quad, has_nan[i]);
      keys[2 * pair][i] = values.x;
      keys[2 * pair][2 + i] = values.y;
      keys[2 * pair + 1][i] = values.z;
      keys[2 * pair + 1][2 + i] = values.w;
    }
  }
  const float scales[2] = {rows[0].Scale(p), rows[1].Scale(p)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t of_quad = __ballot_sync(kAllLanes, has_nan[i]) >> (lane / 4 * 4) & 0xf;
    has_nan[i] = of_quad != 0;
  }
  for (int query = 0; query < walk.window.num_queries; ++query) {
    float sums[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int head = 0; head < padded_heads; head += kHeadBlock) {
      float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      const uint8_t* row =
          Shared().queries + (query * padded_heads + head + lane / 4) * kQueryStride + quad * 16;
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const uint4 heads = *reinterpret_cast<const uint4*>(row + pair * 64);
        gpu::TensorCore<DType::kBf16>::Mma(acc, keys[2 * pair], heads.x, heads.y);
        gpu::TensorCore<DType::kBf16>::Mma(acc, keys[2 * pair + 1], heads.z, heads.w);
      }
      const float2 w = *reinterpret_cast<const float2*>(&Shared().weights[query][head + 2 * quad]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sums[i] = fmaf(w.x, Relu(acc[2 * i]), sums[i]);
        sums[i] = fmaf(w.y, Relu(acc[2 * i + 1]), sums[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = sums[i] + __shfl_xor_sync(kAllLanes, sums[i], 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      sum *= scales[i];
      const uint32_t key = rows[i].page == nullptr ? kAbsentKey
                           : has_nan[i]            ? kNanKey
                                                   : KeyOfScore(sum);
      const int32_t token = position + 8 * i;
      if (quad == i && token < walk.window.num_visible + query) {
        slab.score_keys[(walk.row + query) * slab.stride + token] = key;
      }
    }
  }
}

template <DType kKeys>
__global__ void __launch_bounds__(kNumThreads, 2)
    IndexScores(const __grid_constant__ TopkParams p, const __grid_constant__ Slab slab) {
  gpu::PdlWait();
  gpu::PdlLaunchDependents();
  const int warp = threadIdx.x / kWarpThreads;
  const int padded_heads = (p.num_heads + kHeadBlock - 1) / kHeadBlock * kHeadBlock;
  const int32_t total = FindWork<kNumThreads>(p, slab, kMaxQueries, Shared().work);
  Walk walk(Shared().work, slab.num_rows, total);
  while (walk.Next()) {
    __syncthreads();  // the last window's queries are used
    LoadQueries(p, slab.begin + walk.row, walk.window, padded_heads);
    __syncthreads();
    const Pages pages(p, walk.window.seq_idx);
    constexpr int kTileWarps = kTileTokens / kWarpTokens;
    for (int32_t tile = warp / kTileWarps; tile < walk.num_tiles; tile += kTiles) {
      const int32_t first =
          (walk.first_tile + tile) * kTileTokens + warp % kTileWarps * kWarpTokens;
      ScoreTokens<kKeys>(p, slab, walk, pages, first, padded_heads);
    }
  }
}

}  // namespace

cudaError_t LaunchScores(const TopkParams& p, const Slab& slab, const gpu::DeviceFacts& device,
                         cudaStream_t stream) {
  constexpr int kCtasPerSm = 2;
  const int padded_heads = (p.num_heads + kHeadBlock - 1) / kHeadBlock * kHeadBlock;
  const gpu::LaunchConfig config{
      .grid = dim3(static_cast<uint32_t>(device.num_sms * kCtasPerSm)),
      .block = dim3(kNumThreads),
      .smem_bytes = static_cast<int32_t>(offsetof(SharedMemory, queries)) +
                    kMaxQueries * padded_heads * kQueryStride,
      .stream = stream,
      .programmatic = true,
  };
  return p.key_dtype == DType::kE4m3 ? gpu::Launch<&IndexScores<DType::kE4m3>>(config, p, slab)
                                     : gpu::Launch<&IndexScores<DType::kBf16>>(config, p, slab);
}

}  // namespace jax_mla::index::sm80
