// The producer of the narrow kernel: finds the CTA's work, tells the math about it, streams the
// cache. Roles and barriers: kernel.cuh.
#pragma once

#include "decode/schedule.h"
#include "decode/sm90/narrow/params.cuh"
#include "decode/sm90/tensor_map.h"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::narrow {

namespace hw = gpu::sm90;

template <class C>
struct Producer {
  using T = Element<C::kDType>;
  using Shared = SharedMemory<C>;
  using Cursor = KvCursor<C>;

  __device__ static int32_t PageIndex(const KernelParams& params, int32_t token) {
    return params.page_shift >= 0 ? token >> params.page_shift : token / params.decode.page_size;
  }

  // Table entry of `token`, or anything if the token lies past the end: such entries are not read.
  __device__ static int32_t LoadPageId(const KernelParams& params, const WorkItem& work,
                                       int32_t token) {
    if (token >= work.seq_len) return 0;
    const int64_t row = static_cast<int64_t>(work.seq_idx) * params.decode.max_pages_per_seq;
    return __ldg(params.decode.page_table + row + PageIndex(params, token));
  }

  // Bits [0, n) set, n clamped to [0, 64].
  __device__ static uint64_t LowBits(int n) {
    return n >= kBlockN ? ~uint64_t{0} : n <= 0 ? uint64_t{0} : (uint64_t{1} << n) - 1;
  }

  // Pages that exist here: local ids [0, num_pages) of a layer inside the pool. Loaded at the very
  // start and only evaluated when the first page id is there, so that nothing waits for it.
  struct Ownership {
    int32_t layer;
    uint32_t page_begin;

    __device__ explicit Ownership(const DecodeParams& decode)
        : layer(__ldg(decode.layer)), page_begin(__ldg(decode.page_begin)) {}
    // Local id, or kOutside.
    __device__ int32_t Local(const DecodeParams& decode, int32_t page_id) const {
      const uint32_t local = static_cast<uint32_t>(page_id) - page_begin;
      const bool is_owned = local < static_cast<uint32_t>(decode.num_pages) &&
                            static_cast<uint32_t>(layer) < static_cast<uint32_t>(decode.num_layers);
      return is_owned ? static_cast<int32_t>(local) : kOutside;
    }
  };

  // Tells the math about an item and starts the load of its query tile. One thread.
  __device__ static void SendItem(const KernelParams& params, const TensorMaps& maps,
                                  Shared& shared, const QueryCursor<C>& cursor,
                                  const WorkItem& work, int row_tile) {
    const uint32_t q_full = hw::SharedAddress(&shared.q_full[cursor.stage]);
    const uint32_t q = hw::SharedAddress(shared.q[cursor.stage]);
    hw::MbarrierWait(hw::SharedAddress(&shared.q_empty[cursor.stage]), cursor.parity ^ 1);
    shared.items[cursor.stage] = {.seq_idx = work.seq_idx,
                                  .num_blocks = work.block_end - work.block_begin,
                                  .tokens_left = work.seq_len - work.block_begin * kBlockN,
                                  .slot = work.is_final() ? kFinal : work.slot()};
    hw::MbarrierArriveExpectTx(q_full, C::kQueryBytes);
    const int row_begin = row_tile * C::kBlockM;
    hw::TmaLoad4d(&maps.q_nope, q, q_full, 0, row_begin, 0, work.seq_idx, hw::kCacheEvictNormal);
    hw::TmaLoad4d(&maps.q_pe, q + C::kCkvChunks * C::kQueryChunkBytes, q_full, 0, row_begin, 0,
                  work.seq_idx, hw::kCacheEvictNormal);
  }

  __device__ static void SendEnd(Shared& shared, const QueryCursor<C>& cursor) {
    hw::MbarrierWait(hw::SharedAddress(&shared.q_empty[cursor.stage]), cursor.parity ^ 1);
    shared.items[cursor.stage].num_blocks = kNoMoreItems;
    hw::MbarrierArrive(hw::SharedAddress(&shared.q_full[cursor.stage]));
  }

