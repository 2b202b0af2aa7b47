// One math warpgroup of the prefill kernel: scores, softmax and output of 64 queries of an item.
// Roles and barriers: kernel.cuh.
#pragma once

#include "prefill/sm90/params.cuh"

namespace jax_mla::prefill::sm90 {

// A row's reference rises only when a score exceeds it by more than this, in log2 units: see
// online_softmax.cuh, and docs/kernels/prefill_sm90.md for the choice.
inline constexpr float kRescaleThreshold = 8.0f;

template <class C>
struct Math {
  using T = typename C::T;
  static constexpr int kNumScores = C::kBlockN / 2, kNumOut = C::kDV / 2;

  const PrefillParams& call;
  const Thread thread;
  const float scale_log2;  // sm_scale * log2(e)
  Item item;
  RingPlace key_ring, value_ring;
  uint32_t q_phase = 0;
  float scores[kNumScores];
  float out[kNumOut];
  uint32_t p[C::kValueSteps][4];  // P as wgmma A fragments
  float reference[2], sum[2], factor[2];

  static __device__ __forceinline__ constexpr int RowOf(int j) { return j >> 1 & 1; }

  __device__ explicit Math(const PrefillParams& params)
      : call(params), scale_log2(fmaxf(params.sm_scale * gpu::kLog2E, FLT_MIN)) {}

  __device__ __forceinline__ void Release(uint64_t& barrier) const {
    if (thread.idx == 0) gpu::sm90::MbarrierArrive(SharedAddress(&barrier));
  }

  // Waits for all warps of the warpgroup. An item may be freed only when each of them has read it.
  // Behind a product this is certain, because wgmma needs the whole warpgroup.
  __device__ __forceinline__ void SyncGroup() const {
    gpu::sm90::NamedBarrierSync(kGroup + thread.group, kGroupThreads);
  }

  __device__ __forceinline__ void NextItem() {
    gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().q_full), q_phase);
    q_phase ^= 1;
    item = Shared<C>().item;
  }

  // The element of this thread's row i in an array [queries, heads]; less than 0 if the item has no
  // such row.
  __device__ __forceinline__ int64_t ElementOf(int i) const {
    const int row = thread.row + 8 * i;
    if (row >= item.num_rows) return -1;
    return static_cast<int64_t>(item.q_row + row) * call.num_heads + item.head;
  }

  // Begins with no key, or with the result of other keys.
  __device__ __forceinline__ void Begin() {
#pragma unroll
    for (int j = 0; j < kNumOut; ++j) out[j] = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t element = ElementOf(i);
      // The reference of a row that the item does not have never rises: other sequences' queries
      // must not decide when ours are rescaled.
      reference[i] = element < 0 ? -gpu::NegativeInfinity() : gpu::kNoReference;
      sum[i] = 0;
      if (call.prior_out == nullptr || element < 0) continue;
      const float lse = call.prior_lse[element];
      if (lse == gpu::NegativeInfinity()) continue;
      // The reference is lower than lse by the threshold. lse stands for a sum over many keys, so
      // the weight of one key against it is small, and f16 would hold few of its bits.
      constexpr float kPriorWeight = 1 << static_cast<int>(kRescaleThreshold);
      reference[i] = lse * gpu::kLog2E - kRescaleThreshold;
      if (thread.quad == 0) sum[i] = kPriorWeight;  // sums are added over the quad at the end
      const float* prior = call.prior_out + element * C::kDV + 2 * thread.quad;
#pragma unroll
      for (int j = 0; j < C::kDV / 8; ++j) {
        const float2 pair = *reinterpret_cast<const float2*>(prior + 8 * j);
        out[4 * j + 2 * i] = pair.x * kPriorWeight;
        out[4 * j + 2 * i + 1] = pair.y * kPriorWeight;
      }
    }
  }

  // Issues S = Q K^T of the next block.
  __device__ __forceinline__ void IssueScores() {
    gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().k_full[key_ring.stage]), key_ring.phase);
    const uint64_t q = gpu::sm90::SharedDescriptor(SharedAddress(Shared<C>().q[0]) +
                                                   thread.group * kRowsPerGroup * kChunkRowBytes);
    const uint64_t k = gpu::sm90::SharedDescriptor(SharedAddress(Shared<C>().k[key_ring.stage][0]));
    gpu::sm90::WgmmaFenceOperand(scores);
    gpu::sm90::WgmmaArrive();
