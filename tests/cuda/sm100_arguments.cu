// The backend "sm100" without a Blackwell GPU: all of it but CUTLASS's kernel, which a model
// replaces. The model gets the same parameters, and follows them as the kernel's source does
// (docs/kernels/decode_sm100.md): it trusts its page table and its lengths, reads whole pages, and
// multiplies what lies behind a sequence's end by 0. So the results are right only if the
// arguments, the kernel in front and the kernel behind are. On Hopper it also copies every page
// through the tensor maps that CUTLASS makes of the arguments. Prints the seeds of wrong cases.
//
//   nvcc -std=c++20 -O3 -DNDEBUG -arch=native --expt-relaxed-constexpr -DJAX_MLA_WITH_CUDA -Icsrc
//     -I<cutlass>/include -I<cutlass>/examples/common -I<cutlass>/examples/77_blackwell_fmha
//     tests/cuda/sm100_arguments.cu csrc/decode/sm100/backend.cc csrc/decode/split/plan.cc
//     csrc/gpu/launch.cc
//   ./a.out 1000 [seed]
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "arena.h"
#include "decode/backend.h"
#include "decode/sm100/launch.cuh"
#include "decode_reference.cuh"
#include "draw.h"
#include "guards.cuh"
#include "random_case.cuh"

namespace {

using namespace jax_mla;                  // NOLINT: a program, not a header
using namespace jax_mla::decode;          // NOLINT
using namespace jax_mla::decode::sm100;   // NOLINT
using namespace jax_mla::decode::stress;  // NOLINT

using T = __nv_bfloat16;
using KernelParams = MlaKernel::Params;

constexpr int kModelThreads = 128;
constexpr int kCtaRows = kEntryRows / 2;  // the CTAs of a cluster share an entry's rows
constexpr int kMaxTokens = 2048;          // of a part

__device__ int num_model_errors;

// A tile's row in one of the two streams, as the kernel's tensor maps place it.
__device__ const T* PageRow(const MlaKernel::Element* base, const MlaKernel::TensorStride& stride,
                            int page, int row) {
  return reinterpret_cast<const T*>(base) + page * cute::get<2>(stride) +
         row * cute::get<0>(stride);
}

// The tiles of a part of an entry.
struct PartTiles {
  int begin, count, num_parts;