  // A block without a single key takes one slot of the ring and no copy. Called by every thread
  // that arrives on kv_full; the leader arrives once more, as for a full block.
  __device__ static void SendEmptyBlock(Shared& shared, const Cursor& cursor, bool is_leader) {
    const uint32_t full = hw::SharedAddress(&shared.kv_full[cursor.stage]);
    hw::MbarrierWait(hw::SharedAddress(&shared.kv_empty[cursor.stage]), cursor.parity ^ 1);
    if (is_leader) {
      shared.key_mask[cursor.stage] = 0;
      hw::MbarrierArrive(full);
    }
    if constexpr (C::kLoad == KvLoad::kGather) hw::MbarrierArrive(full);
  }

  // ---- TMA boxes: page sizes that are multiples of 8 --------------------------------------------

  // Page ids of 32 boxes (one a lane), fetched ahead of use.
  struct PageBatch {
    int32_t first_token;  // of this lane's box
    int32_t page_id;      // global, unchecked
  };
  // Where this lane's box lies: page and token of the page.
  struct BoxPlace {
    int32_t page;  // local, or kOutside
    int32_t token;
  };

  __device__ static PageBatch LoadPages(const KernelParams& params, const WorkItem& work,
                                        int32_t batch_begin, int lane) {
    const int32_t token = batch_begin + lane * params.box_tokens;
    return {token, LoadPageId(params, work, token)};
  }

  // Which tokens of a block are keys, from one ownership bit a box.
  __device__ static uint64_t KeyMask(uint32_t owned_boxes, int boxes, int box_tokens,
                                     int tokens_left) {
    uint64_t mask = ~uint64_t{0};
#pragma unroll 1
    for (int box = 0; box < boxes; ++box) {
      if (!(owned_boxes >> box & 1)) mask &= ~(LowBits(box_tokens) << (box * box_tokens));
    }
    return mask & LowBits(tokens_left);
  }

  // Loads a block: lane = ordinal of the chunk, and box by box of it, so that all chunks' slots are
  // tested and announced at once; only the TMA instructions themselves are issued one by one.
  __device__ static void LoadBlock(const KernelParams& params, const TensorMaps& maps,
                                   Shared& shared, const Cursor& block, uint64_t mask,
                                   const BoxPlace& boxes_of_batch, int first_box, int boxes,
                                   int32_t layer, int lane) {
    const Cursor cursor = block.Ahead(lane < C::kChunks ? lane : 0);
    const uint32_t full = hw::SharedAddress(&shared.kv_full[cursor.stage]);
    const uint32_t empty = hw::SharedAddress(&shared.kv_empty[cursor.stage]);
    const uint32_t parity = cursor.parity ^ 1;
    const uint32_t destination = hw::SharedAddress(shared.kv[cursor.stage]);
    const CUtensorMap* map = lane == 0 ? &maps.kpe : &maps.ckv;
    const int dim = lane == 0 ? 0 : (lane - 1) * kChunk;
    bool pending = lane < C::kChunks;
    while (const uint32_t pending_lanes = __ballot_sync(~0u, pending)) {
      const int first = __ffs(pending_lanes) - 1;
      hw::MbarrierWait(__shfl_sync(~0u, empty, first), __shfl_sync(~0u, parity, first));
      const bool ready = pending && hw::MbarrierTest(empty, parity);
      if (ready) {
        if (lane == 0) shared.key_mask[cursor.stage] = mask;
        hw::MbarrierArriveExpectTx(full, kChunkBytes);
      }
#pragma unroll 1
      for (int box = 0; box < boxes; ++box) {
        const int32_t page = __shfl_sync(~0u, boxes_of_batch.page, first_box + box);
        const int32_t token = __shfl_sync(~0u, boxes_of_batch.token, first_box + box);
        if (ready) {
          hw::TmaLoad4d(map, destination + box * params.box_tokens * kChunkRowBytes, full, dim,
                        token, page, layer, hw::kCacheEvictFirst);
        }
      }
      pending = pending && !ready;
    }
  }

