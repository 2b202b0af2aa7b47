// Loads the ring with cp.async, for any page size: four warps, of which every thread copies 16
// bytes at a time. A row of a chunk has 128 bytes, values or codes alike.
#pragma once

#include "decode/sm90/swapped/ring_loader.cuh"

namespace jax_mla::decode::sm90 {

template <class C>
struct GatherLoader : RingLoader<C> {
  using Base = RingLoader<C>;
  using typename Base::Cursor;
  using typename Base::Shared;
  using typename Base::Work;

  // A row is a token's 128 bytes of a chunk. All threads together copy kPassRows rows in a pass.
  static constexpr int kRowLanes = kChunkRowBytes / kCopyBytes;
  static constexpr int kPassRows = C::kProducerThreads / kRowLanes;
  static constexpr int kPasses = kBlockN / kPassRows;
  static_assert(kPassRows % 8 == 0, "the swizzle is the same in every pass");
  static_assert(kWarpThreads % kPassRows == 0, "a pass lies in one half of the lanes' tokens");

  // Latent chunks that are copied together. Where a pass asks for its row, it copies all of it.
  static constexpr int kCopyGroupChunks = C::kMovesRegisters ? C::kCkvChunks : 2;
  static constexpr uint32_t kAbsent = ~0u;  // the row of a token that is no key

  // The rows in the layer, whose pages are contiguous, of the tokens of which a thread copies one
  // 16-byte column, pass by pass; kAbsent for tokens that are no keys. Called by whole warps.
  struct KeptRows {
    static constexpr int kUnroll = kPasses;
    uint32_t rows[kPasses];