  __device__ PartTiles(const KernelParams& p, int entry, int part) : begin(0), count(0) {
    const int allowed = p.ptr_split_kv[entry];
    num_parts = 0;
    if (allowed <= part) return;
    const int tiles = (p.mainloop.ptr_seq[entry] + kTileTokens - 1) / kTileTokens;
    const int per_part = (tiles + allowed - 1) / allowed;
    begin = part * per_part;
    count = max(0, min(tiles, begin + per_part) - begin);
    num_parts = per_part == 0 ? 0 : (tiles + per_part - 1) / per_part;
    // Of what would be wrong: an empty part, or one that the merge does not know.
    if (threadIdx.x == 0 && (count == 0 || num_parts != allowed)) atomicAdd(&num_model_errors, 1);
  }
};

__device__ int PageOf(const KernelParams& p, int entry, int tile) {
  const int id =
      p.mainloop.ptr_page_table[int64_t{entry} * cute::get<1>(p.mainloop.stride_page_table) + tile];
  if (id < 0 || id >= p.mainloop.page_count) {
    atomicAdd(&num_model_errors, 1);
    return 0;
  }
  return id;
}

// One row of a part: scores into `scores`, then output and lse.
__device__ void ModelRow(const KernelParams& p, int entry, int part, const PartTiles& tiles,
                         int row, float* scores) {
  const auto& in = p.mainloop;
  const auto query = [&](const MlaKernel::Element* base, const MlaKernel::TensorStride& stride) {
    return reinterpret_cast<const T*>(base) + entry * cute::get<2>(stride) +
           row * cute::get<0>(stride);
  };
  const T* q_nope = query(in.ptr_q_latent, in.stride_q_latent);
  const T* q_pe = query(in.ptr_q_rope, in.stride_q_rope);
  const int tokens = tiles.count * kTileTokens, len = in.ptr_seq[entry];
  for (int i = threadIdx.x; i < tokens; i += kModelThreads) {
    const int page = PageOf(p, entry, tiles.begin + i / kTileTokens), page_row = i % kTileTokens;
    const T* ckv = PageRow(in.ptr_c_latent, in.stride_c_latent, page, page_row);
    const T* kpe = PageRow(in.ptr_k_rope, in.stride_k_rope, page, page_row);
    float score = 0.0f;
    for (int d = 0; d < kDCkv; ++d) score += float(q_nope[d]) * float(ckv[d]);
    for (int d = 0; d < kDKpe; ++d) score += float(q_pe[d]) * float(kpe[d]);
    scores[i] = tiles.begin * kTileTokens + i < len ? score : -INFINITY;
  }
  __syncthreads();
  float top = -INFINITY, sum = 0.0f;
  for (int i = 0; i < tokens; ++i) top = fmaxf(top, scores[i]);
  for (int i = 0; i < tokens; ++i) sum += expf(in.softmax_scale * (scores[i] - top));
  const auto& to = p.epilogue;
  for (int d = threadIdx.x; d < kDCkv; d += kModelThreads) {
    float out = 0.0f;
    for (int i = 0; i < tokens; ++i) {
      const int page = PageOf(p, entry, tiles.begin + i / kTileTokens);
      const T* ckv = PageRow(in.ptr_c_latent, in.stride_c_latent, page, i % kTileTokens);
      out += expf(in.softmax_scale * (scores[i] - top)) * float(ckv[d]);  // 0 * NaN is NaN
    }
    out = out * to.output_scale / sum;
    if (tiles.num_parts > 1) {
      to.ptr_o_acc[part * kDCkv + entry * cute::get<2>(to.stride_o_acc) +
                   row * cute::get<0>(to.stride_o_acc) + d] = out;
    } else {
      reinterpret_cast<T*>(
          to.ptr_o)[entry * cute::get<2>(to.stride_o) + row * cute::get<0>(to.stride_o) + d] =
          T(out);
    }
  }
  if (threadIdx.x == 0) {
    const float lse = logf(sum) + in.softmax_scale * top;
    if (tiles.num_parts > 1) {
      to.ptr_lse_acc[kEntryRows * part + int64_t{entry} * cute::get<1>(to.stride_lse_acc) + row] =
          lse;
    } else {
      to.ptr_lse[int64_t{entry} * cute::get<1>(to.stride_lse) + row] = lse;
    }
  }
  __syncthreads();
}

// The grid of CUTLASS's kernel: (half of an entry's rows, entry, part).
__global__ void __launch_bounds__(kModelThreads) Model(const __grid_constant__ KernelParams p) {
  __shared__ float scores[kMaxTokens];
  const int entry = blockIdx.y, part = blockIdx.z;
  const PartTiles tiles(p, entry, part);
  for (int row = 0; row < kCtaRows && tiles.count > 0; ++row) {
    ModelRow(p, entry, part, tiles, blockIdx.x * kCtaRows + row, scores);
  }
}

constexpr int kBoxRows = kTileTokens / 2, kBoxDims = 64;  // half a tile for each CTA of the cluster
constexpr int kBoxBytes = kBoxRows * kBoxDims * kElementBytes;
static_assert(MlaKernel::kBytesLoadKC == 2 * kBoxBytes);

// Copies a box of a page, in swizzled rows of 128 bytes. False if it does not arrive.
__device__ bool CopyBox(const void* map, int dim, int row, int page, T* box, uint64_t* barrier,
                        int phase) {
#if __CUDA_ARCH__ >= 900
  const auto shared = [](const void* x) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(x));
  };
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(barrier)),
                 "r"(kBoxBytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared(box)),
        "l"(map), "r"(shared(barrier)), "r"(dim), "r"(row), "r"(page)
        : "memory");
  }
  for (int tries = 0; tries < 1000000; ++tries) {
    uint32_t is_done;
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(is_done)
        : "r"(shared(barrier)), "r"(phase)
        : "memory");
    if (is_done) return true;
  }
#endif
  return false;
}

