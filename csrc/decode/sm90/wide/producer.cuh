// The producer of the wide kernel: finds the CTA's work, tells the math warpgroups about it,
// streams the cache through a copier: box_producer.cuh or gather_producer.cuh. Roles and barriers:
// kernel.cuh.
#pragma once

#include <cstddef>
#include <cstdint>

#include "decode/find_work.cuh"
#include "decode/schedule.h"
#include "decode/sm90/tensor_map.h"
#include "decode/sm90/wide/params.cuh"
#include "decode/trace.cuh"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::wide {

// KV leaves L2 to what is read again: queries, code, tables. The other row tiles read a block while
// it is there all the same.
inline constexpr uint64_t kKvCachePolicy = gpu::sm90::kCacheEvictFirst;

// Where a token, or a box that begins with it, lies.
struct Source {
  int32_t page_id;  // global
  int32_t token;    // of the page; negative: past the end of the sequence
};

template <class C>
struct Producer {
  const WideParams& params;
  const TensorMaps& maps;
  const uint32_t base;  // of the shared memory
  const int32_t lane;
  const bool is_first_warp;  // of those that copy
  const bool is_leader;
  const int32_t layer;  // unchecked
  const uint32_t page_begin;
  uint32_t phases = 0b11;  // of kv_empty[block], one bit a block

  // Where this call's pages begin: lane 0 has the layer, the others have page_begin. One load,
  // which nobody waits for before the work is found.
  static __device__ __forceinline__ int32_t LoadOrigin(const WideParams& params) {
    const DecodeParams& p = params.decode;
    return __ldg(threadIdx.x % kWarpThreads == 0 ? p.layer : p.page_begin);
  }

  __device__ Producer(const WideParams& wide_params, const TensorMaps& tensor_maps, int32_t origin)
      : params(wide_params),
        maps(tensor_maps),
        base(SharedAddress(&Shared<C>())),
        lane(threadIdx.x % kWarpThreads),
        is_first_warp(threadIdx.x / kWarpThreads == kProducerWarp),
        is_leader(gpu::sm90::ElectOne() && is_first_warp),  // later elections agree
        layer(__shfl_sync(kAllLanes, origin, 0)),
        page_begin(__shfl_sync(kAllLanes, origin, 1)) {}

  // Token `offset` of a block of the item: its page's place in the page table, its own in the page.
  struct Place {
    int32_t page_idx;
    int32_t token;  // negative: past the item's end
  };
  __device__ __forceinline__ Place FindPlace(const Item& item, int32_t block,
                                             int32_t offset) const {
    const int32_t token = block * kBlockN + offset;
    if (block >= item.block_end || token >= item.seq_len) return {0, -1};
    const int32_t page_idx = params.page_size.Floor(token);
    return {page_idx, token - page_idx * params.decode.page_size};
  }
  __device__ __forceinline__ int32_t LoadPageId(const Item& item, const Place& place) const {
    if (place.token < 0) return 0;
    const DecodeParams& p = params.decode;
    const uint64_t row =
        uint64_t{static_cast<uint32_t>(item.seq_idx)} * static_cast<uint32_t>(p.max_pages_per_seq);
    return __ldg(p.page_table + row + static_cast<uint32_t>(place.page_idx));
  }

  // kOutside for absent pages and tokens past the end: they are read as zeros.
  __device__ __forceinline__ int32_t LocalPage(const Source& source) const {
    const uint32_t local = static_cast<uint32_t>(source.page_id) - page_begin;
    const bool has_layer =
        static_cast<uint32_t>(layer) < static_cast<uint32_t>(params.decode.num_layers);
    const bool owned =
        source.token >= 0 && has_layer && local < static_cast<uint32_t>(params.decode.num_pages);
    return owned ? static_cast<int32_t>(local) : kOutside;
  }

  __device__ __forceinline__ uint32_t FullBarrier(int block, int group) const {
    return base + static_cast<uint32_t>(offsetof(SharedMemory<C>, kv_full)) +
           (block * C::kNumGroups + group) * static_cast<uint32_t>(sizeof(uint64_t));
  }
  __device__ __forceinline__ uint32_t EmptyBarrier(int block, int group) const {
    return FullBarrier(block, group) + static_cast<uint32_t>(offsetof(SharedMemory<C>, kv_empty) -
                                                             offsetof(SharedMemory<C>, kv_full));
  }
  __device__ __forceinline__ uint32_t Chunk(int block, int chunk) const {
    return base + static_cast<uint32_t>(offsetof(SharedMemory<C>, kv)) +
           (block * C::kChunks + chunk) * C::kChunkBytes;
  }

