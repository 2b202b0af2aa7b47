// Reads what ragged/plan_units.cuh has left for a call of units. Past L1, which may hold what an
// earlier call left at the same addresses.
#pragma once

#include <cstdint>

#include "decode/params.h"
#include "decode/schedule/schedule.h"
#include "decode/schedule/units.h"

namespace jax_mla::decode {

// kHasWindow: with a sliding window, whose units have a first_page.
template <bool kHasWindow = false>
__device__ __forceinline__ Unit LoadUnit(const int4* source) {
  const int4 a = __ldcg(source), b = __ldcg(source + 1);
  return {a.x, a.y, a.z, a.w, b.x, b.y, kHasWindow ? b.z : 0, 0};
}

template <bool kHasWindow = false>
__device__ __forceinline__ Unit LoadUnit(const DecodeParams& p, int32_t unit_idx) {
  return LoadUnit<kHasWindow>(reinterpret_cast<const int4*>(p.units.units + unit_idx));
}

// Where a worker starts, and the unit with which it begins.
struct UnitStart {
  WorkIterator work;
  Unit first;
};
__device__ __forceinline__ UnitStart LoadStart(const UnitTable& units, int32_t worker_idx) {
  const int4* source = reinterpret_cast<const int4*>(units.starts + worker_idx);
  const int4 a = __ldcg(source), b = __ldcg(source + 1);
  return {{{a.x, a.y, a.z != 0}, a.w, b.x, b.y}, LoadUnit(source + 2)};
}

// WorkIterator::Next in a call of units.
__device__ __forceinline__ bool NextUnit(const ScheduleParams& p, WorkIterator& work,
                                         WorkItem* item) {
  if (p.num_splits > 0 || work.policy.worker_cost != kDealt) return work.Next(p, item);
  if (work.cursor >= work.seq_end) return false;
  const int32_t len = ClampedLen(p, work.cursor);
  *item = {work.cursor, len, 0, NumBlocks(len), 0, 1, 0, false};
  ++work.cursor;
  return true;
}

// The worker's first item, found without a load. False if there is none, or if it is left to
// NextUnit.
__device__ __forceinline__ bool TakeFirstUnit(const ScheduleParams& p, UnitStart& start,
                                              WorkItem* item) {
  WorkIterator& work = start.work;
  const int32_t len = start.first.seq_len;
  const bool is_dealt = work.policy.worker_cost == kDealt;
  if (len == 0 || (is_dealt && work.cursor >= work.seq_end)) return false;
  if (is_dealt) {
    *item = {work.cursor, len, 0, NumBlocks(len), 0, 1, 0, false};
    ++work.cursor;
    return true;
  }
  const bool has_range =
      work.cursor >= 0 && work.seq_end > work.worker_idx * work.policy.worker_cost;
  return has_range && work.TakeSequence(p, len, item);
}

}  // namespace jax_mla::decode