#pragma unroll
    for (int step = 0; step < C::kKeySteps; ++step) {
      constexpr int kChunkSteps = kChunkDims / kMmaDepth;
      const int chunk = step / kChunkSteps, byte = step % kChunkSteps * kMmaDepth * kElementBytes;
      gpu::sm90::WgmmaSS<T, C::kBlockN, gpu::sm90::Major::K, gpu::sm90::Major::K>(
          gpu::sm90::AdvanceDescriptor(q, chunk * C::kQueryChunkBytes + byte),
          gpu::sm90::AdvanceDescriptor(k, chunk * C::kChunkBytes + byte), scores, step > 0);
    }
    gpu::sm90::WgmmaCommit();
  }

  __device__ __forceinline__ void ReleaseKeys() {
    Release(Shared<C>().k_empty[key_ring.stage]);
    key_ring.Next();
  }

  // Zeroes the rows of V behind the sequence's last key: they are not ours, and 0 times NaN is NaN.
  // Both warpgroups write the same zeros, so it does not matter that one may write while the
  // other's product reads them. Each fences before it frees the block.
  __device__ __forceinline__ void ZeroTail(int32_t num_keys) const {
    constexpr int kRowVectors = kChunkRowBytes / sizeof(uint4);
    for (int i = thread.idx; i < (C::kBlockN - num_keys) * C::kValueChunks * kRowVectors;
         i += kGroupThreads) {
      const int chunk = i / kRowVectors % C::kValueChunks;
      const int row = num_keys + i / (kRowVectors * C::kValueChunks);
      uint8_t* row_begin = Shared<C>().v[value_ring.stage][chunk] + row * kChunkRowBytes;
      reinterpret_cast<uint4*>(row_begin)[i % kRowVectors] = uint4{};
    }
    gpu::sm90::FenceProxyAsyncShared();
    SyncGroup();
  }

  // Issues O += P V, with P's block. `is_first`: that is the block with which the item begins, its
  // last one.
  __device__ __forceinline__ void IssueValues(bool is_first) {
    gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().v_full[value_ring.stage]), value_ring.phase);
    const int32_t num_keys = item.num_keys - (item.num_blocks - 1) * C::kBlockN;
    if (is_first && num_keys < C::kBlockN) ZeroTail(num_keys);
    constexpr int kRowGroupBytes = 8 * kChunkRowBytes;
    const uint64_t v = gpu::sm90::SharedDescriptor<kRowGroupBytes, C::kChunkBytes>(
        SharedAddress(Shared<C>().v[value_ring.stage][0]));
    gpu::sm90::WgmmaFenceOperand(out);
    gpu::sm90::WgmmaArrive();
