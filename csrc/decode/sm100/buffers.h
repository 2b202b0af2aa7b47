// Where the arrays of one call lie on the device, and how its pages are numbered.
#pragma once

#include <cstdint>

#include "decode/params.h"
#include "decode/sm100/plan.h"

namespace jax_mla::decode::sm100 {

// See ScratchLayout. Arrays that a call does not have are not read.
struct Buffers {
  int32_t* table;
  int32_t* lens;
  int32_t* num_parts;
  void *q_nope, *q_pe, *out;
  float *lse, *part_out, *part_lse;

  PageRange pages;
  int64_t page_bytes;  // of a page of 128 rows
  int32_t max_parts;   // of a sequence in this launch
};

// The arrays of a call in its scratch, on a GPU with so many SMs.
inline Buffers MakeBuffers(const DecodeParams& p, const CallPlan& plan, int32_t num_sms) {
  const int64_t row_width = p.ckv.token_stride;
  const ScratchLayout layout = MakeScratchLayout(plan, row_width);
  char* scratch = static_cast<char*>(p.scratch);
  const auto at = [&](int64_t offset) { return reinterpret_cast<float*>(scratch + offset); };
  const auto ints_at = [&](int64_t offset) { return reinterpret_cast<int32_t*>(scratch + offset); };
  const int64_t page_bytes = kTileTokens * row_width * kElementBytes;
  const int64_t num_pool_pages = int64_t{p.num_layers} * p.num_pages * (p.page_size / kTileTokens);
  return {.table = ints_at(layout.table),
          .lens = ints_at(layout.lens),
          .num_parts = ints_at(layout.num_parts),
          .q_nope = at(layout.q_nope),
          .q_pe = at(layout.q_pe),
          .out = at(layout.out),
          .lse = at(layout.lse),
          .part_out = at(layout.part_out),
          .part_lse = at(layout.part_lse),
          .pages = MakePageRange(reinterpret_cast<uintptr_t>(p.ckv.base), num_pool_pages,
                                 reinterpret_cast<uintptr_t>(scratch + layout.tails), plan.batch,
                                 page_bytes),
          .page_bytes = page_bytes,
          .max_parts = plan.PartsFor(num_sms)};
}

}  // namespace jax_mla::decode::sm100
