// A query's row of the results, and queries that have no choice.
#pragma once

#include "core/divisor.h"
#include "index/choose_shared.cuh"
#include "index/launch.h"
#include "index/places.cuh"

namespace jax_mla::index {

// What the host passes to a kernel of the choice.
struct ChooseParams {
  TopkParams call;
  Slab slab;
  Divisor page_size;
  int32_t max_span;  // that of the longest query
  bool keeps_keys;   // see Span
  // A kernel of scores runs in front. It has waited for whoever wrote the operands before it let
  // this one start. So this one may read operands before it waits, but no scores.
  bool has_scores;
};

// A query's row of the results.
class Row {
 public:
  __device__ __forceinline__ Row(const ChooseParams& params, int32_t row, int32_t seq_idx)
      : pages(params.call, max(seq_idx, 0)),
        params_(params),
        row_(row),
        indices_(params.call.indices + int64_t{row} * params.call.k) {}

  __device__ __forceinline__ int32_t Page(int32_t position) const {
    return params_.page_size.Floor(position);
  }
  __device__ __forceinline__ bool IsPresent(int32_t position) const {
    return pages.Local(pages.Id(Page(position))) >= 0;
  }
  // What entry `i` shows of a token.
  __device__ __forceinline__ void Write(int32_t i, int32_t position, int32_t page,
                                        int32_t page_id) const {
    indices_[i] = params_.call.return_positions
                      ? position
                      : (page_id - page) * params_.call.page_size + position;
  }
  __device__ __forceinline__ void WriteScore(int32_t i, float score) const {
    if (params_.call.scores != nullptr) {
      params_.call.scores[int64_t{row_} * params_.call.k + i] = score;
    }
  }
  // Ends the row behind `number` entries. The group's threads share this.
  __device__ __forceinline__ void End(int32_t number, int32_t thread, int32_t num_threads) const {
#pragma unroll 1
    for (int32_t i = number + thread; i < params_.call.k; i += num_threads) indices_[i] = -1;
    if (thread == 0) params_.call.lens[row_] = number;
  }

  Pages pages;

 private:
  const ChooseParams& params_;
  int32_t row_;
  int32_t* indices_;
};

// Writes all of a query's tokens, if all their pages are in the pool. Returns whether they are.
__device__ __forceinline__ bool WriteAll(const Row& row, int32_t num_visible) {
  bool is_present = true;
#pragma unroll 4  // loads in flight
  for (int32_t position = threadIdx.x; position < num_visible; position += kChooseThreads) {
    is_present &= row.IsPresent(position);
  }
  if (!__syncthreads_and(is_present)) return false;
#pragma unroll 1
  for (int32_t position = threadIdx.x; position < num_visible; position += kChooseThreads) {
    const int32_t page = row.Page(position);
    row.Write(position, position, page, row.pages.Id(page));
    row.WriteScore(position, 0.0f);
  }
  row.End(num_visible, threadIdx.x, kChooseThreads);
  return true;
}

}  // namespace jax_mla::index
