// Wide Hopper decode kernel: 33 and more query rows, in tiles of up to 64 (wgmma's M).
//
// A CTA streams KV blocks of 64 tokens through shared memory and serves one row tile. Two math
// warpgroups own half of the columns of O each and work on blocks in pairs ("seesaw"): the lead
// computes S, P of the even block, the follower of the odd one, and each multiplies both P's with
// its half of V. The running maximum is a *reference* that is raised only when a score exceeds it
// by 2^8 (lazy rescale), so that in the common case O is never touched between two PV products.
// Chunk = 64 tokens x 64 dimensions (8 KB), group = two chunks, block = all groups and the rope.
// The seesaw is FlashMLA's idea (2025); producer warp, lazy rescale and buffer sharing are ours.
//
// Roles: warps 0-3 lead (left half of O), warps 4-7 follower (right half), warp 8 producer.
// Barrier          kind       arrivals         who arrives, when                    who waits,
// before what q_full           mbarrier   1, tx            producer: item published, Q copied math:
// item, first QK q_empty          mbarrier   2                lead, follower: last QK of the item
// producer: next item's Q kv_full[b][g]    mbarrier   1, tx            producer: group g of block b
// copied  lead (b 0), follower (b 1): QK kv_empty[0][kpe] mbarrier   1                lead: S of
// block 0 complete          producer: refill kv_empty[0][g]   mbarrier   1                the
// half's owner: PV of block 0      producer: refill kv_empty[1][g]   mbarrier   1 the half's owner:
// PV of block 1      producer: refill kv_empty[1][kpe] mbarrier   1                lead: PV with
// the follower's P       producer: refill kLeadPFull       named      256 (one way)    lead: P,
// reference, rescaled stored  follower: PV of block 0 kFollowPFull     named      256 (one way)
// follower: the same for block 1       lead: PV of block 1 kLeadScores      named      256 (one
// way)    lead: its QK is nearly done          follower: its own QK kItemEnd         named      256
// both: row sums stored                both: output kLeadTail,kFollowTail named 128 one warpgroup:
// rows past the end are zero   its PV Fences: P and zeroed V rows are written by st.shared and read
// by wgmma, hence fence.proxy.async before kLeadPFull, kFollowPFull. mbarriers start at phase 0;
// the producer first waits on *_empty with parity 1 and passes. What orders the reuse of buffers
// without a barrier of their own:
//   p            the lead's next P needs its next S, that needs right groups of block 0 refilled,
//   and
//                the follower frees those after its PV with p.
//   rope chunk 1 holds the follower's P from S of block 1 (rope read) to the lead's PV, which frees
//   it. reference, rescaled   written again after the other side's *PFull of the same pair. items,
//   sum, owned     two generations; kItemEnd or kLeadPFull lies between their uses.
// Named barriers pair up although arrivals are one-way: the arriving side cannot come twice, since
// what it does in between waits for groups that the other side frees after its own sync.
// Registers: math 232, producer 40 (setmaxnreg; config.h). Shared memory: SharedMemory<C>, checked
// below.
#pragma once

#include <cstdint>
#include <type_traits>

#include "decode/combine.h"
#include "decode/params.h"
#include "decode/schedule.h"
#include "decode/sm90/tensor_map.h"
#include "decode/sm90/wide/config.h"
#include "gpu/launch.h"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::wide {

using gpu::sm90::Major;
using gpu::sm90::SharedAddress;

inline constexpr uint32_t kAllLanes = 0xffffffffu;
inline constexpr float kLn2 = 0.69314718056f;
inline constexpr float kLog2e = 1.44269504089f;
inline constexpr float kMinScaleLog2 = 1e-30f;  // stands for 0, so that -inf stays -inf

// Ids of named barriers; 0 is __syncthreads.
inline constexpr int kLeadPFull = 1, kFollowPFull = 2, kLeadScores = 3, kItemEnd = 4, kLeadTail = 5,
                     kFollowTail = 6;

struct TensorMaps {
  CUtensorMap ckv, kpe, q_nope, q_pe;
};

// Everything the host hands to one launch.
struct WideParams {
  DecodeParams decode;
  SplitPlan plan;
  int32_t rows_per_tile;
  int32_t box_tokens;  // tokens a TMA box takes: divides page_size and kBlockN
  int32_t box_shift;   // its log2
};

enum Half { kLead = 0, kFollow = 1 };

// The CTA's shared memory. Called wherever it is needed instead of being passed on: its address is
// a uniform constant then, and the many wgmma descriptors made from it take no registers.
template <class C>
__device__ __forceinline__ SharedMemory<C>& Shared() {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  return *reinterpret_cast<SharedMemory<C>*>(shared_bytes);
}