  // Hands an item and its queries to the math warpgroups.
  __device__ __forceinline__ void PublishItem(const Item& item, const RowTile& tile, int item_idx,
                                              bool has_next) const {
    if (C::kCopyWarps > 1 && !is_first_warp) return;
    trace::Enter(Phase::kSendItem);
    if (!gpu::sm90::ElectOne()) return;
    const int parity = item_idx & 1;
    const uint32_t full = SharedAddress(&Shared<C>().q_full);
    gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().q_empty), parity ^ 1);
    Shared<C>().items[parity] = item;
    Shared<C>().has_next[parity] = has_next;
    gpu::sm90::MbarrierArriveExpectTx(full, C::kQueryBytes);
    gpu::sm90::TmaLoad4d(&maps.q_nope, SharedAddress(Shared<C>().q[0]), full, 0, tile.row_begin, 0,
                         item.seq_idx, gpu::sm90::kCacheEvictNormal);
    gpu::sm90::TmaLoad4d(&maps.q_pe, SharedAddress(Shared<C>().q[C::kKpeChunk]), full, 0,
                         tile.row_begin, 0, item.seq_idx, gpu::sm90::kCacheEvictNormal);
  }

  __device__ __forceinline__ void PublishNothing() const {
    if (!is_leader) return;
    Shared<C>().items[0] = {};
    gpu::sm90::MbarrierArrive(SharedAddress(&Shared<C>().q_full));
  }

  // A sequence of length 0: out 0, lse -inf.
  __device__ __forceinline__ void WriteEmpty(int32_t seq_idx, const RowTile& tile) const {
    constexpr int kVectors = C::kDCkv * kElementBytes / 16;
    const uint64_t row = uint64_t{static_cast<uint32_t>(seq_idx)} *
                             static_cast<uint32_t>(params.decode.q_len * params.decode.num_heads) +
                         tile.row_begin;
    uint4* out = static_cast<uint4*>(params.decode.out) + row * kVectors;
#pragma unroll 1
    for (int i = lane; i < tile.num_rows * kVectors; i += kWarpThreads) out[i] = uint4{};
#pragma unroll 1
    for (int i = lane; i < tile.num_rows; i += kWarpThreads) {
      params.decode.lse[row + i] = -INFINITY;
    }
  }

  __device__ __forceinline__ bool NextItem(WorkIterator& work, const RowTile& tile,
                                           Item* item) const {
    trace::Enter(Phase::kFindWork);
    WorkItem next;
    const ScheduleParams& schedule = params.plan.schedule;
    while (C::kMerge == Merge::kInside ? work.NextAutomatic(schedule, &next)
                                       : work.Next(schedule, &next)) {
      if (next.block_begin < next.block_end) {
        *item = {next.seq_idx, next.seq_len, next.block_begin, next.block_end,
                 next.is_final() ? kFinal : next.slot()};
        if (C::kMerge == Merge::kInside && !next.is_final() && is_leader) {
          Shared<C>().splits[Shared<C>().num_splits++] = next;
        }
        return true;
      }
      if (is_first_warp) WriteEmpty(next.seq_idx, tile);
    }
    return false;
  }
};

// Streams the KV of a worker's items. Copier: a Producer that copies block after block of an item
// and looks up page ids ahead of their use. Whatever a launch runs but once is fetched cold, at
// some ten cycles an instruction: so there is one piece of code for both blocks of a pair.
template <class Copier>
__device__ __forceinline__ void ProducerLoop(Copier producer, WorkIterator work,
                                             const RowTile& tile) {
  Item item{};
  int generation = 0;
#pragma unroll 1
  for (int item_idx = -1;; ++item_idx) {  // one round ahead: an item knows whether another follows
    Item next;
    const bool has_next = producer.NextItem(work, tile, &next);
    if (item_idx >= 0) producer.PublishItem(item, tile, item_idx, has_next);
    int slot = 0;
#pragma unroll 1
    for (int32_t block = item.block_begin; block < item.block_end; ++block) {
      producer.LoadBlock(slot, generation, item, block);
      generation ^= slot;
      slot ^= 1;
    }
    generation ^= slot;  // half a pair
    if (!has_next) {
      if (item_idx < 0) producer.PublishNothing();
      return;
    }
    item = next;
    producer.BeginItem(item);
  }
}

}  // namespace jax_mla::decode::sm90::wide
