// Where queries and pages of a call lie, on the device.
#pragma once

#include <cstdint>

#include "core/ragged.h"
#include "index/params.h"

namespace jax_mla::index {

// What a ragged call knows of its queries after PlacesKernel.
__device__ __forceinline__ const QueryPlace* PlacesOf(const TopkParams& p) {
  return static_cast<const QueryPlace*>(p.scratch);
}

__device__ __forceinline__ int32_t ClampedLength(const TopkParams& p, int32_t seq_idx) {
  return min(max(p.seq_lens[seq_idx], 0), p.max_seq_len);
}

__device__ __forceinline__ QueryPlace PlaceOf(const TopkParams& p, int32_t row) {
  if (p.cu_q_lens != nullptr) {
    const int4 place = reinterpret_cast<const int4*>(PlacesOf(p))[row];
    return {place.x, place.y, place.z, place.w};
  }
  const int32_t seq_idx = row / p.q_len;
  const int32_t idx = row - seq_idx * p.q_len;
  const int32_t num_behind = p.q_len - 1 - idx;
  if (seq_idx >= NumPresentSeqs(p.num_seqs, p.batch)) return {kNoSequence, 0, idx, num_behind};
  return {seq_idx, ClampedLength(p, seq_idx) - num_behind, idx, num_behind};
}

// The pages of a sequence.
class Pages {
 public:
  __device__ __forceinline__ Pages(const TopkParams& p, int32_t seq_idx)
      : ids_(p.page_table + int64_t{seq_idx} * p.max_pages_per_seq),
        begin_(*p.page_begin),
        // In a layer that does not exist is no page.
        num_pages_(*p.layer >= 0 && *p.layer < p.num_layers ? p.num_pages : 0) {}

  __device__ __forceinline__ const int32_t* Address(int32_t idx) const { return ids_ + idx; }
  __device__ __forceinline__ int32_t Id(int32_t idx) const { return ids_[idx]; }
  // The pool's page with this id; less than 0: the pool does not have it.
  __device__ __forceinline__ int32_t Local(int32_t id) const {
    const int64_t local = int64_t{id} - begin_;
    return local >= 0 && local < num_pages_ ? static_cast<int32_t>(local) : -1;
  }

 private:
  const int32_t* ids_;
  int32_t begin_;
  int32_t num_pages_;
};

}  // namespace jax_mla::index