// Hides where a value comes from: the descriptors derived from it are made anew after this point
// instead of living in (spilled) registers across the loop.
__device__ __forceinline__ uint32_t Opaque(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The row tile of a CTA.
struct RowTile {
  int32_t idx;
  int32_t row_begin;  // in rows of a sequence
  int32_t num_rows;   // valid ones

  __device__ RowTile(const WideParams& params, int32_t tile_idx)
      : idx(tile_idx),
        row_begin(tile_idx * params.rows_per_tile),
        num_rows(
            min(params.rows_per_tile, params.decode.q_len * params.decode.num_heads - row_begin)) {}
};

// ---- producer

// Source of one lane's box: every lane of the producer warp serves sub-box lane % boxes_per_chunk.
struct BoxSource {
  int32_t page_id;  // global
  int32_t token;    // of the page; negative: past the end of the sequence
};

template <class C>
struct Producer {
  const WideParams& params;
  const TensorMaps& maps;
  const int32_t lane;
  const int32_t boxes_per_chunk;
  const int32_t layer;  // kOutside if the pool has no such layer
  const int64_t page_begin;
  uint32_t phases = 0b11;  // of kv_empty[block], one bit a block

  __device__ __forceinline__ BoxSource FindBox(const Item& item, int32_t block) const {
    const DecodeParams& p = params.decode;
    const int32_t token = block * kBlockN + (lane % boxes_per_chunk) * params.box_tokens;
    if (block >= item.block_end || token >= item.seq_len) return {0, -1};
    const int32_t page = token / p.page_size;
    const int64_t entry = static_cast<int64_t>(item.seq_idx) * p.max_pages_per_seq + page;
    return {__ldg(p.page_table + entry), token - page * p.page_size};
  }

  // Absent pages and boxes past the end are read outside the tensor: zeros.
  __device__ __forceinline__ int32_t LocalPage(const BoxSource& box) const {
    const int64_t local = box.page_id - page_begin;
    const bool owned = box.token >= 0 && local >= 0 && local < params.decode.num_pages;
    return owned && layer != kOutside ? static_cast<int32_t>(local) : kOutside;
  }

  __device__ __forceinline__ void LoadGroup(int block, int group, const BoxSource& box,
                                            int32_t page) const {
    const bool is_kpe = group == C::kKpeGroup;
    const int num_chunks = is_kpe ? 1 : kChunksPerGroup;
    const uint32_t full = SharedAddress(&Shared<C>().kv_full[block][group]);
    gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().kv_empty[block][group]),
                            phases >> block & 1);
    if (lane == 0) gpu::sm90::MbarrierArriveExpectTx(full, num_chunks * C::kChunkBytes);
    __syncwarp();
    if (lane < num_chunks * boxes_per_chunk) {
      const int in_group = lane / boxes_per_chunk, sub_box = lane % boxes_per_chunk;
      const int chunk = group * kChunksPerGroup + in_group;
      const uint32_t target =
          SharedAddress(Shared<C>().kv[block][chunk]) + sub_box * params.box_tokens * C::kRowBytes;
      gpu::sm90::TmaLoad4d(is_kpe ? &maps.kpe : &maps.ckv, target, full,
                           is_kpe ? 0 : chunk * kChunkDims, box.token, page, layer,
                           gpu::sm90::kCacheEvictNormal);
    }
  }

  // Copies a block in the order in which its consumer reads it (and, for block 1, in which the
  // halves are freed).
  __device__ __forceinline__ void LoadBlock(int block, int generation, const BoxSource& box) {
    const int32_t page = LocalPage(box);
    const uint32_t owned = __ballot_sync(kAllLanes, box.token < 0 || page != kOutside);
    if (lane == 0) Shared<C>().owned[generation][block] = owned;
#pragma unroll 1
    for (int i = 0; i < C::kNumGroups; ++i) {
      LoadGroup(block, block == 0 ? C::LeadGroup(i) : C::FollowGroup(i), box, page);
    }
    phases ^= 1u << block;
  }

  // Hands an item and its queries to the math warpgroups.
  __device__ __forceinline__ void PublishItem(const Item& item, const RowTile& tile, int item_idx,
                                              bool has_next) const {
    gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().q_empty), (item_idx & 1) ^ 1);
    if (lane == 0) {
      const uint32_t full = SharedAddress(&Shared<C>().q_full);
      Shared<C>().items[item_idx % kNumItems] = item;
      Shared<C>().has_next[item_idx % kNumItems] = has_next;
      gpu::sm90::MbarrierArriveExpectTx(full, C::kQueryBytes);
      gpu::sm90::TmaLoad4d(&maps.q_nope, SharedAddress(Shared<C>().q[0]), full, 0, tile.row_begin,
                           0, item.seq_idx, gpu::sm90::kCacheEvictNormal);
      gpu::sm90::TmaLoad4d(&maps.q_pe, SharedAddress(Shared<C>().q[C::kKpeChunk]), full, 0,
                           tile.row_begin, 0, item.seq_idx, gpu::sm90::kCacheEvictNormal);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void PublishNothing() const {
    if (lane != 0) return;
    Shared<C>().items[0] = {};
    gpu::sm90::MbarrierArrive(SharedAddress(&Shared<C>().q_full));
  }

  // A sequence of length 0: out 0, lse -inf.
  __device__ __forceinline__ void WriteEmpty(int32_t seq_idx, const RowTile& tile) const {
    constexpr int kVectors = C::kDCkv * kElementBytes / 16;
    const int64_t row =
        static_cast<int64_t>(seq_idx) * params.decode.q_len * params.decode.num_heads +
        tile.row_begin;
    uint4* out = static_cast<uint4*>(params.decode.out) + row * kVectors;
    for (int i = lane; i < tile.num_rows * kVectors; i += kWarpThreads) out[i] = uint4{};
    for (int i = lane; i < tile.num_rows; i += kWarpThreads) {
      params.decode.lse[row + i] = -INFINITY;
    }
  }

  __device__ __forceinline__ bool NextItem(WorkIterator& work, const RowTile& tile,
                                           Item* item) const {
    WorkItem next;
    while (work.Next(params.plan.schedule, &next)) {
      if (next.block_begin < next.block_end) {
        *item = {next.seq_idx, next.seq_len, next.block_begin, next.block_end,
                 next.is_final() ? kFinal : next.slot()};
        return true;
      }
      WriteEmpty(next.seq_idx, tile);
    }
    return false;
  }
};

