// The search for work on the device against its twin on the host: of random batches, every item of
// every worker, through each way in that a kernel uses, and the divisions by estimates that they
// rest on. Prints the first mismatch.
//
//   nvcc -std=c++20 -O3 -arch=native --expt-relaxed-constexpr -DJAX_MLA_WITH_CUDA -Icsrc
//     tests/cuda/find_work.cu csrc/decode/schedule/*.cc
//   ./a.out 2000 [seed]
#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "arena.h"
#include "decode/schedule/find_work.cuh"
#include "decode/schedule/host_schedule.h"
#include "decode/schedule/plan.h"
#include "decode/schedule/schedule.h"

namespace {

using namespace jax_mla::decode;          // NOLINT: a program, not a header
using namespace jax_mla::decode::stress;  // NOLINT

constexpr int kThreads = 256;
constexpr int kMaxQuotient = (1 << 18) - 1;  // of CountParts
constexpr int kAllDivisors = 8192;           // every one up to here is tried

// Who looks for work how.
enum class Entry { kSm80, kNarrow, kWide, kCombine };
constexpr Entry kEntries[] = {Entry::kSm80, Entry::kNarrow, Entry::kWide, Entry::kCombine};
constexpr const char* kEntryNames[] = {"FindWork", "FindFirst", "FindFirstOf<false>",
                                       "FindFirstItem"};

// What all workers are expected to find.
struct Expected {
  const WorkItem* items;
  const int* begins;  // [num_workers + 1], in `items`
  int32_t total_blocks;
  SchedulePolicy policy;
};

// The first mismatch.
struct Mismatch {
  int found;
  Entry entry;
  int worker, item_idx, num_expected;
  bool is_end;  // no item found, or no more expected
  WorkItem got;
  const char* what() const { return is_end ? "number of items" : "item"; }
};

__device__ bool IsSame(const WorkItem& a, const WorkItem& b) {
  return a.seq_idx == b.seq_idx && a.seq_len == b.seq_len && a.block_begin == b.block_begin &&
         a.block_end == b.block_end && a.part_idx == b.part_idx && a.num_parts == b.num_parts &&
         a.slot_base == b.slot_base && a.fixed == b.fixed;
}

// One worker's search, by one warp; every lane compares what it got.
struct Search {
  const ScheduleParams& p;
  const Expected& expected;
  Mismatch* mismatch;
  Entry entry;
  int worker;

  __device__ void Report(int item_idx, bool is_end, const WorkItem& got) const {
    if (atomicExch(&mismatch->found, 1) != 0) return;
    const int num_expected = expected.begins[worker + 1] - expected.begins[worker];
    *mismatch = {1, entry, worker, item_idx, num_expected, is_end, got};
  }

  // The item that is looked up early, before its parts are counted.
  __device__ void CompareLookUp(const WorkItem& item) const {
    const bool has_item = expected.begins[worker] < expected.begins[worker + 1];
    const WorkItem& first = expected.items[expected.begins[worker]];
    const bool is_right =
        has_item ? item.seq_idx == first.seq_idx && item.seq_len == first.seq_len &&
                       item.block_begin == first.block_begin && item.block_end == first.block_end
                 : item.seq_len == 0;
    if (!is_right) Report(0, /*is_end=*/!has_item, item);
  }

  __device__ void CompareItems(FirstPart first) const {
    const int begin = expected.begins[worker];
    const int num_expected = expected.begins[worker + 1] - begin;
    WorkItem item = first.item;
    int i = 0;
    for (; first.has_item || first.rest.Next(p, &item); ++i, first.has_item = false) {
      if (i == num_expected) return Report(i, /*is_end=*/true, item);
      if (!IsSame(item, expected.items[begin + i])) return Report(i, /*is_end=*/false, item);
    }
    if (i < num_expected) Report(i, /*is_end=*/true, {});
  }

  // As a kernel picks it, and that it is told the truth.
  __device__ int PickWorker(const SchedulePolicy& policy, int32_t total_blocks) const {
    const bool is_right = policy.worker_cost == expected.policy.worker_cost &&
                          policy.cost_step == expected.policy.cost_step &&
                          policy.may_cut == expected.policy.may_cut &&
                          total_blocks == expected.total_blocks;
    if (!is_right) Report(-1, /*is_end=*/false, {});
    return worker;
  }

