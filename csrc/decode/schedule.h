// Split-KV schedule in closed form: from seq_lens alone, every worker finds its own work and
// everybody finds every sequence's partial results. No metadata tensor, no host plan, nothing to
// keep in step. Plain C++ with a CUDA section at the end; the host runs the same code (schedule.cc)
// in property tests.
//
// Words. A *block* is kScheduleBlock tokens. A *worker* streams KV for one sequence after another;
// it is one CTA (or cluster) per row tile, and all row tiles of a worker do the same items. A
// *part* is the piece of a sequence that one worker owns. A sequence with one part is written to
// `out` directly; every other part goes to a *slot* of the partial buffers and the combine kernel
// merges the slots.
//
// Automatic mode (num_splits == 0): put the sequences end to end, each with a cost in blocks, and
// give worker p the range [p * P, (p + 1) * P).
//   balanced  cost = max(blocks, 1) + seq_cost, P = ceil(total / num_workers). A worker's first
//             and last item may be cut, those between are whole: at most two partials a worker, in
//             the slots 2p (item continued from the worker before) and 2p + 1 (item that starts
//             here).
//   aligned   when lengths are about equal: cost = blocks rounded up to a unit, P a multiple of it.
//             Either P is the unit, so that no worker serves two sequences, or (batch > workers) a
//             unit holds any sequence, so that every worker serves P / unit whole ones. Costs up to
//             1/16 in balance, saves the partials (measured: -5 % at batch 128).
// Fixed mode (num_splits > 0, also used for batch_invariant): every sequence is cut by its own
// length alone into at most num_splits parts; part s of sequence b has slot b * num_splits + s.
#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__CUDACC__)
#define MLA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MLA_HOST_DEVICE inline
#endif

namespace jax_mla::decode {

inline constexpr int32_t kScheduleBlock = 64;  // tokens

// What the schedule depends on; the same in the decode and in the combine kernel of one call.
struct ScheduleParams {
  const int32_t* seq_lens;  // [batch], device pointer; unchecked, clamped on use
  int32_t batch;
  int32_t max_seq_len;  // tokens
  int32_t num_workers;
  int32_t num_splits;  // 0: automatic mode, else fixed mode with at most this many parts a sequence
  int32_t min_blocks;  // no part is made smaller than this, if the sequence is long enough
  int32_t seq_cost;    // balanced mode: fixed cost of a sequence, in blocks
};

// One part of one sequence. Half-open ranges. block_begin == block_end only for a sequence of
// length 0.
struct WorkItem {
  int32_t seq_idx;
  int32_t seq_len;      // clamped to [0, max_seq_len]
  int32_t block_begin;  // in blocks of kScheduleBlock tokens
  int32_t block_end;
  int32_t part_idx;   // this part, of
  int32_t num_parts;  // this many; 1 = final: write `out` and `lse`
  int32_t slot_base;  // fixed mode: slot of part 0; automatic mode: 2 * worker that owns part 0
  bool fixed;

  MLA_HOST_DEVICE bool is_final() const { return num_parts == 1; }
  // Where part `part` of this sequence leaves its partial result.
  MLA_HOST_DEVICE int32_t slot_of(int32_t part) const {
    return fixed ? slot_base + part : slot_base + 2 * part + (part == 0 ? 1 : 0);
  }
  MLA_HOST_DEVICE int32_t slot() const { return slot_of(part_idx); }
};

MLA_HOST_DEVICE int32_t MinI32(int32_t a, int32_t b) { return a < b ? a : b; }
MLA_HOST_DEVICE int32_t MaxI32(int32_t a, int32_t b) { return a > b ? a : b; }

// floor(a / b) for a >= 0, b > 0. On the device an estimate through the reciprocal: integer
// division costs ~100 instructions, and every one here sits on the path to a CTA's first load.
MLA_HOST_DEVICE int32_t FloorDiv(int32_t a, int32_t b) {
#if defined(__CUDA_ARCH__)
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(static_cast<float>(b)));
  int32_t quotient = static_cast<int32_t>(static_cast<float>(a) * inverse);
  int32_t rest = a - quotient * b;
  constexpr int32_t kExactEstimate = 1 << 20;  // below it the estimate is off by at most one
  if (quotient >= kExactEstimate) {
    quotient += static_cast<int32_t>(floorf(static_cast<float>(rest) * inverse));
    rest = a - quotient * b;
  }
  return quotient - (rest < 0 ? 1 : 0) + (rest >= b ? 1 : 0);
#else
  return a / b;
#endif
}
MLA_HOST_DEVICE int32_t CeilDiv(int32_t a, int32_t b) { return FloorDiv(a + b - 1, b); }