template <class C>
__device__ __forceinline__ void ProducerRole(const WideParams& params, const TensorMaps& maps,
                                             const RowTile& tile, int32_t worker) {
  const int32_t layer = __ldg(params.decode.layer);
  Producer<C> producer{params,
                       maps,
                       static_cast<int32_t>(threadIdx.x) % kWarpThreads,
                       kBlockN / params.box_tokens,
                       layer >= 0 && layer < params.decode.num_layers ? layer : kOutside,
                       __ldg(params.decode.page_begin)};
  WorkIterator work = FindWork(params.plan.schedule, worker);
  Item item{}, next{};
  BoxSource box0{}, box1{};  // of the next pair of blocks: page ids load ahead of their use
  int generation = 0;
#pragma unroll 1
  for (int item_idx = -1;; ++item_idx) {  // one round ahead: an item knows whether another follows
    const bool has_next = producer.NextItem(work, tile, &next);
    if (item_idx >= 0) producer.PublishItem(item, tile, item_idx, has_next);
#pragma unroll 1
    for (int32_t pair = item.block_begin; pair < item.block_end; pair += kBlocksInFlight) {
      const BoxSource now0 = box0, now1 = box1;
      box0 = producer.FindBox(item, pair + 2);
      box1 = producer.FindBox(item, pair + 3);
#pragma unroll 1
      for (int block = 0; block < min(kBlocksInFlight, item.block_end - pair); ++block) {
        producer.LoadBlock(
            block, generation,
            {block == 0 ? now0.page_id : now1.page_id, block == 0 ? now0.token : now1.token});
      }
      generation ^= 1;
    }
    if (!has_next) {
      if (item_idx < 0) producer.PublishNothing();
      return;
    }
    item = next;
    box0 = producer.FindBox(item, item.block_begin);
    box1 = producer.FindBox(item, item.block_begin + 1);
  }
}

// ---- math

// Where a thread stands in its warpgroup. In wgmma's accumulator layout it owns rows `row` and
// row + 8 of the tile; of every 8 columns the two from 2 * quad on.
struct Thread {
  int warp, lane, idx, row, quad;

  __device__ Thread()
      : warp(__shfl_sync(kAllLanes, threadIdx.x % kWarpgroupThreads / kWarpThreads, 0)),
        lane(threadIdx.x % kWarpThreads),
        idx(threadIdx.x % kWarpgroupThreads),
        row(warp * 16 + lane / 4),
        quad(lane % 4) {}
};

// One math warpgroup: its part of O, the scores of its block, and the running softmax of two rows.
// Accumulator element j belongs to row + 8 * RowOf(j).
template <class C, Half kHalf>
struct Math {
  using T = std::conditional_t<C::kDType == DType::kBf16, __nv_bfloat16, __half>;
  static constexpr int kNumOut = C::kHalfDims / 2;
  static constexpr int kNumScores = kBlockN / 2;