  // One warp streams this CTA's items. Lane i of a batch knows box i: 32 boxes are looked up at
  // once.
  __device__ static void BoxLoop(const KernelParams& params, const TensorMaps& maps, Shared& shared,
                                 const Ownership& ownership, WorkIterator iterator, int row_tile) {
    const int lane = threadIdx.x % kWarpThreads;
    const int boxes = kBlockN / params.box_tokens;  // of one chunk
    const int batch_blocks = kWarpThreads / boxes;  // blocks that one batch covers
    Cursor kv;
    QueryCursor<C> query;
    WorkItem work{}, next_work;
    PageBatch pages{}, next_pages{};
    // The first pass has no item, only the look ahead: one place in the code, fetched once.
    bool has_work = false, has_next = false;
    do {
      const int num_blocks = work.block_end - work.block_begin;
      if (has_work && lane == 0) SendItem(params, maps, shared, query, work, row_tile);
      BoxPlace place{};
      uint32_t owned = 0;
#pragma unroll 1
      for (int block = 0;; ++block) {
        // The next item's page ids are fetched behind this item's first block.
        if (block == MinI32(num_blocks, 1)) {
          has_next = iterator.Next(params.schedule, &next_work);
          if (has_next) {
            next_pages = LoadPages(params, next_work, next_work.block_begin * kBlockN, lane);
          }
        }
        if (block >= num_blocks) break;
        const int32_t block_token = (work.block_begin + block) * kBlockN;
        const int batch_block = block & (batch_blocks - 1);
        if (batch_block == 0) {
          if (block > 0) pages = LoadPages(params, work, block_token, lane);
          place.page = pages.first_token < work.seq_len
                           ? ownership.Local(params.decode, pages.page_id)
                           : kOutside;
          place.token =
              pages.first_token - PageIndex(params, pages.first_token) * params.decode.page_size;
          owned = __ballot_sync(~0u, place.page != kOutside);
        }
        const int first_box = batch_block * boxes;
        const uint64_t mask =
            KeyMask(owned >> first_box, boxes, params.box_tokens, work.seq_len - block_token);
        if (mask == 0) {
          if (lane == 0) SendEmptyBlock(shared, kv, true);
          __syncwarp();
          kv.Advance(1);
        } else {
          LoadBlock(params, maps, shared, kv, mask, place, first_box, boxes, ownership.layer, lane);
          kv.Advance(C::kChunks);
        }
      }
      if (has_work) query.Advance(1);
      work = next_work;
      pages = next_pages;
      has_work = has_next;
    } while (has_work);
    if (lane == 0) SendEnd(shared, query);
  }

  // ---- gathering: any page size -----------------------------------------------------------------

  static constexpr int kRowLanes = kChunkRowBytes / kCopyBytes;      // threads a token row
  static constexpr int kPassRows = C::kProducerThreads / kRowLanes;  // rows a pass
  static constexpr int kPasses = kBlockN / kPassRows;
  static constexpr int kRopeLanes = C::kDimKpe * kElementBytes / kCopyBytes;  // the rest is unread

  // Page ids of a block's tokens: lane l of every warp holds those of tokens l and l + 32.
  struct TokenPages {
    int32_t low, high;
  };

  __device__ static TokenPages LoadTokenPages(const KernelParams& params, const WorkItem& work,
                                              int32_t block_token, int lane) {
    return {LoadPageId(params, work, block_token + lane),
            LoadPageId(params, work, block_token + lane + kWarpThreads)};
  }