  __device__ void Run() const {
    const auto look_up = [&](const WorkItem& item) { CompareLookUp(item); };
    FirstPart first{};
    switch (entry) {
      case Entry::kSm80:
        first.rest = FindWork(p, worker);
        break;
      case Entry::kNarrow:
        first = FindFirst(p, worker, look_up);
        break;
      case Entry::kWide:
        first = FindFirstOf</*kMayBeFixed=*/false>(
            p,
            [&](const SchedulePolicy& policy, int32_t total) { return PickWorker(policy, total); },
            look_up);
        break;
      case Entry::kCombine: {
        const ScheduleTotals totals = FindTotals(p);
        const SchedulePolicy policy = ChoosePolicy(p, totals.total_blocks, totals.max_blocks);
        first.rest = FindFirstItem(p, totals, policy, PickWorker(policy, totals.total_blocks));
        const int num_busy = NumBusyWorkers(p, policy, totals.total_blocks);
        const bool has_items = expected.begins[worker] < expected.begins[worker + 1];
        if (worker >= num_busy && has_items) Report(-1, /*is_end=*/true, {});
        break;
      }
    }
    CompareItems(first);
  }
};

// Grid (workers, entries), a warp each.
__global__ void FindAll(const __grid_constant__ ScheduleParams p,
                        const __grid_constant__ Expected expected, Mismatch* mismatch) {
  const Entry entry = static_cast<Entry>(blockIdx.y);
  const bool takes_fixed = entry == Entry::kSm80 || entry == Entry::kNarrow;
  if (p.num_splits > 0 && !takes_fixed) return;
  Search{p, expected, mismatch, entry, static_cast<int>(blockIdx.x)}.Run();
}

// A division that is wrong: CountParts(a, b), or FloorDiv(a, b) where is_floor.
struct WrongDivision {
  int found, a, b, got;
  bool is_floor;
};

__device__ void Expect(int expected, int got, int a, int b, bool is_floor, WrongDivision* wrong) {
  if (got != expected && atomicExch(&wrong->found, 1) == 0) *wrong = {1, a, b, got, is_floor};
}

// Grid (parts of the quotients, divisors): every multiple of the divisor, and its neighbours.
__global__ void DivideAll(const int* divisors, WrongDivision* wrong) {
  const int b = divisors[blockIdx.y];
  const int last = min(kMaxQuotient - 1, (INT_MAX - 1) / b - 1);  // a + b fits 32 bits
  for (int q = blockIdx.x * blockDim.x + threadIdx.x; q <= last; q += gridDim.x * blockDim.x) {
    for (int rest = q == 0 ? 0 : -1; rest <= 1; ++rest) {
      const int a = q * b + rest;
      const int floor = rest < 0 ? q - 1 : q + (rest == b ? 1 : 0);
      const int ceil = rest > 0 ? q + 1 : q - (rest == -b ? 1 : 0);
      Expect(ceil, CountParts(a, b), a, b, /*is_floor=*/false, wrong);
      if (floor < kMaxQuotient) {
        Expect(floor, FloorDiv(a, b), a, b, /*is_floor=*/true, wrong);
      }
    }
  }
}

bool DivisionsAreRight(Arena& arena) {
  std::vector<int> divisors;
  for (int b = 1; b <= kAllDivisors; ++b) divisors.push_back(b);
  for (int b = kAllDivisors; b <= 1 << 29; b *= 2) {
    for (int more : {-1, 1, b / 3, b / 2, b - 3}) divisors.push_back(b + more);
  }
  arena.Reset();
  WrongDivision wrong{};
  WrongDivision* device_wrong = arena.Copy(std::vector<WrongDivision>{wrong});
  const dim3 grid(16, static_cast<unsigned>(divisors.size()));
  DivideAll<<<grid, kThreads>>>(arena.Copy(divisors), device_wrong);
  Check(cudaGetLastError());
  Check(cudaMemcpy(&wrong, device_wrong, sizeof(wrong), cudaMemcpyDeviceToHost));
  if (!wrong.found) return true;
  std::printf("%s(%d, %d) is not %d\n", wrong.is_floor ? "FloorDiv" : "CountParts", wrong.a,
              wrong.b, wrong.got);
  return false;
}

// One random batch.
class Case {
 public:
  Case(Arena& arena, uint64_t seed) : rng_(seed) {
    arena.Reset();
    DrawLengths();
    const SplitPlan plan = MakeSplitPlan(DrawCall(), DrawOptions());
    host_ = device_ = plan.schedule;
    host_.seq_lens = lens_.data();
    device_.seq_lens = arena.Copy(lens_);
    Expect();
    expected_.items = arena.Copy(items_);
    expected_.begins = arena.Copy(begins_);
    mismatch_ = arena.Copy(std::vector<Mismatch>(1));
  }

  bool IsRight() {
    const dim3 grid(host_.num_workers, std::size(kEntries));
    FindAll<<<grid, kScheduleLanes>>>(device_, expected_, mismatch_);
    Check(cudaGetLastError());
    Mismatch mismatch;
    Check(cudaMemcpy(&mismatch, mismatch_, sizeof(mismatch), cudaMemcpyDeviceToHost));
    if (mismatch.found) Print(mismatch);
    return !mismatch.found;
  }

