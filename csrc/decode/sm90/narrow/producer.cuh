// The producer of the narrow kernel: finds the CTA's work, tells the math about it, streams the
// cache. Roles and barriers: kernel.cuh.
#pragma once

#include "decode/sm90/common/owned_pages.cuh"
#include "decode/sm90/common/tensor_map.h"
#include "decode/sm90/narrow/params.cuh"
#include "decode/split/find_work.cuh"
#include "decode/split/schedule.h"
#include "decode/trace.cuh"
#include "gpu/element.h"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::narrow {

namespace hw = gpu::sm90;

template <class C>
struct ProducerBase {
  using T = gpu::Element<C::kDType>;
  using Shared = SharedMemory<C>;
  using Cursor = KvCursor<C>;

  // Table entry of `token`, or 0 if the token lies past the end: such entries are not read.
  __device__ static int32_t LoadPageId(const KernelParams& params, const WorkItem& work,
                                       int32_t token) {
    const int64_t row = static_cast<int64_t>(work.seq_idx) * params.decode.max_pages_per_seq;
    return hw::LoadReadOnly(params.decode.page_table + row + params.page_size.Floor(token),
                            token < work.seq_len);
  }

  // Bits [0, n) set, n clamped to [0, 64].
  __device__ static uint64_t LowBits(int n) {
    return n >= kBlockN ? ~uint64_t{0} : n <= 0 ? uint64_t{0} : (uint64_t{1} << n) - 1;
  }

  // Tells the math about an item and starts the load of its query tile, or, without work, that
  // there is none left. One thread.
  __device__ static void SendItem(const KernelParams& params, const TensorMaps& maps,
                                  Shared& shared, const QueryCursor<C>& cursor,
                                  const WorkItem& work, bool has_work, int row_tile) {
    trace::Enter(Phase::kSendItem);
    const uint32_t q_full = hw::SharedAddress(&shared.q_full[cursor.stage]);
    const uint32_t q = hw::SharedAddress(shared.q[cursor.stage]);
    hw::MbarrierWait(hw::SharedAddress(&shared.q_empty[cursor.stage]), cursor.parity ^ 1);
    shared.items[cursor.stage] = {
        .seq_idx = work.seq_idx,
        .num_blocks = has_work ? work.block_end - work.block_begin : kNoMoreItems,
        .tokens_left = work.seq_len - work.block_begin * kBlockN,
        .slot = work.is_final() ? kFinal : work.slot()};
    if (!has_work) {
      hw::MbarrierArrive(q_full);
      return;
    }
    hw::MbarrierArriveExpectTx(q_full, C::kQueryBytes);
    const int row_begin = row_tile * C::kBlockM;
    hw::TmaLoad4d(&maps.q_nope, q, q_full, 0, row_begin, 0, work.seq_idx, hw::kCacheEvictNormal);
    hw::TmaLoad4d(&maps.q_pe, q + C::kCkvChunks * C::kQueryChunkBytes, q_full, 0, row_begin, 0,
                  work.seq_idx, hw::kCacheEvictNormal);
  }

  // A block without a single key takes one slot of the ring and no copy. Called by every thread
  // that arrives on kv_full; gathering, the leader arrives once more, as for a full block.
  __device__ static void SendEmptyBlock(Shared& shared, const Cursor& cursor, bool is_leader) {
    const uint32_t full = hw::SharedAddress(&shared.kv_full[cursor.stage]);
    hw::MbarrierWait(hw::SharedAddress(&shared.kv_empty[cursor.stage]), cursor.parity ^ 1);
    if (is_leader) {
      shared.key_mask[cursor.stage] = 0;
      if constexpr (C::kLoad == KvLoad::kGather) hw::MbarrierArrive(full);
    }
    hw::MbarrierArrive(full);
  }
};

}  // namespace jax_mla::decode::sm90::narrow