MLA_HOST_DEVICE int32_t ClampedLen(const ScheduleParams& p, int32_t seq_idx) {
#if defined(__CUDA_ARCH__)
  const int32_t len = __ldg(p.seq_lens + seq_idx);
#else
  const int32_t len = p.seq_lens[seq_idx];
#endif
  return MaxI32(0, MinI32(len, p.max_seq_len));
}
// Written without an addition that could overflow at INT32_MAX.
MLA_HOST_DEVICE int32_t NumBlocks(int32_t len) {
  return len / kScheduleBlock + (len % kScheduleBlock != 0 ? 1 : 0);
}

// The automatic mode's decision, equal for all workers of a call.
struct SchedulePolicy {
  int32_t blocks_per_worker;  // P
  int32_t seq_cost;
  int32_t aligned_unit;  // 0: balanced
  bool may_cut = true;   // false: every sequence of the call is one part

  MLA_HOST_DEVICE int32_t Cost(int32_t blocks) const {
    return aligned_unit > 0 ? CeilDiv(blocks, aligned_unit) * aligned_unit : blocks + seq_cost;
  }
};

// total_blocks and max_blocks: sum and maximum of max(NumBlocks(len), 1) over the batch.
MLA_HOST_DEVICE SchedulePolicy ChoosePolicy(const ScheduleParams& p, int32_t total_blocks,
                                            int32_t max_blocks) {
  const int32_t workers = p.num_workers;
  // One block each on very many workers is slower than two on half of them: more partials to merge
  // for the same latency (1 x 8192, H200: 11.2 -> 10.3 us).
  constexpr int32_t kManyWorkers = 66;
  const int32_t min_blocks = p.min_blocks > 1 || total_blocks <= kManyWorkers ? p.min_blocks : 2;
  SchedulePolicy policy{
      MaxI32(CeilDiv(total_blocks + p.batch * p.seq_cost, workers), p.seq_cost + min_blocks),
      p.seq_cost, 0};
  if (p.batch <= workers) {
    const int32_t even_blocks = CeilDiv(max_blocks, FloorDiv(workers, p.batch));
    const int32_t ideal_blocks = CeilDiv(total_blocks, workers);
    if (even_blocks <= ideal_blocks + MaxI32(1, ideal_blocks / 16)) {
      policy.blocks_per_worker = MaxI32(even_blocks, min_blocks);
      policy.aligned_unit = policy.blocks_per_worker;
      policy.may_cut = max_blocks > policy.aligned_unit;
    }
  } else {
    const int32_t seqs_per_worker = CeilDiv(p.batch, workers);
    const int32_t even_blocks = seqs_per_worker * (max_blocks + p.seq_cost);
    if (even_blocks <= policy.blocks_per_worker + policy.blocks_per_worker / 16) {
      policy.blocks_per_worker = even_blocks;
      policy.aligned_unit = max_blocks + p.seq_cost;
      policy.may_cut = false;
    }
  }
  return policy;
}

// Walks the items of one worker, in order. Cheap to copy; every thread may run it redundantly.
// Build it with FindWork (device) or FindWorkHost (schedule.cc).
struct WorkIterator {
  SchedulePolicy policy;
  int32_t worker_idx;
  int32_t cursor;     // automatic: next sequence; fixed: next (part, sequence) pair, part-major
  int32_t seq_begin;  // automatic: where that sequence begins on the line of costs

  MLA_HOST_DEVICE bool Next(const ScheduleParams& p, WorkItem* item) {
    return p.num_splits > 0 ? NextFixed(p, item) : NextAutomatic(p, item);
  }

  MLA_HOST_DEVICE bool NextAutomatic(const ScheduleParams& p, WorkItem* item) {
    const int32_t range_begin = worker_idx * policy.blocks_per_worker;
    const int32_t range_end = range_begin + policy.blocks_per_worker;
    while (cursor < p.batch && seq_begin < range_end) {
      const int32_t len = ClampedLen(p, cursor);
      const int32_t blocks = NumBlocks(len);
      const int32_t units =
          MaxI32(blocks, 1);  // a sequence of length 0 is an item too: it writes 0
      const int32_t this_seq = cursor, this_begin = seq_begin;
      ++cursor;
      seq_begin += policy.Cost(units);
      const int32_t begin = MaxI32(range_begin - this_begin, 0);
      const int32_t end = MinI32(range_end - this_begin, units);
      if (begin >= end) continue;  // only the padding of this sequence's cost lies in the range
      const int32_t first_worker =
          this_begin >= range_begin ? worker_idx : FloorDiv(this_begin, policy.blocks_per_worker);
      const int32_t last_worker = this_begin + units <= range_end
                                      ? worker_idx
                                      : FloorDiv(this_begin + units - 1, policy.blocks_per_worker);
      *item = {this_seq,
               len,
               MinI32(begin, blocks),
               MinI32(end, blocks),
               worker_idx - first_worker,
               last_worker - first_worker + 1,
               2 * first_worker,
               false};
      return true;
    }
    return false;
  }