  const WideParams& params;
  const RowTile& tile;
  const Thread thread;
  const float scale_log2;  // of scores taken with their sign flipped if `flip_scores`
  const bool flip_scores;  // sm_scale is negative: the maximum is then that of -S
  float out[kNumOut];
  float scores[kNumScores];
  uint32_t p[C::kKSteps][4];  // P as wgmma A fragments
  float reference[2], sum[2];
  float factor[2];  // what this block's rescale multiplies O with
  Item item;
  bool has_next;
  int32_t limit[2];    // first token that the row does not see
  int item_idx = 0;    // of `item`, plus one
  int generation = 0;  // pairs so far, mod 2
  uint32_t full_phase = 0;

  static __device__ __forceinline__ constexpr int RowOf(int j) { return j >> 1 & 1; }

  __device__ Math(const WideParams& wide_params, const RowTile& row_tile)
      : params(wide_params),
        tile(row_tile),
        scale_log2(fmaxf(fabsf(wide_params.decode.sm_scale) * kLog2e, kMinScaleLog2)),
        flip_scores(wide_params.decode.sm_scale < 0) {}

  __device__ __forceinline__ int32_t num_blocks() const {
    return item.block_end - item.block_begin;
  }
  // Block that this half scores; both halves multiply both.
  static constexpr int kOwnBlock = kHalf == kLead ? 0 : 1;

  __device__ __forceinline__ void Release(uint64_t& barrier) const {
    if (thread.idx == 0) gpu::sm90::MbarrierArrive(SharedAddress(&barrier));
  }
  __device__ __forceinline__ void ReleaseValues(int block) const {
#pragma unroll
    for (int g = 0; g < C::kHalfGroups; ++g) {
      Release(Shared<C>().kv_empty[block][kHalf * C::kHalfGroups + g]);
    }
  }

  // Takes over the next published item and waits for its queries.
  __device__ __forceinline__ void NextItem() {
    gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().q_full), item_idx & 1);
    item = Shared<C>().items[item_idx % kNumItems];
    has_next = Shared<C>().has_next[item_idx % kNumItems];
    ++item_idx;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const DecodeParams& d = params.decode;
      const int32_t q_idx = min((tile.row_begin + thread.row + 8 * i) / d.num_heads, d.q_len - 1);
      limit[i] = d.causal ? item.seq_len - (d.q_len - 1 - q_idx) : item.seq_len;
    }
  }
  __device__ __forceinline__ void ResetSoftmax() {
    reference[0] = reference[1] = kNoReference;
    sum[0] = sum[1] = 0;
  }

  // S (+)= Q K^T over one group of chunks, once that has landed.
  // `q_base`, `k_base`: chunk 0 of the queries and of the own block.
  __device__ __forceinline__ void ScoreGroup(uint32_t q_base, uint32_t k_base, int group,
                                             bool first) {
    const bool is_kpe = group == C::kKpeGroup;
    gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().kv_full[kOwnBlock][group]), full_phase);
    if (first) gpu::sm90::WgmmaFenceOperand(scores);
    gpu::sm90::WgmmaArrive();
#pragma unroll
    for (int i = 0; i < (is_kpe ? 1 : kChunksPerGroup); ++i) {
      const int chunk = group * kChunksPerGroup + i;
      const uint32_t q = q_base + chunk * C::kChunkBytes, k = k_base + chunk * C::kChunkBytes;
#pragma unroll
      for (int step = 0; step < (is_kpe ? C::kKpeKSteps : C::kKSteps); ++step) {
        const int offset = step * C::kMmaK * kElementBytes;
        gpu::sm90::WgmmaSS<T, kBlockN, Major::K, Major::K>(gpu::sm90::SharedDescriptor(q + offset),
                                                           gpu::sm90::SharedDescriptor(k + offset),
                                                           scores, !(first && i == 0 && step == 0));
      }
    }
  }

  // O (+)= P V over this half's columns of one block; P from registers (own block) or shared
  // memory.
  __device__ __forceinline__ void IssueValues(int block, bool accumulate) {
    const uint32_t v = Opaque(SharedAddress(Shared<C>().kv[block][kHalf * C::kHalfChunks]));
    const uint32_t remote_p =
        Opaque(SharedAddress(block == 0 ? Shared<C>().p : Shared<C>().kv[1][C::kKpeChunk]));
    gpu::sm90::WgmmaFenceOperand(out);
    gpu::sm90::WgmmaArrive();
#pragma unroll
    for (int step = 0; step < C::kKSteps; ++step) {
      const uint64_t v_desc =
          gpu::sm90::SharedDescriptor<1024, C::kChunkBytes>(v + step * C::kMmaK * C::kRowBytes);
      if (block == kOwnBlock) {
        gpu::sm90::WgmmaRS<T, C::kHalfDims, Major::MN>(p[step], v_desc, out,
                                                       accumulate || step > 0);
      } else {
        const uint64_t p_desc =
            gpu::sm90::SharedDescriptor(remote_p + step * C::kMmaK * kElementBytes);
        gpu::sm90::WgmmaSS<T, C::kHalfDims, Major::K, Major::MN>(p_desc, v_desc, out,
                                                                 accumulate || step > 0);
      }
    }
    gpu::sm90::WgmmaCommit();
  }

  __device__ __forceinline__ void ScaleOut(const float (&f)[2]) {
#pragma unroll
    for (int j = 0; j < kNumOut; ++j) out[j] *= f[RowOf(j)];
  }

  // Scores -> P, row sums. `score(j)` is score j or -inf: the array itself is never written, or
  // ptxas serialises every wgmma (C7515). Returns whether the reference rose in this warp.
  template <class Score>
  __device__ __forceinline__ bool SoftmaxOf(Score score) {
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < kNumScores; ++j) top[RowOf(j)] = fmaxf(top[RowOf(j)], score(j));
    bool exceeds = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] = fmaxf(top[i], __shfl_xor_sync(kAllLanes, top[i], 1));
      top[i] = fmaxf(top[i], __shfl_xor_sync(kAllLanes, top[i], 2)) * scale_log2;
      exceeds |= top[i] > reference[i] + kRescaleThresholdLog2;
    }
    const bool rescale = __any_sync(kAllLanes, exceeds);
    if (rescale) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float raised = fmaxf(reference[i], top[i]);
        factor[i] = gpu::sm90::Exp2(reference[i] - raised);
        reference[i] = raised;
        sum[i] *= factor[i];
        if (thread.quad == 0) Shared<C>().reference[kHalf][thread.row + 8 * i] = raised;
      }
    }
