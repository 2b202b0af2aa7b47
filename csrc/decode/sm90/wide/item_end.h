// What becomes of the result of an item of the wide kernel.
#pragma once

#include <cstdint>

#include "decode/schedule/schedule.h"
#include "decode/sm90/tuning.h"
#include "decode/sm90/wide/config.h"

namespace jax_mla::decode::sm90::wide {

// The first row that applies counts.
//
//   The item is                                                     What becomes of it
//   a whole sequence                                                kWhole
//   a part, where the combine kernel merges                         kPart
//   one of two parts, which a cluster's two CTAs have               kExchanged
//   the second of two parts, balanced schedule, >= kMinKeptRows     kKept
//     rows: of a full tile or, if it has fewer, of the unit
//   any other part                                                  kPart
//
// A kept item is always its worker's last one. Workers walk the line of sequences backwards, so
// only the last item can have a part in front of it. That part is another worker's first item and
// has long been written. In an aligned schedule both workers compute their parts at the same time,
// and each merges a share of the sequence instead (MergeTask).
template <Merge kMerge>
MLA_HOST_DEVICE ItemEnd EndOfItem(const WorkItem& work, const SchedulePolicy& policy,
                                  int32_t num_rows) {
  if (work.is_final()) return ItemEnd::kWhole;
  if constexpr (kMerge == Merge::kCombine) return ItemEnd::kPart;
  if (policy.is_clustered()) return ItemEnd::kExchanged;
  const bool is_balanced = policy.first_merging_part() > 0;
  if (is_balanced && work.part_idx == 1 && work.num_parts == 2 && num_rows >= kMinKeptRows) {
    return ItemEnd::kKept;
  }
  return ItemEnd::kPart;
}

}  // namespace jax_mla::decode::sm90::wide