  MLA_HOST_DEVICE bool NextFixed(const ScheduleParams& p, WorkItem* item) {
    const int32_t num_pairs = p.batch * p.num_splits;
    while (cursor < num_pairs) {
      const int32_t part = FloorDiv(cursor, p.batch), seq = cursor - part * p.batch;
      cursor += p.num_workers;
      const int32_t len = ClampedLen(p, seq);
      const int32_t blocks = NumBlocks(len);
      const int32_t part_blocks = MaxI32(CeilDiv(blocks, p.num_splits), p.min_blocks);
      const int32_t num_parts = MaxI32(CeilDiv(blocks, part_blocks), 1);
      if (part >= num_parts) continue;
      *item = {seq,  len,       part * part_blocks, MinI32((part + 1) * part_blocks, blocks),
               part, num_parts, seq * p.num_splits, true};
      return true;
    }
    return false;
  }
};

#if defined(__CUDACC__)

// The policy of a call in automatic mode, and the blocks it distributes. Called by one whole warp;
// every lane gets the same result. Reads seq_lens once, any batch, no shared memory.
__device__ __forceinline__ SchedulePolicy FindPolicy(const ScheduleParams& p,
                                                     int32_t* total_blocks) {
  constexpr uint32_t kAllLanes = 0xffffffffu;
  constexpr int32_t kWarp = 32, kUnroll = 4;  // loads in flight a lane
  const int32_t lane = threadIdx.x % kWarp;
  int32_t total = 0, longest = 0;
  for (int32_t base = 0; base < p.batch; base += kWarp * kUnroll) {
    int32_t len[kUnroll];
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      const int32_t seq = base + u * kWarp + lane;
      len[u] = seq < p.batch ? ClampedLen(p, seq) : -1;
    }
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      const int32_t units = len[u] < 0 ? 0 : MaxI32(NumBlocks(len[u]), 1);
      total += units;
      longest = MaxI32(longest, units);
    }
  }
  *total_blocks = __reduce_add_sync(kAllLanes, total);
  return ChoosePolicy(p, *total_blocks, __reduce_max_sync(kAllLanes, longest));
}

// Workers 0 .. n - 1 have all the work; n is exact in balanced mode, else rarely a little high.
__device__ __forceinline__ int32_t NumBusyWorkers(const ScheduleParams& p,
                                                  const SchedulePolicy& policy,
                                                  int32_t total_blocks) {
  const int32_t seq_cost = policy.aligned_unit > 0 ? policy.aligned_unit - 1 : policy.seq_cost;
  return MinI32(CeilDiv(total_blocks + p.batch * seq_cost, policy.blocks_per_worker),
                p.num_workers);
}

// Finds the first item of worker `worker_idx` in automatic mode. Called by one whole warp; every
// lane gets the same result. Reads seq_lens (from L1, after FindPolicy).
__device__ __forceinline__ WorkIterator FindFirstItem(const ScheduleParams& p,
                                                      const SchedulePolicy& policy,
                                                      int32_t worker_idx) {
  constexpr uint32_t kAllLanes = 0xffffffffu;
  constexpr int32_t kWarp = 32;
  const int32_t lane = threadIdx.x % kWarp;
  // Skip whole groups of 32 sequences by their sum, then locate the sequence in its group by a
  // scan.
  const int32_t range_begin = worker_idx * policy.blocks_per_worker;
  int32_t group_begin = 0;
  for (int32_t base = 0; base < p.batch; base += kWarp) {
    const int32_t seq = base + lane;
    const int32_t cost = seq < p.batch ? policy.Cost(MaxI32(NumBlocks(ClampedLen(p, seq)), 1)) : 0;
    const int32_t group_cost = __reduce_add_sync(kAllLanes, cost);
    if (group_begin + group_cost > range_begin) {
      int32_t end = cost;
#pragma unroll
      for (int32_t step = 1; step < kWarp; step *= 2) {
        const int32_t below = __shfl_up_sync(kAllLanes, end, step);
        if (lane >= step) end += below;
      }
      const uint32_t after = __ballot_sync(kAllLanes, group_begin + end > range_begin);
      const int32_t owner = __ffs(after) - 1;
      return {policy, worker_idx, base + owner,
              group_begin + __shfl_sync(kAllLanes, end - cost, owner)};
    }
    group_begin += group_cost;
  }
  return {policy, worker_idx, p.batch, group_begin};  // nothing left for this worker
}

// Where worker `worker_idx` starts, in either mode. Called by one whole warp.
__device__ __forceinline__ WorkIterator FindWork(const ScheduleParams& p, int32_t worker_idx) {
  if (p.num_splits > 0) return {SchedulePolicy{}, worker_idx, worker_idx, 0};
  int32_t total_blocks;
  const SchedulePolicy policy = FindPolicy(p, &total_blocks);
  return FindFirstItem(p, policy, worker_idx);
}

#endif  // __CUDACC__

}  // namespace jax_mla::decode
