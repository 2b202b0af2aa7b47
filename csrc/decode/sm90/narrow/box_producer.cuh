// The producer of the narrow kernel that copies KV with TMA, for page sizes that are multiples of
// 16. It has four warps, and each copies one box of every chunk. Where page sizes are multiples of
// a block, a chunk is one box, and one warp copies all of them. That is a compile-time choice
// (KvLoad::kTmaBlocks), because it leaves fewer instructions before the first copy. Roles and
// barriers: kernel.cuh.
#pragma once

#include <bit>

#include "decode/sm90/narrow/producer.cuh"

namespace jax_mla::decode::sm90::narrow {

template <class C>
struct BoxProducer : ProducerBase<C> {
  using Base = ProducerBase<C>;
  using typename Base::Cursor;
  using typename Base::Shared;
  using typename Base::Work;

  static constexpr bool kWholeBlocks = C::kLoad == KvLoad::kTmaBlocks;

  __device__ static int BoxShift(const KernelParams& params) {
    return kWholeBlocks ? std::countr_zero(static_cast<uint32_t>(kBlockN)) : params.box_shift;
  }

  // The page ids of 32 boxes, one in each lane, loaded ahead of their use.
  struct PageBatch {
    int32_t first_token;  // of this lane's box
    int32_t page_id;      // global, may be any value
  };
  // Where this lane's box lies.
  struct BoxPlace {
    int32_t page;   // local, or kOutside
    int32_t token;  // of the page
  };

  __device__ static PageBatch LoadPages(const KernelParams& params, const Work& work,
                                        int32_t batch_begin, int lane) {
    const int32_t token = batch_begin + (lane << BoxShift(params));
    return {token, Base::LoadPageIdOf(params, work, token)};
  }

  // Which tokens of a block are keys. `owned_boxes`: bit i is set if box i's page is here.
  __device__ static uint64_t KeyMask(uint32_t owned_boxes, int boxes, int box_tokens,
                                     int tokens_left) {
    if constexpr (kWholeBlocks) {
      return LowBits(tokens_left) & (0 - uint64_t{owned_boxes & 1});
    }
    uint64_t mask = ~uint64_t{0};
#pragma unroll 1
    for (int box = 0; box < boxes; ++box) {
      if (!(owned_boxes >> box & 1)) mask &= ~(LowBits(box_tokens) << (box * box_tokens));
    }
    return mask & LowBits(tokens_left);
  }

  // Tells the appending warp about an item with queries at `cursor`, if it has a task there.
  __device__ static void TellAppend(const KernelParams& params, Shared& shared, const Work& work,
                                    const QueryCursor<C>& cursor) {
    if constexpr (C::kAppends) {
      if (Append::HasTask<C>(params.new_rows, work)) {
        Append::Tell(shared.append_task, work, cursor.stage, cursor.parity);
      }
    }
  }

  // What the producer finds out before the CTA's barriers exist: the first item. Its page ids are
  // on their way.
  struct Start {
    PendingOwnedPages owned_pages;
    typename Base::First first;
    PageBatch pages;
  };
  __device__ static Start Begin(const KernelParams& params, Shared& shared) {
    trace::Enter(Phase::kFindWork);
    const int lane = threadIdx.x % kWarpThreads;
    Start start{.owned_pages = PendingOwnedPages::Load(params.decode)};
    start.first = Base::FindFirstWork(params, [&](const Work& item) {
      start.pages = LoadPages(params, item, item.block_begin * kBlockN, lane);
      TellAppend(params, shared, item, {});
    });
    return start;
  }

  // Copies this warp's box of every chunk of a block, if it has one. Lane i takes chunk i, so that
  // the stages of all chunks are tested and announced at once. Only the TMA instructions themselves
  // are issued one by one.
  __device__ static void LoadBlock(const KernelParams& params, const typename C::Maps& maps,
                                   Shared& shared, const Cursor& block, uint64_t mask,
                                   const BoxPlace& boxes_of_batch, int first_box, int box,
                                   bool has_box, int32_t layer, int tile_scale_idx, int lane) {
    const Cursor cursor = block.Ahead(lane < C::kChunks ? lane : 0);
    const uint32_t full = hw::SharedAddress(&shared.kv_full[cursor.stage]);
    const uint32_t empty = hw::SharedAddress(&shared.kv_empty[cursor.stage]);
    const uint32_t parity = cursor.parity ^ 1;
    const uint32_t box_bytes = kChunkRowBytes << BoxShift(params);
    const uint32_t destination = hw::SharedAddress(shared.kv[cursor.stage]) + box * box_bytes;
    const int32_t page = __shfl_sync(~0u, boxes_of_batch.page, first_box + box);
    const int32_t token = __shfl_sync(~0u, boxes_of_batch.token, first_box + box);
    const CUtensorMap* map = lane == 0 ? &maps.kpe : &maps.ckv;
    const int dim = lane == 0 ? 0 : (lane - 1) * C::kLatentChunkDims;
    bool pending = lane < C::kChunks;
    while (true) {
      const bool ready = pending && hw::MbarrierTest(empty, parity);
      trace::Enter(Phase::kIssue);
      if (ready) {
        if (lane == 0 && box == 0) shared.key_mask[cursor.stage] = mask;
        const bool has_scales = C::kHasTileScales && lane == 0;
        hw::MbarrierArriveExpectTx(full,
                                   (has_box ? box_bytes : 0) + (has_scales ? kTileScaleBytes : 0));
        if (has_box) {
          hw::TmaLoad4d(map, destination, full, dim, token, page, layer, kKvCachePolicy);
        }
        if constexpr (C::kHasTileScales) {
          if (has_scales) {
            const auto& scales = shared.tile_scales.blocks[tile_scale_idx];
            hw::TmaLoad4d(&maps.tile_scales, hw::SharedAddress(scales), full, 0, token, page, layer,
                          kKvCachePolicy);
          }
        }
      }
      pending = pending && !ready;
      const uint32_t pending_lanes = __ballot_sync(~0u, pending);
      if (pending_lanes == 0) break;
      const int first = __ffs(pending_lanes) - 1;
      trace::Enter(Phase::kWaitStage);
      hw::MbarrierWait(__shfl_sync(~0u, empty, first), __shfl_sync(~0u, parity, first));
    }
  }

