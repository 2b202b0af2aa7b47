// A head start for the first block of every CTA. Without it memory would be idle for the 2 to 3 us
// that the producer takes to find its work and to issue its first copies.
#pragma once

#include <cstdint>

#include "decode/params.h"
#include "decode/schedule/schedule.h"
#include "decode/sm90/common/codes.h"
#include "decode/sm90/common/kv_load.h"
#include "decode/sm90/common/load/token_source.cuh"
#include "decode/sm90/common/sizes.h"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90 {

// Warps that take part. A box is one bulk prefetch, so the lanes of one warp are enough; rows that
// are gathered are prefetched line by line.
template <KvLoad kLoad>
inline constexpr int kFirstBlockWarps = kLoad == KvLoad::kGather ? 4 : 1;

// Prefetches a guess of the worker's first block into L2. It takes all sequences to be as long as
// one of them, the one that the worker would then begin with. If the guess is wrong, somebody still
// reads this block in this call, and only time depends on it. `thread`: of the kFirstBlockWarps.
template <KvLoad kLoad, CacheCodes kCodes>
__device__ __forceinline__ void PrefetchFirstBlock(const DecodeParams& p, const ScheduleParams& s,
                                                   const Divisor& page_size, int32_t worker,
                                                   int32_t thread) {
  constexpr int kLineBytes = 128, kRowThreads = 2;
  // The token of the block that this thread prefetches, or begins with.
  const int32_t offset = kLoad == KvLoad::kGather ? thread / kRowThreads : thread * kBlockN;
  const int32_t worker_group = s.seq_workers.Floor(worker);
  const int32_t first_seq = worker_group * s.worker_steps;
  if (first_seq >= s.batch || offset >= kScheduleBlock) return;
  const int32_t seq = MinI32(first_seq + s.worker_steps, s.batch) - 1;
  const OwnedPages owned_pages{__ldg(p.layer), __ldg(p.page_begin)};
  const int32_t len = ClampedLen(s, seq), blocks = NumBlocks(len);
  const int32_t part_blocks =
      MaxI32(s.seq_workers.Ceil(blocks), MinPartBlocks(s, blocks * s.batch));
  const int32_t block = (worker - worker_group * s.seq_workers.value()) * part_blocks;
  if (block >= blocks) return;
  if (offset >= len - block * kScheduleBlock) return;
  const int32_t token = block * kScheduleBlock + offset;
  const TokenSource source{p, page_size};
  const int32_t page_idx = source.PageOf(token);
  const int32_t page_id = source.LoadPageId(seq, page_idx, /*is_inside=*/true);
  const int32_t page = owned_pages.Local(p, page_id);
  if (page == kOutside) return;
  const int32_t page_token = source.InPage(token, page_idx);
  constexpr int kCkvBytes = kCodes == CacheCodes::kNone ? kElementBytes : 1;
  const int kpe_bytes =
      kCodes != CacheCodes::kNone && p.kv_format == KvFormat::kE4m3 ? 1 : kElementBytes;
  auto row = [&](const KvStream& stream, int element_bytes) {
    const int64_t element = owned_pages.layer * stream.layer_stride + page * stream.page_stride +
                            page_token * stream.token_stride;
    return static_cast<const char*>(stream.base) + element * element_bytes;
  };
  if constexpr (kLoad == KvLoad::kGather) {
    const int32_t half_bytes = p.d_ckv * kCkvBytes / kRowThreads;
    const char* ckv = row(p.ckv, kCkvBytes) + thread % kRowThreads * half_bytes;
#pragma unroll 1
    for (int32_t byte = 0; byte < half_bytes; byte += kLineBytes) gpu::sm90::PrefetchL2(ckv + byte);
    if (thread % kRowThreads == 0 && p.d_kpe > 0) gpu::sm90::PrefetchL2(row(p.kpe, kpe_bytes));
  } else {
    auto prefetch = [&](const KvStream& stream, int element_bytes) {
      const int32_t bytes = kBlockN * static_cast<int32_t>(stream.token_stride) * element_bytes;
      gpu::sm90::BulkPrefetchL2(row(stream, element_bytes), bytes);
    };
    prefetch(p.ckv, kCkvBytes);  // in a packed pool these rows contain kpe
    const bool is_packed = p.kpe.token_stride * kpe_bytes == p.ckv.token_stride * kCkvBytes;
    if (!is_packed) prefetch(p.kpe, kpe_bytes);
  }
}

}  // namespace jax_mla::decode::sm90
