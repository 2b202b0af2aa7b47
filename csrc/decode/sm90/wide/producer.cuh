// The producer of the wide kernel: finds the CTA's work, tells the math warpgroups about it,
// streams the cache. Roles and barriers: kernel.cuh.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "decode/schedule.h"
#include "decode/sm90/tensor_map.h"
#include "decode/sm90/wide/params.cuh"
#include "decode/trace.cuh"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::wide {

// Source of one lane's box. A group's chunks are cut into boxes of box_tokens tokens, one a lane:
// lane i takes box i % boxes_per_chunk of chunk i / boxes_per_chunk.
struct BoxSource {
  int32_t page_id;  // global
  int32_t token;    // of the page; negative: past the end of the sequence
};

template <class C>
struct Producer {
  const WideParams& params;
  const TensorMaps& maps;
  const uint32_t base;  // of the shared memory
  const int32_t lane;
  const bool is_leader;
  const int32_t layer;  // unchecked
  const int32_t page_begin;
  const int32_t chunk;      // of the group, that this lane copies
  const int32_t box_begin;  // first token of this lane's box in the block
  uint32_t phases = 0b11;   // of kv_empty[block], one bit a block

  __device__ Producer(const WideParams& wide_params, const TensorMaps& tensor_maps)
      : params(wide_params),
        maps(tensor_maps),
        base(SharedAddress(&Shared<C>())),
        lane(threadIdx.x % kWarpThreads),
        is_leader(lane == 0),
        layer(__ldg(wide_params.decode.layer)),
        page_begin(__ldg(wide_params.decode.page_begin)),
        chunk(lane * wide_params.box_tokens / kBlockN),
        box_begin(lane * wide_params.box_tokens % kBlockN) {}

  __device__ __forceinline__ BoxSource FindBox(const Item& item, int32_t block) const {
    const DecodeParams& p = params.decode;
    const int32_t token = block * kBlockN + box_begin;
    if (block >= item.block_end || token >= item.seq_len) return {0, -1};
    const int32_t page = params.page_shift >= 0 ? token >> params.page_shift : token / p.page_size;
    const int64_t entry = static_cast<int64_t>(item.seq_idx) * p.max_pages_per_seq + page;
    return {__ldg(p.page_table + entry), token - page * p.page_size};
  }

  // Absent pages and boxes past the end are read outside the tensor: zeros.
  __device__ __forceinline__ int32_t LocalPage(const BoxSource& box) const {
    const int64_t local = int64_t{box.page_id} - page_begin;
    const bool has_layer = layer >= 0 && layer < params.decode.num_layers;
    const bool owned = box.token >= 0 && has_layer && local >= 0 && local < params.decode.num_pages;
    return owned ? static_cast<int32_t>(local) : kOutside;
  }

  // Copies one group once its slots are free. Block and group are known at compile time: the
  // producer is one warp whose latency adds to every refill, so a copy must cost it few
  // instructions.
  template <bool kWholeChunks, int kBlock, int kGroup>
  __device__ __forceinline__ void LoadGroup(const BoxSource& box, int32_t page) const {
    constexpr bool kIsKpe = kGroup == C::kKpeGroup;
    constexpr int kNumChunks = kIsKpe ? 1 : kChunksPerGroup;
    constexpr int kFirstChunk = kGroup * kChunksPerGroup;
    const CUtensorMap* map = kIsKpe ? &maps.kpe : &maps.ckv;
    const uint32_t full = base + offsetof(SharedMemory<C>, kv_full) +
                          (kBlock * C::kNumGroups + kGroup) * sizeof(uint64_t);
    const uint32_t empty = base + offsetof(SharedMemory<C>, kv_empty) +
                           (kBlock * C::kNumGroups + kGroup) * sizeof(uint64_t);
    const uint32_t target =
        base + offsetof(SharedMemory<C>, kv) + (kBlock * C::kChunks + kFirstChunk) * C::kChunkBytes;
    if constexpr (kWholeChunks) {
      // The other lanes must not wait here: nothing would hold the leader back while one of them is
      // late, and it would miss the phase. They meet again at the next block's vote.
      if (!is_leader) return;
      trace::Enter(Phase::kWaitSlot);
      gpu::sm90::MbarrierWait(empty, phases >> kBlock & 1);
      trace::Enter(Phase::kIssue);
      gpu::sm90::MbarrierArriveExpectTx(full, kNumChunks * C::kChunkBytes);
#pragma unroll
      for (int i = 0; i < kNumChunks; ++i) {
        gpu::sm90::TmaLoad4d(map, target + i * C::kChunkBytes, full,
                             kIsKpe ? 0 : (kFirstChunk + i) * kChunkDims, box.token, page, layer,
                             gpu::sm90::kCacheEvictNormal);
      }
    } else {
      trace::Enter(Phase::kWaitSlot);
      gpu::sm90::MbarrierWait(empty, phases >> kBlock & 1);
      trace::Enter(Phase::kIssue);
      if (is_leader) gpu::sm90::MbarrierArriveExpectTx(full, kNumChunks * C::kChunkBytes);
      __syncwarp();
      if (chunk >= kNumChunks) return;
      gpu::sm90::TmaLoad4d(map, target + chunk * C::kChunkBytes + box_begin * C::kRowBytes, full,
                           kIsKpe ? 0 : (kFirstChunk + chunk) * kChunkDims, box.token, page, layer,
                           gpu::sm90::kCacheEvictNormal);
    }
  }