  // Hides the schedule from the compiler, which would otherwise compute a part of the next item
  // before the first block's copies.
  __device__ static void DelaySearch(WorkIterator& iterator) {
    asm volatile("" : "+r"(iterator.policy.worker_cost), "+r"(iterator.policy.cost_step));
  }

  // Streams this CTA's items. 32 boxes are looked up at once, one by each lane. All producer warps
  // walk the same items, and only the ring's barriers keep them together.
  __device__ static void Run(const KernelParams& params, const typename C::Maps& maps,
                             Shared& shared, const Start& start, int row_tile) {
    const OwnedPages owned_pages = start.owned_pages.Get();
    WorkIterator iterator = start.first.rest;
    const int lane = threadIdx.x % kWarpThreads;
    const int boxes = kBlockN >> BoxShift(params);  // of a chunk
    const int warp =
        kWholeBlocks ? 0 : __shfl_sync(~0u, threadIdx.x / kWarpThreads, 0) - kTeamWarps;
    // Blocks whose boxes are looked up at once.
    const int batch_blocks = (kWarpThreads << BoxShift(params)) / kBlockN;
    Cursor kv;
    int tile_scale_idx = 0;
    QueryCursor<C> query;
    Work work = start.first.item, next_work;
    PageBatch pages = start.pages, next_pages{};
    bool has_work = start.first.has_item, has_next = false;
#pragma unroll 1
    while (true) {
      if (warp == 0 && hw::ElectOne()) {
        Base::SendItem(params, maps, shared, query, work, has_work, row_tile);
      }
      if (!has_work) break;
      query.Advance(1);
      const int num_blocks = work.block_end - work.block_begin;
      BoxPlace place{};
      uint32_t owned = 0;
#pragma unroll 1
      for (int block = 0;; ++block) {
        // The next item's page ids are loaded behind this item's first block.
        if (block == MinI32(num_blocks, 1)) {
          trace::Enter(Phase::kFindWork);
          DelaySearch(iterator);
          has_next = Base::NextWork(params, iterator, &next_work);
          if (has_next) {
            next_pages = LoadPages(params, next_work, next_work.block_begin * kBlockN, lane);
          }
        }
        if (block >= num_blocks) break;
        const int32_t block_token = (work.block_begin + block) * kBlockN;
        const int batch_block = block & (batch_blocks - 1);
        if (batch_block == 0) {
          trace::Enter(Phase::kLookUp);
          if (block > 0) pages = LoadPages(params, work, block_token, lane);
          place.page = pages.first_token < work.seq_len
                           ? owned_pages.Local(params.decode, pages.page_id)
                           : kOutside;
          place.token = pages.first_token -
                        params.page_size.Floor(pages.first_token) * params.decode.page_size;
          owned = __ballot_sync(~0u, place.page != kOutside);
        }
        if (C::kAppends && block == num_blocks - 1 && Append::HasTask<C>(params.new_rows, work)) {
          Append::WaitWritten();
        }
        const int first_box = batch_block * boxes;
        const uint64_t mask =
            KeyMask(owned >> first_box, boxes, 1 << BoxShift(params), work.seq_len - block_token);
        if (C::kTeams == 1 && mask == 0) {
          if (lane == 0) Base::SendEmptyBlock(shared, kv, warp == 0);
          __syncwarp();
          kv.Advance(1);
        } else {
          const bool has_box = warp < boxes && (C::kTeams == 1 || mask != 0);
          LoadBlock(params, maps, shared, kv, mask, place, first_box, warp, has_box,
                    owned_pages.layer, tile_scale_idx, lane);
          kv.Advance(C::kChunks);
          if constexpr (C::kHasTileScales) {
            tile_scale_idx = NextTileScaleBlock<C>(tile_scale_idx);
          }
        }
      }
      work = next_work;
      pages = next_pages;
      has_work = has_next;
      if (has_work) TellAppend(params, shared, work, query);
    }
    if constexpr (C::kAppends) Append::TellEnd(shared.append_task);
  }
};

}  // namespace jax_mla::decode::sm90::narrow