// Every page of every sequence through the maps of keys, against the pointers that the model uses.
// Grid (tiles, entries). Only on Hopper and newer.
__global__ void __launch_bounds__(kModelThreads) CheckMaps(const __grid_constant__ KernelParams p) {
  __shared__ alignas(1024) T box[kBoxRows * kBoxDims];
  __shared__ uint64_t barrier;
  const int tile = blockIdx.x, entry = blockIdx.y;
  if (tile * kTileTokens >= p.mainloop.ptr_seq[entry]) return;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(
        static_cast<uint32_t>(__cvta_generic_to_shared(&barrier))));
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  __syncthreads();
  const int page = PageOf(p, entry, tile);
  const auto& maps = p.mainloop_params;
  int phase = 0, wrong = 0;
  for (int dim = 0; dim < kDCkv + kDKpe; dim += kBoxDims) {
    const bool is_ckv = dim < kDCkv;
    const void* map = is_ckv ? static_cast<const void*>(maps.tma_load_c_latent.get_tma_descriptor())
                             : static_cast<const void*>(maps.tma_load_k_rope.get_tma_descriptor());
    for (int row = 0; row < kTileTokens; row += kBoxRows, phase ^= 1) {
      if (!CopyBox(map, is_ckv ? dim : 0, row, page, box, &barrier, phase)) {
        atomicAdd(&num_model_errors, 1);
        return;
      }
      for (int i = threadIdx.x; i < kBoxRows * kBoxDims; i += kModelThreads) {
        const int r = i / kBoxDims, d = i % kBoxDims;
        const T* from = PageRow(p.mainloop.ptr_c_latent, p.mainloop.stride_c_latent, page, row + r);
        const T got = box[r * kBoxDims + ((d / 8) ^ (r % 8)) * 8 + d % 8];
        wrong += __bfloat16_as_ushort(got) != __bfloat16_as_ushort(from[dim + d]);
      }
      __syncthreads();
    }
  }
  if (wrong != 0) atomicAdd(&num_model_errors, wrong);
}

bool has_maps = false;  // whether the GPU can copy through them

}  // namespace

namespace jax_mla::decode::sm100 {

// In place of the instance.
template <>
cudaError_t LaunchDecode<DType::kBf16>(const DecodeParams& p, const CallPlan& plan,
                                       const Buffers& b, cudaStream_t stream) {
  return LaunchAround(p, plan, b, stream, [&](const KernelParams& params) {
    Model<<<MlaKernel::get_grid_shape(params), kModelThreads, 0, stream>>>(params);
    if (has_maps) {
      CheckMaps<<<dim3(plan.max_tiles, plan.num_entries), kModelThreads, 0, stream>>>(params);
    }
    return cudaGetLastError();
  });
}

}  // namespace jax_mla::decode::sm100

namespace {

// One random call.
class Case {
 public:
  Case(Arena& arena, const Options& options, Draw& draw, uint64_t seed)
      : arena_(arena), guarded_(arena), draw_(draw), seed_(seed), device_(options.device) {
    arena.Reset();
    constexpr int kSms[] = {148, 148, 40, 2};
    device_.cc_major = 10, device_.cc_minor = 0, device_.num_sms = draw.Of(kSms);
    DrawShape();
    DrawTable();
    DrawPool();
    FillKeys<T><<<dim3(64, p_.batch), 128>>>(p_, seed, 1.0f);
  }

  // What went wrong, "" if nothing.
  std::string Run() {
    if (std::string reason = kSm100Backend.why_not(Problem(p_)); !reason.empty()) return reason;
    Check(cudaMemcpyToSymbol(num_model_errors, &kZero, sizeof(int)));
    Launch(p_);
    if (!error_.empty()) return error_;
    if (std::string wrong = CompareWithReference(); !wrong.empty()) return wrong;
    int* differences = arena_.Copy(std::vector<int>{0});
    if (p_.batch_invariant) CompareAlone(differences);
    guarded_.CountChanges(differences);
    int num_differences = 0, num_errors = 0;
    Check(cudaMemcpy(&num_differences, differences, sizeof(int), cudaMemcpyDeviceToHost));
    Check(cudaMemcpyFromSymbol(&num_errors, num_model_errors, sizeof(int)));
    if (!error_.empty()) return error_;
    if (num_errors != 0) return std::to_string(num_errors) + " wrong arguments or maps";
    return num_differences == 0 ? "" : std::to_string(num_differences) + " words differ";
  }

  std::string Describe() const {
    const auto text = [](const char* name, int64_t x) { return name + std::to_string(x); };
    return text("batch ", p_.batch) + text(", heads ", p_.num_heads) +
           text(", page size ", p_.page_size) + text(", longest ", longest_) +
           text(", width ", p_.ckv.token_stride) + text(", num_splits ", p_.num_splits) +
           text(", invariant ", p_.batch_invariant) + text(", layer ", layer_) +
           text(", SMs ", device_.num_sms);
  }