#pragma unroll
    for (int j = 0; j < kNumScores; j += 2) {
      const int i = RowOf(j);
      const float a = gpu::sm90::Exp2(fmaf(score(j), scale_log2, -reference[i]));
      const float b = gpu::sm90::Exp2(fmaf(score(j + 1), scale_log2, -reference[i]));
      sum[i] += a + b;
      p[j / 8][j / 2 % 4] = gpu::sm90::Pack2<T>(a, b);
    }
    if (thread.lane == 0) Shared<C>().rescaled[kHalf][thread.warp] = rescale;
    return rescale;
  }

  // Bit j: this thread's score j is of a token that its row sees.
  __device__ __forceinline__ uint32_t VisibleScores(int32_t token_begin, uint32_t owned) const {
    const int32_t first_token = token_begin + thread.quad * 2;
    uint32_t visible = 0;
#pragma unroll
    for (int j = 0; j < kNumScores; ++j) {
      const bool sees = j / 4 * 8 + j % 2 < limit[RowOf(j)] - first_token;
      visible |= static_cast<uint32_t>(sees) << j;
    }
    if (owned == kAllLanes) return visible;
#pragma unroll 1
    for (int j = 0; j < kNumScores; ++j) {
      const int token = j / 4 * 8 + thread.quad * 2 + j % 2;
      visible &= ~((~owned >> (token >> params.box_shift) & 1) << j);
    }
    return visible;
  }

  __device__ __forceinline__ bool Softmax(int32_t block) {
    const int32_t token_begin = block * kBlockN;
    const uint32_t owned = Shared<C>().owned[generation][kOwnBlock];
    const int32_t seen_by_all = item.seq_len - (params.decode.causal ? params.decode.q_len - 1 : 0);
    if (token_begin + kBlockN <= seen_by_all && owned == kAllLanes && !flip_scores) {
      return SoftmaxOf([&](int j) { return scores[j]; });
    }
    const uint32_t visible = VisibleScores(token_begin, owned);
    return SoftmaxOf([&](int j) {
      return (visible >> j & 1) == 0 ? -INFINITY : flip_scores ? -scores[j] : scores[j];
    });
  }

  // Stores P where the other half reads it, and makes it and this block's V fit for wgmma.
  __device__ __forceinline__ void PublishP(int32_t block) {
    const uint32_t target =
        SharedAddress(kHalf == kLead ? Shared<C>().p : Shared<C>().kv[1][C::kKpeChunk]);
    const uint32_t row = thread.warp * 16 + thread.lane % 16;
#pragma unroll
    for (int step = 0; step < C::kKSteps; ++step) {
      const uint32_t vector = (step * 2 + thread.lane / 16) ^ (row % 8);
      gpu::sm90::StoreMatrixX4(target + row * C::kRowBytes + vector * 16, p[step][0], p[step][1],
                               p[step][2], p[step][3]);
    }
    const int32_t rows_left = item.seq_len - block * kBlockN;
    if (rows_left < kBlockN) {  // V rows past the end: 0 * NaN would be NaN
      constexpr int kVectors = C::kRowBytes / 16;
      for (int i = thread.idx; i < (kBlockN - rows_left) * kVectors * C::kCkvChunks;
           i += kWarpgroupThreads) {
        const int chunk = i / kVectors % C::kCkvChunks;
        const int tail_row = rows_left + i / (kVectors * C::kCkvChunks);
        reinterpret_cast<uint4*>(
            Shared<C>().kv[kOwnBlock][chunk])[tail_row * kVectors + i % kVectors] = uint4{};
      }
      gpu::sm90::FenceProxyAsyncShared();
      gpu::sm90::NamedBarrierSync(kHalf == kLead ? kLeadTail : kFollowTail, kWarpgroupThreads);
    }
    gpu::sm90::FenceProxyAsyncShared();
    gpu::sm90::NamedBarrierArrive(kHalf == kLead ? kLeadPFull : kFollowPFull, kNumMathThreads);
  }

  // After the other half's P: takes over its reference where that rose. True if O has to be scaled
  // by `factor`.
  __device__ __forceinline__ bool FollowReference() {
    constexpr int kOther = 1 - kHalf;
    if (!Shared<C>().rescaled[kOther][thread.warp]) return false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float raised = Shared<C>().reference[kOther][thread.row + 8 * i];
      factor[i] = gpu::sm90::Exp2(reference[i] - raised);
      reference[i] = raised;
      sum[i] *= factor[i];
    }
    return true;
  }

  // ---- output

  // Both halves' sums together; a row that saw nothing keeps 0.
  __device__ __forceinline__ void FinishSums(const Item& done, int done_idx) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(kAllLanes, sum[i], 1);
      sum[i] += __shfl_xor_sync(kAllLanes, sum[i], 2);
      if (thread.quad == 0) Shared<C>().sum[done_idx % 2][kHalf][thread.row + 8 * i] = sum[i];
    }
    gpu::sm90::NamedBarrierSync(kItemEnd, kNumMathThreads);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = thread.row + 8 * i;
      sum[i] = Shared<C>().sum[done_idx % 2][0][row] + Shared<C>().sum[done_idx % 2][1][row];
    }
  }

  // Rows of T; the four lanes of a quad transpose 4 x 4 so that each stores 16 bytes.
  __device__ __forceinline__ void WriteFinal(const Item& done) const {
    const DecodeParams& d = params.decode;
    const int64_t first_row =
        static_cast<int64_t>(done.seq_idx) * d.q_len * d.num_heads + tile.row_begin;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = thread.row + 8 * i;
      const float inverse = sum[i] == 0 ? 0.0f : 1.0f / sum[i];
      T* target = static_cast<T*>(d.out) + (first_row + row) * C::kDCkv + kHalf * C::kHalfDims +
                  thread.quad * 8;
#pragma unroll
      for (int j = 0; j < kNumOut; j += 16) {
        uint32_t v[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int e = j + 4 * k + 2 * i;
          v[k] = gpu::sm90::Pack2<T>(out[e] * inverse, out[e + 1] * inverse);
        }
        const bool odd = thread.quad & 1, upper = thread.quad & 2;
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
          const uint32_t other = __shfl_xor_sync(kAllLanes, odd ? v[k] : v[k + 1], 1);
          (odd ? v[k] : v[k + 1]) = other;
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const uint32_t other = __shfl_xor_sync(kAllLanes, upper ? v[k] : v[k + 2], 2);
          (upper ? v[k] : v[k + 2]) = other;
        }
        if (row < tile.num_rows) {
          *reinterpret_cast<uint4*>(target + 2 * j) = make_uint4(v[0], v[1], v[2], v[3]);
        }
      }
      if (kHalf == kLead && thread.quad == 0 && row < tile.num_rows) {
        d.lse[first_row + row] = sum[i] == 0 ? -INFINITY : reference[i] * kLn2 + logf(sum[i]);
      }
    }
  }

  // Rows of f32; pairs of lanes exchange so that each stores 16 bytes.
  __device__ __forceinline__ void WritePartial(const Item& done) const {
    const PartialBuffers& partials = params.plan.partials;
    const int64_t first_row = partials.RowIndex(done.slot, tile.idx);
    const bool odd = thread.quad & 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = thread.row + 8 * i;
      const float inverse = sum[i] == 0 ? 0.0f : 1.0f / sum[i];
      float* target = partials.out + (first_row + row) * C::kDCkv + kHalf * C::kHalfDims +
                      (thread.quad & 1) * 8 + (thread.quad & 2) * 2;
#pragma unroll
      for (int j = 0; j < kNumOut; j += 8) {
        const int e = j + 2 * i;
        const float a0 = out[e] * inverse, a1 = out[e + 1] * inverse;
        const float b0 = out[e + 4] * inverse, b1 = out[e + 5] * inverse;
        const float x0 = __shfl_xor_sync(kAllLanes, odd ? a0 : b0, 1);
        const float x1 = __shfl_xor_sync(kAllLanes, odd ? a1 : b1, 1);
        if (row < tile.num_rows) {
          *reinterpret_cast<float4*>(target + 2 * j) =
              odd ? make_float4(x0, x1, b0, b1) : make_float4(a0, a1, x0, x1);
        }
      }
      if (kHalf == kLead && thread.quad == 0 && row < tile.num_rows) {
        partials.lse_log2[first_row + row] = reference[i] + log2f(sum[i]);
      }
    }
  }

  __device__ __forceinline__ void WriteItem(const Item& done, int done_idx) {
    gpu::sm90::WgmmaFenceOperand(out);
    FinishSums(done, done_idx);
    if (done.slot == kFinal) {
      WriteFinal(done);
    } else {
      WritePartial(done);
    }
  }
};

