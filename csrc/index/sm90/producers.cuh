// The two warps that copy keys and queries to shared memory.
#pragma once

#include "index/sm90/params.cuh"

namespace jax_mla::index::sm90 {

// Copies the tiles of keys, box by box. A box is a page or 64 tokens of one. A box whose page is
// not in the pool is left out, as are those behind the window's last token. Each lane finds the
// page of one box of the next 32, and later copies it.
template <class C>
__device__ __forceinline__ void KeyRole(const KernelParams& params, const TensorMaps& maps,
                                        Walk walk) {
  constexpr int kTileLog2 = 6;
  static_assert(1 << kTileLog2 == kTileTokens, "a tile's logarithm");
  constexpr auto kTokenBytes = static_cast<uint32_t>(IndexPageBytes(C::kKeyType, kDim, 1));
  const TopkParams& call = params.call;
  const int lane = threadIdx.x % kWarpThreads;
  const int boxes_log2 = kTileLog2 - params.box_tokens_log2;  // of a tile
  const int boxes_per_tile = 1 << boxes_log2;
  const int32_t boxes_per_page = call.page_size >> params.box_tokens_log2;
  const uint32_t box_bytes = params.box_tokens * kTokenBytes;
  const int own_tile = lane >> boxes_log2;
  const int own_token = lane % boxes_per_tile * params.box_tokens;  // of the tile, the box's first
  const int64_t page_bytes = IndexPageBytes(C::kKeyType, kDim, call.page_size);
  const int32_t first_page = *call.layer * call.num_pages;
  const auto* scales = static_cast<const uint8_t*>(call.index_pages) + call.page_size * kDim;
  RingPlace<C::kStages> ring;
  while (walk.Next()) {
    const Pages pages(call, walk.window.seq_idx);
    const int32_t num_boxes =
        (walk.window.num_tokens() + params.box_tokens - 1) >> params.box_tokens_log2;
    const int32_t first_box = walk.first_tile << boxes_log2;
    const int32_t last_box = first_box + (walk.num_tiles << boxes_log2);
    const auto page_of = [&](int32_t box) {
      if (box >= min(last_box, num_boxes)) return -1;
      return pages.Local(pages.Id(boxes_per_page == 1 ? box : box / boxes_per_page));
    };
    int32_t next_page = page_of(first_box + lane);
    for (int32_t base = first_box; base < last_box; base += kWarpThreads) {
      const int32_t page = next_page;
      next_page = page_of(base + kWarpThreads + lane);
      const int32_t row =
          boxes_per_page == 1 ? 0 : (base + lane) % boxes_per_page * params.box_tokens;
      const uint32_t present = __ballot_sync(kAllLanes, page >= 0);
      const uint8_t* own_scales =
          scales + (int64_t{first_page} + page) * page_bytes + row * sizeof(float);
      const int num_tiles = min(kWarpThreads, last_box - base) >> boxes_log2;
#pragma unroll 1
      for (int tile = 0; tile < num_tiles; ++tile) {
        const uint32_t full = SharedAddress(&Shared<C>().keys_full[ring.idx]);
        if (lane == tile << boxes_log2) {
          const uint32_t boxes = present >> lane & ((1u << boxes_per_tile) - 1);
          gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().keys_empty[ring.idx]), ring.phase ^ 1);
          Shared<C>().boxes_present[ring.idx] = boxes;
          gpu::sm90::MbarrierArriveExpectTx(full, __popc(boxes) * box_bytes);
        }
        __syncwarp();
        if (own_tile == tile && page >= 0) {
#pragma unroll
          for (int half = 0; half < C::kHalves; ++half) {
            gpu::sm90::TmaLoad4d(
                &maps.keys, SharedAddress(Shared<C>().keys[ring.idx][half] + own_token * kRowBytes),
                full, 0, row, half, first_page + page, params.key_policy);
          }
          if constexpr (C::kHasCodes) {
            gpu::sm90::BulkCopy(SharedAddress(Shared<C>().scales[ring.idx] + own_token), own_scales,
                                params.box_tokens * sizeof(float), full, params.key_policy);
          }
        }
        ring.Next();
      }
    }
  }
}

// Copies the queries of each window, and their weights. With codes these are halved, see Math.
template <class C>
__device__ __forceinline__ void QueryRole(const KernelParams& params, const TensorMaps& maps,
                                          Walk walk) {
  const TopkParams& call = params.call;
  const int lane = threadIdx.x % kWarpThreads;
  RingPlace<kSlots> ring;
  while (walk.Next()) {
    const int32_t first_query = params.slab.begin + walk.row;
    const int num_queries = walk.window.num_queries;
    const uint32_t full = SharedAddress(&Shared<C>().queries_full[ring.idx]);
    gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().queries_empty[ring.idx]), ring.phase ^ 1);
    if (lane == 0) {
      gpu::sm90::MbarrierArriveExpectTx(full, num_queries * C::kHeads * C::kHalves * kRowBytes);
      for (int query = 0; query < num_queries; ++query) {
        const int head = query * C::kHeads;
#pragma unroll
        for (int half = 0; half < C::kHalves; ++half) {
          gpu::sm90::TmaLoad4d(&maps.queries,
                               SharedAddress(Shared<C>().queries[ring.idx][head / kColumns][half] +
                                             head % kColumns * kRowBytes),
                               full, 0, 0, half, first_query + query, gpu::sm90::kCacheEvictNormal);
        }
      }
    }
    __syncwarp();
    float* weights = Shared<C>().weights[ring.idx][0];
    const float* given = call.weights + int64_t{first_query} * call.num_heads;
#pragma unroll 4
    for (int i = lane; i < num_queries * C::kHeads; i += kWarpThreads) {
      const int query = i / C::kHeads, head = i % C::kHeads;
      const float weight = head < call.num_heads ? given[query * call.num_heads + head] : 0.0f;
      const int four = head / 16, quad = head % 8 / 2, place = head / 8 % 2 * 2 + head % 2;
      weights[query * C::kHeads + four * 16 + quad * 4 + place] =
          C::kHasCodes ? 0.5f * weight : weight;
    }
    __syncwarp();
    if (lane == 0) gpu::sm90::MbarrierArrive(full);
    ring.Next();
  }
}

}  // namespace jax_mla::index::sm90
