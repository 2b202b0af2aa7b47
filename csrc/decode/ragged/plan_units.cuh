// Cuts the query rows of a step into units (schedule/units.h), and finds where the workers start.
// One CTA does it, before the decode kernel runs.
//
// Where that balances well, units are dealt out: workers get whole ones, the longest first. Then
// nothing is merged, and all workers read the same keys of a long chunk at about the same time,
// which L2 serves at much less cost. Otherwise the units lie on a line, as the sequences of a
// uniform call do (schedule.h).
#pragma once

#include <cstdint>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "core/ragged.h"
#include "decode/ragged/plan.h"
#include "decode/schedule/schedule.h"
#include "decode/schedule/tuning.h"

namespace jax_mla::decode::ragged {

inline constexpr int kThreads = 512;
inline constexpr int kSharedUnits = 2048, kSharedSeqs = 1024;  // more of them lie in the scratch
inline constexpr int kBins = kThreads;                         // of units by length
inline constexpr int kMaxHands = kThreads;  // workers: with more of them, nothing is dealt out
inline constexpr int32_t kMaxHandCost = (1 << 22) - 1;  // a key has 32 bits; more is not dealt out

// What the workers have to do in a round of DealRanks.
struct Levels {
  int32_t least;            // of all workers
  int32_t least_of_others;  // of those that get no unit
};

struct SharedMemory {
  union {
    cub::BlockScan<int32_t, kThreads>::TempStorage scan;
    cub::BlockReduce<int32_t, kThreads>::TempStorage reduce;
  };
  int32_t totals[2];
  int32_t bins[kBins];
  alignas(16) uint32_t keys[kMaxHands];
  int32_t first_units[kMaxHands];
  Levels levels[2];  // rounds use them in turn
  int32_t cost_ends[kSharedUnits];
  int32_t ranked[kSharedUnits];
  PlannedSequence sequences[kSharedSeqs];
};

// What the planning threads share besides. Params: PlanParams or WindowPlanParams.
template <class Params>
struct Planning {
  const Params& p;
  SharedMemory& shared;
  PlannedSequence* sequences;  // [batch]
  int32_t* cost_ends;          // [num_units] where they end on the line
  int32_t* ranked;             // [num_units] see RankUnits
  int32_t num_units;
};

// What the lengths of the sequences are clamped to.
__device__ __forceinline__ int32_t MaxSeqLen(const PlanParams& p) { return p.schedule.max_seq_len; }
__device__ __forceinline__ int32_t MaxSeqLen(const WindowPlanParams& p) { return p.max_seq_len; }

// Cuts whole pages off the front of a unit's sequence, of which none of its rows sees a token.
__device__ __forceinline__ Unit InWindow(const PlanParams&, const Unit& unit) { return unit; }
__device__ __forceinline__ Unit InWindow(const WindowPlanParams& p, Unit unit) {
  unit.first_page = MaxI32(unit.first_limit - p.sliding_window, 0) / p.page_size;
  unit.first_limit -= unit.first_page * p.page_size;
  unit.seq_len -= unit.first_page * p.page_size;
  return unit;
}

struct Sum {
  __device__ __forceinline__ int32_t operator()(int32_t a, int32_t b) const { return a + b; }
};
struct Max {
  __device__ __forceinline__ int32_t operator()(int32_t a, int32_t b) const { return MaxI32(a, b); }
};

// Exclusive scan over the CTA's threads that goes on where the last one ended.
template <class Op>
__device__ __forceinline__ int32_t ScanOn(SharedMemory& shared, int32_t value, Op op,
                                          int32_t* carry) {
  int32_t before, total;
  cub::BlockScan<int32_t, kThreads>(shared.scan).ExclusiveScan(value, before, *carry, op, total);
  *carry = op(*carry, total);
  __syncthreads();  // `scan` is used again
  return before;
}

// Tokens without a sequence.
__device__ __forceinline__ void PlacePadding(const PlanParams& p, const TokenRange& tokens) {
  for (int32_t token = tokens.begin + threadIdx.x; token < tokens.end; token += kThreads) {
    p.plan.places[token] = {kNoSequence, -1};
  }
}

// Finds each sequence's tokens and its first unit, and tells which tokens are padding. Returns the
// number of units.
template <class Params>
__device__ __forceinline__ int32_t PlanSequences(const Planning<Params>& planning) {
  const Params& p = planning.p;
  const StepTokens& a = p.tokens;
  const int32_t present = NumPresentSeqs(a.num_seqs, a.batch);
  const auto clip = [&](int32_t token) { return MaxI32(0, MinI32(token, a.num_tokens)); };
  int32_t token_end = a.cu_q_lens == nullptr ? 0 : clip(a.cu_q_lens[0]);  // the largest so far
  int32_t num_units = 0;
#pragma unroll 1
  for (int32_t base = 0; base < a.batch; base += kThreads) {
    const int32_t seq = base + threadIdx.x;
    int32_t end = 0;
    if (seq < present) {
      end = a.cu_q_lens == nullptr ? (seq + 1) * a.q_len : clip(a.cu_q_lens[seq + 1]);
    }
    const int32_t begin = ScanOn(planning.shared, end, Max{}, &token_end);
    const int32_t q_len = MaxI32(end - begin, 0);
    const int32_t rows = q_len * p.num_heads;
    const int32_t first_unit =
        ScanOn(planning.shared, (rows + p.unit_rows - 1) / p.unit_rows, Sum{}, &num_units);
    if (seq < a.batch) {
      planning.sequences[seq] = {begin, q_len, first_unit, a.seq_lens[seq]};
    }
  }
  __syncthreads();  // sequences
  const int32_t token_begin = a.cu_q_lens == nullptr ? 0 : clip(a.cu_q_lens[0]);
  PlacePadding(p, {0, token_begin});
  PlacePadding(p, {token_end, a.num_tokens});
  return num_units;
}

// Says of every token of a sequence where it belongs. A warp takes one sequence after another.
template <class Params>
__device__ __forceinline__ void PlaceTokens(const Planning<Params>& planning) {
  constexpr int kWarpThreads = 32, kWarps = kThreads / kWarpThreads;
  const Params& p = planning.p;
#pragma unroll 1
  for (int32_t seq = threadIdx.x / kWarpThreads; seq < p.tokens.batch; seq += kWarps) {
    const PlannedSequence planned = planning.sequences[seq];
    const int32_t q_end = planned.q_begin + planned.q_len;
    const bool is_writable = IsWritable(planned.seq_len, MaxSeqLen(p));
#pragma unroll 1
    for (int32_t token = planned.q_begin + threadIdx.x % kWarpThreads; token < q_end;
         token += kWarpThreads) {
      p.plan.places[token] = {seq, is_writable ? TokenPosition(planned.seq_len, q_end, token) : -1};
    }
  }
}

// The sequence that a unit belongs to: the last one whose first unit is not behind it. (A sequence
// without units has its first unit in common with the next one.)
template <class Params>
__device__ __forceinline__ int32_t SequenceOfUnit(const Planning<Params>& planning, int32_t unit) {
  int32_t low = 0, high = planning.p.tokens.batch - 1;
  while (low < high) {
    const int32_t middle = low + (high - low + 1) / 2;
    if (planning.sequences[middle].first_unit <= unit) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

template <class Params>
__device__ __forceinline__ Unit MakeUnit(const Planning<Params>& planning, int32_t unit) {
  const Params& p = planning.p;
  const int32_t seq = SequenceOfUnit(planning, unit);
  const PlannedSequence planned = planning.sequences[seq];
  const int32_t len = MaxI32(0, MinI32(planned.seq_len, MaxSeqLen(p)));
  const int32_t first_row = (unit - planned.first_unit) * p.unit_rows;
  const int32_t num_rows = MinI32(p.unit_rows, planned.q_len * p.num_heads - first_row);
  const int32_t first_query = first_row / p.num_heads;
  const int32_t last_query = (first_row + num_rows - 1) / p.num_heads;
  const int32_t old_len = len - planned.q_len;
  return InWindow(p, {.seq_idx = seq,
                      .row_begin = planned.q_begin * p.num_heads + first_row,
                      .num_rows = num_rows,
                      .first_limit = old_len + first_query + 1,
                      .first_head = first_row - first_query * p.num_heads,
                      .seq_len = MaxI32(old_len + last_query + 1, 0),
                      .first_page = 0,
                      .unused = 0});
}

__device__ __forceinline__ void StoreUnit(const PlanParams& p, int32_t place, const Unit& unit) {
  p.plan.units[place] = unit;
  p.plan.unit_lens[place] = unit.seq_len;
}

// Units are put in order of their length by bins, the longest first. Bins have one length up to
// kExactBlocks, then 64 to the octave. All units of a bin count as its longest, so that their order
// does not matter: it differs from run to run. Where a unit is longer than LongestOf(0), nothing is
// dealt out.
inline constexpr int32_t kExactBlocks = 128, kOctaveBins = kExactBlocks / 2;

__device__ __forceinline__ int32_t BinOf(int32_t blocks) {
  const int32_t shift = MaxI32(0, 32 - __clz(blocks / kExactBlocks));
  const int32_t bin = (blocks >> shift) + shift * kOctaveBins;
  return kBins - 1 - MinI32(bin, kBins - 1);
}
__device__ __forceinline__ int32_t LongestOf(int32_t bin) {
  const int32_t from_shortest = kBins - 1 - bin;
  const int32_t shift = MaxI32(0, from_shortest / kOctaveBins - 1);
  return ((from_shortest - shift * kOctaveBins + 1) << shift) - 1;
}

// What all units cost and the longest of them, in blocks; also counts the units of each bin.
template <class Params>
__device__ __forceinline__ void MeasureUnits(const Planning<Params>& planning) {
  const Params& p = planning.p;
  SharedMemory& shared = planning.shared;
  shared.bins[threadIdx.x] = 0;
  __syncthreads();  // bins
  int32_t total = 0, longest = 1;
#pragma unroll 1
  for (int32_t unit = threadIdx.x; unit < planning.num_units; unit += kThreads) {
    const Unit made = MakeUnit(planning, unit);
    const int32_t blocks = CountedBlocks(made.seq_len);
    total += blocks;
    longest = MaxI32(longest, blocks);
    atomicAdd(&shared.bins[BinOf(blocks)], 1);
    StoreUnit(p, unit, made);
  }
  using Reduce = cub::BlockReduce<int32_t, kThreads>;
  total = Reduce(shared.reduce).Sum(total);
  __syncthreads();  // `reduce` is used again
  longest = Reduce(shared.reduce).Reduce(longest, Max{});
  if (threadIdx.x == 0) shared.totals[0] = total, shared.totals[1] = longest;
  __syncthreads();  // totals, bins, unit_lens
}

// Ranks the units by length, the longest first. `ranked` gets the blocks of each rank, and the rank
// of a unit goes where its end on the line would.
template <class Params>
__device__ __forceinline__ void RankUnits(const Planning<Params>& planning) {
  const Params& p = planning.p;
  SharedMemory& shared = planning.shared;
  int32_t carry = 0;
  const int32_t first = ScanOn(shared, shared.bins[threadIdx.x], Sum{}, &carry);
  shared.bins[threadIdx.x] = first;
  __syncthreads();  // bins
#pragma unroll 1
  for (int32_t unit = threadIdx.x; unit < planning.num_units; unit += kThreads) {
    const int32_t bin = BinOf(CountedBlocks(p.plan.unit_lens[unit]));
    const int32_t rank = atomicAdd(&shared.bins[bin], 1);
    planning.cost_ends[unit] = rank;
    planning.ranked[rank] = LongestOf(bin);
  }
  __syncthreads();  // ranked
}

// Which unit of which worker a unit becomes.
struct Deal {
  int32_t worker, turn;

  __device__ __forceinline__ static Deal Unpack(int32_t packed) {
    return {packed % kMaxHands, packed / kMaxHands};
  }
  __device__ __forceinline__ int32_t Pack() const { return turn * kMaxHands + worker; }
};

struct Hands {
  int32_t num_units;  // of the thread's worker
  int32_t most;       // what the busiest worker has to do
};

// Deals out the ranked units, the longest first, each to the worker that has least to do. In a
// round, every worker gets one that has less to do now than the least busy worker would have with
// another. Where the others have much more, it gets several. `ranked` gets where each went.
template <class Params>
__device__ __forceinline__ Hands DealRanks(const Planning<Params>& planning) {
  const ScheduleParams& schedule = planning.p.schedule;
  SharedMemory& shared = planning.shared;
  const int32_t worker = threadIdx.x;
  const bool is_worker = worker < schedule.num_workers;
  Hands hands{};
  int32_t cost = 0;
  if (worker < 2) shared.levels[worker].least_of_others = kMaxHandCost;
#pragma unroll 1
  for (int32_t next = 0, round = 0; next < planning.num_units; ++round) {
    const int32_t next_cost = planning.ranked[next] + schedule.seq_cost;
    // One number to compare: no two workers have the same.
    const uint32_t key = static_cast<uint32_t>(cost) * kMaxHands + worker;
    shared.keys[worker] = is_worker ? key : UINT32_MAX;
    __syncthreads();  // keys, levels
    uint32_t least_key = key;
    int32_t num_before = 0;
    const auto compare = [&](uint32_t other) {
      least_key = min(least_key, other);
      num_before += static_cast<int32_t>(other < key);
    };
    if (is_worker) {
#pragma unroll 4
      for (int32_t other = 0; other < schedule.num_workers; other += 4) {
        const uint4 keys = *reinterpret_cast<const uint4*>(shared.keys + other);
        compare(keys.x);
        compare(keys.y);
        compare(keys.z);
        compare(keys.w);
      }
    }
    const int32_t least = static_cast<int32_t>(least_key / kMaxHands);
    const bool takes = is_worker && cost < least + next_cost;
    Levels& levels = shared.levels[round % 2];
    if (is_worker && num_before == 0) levels.least = cost;
    if (is_worker && !takes) atomicMin(&levels.least_of_others, cost);
    if (worker == 0) shared.levels[(round + 1) % 2].least_of_others = kMaxHandCost;
    const int32_t num_takers = __syncthreads_count(takes);  // levels
    const bool has_others = num_takers < schedule.num_workers;
    const int32_t turns = has_others ? (levels.least_of_others - levels.least) / next_cost : 1;
    for (int32_t turn = 0; takes && turn < turns; ++turn) {
      const int32_t rank = next + turn * num_takers + num_before;
      if (rank >= planning.num_units) break;
      cost = MinI32(cost + planning.ranked[rank] + schedule.seq_cost, kMaxHandCost);
      planning.ranked[rank] = Deal{worker, hands.num_units++}.Pack();
    }
    next += MinI32(turns, CeilDiv(planning.num_units - next, num_takers)) * num_takers;
  }
  using Reduce = cub::BlockReduce<int32_t, kThreads>;
  const int32_t most = Reduce(shared.reduce).Reduce(cost, Max{});
  if (worker == 0) shared.totals[0] = most;
  __syncthreads();  // totals, ranked
  hands.most = shared.totals[0];
  return hands;
}

// Puts the units in the order in which they were dealt out, worker by worker.
template <class Params>
__device__ __forceinline__ void StoreHands(const Planning<Params>& planning, int32_t num_units) {
  const Params& p = planning.p;
  SharedMemory& shared = planning.shared;
  const int32_t worker = threadIdx.x;
  int32_t carry = 0;
  const int32_t first_unit = ScanOn(shared, num_units, Sum{}, &carry);
  shared.first_units[worker] = first_unit;
  __syncthreads();  // first_units
#pragma unroll 1
  for (int32_t unit = threadIdx.x; unit < planning.num_units; unit += kThreads) {
    const Deal deal = Deal::Unpack(planning.ranked[planning.cost_ends[unit]]);
    StoreUnit(p, shared.first_units[deal.worker] + deal.turn, MakeUnit(planning, unit));
  }
  __syncthreads();  // units
  if (worker < p.schedule.num_workers) {
    p.plan.starts[worker] = {.worker_cost = kDealt,
                             .worker_idx = worker,
                             .cursor = first_unit,
                             .seq_end = first_unit + num_units,
                             .first = num_units > 0 ? p.plan.units[first_unit] : Unit{}};
  }
  if (worker == 0) *p.plan.num_busy = 0;  // nothing is split, so nothing is merged
}

// Deals the units out, if the busiest worker then has little more than on the line.
template <class Params>
__device__ __forceinline__ bool DealOut(const Planning<Params>& planning,
                                        const ScheduleParams& schedule, const SchedulePolicy& line,
                                        int32_t longest) {
  const int32_t most = line.worker_cost + schedule.slack.blocks + (line.worker_cost >> kDealShift);
  if (schedule.num_workers > kMaxHands || longest + schedule.seq_cost > most) return false;
  if (longest > LongestOf(0) || most >= kMaxHandCost) return false;
  RankUnits(planning);
  const Hands hands = DealRanks(planning);
  if (hands.most > most) return false;
  StoreHands(planning, hands.num_units);
  return true;
}

// Finds where a worker starts on the line: with the last unit that begins in front of its range's
// end.
template <class Params>
__device__ __forceinline__ WorkStart FindStart(const Planning<Params>& planning,
                                               const SchedulePolicy& policy, int32_t worker) {
  const int64_t range_end = int64_t{worker + 1} * policy.worker_cost;
  int32_t low = -1, high = planning.num_units - 1;
  while (low < high) {
    const int32_t middle = low + (high - low + 1) / 2;
    const int32_t begin = middle == 0 ? 0 : planning.cost_ends[middle - 1];
    if (begin < range_end) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return {.worker_cost = policy.worker_cost,
          .cost_step = policy.cost_step,
          .may_cut = policy.may_cut,
          .worker_idx = worker,
          .cursor = low,
          .seq_end = low < 0 ? 0 : planning.cost_ends[low],
          .first = low < 0 ? Unit{} : planning.p.plan.units[low]};
}

// Puts the units on a line.
template <class Params>
__device__ __forceinline__ void LineUp(const Planning<Params>& planning,
                                       const ScheduleParams& schedule,
                                       const SchedulePolicy& policy) {
  const Params& p = planning.p;
  int32_t line_end = 0;
#pragma unroll 1
  for (int32_t base = 0; base < planning.num_units; base += kThreads) {
    const int32_t unit = base + threadIdx.x;
    const bool exists = unit < planning.num_units;
    const int32_t cost = exists ? policy.Cost(schedule, CountedBlocks(p.plan.unit_lens[unit])) : 0;
    const int32_t begin = ScanOn(planning.shared, cost, Sum{}, &line_end);
    if (exists) planning.cost_ends[unit] = begin + cost;
  }
  __syncthreads();  // cost_ends
#pragma unroll 1
  for (int32_t worker = threadIdx.x; worker < schedule.num_workers; worker += kThreads) {
    p.plan.starts[worker] = FindStart(planning, policy, worker);
  }
  if (threadIdx.x == 0) {
    const int32_t busy = (line_end + policy.worker_cost - 1) / policy.worker_cost;
    *p.plan.num_busy = MinI32(busy, schedule.num_workers);
  }
}

// Called by all threads of one CTA.
template <class Params>
__device__ __forceinline__ void PlanUnits(const Params& p, SharedMemory& shared) {
  Planning<Params> planning{p,
                            shared,
                            p.tokens.batch <= kSharedSeqs ? shared.sequences : p.plan.sequences,
                            p.plan.cost_ends,
                            p.plan.ranked,
                            0};
  planning.num_units = PlanSequences(planning);
  if (planning.num_units <= kSharedUnits) {
    planning.cost_ends = shared.cost_ends;
    planning.ranked = shared.ranked;
  }
  PlaceTokens(planning);
  MeasureUnits(planning);
  if (p.schedule.num_splits > 0) {  // the kernel visits all places
    for (int32_t place = planning.num_units + threadIdx.x; place < p.max_units; place += kThreads) {
      StoreUnit(p, place, Unit{});
    }
    return;
  }
  ScheduleParams schedule = p.schedule;
  schedule.batch = planning.num_units;
  schedule = AddQuotients(schedule);
  const int32_t total = shared.totals[0], longest = shared.totals[1];
  const SchedulePolicy line = ChoosePolicy(schedule, total, longest);
  if (!DealOut(planning, schedule, line, longest)) LineUp(planning, schedule, line);
}

}  // namespace jax_mla::decode::ragged