// All groups of a block. The lead's last one is a commit group of its own: WgmmaWait<1> then means
// "nearly done".
template <class C, Half kHalf>
__device__ __forceinline__ void IssueScores(Math<C, kHalf>& math) {
  const uint32_t q = Opaque(SharedAddress(Shared<C>().q));
  const uint32_t k = Opaque(SharedAddress(Shared<C>().kv[math.kOwnBlock]));
#pragma unroll
  for (int i = 0; i < C::kNumGroups; ++i) {
    if (kHalf == kLead && i == C::kNumGroups - 1) gpu::sm90::WgmmaCommit();
    math.ScoreGroup(q, k, kHalf == kLead ? C::LeadGroup(i) : C::FollowGroup(i), i == 0);
  }
  gpu::sm90::WgmmaCommit();
  math.full_phase ^= 1;
}

// Even blocks: S, P; the left half of O.
template <class C>
__device__ __forceinline__ void LeadRole(const WideParams& params, const RowTile& tile) {
  Math<C, kLead> math(params, tile);
  math.NextItem();
  if (math.num_blocks() == 0) return;
  IssueScores(math);
  if (C::kOrder == FollowOrder::kScoresFirst) {
    gpu::sm90::NamedBarrierArrive(kLeadScores, kNumMathThreads);
  }
  gpu::sm90::WgmmaWait<0>();
  gpu::sm90::WgmmaFenceOperand(math.scores);
  math.ResetSoftmax();
  int32_t done_blocks = 0;  // of the item, before this pair
#pragma unroll 1
  while (true) {
    const bool has_pair = done_blocks + 1 < math.num_blocks();
    const bool is_last = done_blocks + 2 >= math.num_blocks();
    const int32_t block = math.item.block_begin + done_blocks;
    math.Release(Shared<C>().kv_empty[0][C::kKpeGroup]);
    if (is_last) math.Release(Shared<C>().q_empty);
    if (math.Softmax(block) && done_blocks > 0) math.ScaleOut(math.factor);
    math.PublishP(block);
    math.IssueValues(0, done_blocks > 0);
    gpu::sm90::WgmmaWait<0>();
    gpu::sm90::WgmmaFenceOperand(math.out);
    math.ReleaseValues(0);
    if (has_pair) {
      gpu::sm90::NamedBarrierSync(kFollowPFull, kNumMathThreads);
      if (math.FollowReference()) math.ScaleOut(math.factor);
      math.IssueValues(1, true);
      gpu::sm90::WgmmaWait<0>();
      gpu::sm90::WgmmaFenceOperand(math.out);
      math.ReleaseValues(1);
      math.Release(Shared<C>().kv_empty[1][C::kKpeGroup]);
    }
    math.generation ^= 1;
    const Item done = math.item;
    const int done_idx = math.item_idx;
    const bool more = !is_last || math.has_next;
    if (is_last && more) math.NextItem();
    if (more) {
      IssueScores(math);
      if (C::kOrder == FollowOrder::kScoresFirst && is_last) {
        gpu::sm90::NamedBarrierArrive(kLeadScores, kNumMathThreads);
      }
    }
    if (!is_last) {
      done_blocks += 2;
      if (C::kOrder == FollowOrder::kScoresFirst) {
        gpu::sm90::WgmmaWait<1>();
        gpu::sm90::NamedBarrierArrive(kLeadScores, kNumMathThreads);
      }
      gpu::sm90::WgmmaWait<0>();
      gpu::sm90::WgmmaFenceOperand(math.scores);
      continue;
    }
    math.WriteItem(done, done_idx);  // while the next item's scores are computed
    gpu::sm90::WgmmaWait<0>();
    gpu::sm90::WgmmaFenceOperand(math.scores);
    if (!more) return;
    math.ResetSoftmax();
    done_blocks = 0;
  }
}

