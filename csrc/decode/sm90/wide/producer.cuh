// The producer of the wide kernel: finds the CTA's work, tells the math warpgroups about it,
// streams the cache. Roles and barriers: kernel.cuh.
#pragma once

#include <cstdint>

#include "decode/schedule.h"
#include "decode/sm90/tensor_map.h"
#include "decode/sm90/wide/params.cuh"
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
  const int32_t lane;
  const int32_t layer;  // unchecked
  const int32_t page_begin;
  const int32_t chunk;      // of the group, that this lane copies
  const int32_t box_begin;  // first token of this lane's box in the block
  uint32_t phases = 0b11;   // of kv_empty[block], one bit a block

  __device__ Producer(const WideParams& wide_params, const TensorMaps& tensor_maps)
      : params(wide_params),
        maps(tensor_maps),
        lane(threadIdx.x % kWarpThreads),
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

  __device__ __forceinline__ void LoadGroup(int block, int group, const BoxSource& box,
                                            int32_t page) const {
    const bool is_kpe = group == C::kKpeGroup;
    const int num_chunks = is_kpe ? 1 : kChunksPerGroup;
    const uint32_t full = SharedAddress(&Shared<C>().kv_full[block][group]);
    const uint32_t target = SharedAddress(Shared<C>().kv[block][group * kChunksPerGroup]);
    gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().kv_empty[block][group]),
                            phases >> block & 1);
    if (lane == 0) gpu::sm90::MbarrierArriveExpectTx(full, num_chunks * C::kChunkBytes);
    __syncwarp();
    if (chunk < num_chunks) {
      gpu::sm90::TmaLoad4d(is_kpe ? &maps.kpe : &maps.ckv,
                           target + chunk * C::kChunkBytes + box_begin * C::kRowBytes, full,
                           is_kpe ? 0 : (group * kChunksPerGroup + chunk) * kChunkDims, box.token,
                           page, layer, gpu::sm90::kCacheEvictNormal);
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
  Producer<C> producer(params, maps);
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

}  // namespace jax_mla::decode::sm90::wide
