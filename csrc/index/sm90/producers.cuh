// The two warps that copy keys and queries to shared memory.
#pragma once

#include "index/sm90/params.cuh"

namespace jax_mla::index::sm90 {

// Copies the tiles of keys, box by box. A box is a page or 64 tokens of one. A box whose page is
// not in the pool is left out, as are those behind the window's last token.
template <class C>
__device__ __forceinline__ void KeyRole(const KernelParams& params, const TensorMaps& maps,
                                        Walk walk) {
  const TopkParams& call = params.call;
  const int lane = threadIdx.x % kWarpThreads;
  const int boxes_per_tile = kTileTokens >> params.box_tokens_log2;
  const int32_t boxes_per_page = call.page_size >> params.box_tokens_log2;
  const int64_t page_bytes = int64_t{call.page_size} * TokenBytes(C::kKeyType);
  const int32_t first_page = *call.layer * call.num_pages;
  const auto* pool = static_cast<const uint8_t*>(call.index_pages);
  RingPlace<C::kStages> ring;
  while (walk.Next()) {
    const Pages pages(call, walk.window.seq_idx);
    const int32_t num_boxes =
        (walk.window.num_tokens() + params.box_tokens - 1) >> params.box_tokens_log2;
    const int32_t first_box = walk.first_tile * boxes_per_tile;
    const int32_t boxes = walk.num_tiles * boxes_per_tile;
    // The pages of 32 boxes, one a lane, and those of the next 32.
    const auto load_page = [&](int32_t box) {
      const int32_t idx = first_box + box;
      if (box >= boxes || idx >= num_boxes) return -1;
      return pages.Local(pages.Id(idx / boxes_per_page));
    };
    int32_t page = -1, next_page = load_page(lane);
    for (int32_t box = 0; box < boxes; box += boxes_per_tile) {
      if (box % kWarpThreads == 0) {
        page = next_page;
        next_page = load_page(box + kWarpThreads + lane);
      }
      const int source = box % kWarpThreads + lane;
      const int32_t own_page = __shfl_sync(kAllLanes, page, source % kWarpThreads);
      const bool is_present = lane < boxes_per_tile && own_page >= 0;
      const uint32_t present = __ballot_sync(kAllLanes, is_present);
      const uint32_t full = SharedAddress(&Shared<C>().keys_full[ring.idx]);
      if (lane == 0) {
        gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().keys_empty[ring.idx]), ring.phase ^ 1);
        Shared<C>().boxes_present[ring.idx] = present;
        constexpr int kTokenBytes = kDim * C::kElementBytes + (C::kHasCodes ? sizeof(float) : 0);
        gpu::sm90::MbarrierArriveExpectTx(full, __popc(present) * params.box_tokens * kTokenBytes);
      }
      __syncwarp();
      if (is_present) {
        const int32_t first_token = lane * params.box_tokens;
        const int32_t row = (first_box + box + lane) % boxes_per_page * params.box_tokens;
#pragma unroll
        for (int half = 0; half < C::kHalves; ++half) {
          gpu::sm90::TmaLoad4d(
              &maps.keys, SharedAddress(Shared<C>().keys[ring.idx][half] + first_token * kRowBytes),
              full, 0, row, half, first_page + own_page, gpu::sm90::kCacheEvictNormal);
        }
        if constexpr (C::kHasCodes) {
          const uint8_t* scales = pool + (int64_t{first_page} + own_page) * page_bytes +
                                  call.page_size * kDim + row * sizeof(float);
          gpu::sm90::BulkCopy(SharedAddress(Shared<C>().scales[ring.idx] + first_token), scales,
                              params.box_tokens * sizeof(float), full,
                              gpu::sm90::kCacheEvictNormal);
        }
      }
      ring.Next();
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