// Odd blocks: S, P; the right half of O.
template <class C>
__device__ __forceinline__ void FollowRole(const WideParams& params, const RowTile& tile) {
  constexpr bool kScoresFirst = C::kOrder == FollowOrder::kScoresFirst;
  Math<C, kFollow> math(params, tile);
  do {
    math.NextItem();
    if (math.num_blocks() == 0) return;
    math.ResetSoftmax();
    if (math.num_blocks() == 1) math.Release(Shared<C>().q_empty);
#pragma unroll 1
    for (int32_t done_blocks = 0; done_blocks < math.num_blocks(); done_blocks += 2) {
      const bool has_own = done_blocks + 1 < math.num_blocks();
      const bool is_last_own = done_blocks + 3 >= math.num_blocks();
      const int32_t block = math.item.block_begin + done_blocks + 1;
      if (kScoresFirst) {
        gpu::sm90::NamedBarrierSync(kLeadScores, kNumMathThreads);
        if (has_own) IssueScores(math);
      }
      gpu::sm90::NamedBarrierSync(kLeadPFull, kNumMathThreads);
      if (math.FollowReference() && done_blocks > 0) {
        gpu::sm90::WgmmaWait<0>();
        math.ScaleOut(math.factor);
      }
      math.IssueValues(0, done_blocks > 0);
      if (!kScoresFirst) {
        gpu::sm90::WgmmaWait<0>();
        gpu::sm90::WgmmaFenceOperand(math.out);
        math.ReleaseValues(0);
        if (has_own) {
          IssueScores(math);
          gpu::sm90::WgmmaWait<0>();
          gpu::sm90::WgmmaFenceOperand(math.scores);
        }
      }
      if (has_own) {
        if (kScoresFirst) {
          gpu::sm90::WgmmaWait<1>();
          gpu::sm90::WgmmaFenceOperand(math.scores);
        }
        if (is_last_own) math.Release(Shared<C>().q_empty);
        const bool rescale = math.Softmax(block);
        math.PublishP(block);
        if (rescale) {
          gpu::sm90::WgmmaWait<0>();
          gpu::sm90::WgmmaFenceOperand(math.out);
          math.ScaleOut(math.factor);
        }
        math.IssueValues(1, true);
        if (kScoresFirst) {
          gpu::sm90::WgmmaWait<1>();
          math.ReleaseValues(0);
        }
        gpu::sm90::WgmmaWait<0>();
        gpu::sm90::WgmmaFenceOperand(math.out);
        math.ReleaseValues(1);
      } else if (kScoresFirst) {
        gpu::sm90::WgmmaWait<0>();
        gpu::sm90::WgmmaFenceOperand(math.out);
        math.ReleaseValues(0);
      }
      math.generation ^= 1;
    }
    math.WriteItem(math.item, math.item_idx);
  } while (math.has_next);
}