  // Copies a block of which `thread` holds one 16-byte column of kPasses rows.
  __device__ static void GatherBlock(const KernelParams& params, Shared& shared,
                                     const Cursor& block, uint64_t mask,
                                     const int32_t (&page)[kPasses], int32_t block_token,
                                     int32_t layer, int thread) {
    const int column = thread % kRowLanes;
    int64_t ckv_offset[kPasses], kpe_offset[kPasses];  // elements
    uint32_t destination[kPasses];
    bool present[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = i * kPassRows + thread / kRowLanes;
      const int32_t token = block_token + row;
      const int32_t slot = token - PageIndex(params, token) * params.decode.page_size;
      const KvStream &ckv = params.decode.ckv, &kpe = params.decode.kpe;
      present[i] = mask >> row & 1;
      ckv_offset[i] = layer * ckv.layer_stride + page[i] * ckv.page_stride +
                      slot * ckv.token_stride + column * (kCopyBytes / kElementBytes);
      kpe_offset[i] = layer * kpe.layer_stride + page[i] * kpe.page_stride +
                      slot * kpe.token_stride + column * (kCopyBytes / kElementBytes);
      if (!present[i]) ckv_offset[i] = kpe_offset[i] = 0;
      destination[i] = row * kChunkRowBytes + ((column ^ (row % 8)) * kCopyBytes);
    }
    Cursor cursor = block;
#pragma unroll 1
    for (int ordinal = 0; ordinal < C::kChunks; ++ordinal) {
      const uint32_t full = hw::SharedAddress(&shared.kv_full[cursor.stage]);
      const uint32_t chunk = hw::SharedAddress(shared.kv[cursor.stage]);
      const bool is_rope = ordinal == 0;
      const T* base =
          static_cast<const T*>(is_rope ? params.decode.kpe.base : params.decode.ckv.base) +
          (is_rope ? 0 : (ordinal - 1) * kChunk);
      hw::MbarrierWait(hw::SharedAddress(&shared.kv_empty[cursor.stage]), cursor.parity ^ 1);
      if (!is_rope || column < kRopeLanes) {
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          hw::CopyAsync16(chunk + destination[i], base + (is_rope ? kpe_offset[i] : ckv_offset[i]),
                          present[i]);
        }
      }
      hw::CopyAsyncArrive(full);
      if (thread == 0) {
        if (is_rope) shared.key_mask[cursor.stage] = mask;
        hw::MbarrierArrive(full);
      }
      cursor.Advance(1);
    }
  }

  // All producer warps walk the items together; nothing but the ring's barriers joins them.
  __device__ static void GatherLoop(const KernelParams& params, const TensorMaps& maps,
                                    Shared& shared, const Ownership& ownership,
                                    WorkIterator iterator, int row_tile) {
    const int lane = threadIdx.x % kWarpThreads;
    const int thread = threadIdx.x - kNumMathThreads;
    Cursor kv;
    QueryCursor<C> query;
    WorkItem work;
    while (iterator.Next(params.schedule, &work)) {
      if (thread == 0) SendItem(params, maps, shared, query, work, row_tile);
      TokenPages ids = LoadTokenPages(params, work, work.block_begin * kBlockN, lane);
      for (int32_t block = work.block_begin; block < work.block_end; ++block) {
        const int32_t block_token = block * kBlockN;
        const int32_t low = ownership.Local(params.decode, ids.low),
                      high = ownership.Local(params.decode, ids.high);
        const uint64_t owned = static_cast<uint64_t>(__ballot_sync(~0u, high != kOutside)) << 32 |
                               __ballot_sync(~0u, low != kOutside);
        const uint64_t mask = owned & LowBits(work.seq_len - block_token);
        // The next block's ids are on their way while this block is copied.
        if (block + 1 < work.block_end) {
          ids = LoadTokenPages(params, work, block_token + kBlockN, lane);
        }
        if (mask == 0) {
          SendEmptyBlock(shared, kv, thread == 0);
          kv.Advance(1);
          continue;
        }
        int32_t page[kPasses];
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          const int row = i * kPassRows + thread / kRowLanes;
          const int32_t of_low = __shfl_sync(~0u, low, row % kWarpThreads);
          const int32_t of_high = __shfl_sync(~0u, high, row % kWarpThreads);
          page[i] = row < kWarpThreads ? of_low : of_high;
        }
        GatherBlock(params, shared, kv, mask, page, block_token, ownership.layer, thread);
        kv.Advance(C::kChunks);
      }
      query.Advance(1);
    }
    if (thread == 0) SendEnd(shared, query);
  }

  // The producer warps: what they do before the CTA's barriers exist, and after.
  struct Start {
    Ownership ownership;
    WorkIterator iterator;

    __device__ explicit Start(const KernelParams& params)
        : ownership(params.decode), iterator(FindWork(params.schedule, blockIdx.x)) {}
  };

  __device__ static void Run(const KernelParams& params, const TensorMaps& maps, Shared& shared,
                             const Start& start, int row_tile) {
    if constexpr (C::kLoad == KvLoad::kTma) {
      BoxLoop(params, maps, shared, start.ownership, start.iterator, row_tile);
    } else {
      GatherLoop(params, maps, shared, start.ownership, start.iterator, row_tile);
    }
  }
};

}  // namespace jax_mla::decode::sm90::narrow