  // Copies a block in the order in which its consumer reads it (and, for block 1, in which the
  // halves are freed).
  template <bool kWholeChunks, int kBlock>
  __device__ __forceinline__ void LoadBlock(int generation, const BoxSource& box) {
    trace::Enter(Phase::kLookUp);
    const int32_t page = LocalPage(box);
    const uint32_t owned = __ballot_sync(kAllLanes, box.token < 0 || page != kOutside);
    if (is_leader) Shared<C>().owned[generation][kBlock] = owned;
    [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
      (LoadGroup<kWholeChunks, kBlock, kBlock == 0 ? C::LeadGroup(kIndex) : C::FollowGroup(kIndex)>(
           box, page),
       ...);
    }(std::make_integer_sequence<int, C::kNumGroups>{});
    phases ^= 1u << kBlock;
  }

  // Hands an item and its queries to the math warpgroups.
  __device__ __forceinline__ void PublishItem(const Item& item, const RowTile& tile, int item_idx,
                                              bool has_next) const {
    trace::Enter(Phase::kSendItem);
    gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().q_empty), (item_idx & 1) ^ 1);
    if (is_leader) {
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
    if (!is_leader) return;
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
    trace::Enter(Phase::kFindWork);
    WorkItem next;
    while (work.Next(params.plan.schedule, &next)) {
      if (next.block_begin < next.block_end) {
        *item = {next.seq_idx, next.seq_len, next.block_begin, next.block_end,
                 next.is_final() ? kFinal : next.slot()};
        if (!next.is_final() && params.merge_inside && is_leader) {
          Shared<C>().splits[Shared<C>().num_splits++] = next;
        }
        return true;
      }
      WriteEmpty(next.seq_idx, tile);
    }
    return false;
  }
};

// Streams the KV of a worker's items.
template <class C, bool kWholeChunks>
__device__ __forceinline__ void ProducerLoop(Producer<C>& producer, WorkIterator work,
                                             const RowTile& tile) {
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
      producer.template LoadBlock<kWholeChunks, 0>(generation, now0);
      if (pair + 1 < item.block_end) {
        producer.template LoadBlock<kWholeChunks, 1>(generation, now1);
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

template <class C>
__device__ __forceinline__ void ProducerRole(const WideParams& params, const TensorMaps& maps,
                                             const RowTile& tile, int32_t worker) {
  trace::Enter(Phase::kFindWork);
  Producer<C> producer(params, maps);
  const WorkIterator work = FindWork(params.plan.schedule, worker);
  if (producer.is_leader) {
    Shared<C>().merges = params.merge_inside && work.policy.may_cut;
    Shared<C>().num_splits = 0;
  }
  if (params.box_tokens == kBlockN) {
    ProducerLoop<C, true>(producer, work, tile);
  } else {
    ProducerLoop<C, false>(producer, work, tile);
  }
}

}  // namespace jax_mla::decode::sm90::wide