 private:
  static constexpr int kZero = 0;

  int Below(int n) { return draw_.Below(n); }
  bool OneIn(int n) { return draw_.OneIn(n); }

  void DrawShape() {
    constexpr int kHeads[] = {1, 16, 64, 100, 128, 128, 128, 129, 200, 256};
    constexpr int kPages[] = {128, 128, 256, 384};
    p_.dtype = DType::kBf16;
    p_.d_ckv = kDCkv, p_.d_kpe = kDKpe, p_.q_len = 1;
    p_.num_heads = draw_.Of(kHeads);
    p_.batch = OneIn(8) ? 20 + Below(30) : 1 + Below(5);
    p_.causal = !OneIn(4);
    p_.sm_scale = OneIn(8) ? 0.5f : 0.0721688f;
    p_.num_splits = Below(3) ? 0 : 1 + Below(8);
    p_.batch_invariant = OneIn(4);
    p_.num_layers = 1 + Below(3);
    p_.page_size = draw_.Of(kPages);
    longest_ = p_.batch > 5 ? 300 : OneIn(3) ? 1500 : 500;
    p_.num_tokens = p_.batch;
  }

  void DrawTable() {
    std::vector<int> lens(p_.batch);
    int num_used = 0;
    const auto num_pages = [&](int len) { return (len + p_.page_size - 1) / p_.page_size; };
    for (int& len : lens) {
      len = OneIn(8) ? 0 : OneIn(4) ? kTileTokens * Below(4) : Below(longest_ + 1);
      num_used += num_pages(len);
      p_.max_pages_per_seq = std::max(p_.max_pages_per_seq, num_pages(len));
    }
    p_.max_pages_per_seq += Below(3);
    p_.max_pages_per_seq = std::max(p_.max_pages_per_seq, 1);
    p_.max_seq_len = std::min(p_.max_pages_per_seq * p_.page_size, kMaxTokens);
    if (OneIn(4)) p_.max_seq_len = 1 + Below(p_.max_seq_len);  // the keys behind it stay NaN
    p_.num_pages = num_used + 1 + Below(4);
    const PageIds ids = DrawPageIds(draw_, p_.num_pages);
    layer_ = DrawLayer(draw_, p_.num_layers);
    std::vector<int> order(p_.num_pages), table(size_t(p_.batch) * p_.max_pages_per_seq);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), draw_.rng());
    const int wild_percent = Below(3) ? 0 : 30;
    for (size_t i = 0, next = 0; i < table.size(); ++i) {
      const int seq = i / p_.max_pages_per_seq, index = i % p_.max_pages_per_seq;
      const bool is_used = index * p_.page_size < lens[seq] && Below(100) >= wild_percent;
      table[i] = is_used ? ids.Id(order[next++]) : ids.Wild(draw_);
    }
    if (OneIn(8)) lens[Below(p_.batch)] = draw_.Of(kWildLengths);
    for (int len : lens) lens_.push_back(std::clamp(len, 0, p_.max_seq_len));
    p_.page_table = arena_.Copy(table);
    p_.seq_lens = arena_.Copy(lens);
    p_.layer = arena_.Copy(std::vector<int>{layer_});
    p_.page_begin = arena_.Copy(std::vector<int>{ids.begin});
  }

  // The scratch lies before the pool or behind it: its pages are numbered from the lower one.
  void DrawPool() {
    const int64_t padding = OneIn(3) ? 8 + 8 * Below(12) : 0;
    const PoolLayout layout{.is_split = false,
                            .num_layers = p_.num_layers,
                            .num_tokens = int64_t{p_.num_pages} * p_.page_size,
                            .ckv_width = kDCkv + kDKpe + padding,
                            .kpe_width = 0};
    const bool is_before = Below(2) != 0;
    layout.Place(static_cast<T*>(nullptr), p_);  // the strides, which size the scratch
    p_.kpe.base = static_cast<const T*>(p_.ckv.base) + kDCkv;
    if (is_before) TakeScratch();
    T* pool = arena_.Take<T>(layout.size());
    layout.Place(pool, p_);
    if (!is_before) TakeScratch();
    PoisonPool(pool, layout.size());
    const size_t rows = size_t(p_.batch) * p_.num_heads;
    T* q = arena_.Take<T>(rows * (kDCkv + kDKpe));
    FillGauss<<<64, 256>>>(q, rows * (kDCkv + kDKpe), seed_);
    p_.q_nope = q;
    p_.q_pe = q + rows * kDCkv;
  }

  void TakeScratch() {
    p_.scratch_bytes = kSm100Backend.scratch_bytes(ShapeOf(p_));
    p_.scratch = guarded_.Take<char>(p_.scratch_bytes);
  }

  DecodeProblem Problem(const DecodeParams& p) const { return {device_, ShapeOf(p), ""}; }

  // With new, poisoned outputs and scratch.
  void Launch(DecodeParams& p) {
    const size_t rows = size_t(p.batch) * p.num_heads;
    p.out = guarded_.Take<T>(rows * kDCkv);
    p.lse = guarded_.Take<float>(rows);
    FillWords<<<64, 256>>>(static_cast<uint32_t*>(p.out), rows * kDCkv / 2, kNanPair);
    FillWords<<<64, 256>>>(reinterpret_cast<uint32_t*>(p.lse), rows, kNanWord);
    FillWords<<<64, 256>>>(static_cast<uint32_t*>(p.scratch), p.scratch_bytes / 4, kNanWord);
    error_ = kSm100Backend.launch(p, Problem(p), nullptr);
  }

  // One sequence alone, with a tighter bound of the lengths, has the same bits.
  void CompareAlone(int* differences) {
    const int seq = Below(p_.batch);
    const int64_t row = int64_t{seq} * p_.num_heads;
    DecodeParams alone = p_;
    alone.batch = alone.num_tokens = 1;
    alone.q_nope = static_cast<const T*>(p_.q_nope) + row * kDCkv;
    alone.q_pe = static_cast<const T*>(p_.q_pe) + row * kDKpe;
    alone.page_table += int64_t{seq} * p_.max_pages_per_seq;
    alone.seq_lens += seq;
    alone.max_seq_len = std::max(lens_[seq], 1);
    Launch(alone);
    const size_t words = size_t(p_.num_heads) * kDCkv / 2;
    CountDifferentWords<<<64, 256>>>(static_cast<const uint32_t*>(p_.out) + seq * words,
                                     static_cast<const uint32_t*>(alone.out), words, differences);
    CountDifferentWords<<<1, 256>>>(reinterpret_cast<const uint32_t*>(p_.lse + row),
                                    reinterpret_cast<const uint32_t*>(alone.lse), p_.num_heads,
                                    differences);
  }

  std::string CompareWithReference() {
    std::vector<Verdict> verdicts(p_.batch);
    Verdict* on_device = arena_.Copy(verdicts);
    const size_t rows = size_t(p_.batch) * p_.num_heads;
    float* scores = arena_.Take<float>(rows * (p_.max_seq_len + 1));
    Compare<T><<<dim3(p_.num_heads, p_.batch), 128>>>(p_, scores, p_.max_seq_len + 1, /*stride=*/1,
                                                      on_device);
    Check(
        cudaMemcpy(verdicts.data(), on_device, p_.batch * sizeof(Verdict), cudaMemcpyDeviceToHost));
    for (int seq = 0; seq < p_.batch; ++seq) {
      const double relative = std::sqrt(verdicts[seq].error / std::max(verdicts[seq].norm, 1e-300));
      if (verdicts[seq].bad == 0 && !(verdicts[seq].norm > 0 && !(relative < kMaxRelative)))
        continue;
      return "sequence " + std::to_string(seq) + ": relative error " + std::to_string(relative) +
             ", " + std::to_string(verdicts[seq].bad) + " bad values";
    }
    return "";
  }

  Arena& arena_;
  GuardedArena guarded_;
  Draw& draw_;
  const uint64_t seed_;
  gpu::DeviceFacts device_;
  DecodeParams p_{};
  std::vector<int> lens_;  // clamped
  int longest_ = 0, layer_ = 0;
  std::string error_;
};

}  // namespace

int main(int argc, char** argv) {
  const auto run = [](Arena& arena, const Options& options, Draw& draw, uint64_t seed, auto) {
    has_maps = options.device.cc_major >= 9;
    Case one(arena, options, draw, seed);
    const std::string problem = one.Run();
    return problem.empty() ? "" : problem + " (" + one.Describe() + ")";
  };
  return RunCases(argc, argv, kArenaBytes, run);
}