    // Lane l of `row_of` has the rows of tokens l and l + 32.
    __device__ KeptRows(const uint32_t (&row_of)[2], uint32_t thread) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        rows[i] = __shfl_sync(~0u, row_of[i * kPassRows / kWarpThreads],
                              i * kPassRows % kWarpThreads + thread / kRowLanes);
      }
    }
    __device__ uint32_t operator[](int pass) const { return rows[pass]; }
  };
  // The same with fewer registers, where the math warpgroups have most of them.
  struct ShuffledRows {
    static constexpr int kUnroll = 1;
    uint32_t row_of[2];

    __device__ ShuffledRows(const uint32_t (&rows)[2], uint32_t) : row_of{rows[0], rows[1]} {}
    __device__ uint32_t operator[](int pass) const {
      const int token = pass * kPassRows + gpu::ThreadIndex() % kWarpgroupThreads / kRowLanes;
      return __shfl_sync(~0u, pass < kPasses / 2 ? row_of[0] : row_of[1], token);
    }
  };
  using Rows = std::conditional_t<C::kMovesRegisters, ShuffledRows, KeptRows>;

  // Where a block's tokens lie: lane l of every warp knows tokens l and l + 32.
  struct TokenPlaces {
    int32_t page_id[2];  // global, may be any value
    int32_t offset[2];   // token of the page
  };

  __device__ static TokenPlaces LookUp(const KernelParams& params, const Work& work,
                                       int32_t block_token, int lane) {
    TokenPlaces places;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t token = block_token + lane + half * kWarpThreads;
      places.page_id[half] = Base::LoadPageIdOf(params, work, token);
      places.offset[half] = Base::SourceOf(params).InPage(token);
    }
    return places;
  }

  __device__ static void WaitFree(Shared& shared, const Cursor& cursor) {
    hw::MbarrierWait(hw::SharedAddress(&shared.kv_empty[cursor.stage]), cursor.parity ^ 1);
  }

  // Where a thread copies its column to, in a chunk.
  __device__ static uint32_t TargetInChunk(uint32_t thread) {
    const uint32_t column = thread % kRowLanes, row = thread / kRowLanes;
    return row * kChunkRowBytes + (column ^ row % 8) * kCopyBytes;
  }

  // Copies this thread's part of a group of latent chunks, from `chunk` on, into consecutive
  // stages. Rows lie anywhere, so as much of a row as possible is copied at a time.
  __device__ static void CopyLatentChunks(const KernelParams& params, Shared& shared,
                                          const Cursor& first, const Rows& rows, int32_t layer,
                                          int chunk, uint32_t thread) {
    const KvStream& ckv = params.decode.ckv;
    uint32_t chunks[kCopyGroupChunks];
    trace::Enter(Phase::kWaitStage);
#pragma unroll
    for (int c = 0; c < kCopyGroupChunks; ++c) {
      const Cursor cursor = first.Ahead(c);
      chunks[c] = hw::SharedAddress(shared.kv[cursor.stage]) + TargetInChunk(thread);
      WaitFree(shared, cursor);
    }
    trace::Enter(Phase::kIssue);
    const char* source = static_cast<const char*>(ckv.base) +
                         layer * ckv.layer_stride * C::kValueBytes + chunk * kChunkRowBytes +
                         thread % kRowLanes * kCopyBytes;
    const uint32_t stride = static_cast<uint32_t>(ckv.token_stride) * C::kValueBytes;
#pragma unroll Rows::kUnroll
    for (int i = 0; i < kPasses; ++i) {
      const uint32_t row = rows[i];
      const char* from = source + uint64_t{row} * stride;  // not read if the row is absent
#pragma unroll
      for (int c = 0; c < kCopyGroupChunks; ++c) {
        hw::CopyAsync16(chunks[c] + i * kPassRows * kChunkRowBytes, from + c * kChunkRowBytes,
                        row != kAbsent, params.gather_policy);
      }
    }
  }

  __device__ static uint32_t RopeValueBytes(const DecodeParams& decode) {
    const bool has_codes =
        C::kHasCodes && !C::kHasTileScales && decode.kv_format == KvFormat::kE4m3;
    return has_codes ? 1 : kElementBytes;
  }

  // Copies this thread's part of the rope chunk, and the first column's thread a token's tile
  // scales. Those of absent tokens are 0. Nobody reads a row of the chunk behind kpe.
  __device__ static void CopyRopeChunk(const KernelParams& params, Shared& shared,
                                       const Cursor& place, const Rows& rows, int32_t layer,
                                       int tile_scale_idx, uint32_t thread) {
    const DecodeParams& decode = params.decode;
    const uint32_t value_bytes = RopeValueBytes(decode), column = thread % kRowLanes;
    const bool has_column = column * kCopyBytes < C::kDKpe * value_bytes;
    const uint32_t target = hw::SharedAddress(shared.kv[place.stage]) + TargetInChunk(thread);
    trace::Enter(Phase::kWaitStage);
    WaitFree(shared, place);  // also nobody may arrive on kv_full of a stage that is not free
    trace::Enter(Phase::kIssue);
    const char* source = static_cast<const char*>(decode.kpe.base) +
                         layer * decode.kpe.layer_stride * value_bytes + column * kCopyBytes;
    const uint32_t stride = static_cast<uint32_t>(decode.kpe.token_stride) * value_bytes;
#pragma unroll Rows::kUnroll
    for (int i = 0; i < kPasses; ++i) {
      const uint32_t row = rows[i];
      if (has_column) {
        hw::CopyAsync16(target + i * kPassRows * kChunkRowBytes, source + uint64_t{row} * stride,
                        row != kAbsent, params.gather_policy);
      }
      if constexpr (C::kHasTileScales) {
        constexpr int kScalesOfKpe = DsMla::kScalesOffset - DsMla::kKpeOffset;
        if (column != 0) continue;
        TokenScales& scales =
            shared.tile_scales.blocks[tile_scale_idx][i * kPassRows + thread / kRowLanes];
        hw::CopyAsync16(hw::SharedAddress(&scales), source + uint64_t{row} * stride + kScalesOfKpe,
                        row != kAbsent, params.gather_policy);
      }
    }
  }

  // Lets kv_full of `count` stages count the copies so far when they land.
  __device__ static void Announce(Shared& shared, const Cursor& first, int count, bool is_leader) {
#pragma unroll
    for (int c = 0; c < count; ++c) {
      const uint32_t full = hw::SharedAddress(&shared.kv_full[first.Ahead(c).stage]);
      hw::CopyAsyncArrive(full);
      if (is_leader) hw::MbarrierArrive(full);
    }
    // Lanes would drift apart, and then ask for every line in pieces: up to 40 % more time.
    __syncwarp();
  }

  // Copies a block.
  __device__ static void GatherBlock(const KernelParams& params, Shared& shared,
                                     const Cursor& block, uint64_t mask, const Rows& rows,
                                     int32_t layer, int tile_scale_idx, uint32_t thread) {
    const bool is_leader = thread == 0;
    if constexpr (C::kHasRope) {
      CopyRopeChunk(params, shared, block, rows, layer, tile_scale_idx, thread);
      if (is_leader) shared.key_mask[block.stage] = mask;
      Announce(shared, block, 1, is_leader);
    }
#pragma unroll 1
    for (int chunk = 0; chunk < C::kCkvChunks; chunk += kCopyGroupChunks) {
      const Cursor first = block.Ahead(C::kFirstLatentChunk + chunk);
      CopyLatentChunks(params, shared, first, rows, layer, chunk, thread);
      if (!C::kHasRope && chunk == 0 && is_leader) shared.key_mask[block.stage] = mask;
      Announce(shared, first, kCopyGroupChunks, is_leader);
    }
  }

  // What the producer warps find out before the CTA's barriers exist: the first item. The page ids
  // of its first block are on their way.
  struct Start {
    PendingOwnedPages owned_pages;
    typename Base::First first;
    TokenPlaces places;
  };
  __device__ static Start Begin(const KernelParams& params, Shared&) {
    trace::Enter(Phase::kFindWork);
    const int lane = threadIdx.x % kWarpThreads;
    Start start{.owned_pages = PendingOwnedPages::Load(params.decode)};
    start.first = Base::FindFirstWork(params, [&](const Work& item) {
      start.places = LookUp(params, item, item.block_begin * kBlockN, lane);
    });
    return start;
  }

  // Streams this CTA's items. All producer warps walk the same items, and only the ring's barriers
  // keep them together.
  __device__ static void Run(const KernelParams& params, const TensorMaps& maps, Shared& shared,
                             const Start& start, int row_tile) {
    const OwnedPages owned_pages = start.owned_pages.Get();
    WorkIterator iterator = start.first.rest;
    const int lane = threadIdx.x % kWarpThreads;
    const uint32_t thread = threadIdx.x % kWarpgroupThreads;
    Cursor kv;
    int tile_scale_idx = 0;
    QueryCursor<C> query;
    Work work = start.first.item;
    TokenPlaces places = start.places;
    bool has_work = start.first.has_item;
#pragma unroll 1
    while (true) {
      if (thread == 0) Base::SendItem(params, maps, shared, query, work, has_work, row_tile);
      __syncwarp();  // see Announce
      if (!has_work) return;
      for (int32_t block = work.block_begin; block < work.block_end; ++block) {
        const int32_t block_token = block * kBlockN;
        trace::Enter(Phase::kLookUp);
        uint32_t row_of[2];
        uint64_t owned = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int32_t page = owned_pages.Local(params.decode, places.page_id[half]);
          const bool is_present =
              page != kOutside && block_token + lane + half * kWarpThreads < work.seq_len;
          // 32 bits are enough: a layer of 2^32 rows would take more than 1 TB.
          row_of[half] = is_present ? static_cast<uint32_t>(page) * params.decode.page_size +
                                          places.offset[half]
                                    : kAbsent;
          owned |= static_cast<uint64_t>(__ballot_sync(~0u, is_present)) << (half * kWarpThreads);
        }
        // The next block's page ids are on their way while this block is copied.
        if (block + 1 < work.block_end) {
          places = LookUp(params, work, block_token + kBlockN, lane);
        }
        if (!C::kTakesTurns && owned == 0) {
          Base::SendEmptyBlock(shared, kv, thread == 0);
          kv.Advance(1);
          continue;
        }
        const Rows rows(row_of, thread);
        GatherBlock(params, shared, kv, owned, rows, owned_pages.layer, tile_scale_idx, thread);
        kv.Advance(C::kChunks);
        if constexpr (C::kHasTileScales) tile_scale_idx = NextTileScaleBlock<C>(tile_scale_idx);
      }
      query.Advance(1);
      trace::Enter(Phase::kFindWork);
      Base::DelaySearch(iterator);
      has_work = Base::NextWork(params, iterator, &work);
      if (has_work) places = LookUp(params, work, work.block_begin * kBlockN, lane);
    }
  }
};

}  // namespace jax_mla::decode::sm90