#pragma unroll
    for (int step = 0; step < C::kValueSteps; ++step) {
      gpu::sm90::WgmmaRS<T, C::kDV, gpu::sm90::Major::MN>(
          p[step], gpu::sm90::AdvanceDescriptor(v, step * kMmaDepth * kChunkRowBytes), out, true);
    }
    gpu::sm90::WgmmaCommit();
  }

  __device__ __forceinline__ void ReleaseValues() {
    Release(Shared<C>().v_empty[value_ring.stage]);
    value_ring.Next();
  }

  // Removes the scores of keys that a query does not see.
  __device__ __forceinline__ void Mask(int32_t block) {
    int32_t limit[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t place = item.place + thread.row + 8 * i;
      limit[i] = (call.causal ? min(item.num_keys, place + 1) : item.num_keys) -
                 block * C::kBlockN - 2 * thread.quad;
    }
#pragma unroll
    for (int j = 0; j < kNumScores; ++j) {
      const int column = j / 4 * 8 + j % 2;
      if (column >= limit[RowOf(j)]) scores[j] = gpu::NegativeInfinity();
    }
  }

  // Whether a query of the warpgroup does not see all of a block that is not the item's last one.
  __device__ __forceinline__ bool IsMasked(int32_t block) const {
    if constexpr (C::kMasksOneBlock) return false;
    const int32_t first_place = item.place + thread.group * kRowsPerGroup;
    return call.causal && (block + 1) * C::kBlockN > first_place + 1;
  }

  // Turns scores into weights and adds them to `sum`. Returns whether O has to be multiplied by
  // `factor`. The answer is the same in all lanes of a warp.
  __device__ __forceinline__ bool Softmax() {
    float peak[2] = {scores[0], scores[2]};
#pragma unroll
    for (int j = 0; j < kNumScores; ++j) peak[RowOf(j)] = fmaxf(peak[RowOf(j)], scores[j]);
    bool rises = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      peak[i] = fmaxf(peak[i], __shfl_xor_sync(kAllLanes, peak[i], 1));
      peak[i] = fmaxf(peak[i], __shfl_xor_sync(kAllLanes, peak[i], 2)) * scale_log2;
      rises |= peak[i] > reference[i] + kRescaleThreshold;
    }
    rises = __any_sync(kAllLanes, rises);
    if (rises) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float raised = fmaxf(reference[i], peak[i]);
        factor[i] = gpu::Exp2(reference[i] - raised);
        reference[i] = raised;
        sum[i] *= factor[i];
      }
    }
#pragma unroll
    for (int j = 0; j < kNumScores; ++j) {
      scores[j] = gpu::Exp2(fmaf(scores[j], scale_log2, -reference[RowOf(j)]));
      sum[RowOf(j)] += scores[j];
    }
    return rises;
  }

  __device__ __forceinline__ void ScaleOut() {
#pragma unroll
    for (int j = 0; j < kNumOut; ++j) out[j] *= factor[RowOf(j)];
  }

  // An accumulator's layout is that of A fragments.
  __device__ __forceinline__ void PackP() {
#pragma unroll
    for (int step = 0; step < C::kValueSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[step][i] = gpu::Pack2<T>(scores[8 * step + 2 * i], scores[8 * step + 2 * i + 1]);
      }
    }
  }

  __device__ __forceinline__ void Write() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(kAllLanes, sum[i], 1);
      sum[i] += __shfl_xor_sync(kAllLanes, sum[i], 2);
      const int64_t element = ElementOf(i);
      if (element < 0) continue;
      const float inverse = gpu::InverseSum(sum[i]);
      const int64_t first = element * C::kDV + 2 * thread.quad;
      if (call.out_is_f32) {
        float* row = static_cast<float*>(call.out) + first;
#pragma unroll
        for (int j = 0; j < C::kDV / 8; ++j) {
          *reinterpret_cast<float2*>(row + 8 * j) =
              make_float2(out[4 * j + 2 * i] * inverse, out[4 * j + 2 * i + 1] * inverse);
        }
      } else {
        T* row = static_cast<T*>(call.out) + first;
#pragma unroll
        for (int j = 0; j < C::kDV / 8; ++j) {
          *reinterpret_cast<uint32_t*>(row + 8 * j) =
              gpu::Pack2<T>(out[4 * j + 2 * i] * inverse, out[4 * j + 2 * i + 1] * inverse);
        }
      }
      if (thread.quad == 0) call.lse[element] = gpu::LseLog2(reference[i], sum[i]) * gpu::kLn2;
    }
  }
};

}  // namespace jax_mla::prefill::sm90