template <class C>
__device__ __forceinline__ void InitBarriers() {
  constexpr int kOwners = 1, kBothHalves = 2;
  for (int block = 0; block < kBlocksInFlight; ++block) {
    for (int group = 0; group < C::kNumGroups; ++group) {
      gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().kv_full[block][group]), kOwners);
      gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().kv_empty[block][group]), kOwners);
    }
  }
  gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().q_full), kOwners);
  gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().q_empty), kBothHalves);
  gpu::sm90::MbarrierInitFence();
}

// Grid: num_workers x row tiles; the tiles of a worker are neighbours, so that L2 serves all but
// one of them.
template <class C>
__global__ void __launch_bounds__(kNumThreads, 1)
    WideDecode(const __grid_constant__ WideParams params, const __grid_constant__ TensorMaps maps) {
  static_assert(sizeof(SharedMemory<C>) <= kMaxSharedBytes,
                "shorten the KV ring or share a buffer");
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarpThreads, 0);
  const int32_t num_tiles = params.plan.partials.num_row_tiles;
  const int32_t worker = blockIdx.x / num_tiles;
  const RowTile tile(params, blockIdx.x - worker * num_tiles);

  if (threadIdx.x == 0) InitBarriers<C>();
  if (warp == kProducerWarp && gpu::sm90::ElectOne()) {
    gpu::sm90::PrefetchTensorMap(&maps.q_nope);
    gpu::sm90::PrefetchTensorMap(&maps.ckv);
    gpu::sm90::PrefetchTensorMap(&maps.q_pe);
    gpu::sm90::PrefetchTensorMap(&maps.kpe);
  }
  gpu::PdlWait();
  gpu::PdlLaunchDependents();
  __syncthreads();

  if (warp >= kProducerWarp) {
    gpu::sm90::SetMaxRegistersDown<kProducerRegisters>();
    if (warp == kProducerWarp) ProducerRole<C>(params, maps, tile, worker);
  } else {
    gpu::sm90::SetMaxRegistersUp<kMathRegisters>();
    if (warp < kProducerWarp / 2) {
      LeadRole<C>(params, tile);
    } else {
      FollowRole<C>(params, tile);
    }
  }
}

}  // namespace jax_mla::decode::sm90::wide
