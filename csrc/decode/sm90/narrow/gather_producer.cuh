// The gathering producer of the narrow kernel: four warps copy 16 bytes a thread, for any page
// size. Roles and barriers: kernel.cuh.
#pragma once

#include "decode/sm90/narrow/producer.cuh"

namespace jax_mla::decode::sm90::narrow {

template <class C>
struct GatherProducer : ProducerBase<C> {
  using Base = ProducerBase<C>;
  using typename Base::Cursor;
  using typename Base::Ownership;
  using typename Base::Shared;
  using typename Base::T;

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
    return {Base::LoadPageId(params, work, block_token + lane),
            Base::LoadPageId(params, work, block_token + lane + kWarpThreads)};
  }

  // Copies a block of which `thread` holds one 16-byte column of kPasses rows.
  __device__ static void GatherBlock(const KernelParams& params, Shared& shared,
                                     const Cursor& block, uint64_t mask,
                                     const int32_t (&page)[kPasses], int32_t block_token,
                                     int32_t layer, int thread) {
    static_assert(kPassRows % 8 == 0, "the swizzle is the same in every pass");
    const KvStream &ckv = params.decode.ckv, &kpe = params.decode.kpe;
    const int column = thread % kRowLanes, first_row = thread / kRowLanes;
    const uint32_t destination =
        first_row * kChunkRowBytes + ((column ^ (first_row % 8)) * kCopyBytes);
    const T *source[kPasses], *latent[kPasses];  // of this chunk, of the first latent one
    bool present[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = i * kPassRows + first_row;
      const int32_t token = block_token + row;
      const int32_t slot = token - params.page_size.Floor(token) * params.decode.page_size;
      present[i] = mask >> row & 1;
      source[i] = static_cast<const T*>(kpe.base);
      latent[i] = static_cast<const T*>(ckv.base);
      if (!present[i]) continue;
      const int element = column * (kCopyBytes / kElementBytes);
      source[i] +=
          layer * kpe.layer_stride + page[i] * kpe.page_stride + slot * kpe.token_stride + element;
      latent[i] +=
          layer * ckv.layer_stride + page[i] * ckv.page_stride + slot * ckv.token_stride + element;
    }
    Cursor cursor = block;
#pragma unroll 1
    for (int ordinal = 0; ordinal < C::kChunks; ++ordinal) {
      const uint32_t full = hw::SharedAddress(&shared.kv_full[cursor.stage]);
      const uint32_t chunk = hw::SharedAddress(shared.kv[cursor.stage]);
      const bool is_rope = ordinal == 0;
      trace::Enter(Phase::kWaitSlot);
      hw::MbarrierWait(hw::SharedAddress(&shared.kv_empty[cursor.stage]), cursor.parity ^ 1);
      trace::Enter(Phase::kIssue);
      if (!is_rope || column < kRopeLanes) {
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          hw::CopyAsync16(chunk + destination + i * kPassRows * kChunkRowBytes, source[i],
                          present[i], hw::kCacheEvictFirst);
        }
      }
#pragma unroll
      for (int i = 0; i < kPasses; ++i) source[i] = is_rope ? latent[i] : source[i] + kChunk;
      hw::CopyAsyncArrive(full);
      if (thread == 0) {
        if (is_rope) shared.key_mask[cursor.stage] = mask;
        hw::MbarrierArrive(full);
      }
      cursor.Advance(1);
    }
  }

  // What the producer warps find out before the CTA's barriers exist.
  struct Start {
    typename Base::Origin origin;
    WorkIterator iterator;
  };
  __device__ static Start Begin(const KernelParams& params) {
    trace::Enter(Phase::kFindWork);
    const auto origin = Base::Origin::Load(params);
    return {origin, FindWork(params.schedule, blockIdx.x)};
  }

  // All producer warps walk the items together; nothing but the ring's barriers joins them.
  __device__ static void Run(const KernelParams& params, const TensorMaps& maps, Shared& shared,
                             const Start& start, int row_tile) {
    const Ownership ownership = start.origin.GetOwnership();
    WorkIterator iterator = start.iterator;
    const int lane = threadIdx.x % kWarpThreads;
    const int thread = threadIdx.x - kNumMathThreads;
    Cursor kv;
    QueryCursor<C> query;
    WorkItem work;
#pragma unroll 1
    while (true) {
      const bool has_work = iterator.Next(params.schedule, &work);
      if (thread == 0) Base::SendItem(params, maps, shared, query, work, has_work, row_tile);
      if (!has_work) return;
      TokenPages ids = LoadTokenPages(params, work, work.block_begin * kBlockN, lane);
      for (int32_t block = work.block_begin; block < work.block_end; ++block) {
        const int32_t block_token = block * kBlockN;
        trace::Enter(Phase::kLookUp);
        const int32_t low = ownership.Local(params.decode, ids.low),
                      high = ownership.Local(params.decode, ids.high);
        const uint64_t owned = static_cast<uint64_t>(__ballot_sync(~0u, high != kOutside)) << 32 |
                               __ballot_sync(~0u, low != kOutside);
        const uint64_t mask = owned & Base::LowBits(work.seq_len - block_token);
        // The next block's ids are on their way while this block is copied.
        if (block + 1 < work.block_end) {
          ids = LoadTokenPages(params, work, block_token + kBlockN, lane);
        }
        if (mask == 0) {
          Base::SendEmptyBlock(shared, kv, thread == 0);
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
  }
};

}  // namespace jax_mla::decode::sm90::narrow