 private:
  int Below(int n) { return static_cast<int>(rng_() % n); }
  bool OneIn(int n) { return Below(n) == 0; }

  void DrawLengths() {
    // A sequence a lane, four a lane, and groups of 32: also right at the limits.
    constexpr int kLimits[] = {1, 31, 32, 33, 127, 128, 129, 160};
    const int batch = OneIn(4)   ? kLimits[Below(std::size(kLimits))]
                      : OneIn(2) ? 1 + Below(32)
                      : OneIn(2) ? 33 + Below(96)
                                 : 129 + Below(500);
    const int longest = OneIn(8) ? 100000 : OneIn(2) ? 5000 : 500;
    const bool are_equal = OneIn(3), are_skewed = OneIn(4);
    for (int i = 0; i < batch; ++i) {
      const int len = are_equal         ? longest - Below(80)
                      : are_skewed && i ? Below(longest / 30)
                      : OneIn(10)       ? 0
                      : OneIn(8)        ? (1 + Below(longest / 64)) * kScheduleBlock
                                        : Below(longest + 1);
      lens_.push_back(OneIn(200) ? (OneIn(2) ? INT_MIN : INT_MAX) : len);
    }
    std::shuffle(lens_.begin(), lens_.end(), rng_);
    max_seq_len_ = longest + Below(longest);
  }

  DecodeParams DrawCall() {
    DecodeParams call{};
    call.scratch_bytes = OneIn(8) ? 1 << 20 : int64_t{1} << 40;
    call.batch = static_cast<int32_t>(lens_.size());
    call.q_len = 1;
    call.num_heads = 1 + Below(160);
    call.d_ckv = 512;
    call.page_size = 1;
    call.max_pages_per_seq = call.max_seq_len = max_seq_len_;
    call.num_splits = OneIn(8) ? 1 + Below(70) : 0;
    return call;
  }

  SplitOptions DrawOptions() {
    return {.block_m = 8 << Below(4),
            .num_ctas = OneIn(2) ? 132 : 1 + Below(200),
            .seq_cost = Below(3),
            .max_single_blocks = kMaxSingleBlocks / (1 + Below(3)),
            .can_cluster = OneIn(2),
            .slack = {.blocks = Below(16), .shift = 2 + Below(6)}};
  }

  void Expect() {
    int32_t longest = 0;
    for (int seq = 0; seq < host_.batch; ++seq) {
      const int32_t blocks = MaxI32(NumBlocks(ClampedLen(host_, seq)), 1);
      expected_.total_blocks += blocks;
      longest = MaxI32(longest, blocks);
    }
    expected_.policy = ChoosePolicy(host_, expected_.total_blocks, longest);
    for (int worker = 0; worker < host_.num_workers; ++worker) {
      begins_.push_back(static_cast<int>(items_.size()));
      WorkIterator work = FindWorkHost(host_, worker);
      for (WorkItem item; work.Next(host_, &item);) items_.push_back(item);
    }
    begins_.push_back(static_cast<int>(items_.size()));
  }

  void Print(const Mismatch& m) const {
    const auto print = [](const char* name, const WorkItem& item) {
      std::printf("  %s: sequence %d of %d tokens, blocks [%d, %d), part %d of %d, slot base %d\n",
                  name, item.seq_idx, item.seq_len, item.block_begin, item.block_end, item.part_idx,
                  item.num_parts, item.slot_base);
    };
    std::printf("batch %d, workers %d, num_splits %d, blocks %d: %s, worker %d, ", host_.batch,
                host_.num_workers, host_.num_splits, expected_.total_blocks,
                kEntryNames[static_cast<int>(m.entry)], m.worker);
    if (m.item_idx < 0) {
      std::printf("wrong %s\n", m.is_end ? "number of busy workers" : "policy or total");
      return;
    }
    std::printf("%s %d of %d\n", m.what(), m.item_idx, m.num_expected);
    print("got", m.got);
    if (m.item_idx < m.num_expected) print("expected", items_[begins_[m.worker] + m.item_idx]);
  }

  std::mt19937_64 rng_;
  std::vector<int> lens_;
  int max_seq_len_ = 0;
  ScheduleParams host_, device_;
  std::vector<WorkItem> items_;
  std::vector<int> begins_;
  Expected expected_{};
  Mismatch* mismatch_;
};

}  // namespace

int main(int argc, char** argv) {
  const int num_cases = argc > 1 ? std::atoi(argv[1]) : 2000;
  const uint64_t first_seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  Arena arena;
  if (!DivisionsAreRight(arena)) return 1;
  for (int i = 0; i < num_cases; ++i) {
    if (Case(arena, first_seed + i).IsRight()) continue;
    std::printf("seed %llu\n", static_cast<unsigned long long>(first_seed + i));
    return 1;
  }
  std::printf("%d cases are right\n", num_cases);
  return 0;
}
