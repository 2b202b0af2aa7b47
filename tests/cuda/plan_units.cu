// The plan of ragged calls (decode/ragged/plan_units.cuh) on random steps, valid and wild ones:
// every query row is in one unit and sees what its place says, every token has its place, workers
// visit every block of every unit exactly once, no two partial results share a slot, and where
// units are dealt out nobody has much more than on the line. Prints the first step that is wrong.
//
//   nvcc -std=c++20 -O3 -arch=native --expt-relaxed-constexpr -DJAX_MLA_WITH_CUDA -Icsrc
//     tests/cuda/plan_units.cu csrc/decode/ragged/plan.cu csrc/decode/schedule/*.cc csrc/gpu/*.cc
//   ./a.out 2000 [seed]
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arena.h"
#include "core/ragged.h"
#include "decode/ragged/plan.h"
#include "decode/schedule/plan.h"
#include "decode/schedule/unit_plan.h"

namespace {

using namespace jax_mla;                  // NOLINT: a program, not a header
using namespace jax_mla::decode;          // NOLINT
using namespace jax_mla::decode::stress;  // NOLINT

constexpr int kPageSize = 64;
constexpr int kDims = 8;  // of the rows, which the plan does not depend on

struct Step {
  int num_tokens, batch, num_heads, q_len, max_seq_len, num_workers, num_splits;
  int sliding_window;  // 0: none
  bool has_num_seqs;
  std::vector<int32_t> cu_q_lens, seq_lens;
  int32_t num_seqs;
};

int Draw(std::mt19937& rng, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(rng);
}

Step RandomStep(std::mt19937& rng) {
  Step s{};
  constexpr int kHeads[] = {1, 5, 16, 64, 96, 128};
  s.num_heads = kHeads[Draw(rng, 0, 5)];
  s.batch = Draw(rng, 0, 9) == 0 ? Draw(rng, 1000, 1500) : Draw(rng, 1, 80);
  const bool is_long = s.batch <= 80 && Draw(rng, 0, 15) == 0;  // more blocks than bins tell apart
  s.max_seq_len = 64 * Draw(rng, 1, is_long ? 20000 : Draw(rng, 0, 3) == 0 ? 2600 : 70);
  s.num_workers = Draw(rng, 1, 264);
  s.num_splits = Draw(rng, 0, 3) == 0 ? Draw(rng, 1, 8) : 0;
  const bool is_decode = Draw(rng, 0, 3) == 0, is_wild = Draw(rng, 0, 3) == 0;
  s.cu_q_lens = {is_wild ? Draw(rng, -3, 3) : 0};
  for (int b = 0; b < s.batch; ++b) {
    int q_len = is_decode ? 1 : Draw(rng, 0, 3) == 0 ? Draw(rng, 0, 300) : Draw(rng, 0, 2);
    if (is_wild && Draw(rng, 0, 5) == 0) q_len = Draw(rng, -200, 100000);
    s.cu_q_lens.push_back(s.cu_q_lens.back() + q_len);
    const int any = Draw(rng, 0, 20);
    s.seq_lens.push_back(any == 0   ? Draw(rng, -5, INT32_MAX)
                         : any == 1 ? Draw(rng, 0, 70)
                                    : Draw(rng, 0, s.max_seq_len));
  }
  const int most_tokens = s.batch > 80 ? 4000 : 1500;  // more units than shared memory holds
  s.num_tokens = std::clamp(s.cu_q_lens.back() + Draw(rng, -2, 5), 1, most_tokens);
  if (is_decode && Draw(rng, 0, 1) == 0) s.num_tokens = s.batch;
  s.has_num_seqs = Draw(rng, 0, 1) == 0;
  s.num_seqs = Draw(rng, 0, 4) == 0 ? Draw(rng, -3, s.batch + 3) : s.batch;
  if (Draw(rng, 0, 5) == 0) {  // the same number of tokens for all
    s.cu_q_lens.clear();
    s.q_len = s.batch > 80 ? 1 : Draw(rng, 1, 20);
    s.num_tokens = s.batch * s.q_len;
  }
  s.sliding_window = Draw(rng, 0, 2) == 0 ? Draw(rng, 1, Draw(rng, 1, s.max_seq_len)) : 0;
  return s;
}

// The plan, copied back.
struct Planned {
  std::vector<Unit> units;
  std::vector<int32_t> unit_lens;
  std::vector<TokenPlace> places;
  std::vector<WorkStart> starts;
  ScheduleParams schedule;
  int unit_rows;
};

Planned Run(const Step& s, Arena& arena) {
  const DecodeShape shape{.dtype = DType::kBf16,
                          .batch = s.batch,
                          .q_len = s.q_len,
                          .num_heads = s.num_heads,
                          .d_ckv = kDims,
                          .d_kpe = kDims,
                          .page_size = kPageSize,
                          .max_pages_per_seq = s.max_seq_len / kPageSize,
                          .max_seq_len = s.max_seq_len,
                          .num_splits = s.num_splits,
                          .sliding_window = s.sliding_window};
  const DecodeShape call = UnitCallShape(shape, s.num_tokens);
  const int64_t bytes = MakeUnitPlan(shape, s.num_tokens, nullptr).num_bytes;
  const UnitPlan plan = MakeUnitPlan(shape, s.num_tokens, arena.Take<uint8_t>(bytes));
  ScheduleParams schedule = MakeSchedule(
      call, {.block_m = std::min(call.num_heads, 64), .num_ctas = s.num_workers, .seq_cost = 2},
      INT32_MAX);
  schedule.seq_lens = plan.unit_lens;
  const ragged::PlanParams params{
      .tokens = {.seq_lens = arena.Copy(s.seq_lens),
                 .cu_q_lens = s.cu_q_lens.empty() ? nullptr : arena.Copy(s.cu_q_lens),
                 .num_seqs =
                     s.has_num_seqs ? arena.Copy(std::vector<int32_t>{s.num_seqs}) : nullptr,
                 .batch = s.batch,
                 .q_len = s.q_len,
                 .num_tokens = s.num_tokens},
      .num_heads = s.num_heads,
      .schedule = schedule,
      .unit_rows = call.num_heads,
      .max_units = call.batch,
      .plan = plan};
  if (s.sliding_window == kNoWindow) {
    Check(ragged::LaunchPlan(params, nullptr));
  } else {
    const ragged::WindowPlanParams with_window{params, s.sliding_window, kPageSize, s.max_seq_len};
    Check(ragged::LaunchPlan(with_window, nullptr));
  }
  Planned planned{.units = std::vector<Unit>(call.batch),
                  .unit_lens = std::vector<int32_t>(call.batch),
                  .places = std::vector<TokenPlace>(s.num_tokens),
                  .starts = std::vector<WorkStart>(schedule.num_workers),
                  .schedule = schedule,
                  .unit_rows = call.num_heads};
  const auto pull = [](auto& to, const auto* from) {
    Check(cudaMemcpy(to.data(), from, to.size() * sizeof(to[0]), cudaMemcpyDeviceToHost));
  };
  pull(planned.units, plan.units);
  pull(planned.unit_lens, plan.unit_lens);
  pull(planned.places, plan.places);
  pull(planned.starts, plan.starts);
  planned.schedule.seq_lens = nullptr;
  return planned;
}

// How many units there are: in automatic mode those that the rows need, and places behind them hold
// nothing that counts.
int NumUnits(const Step& s, int unit_rows, std::vector<TokenRange>& ranges) {
  const struct {
    const int32_t* cu_q_lens;
    int32_t q_len, num_tokens;
  } tokens{s.cu_q_lens.empty() ? nullptr : s.cu_q_lens.data(), s.q_len, s.num_tokens};
  TokenRanges find(tokens);
  const int present = s.has_num_seqs ? NumPresentSeqs(&s.num_seqs, s.batch) : s.batch;
  int num_units = 0;
  for (int b = 0; b < present; ++b) {
    ranges.push_back(find.Next());
    num_units += CeilDiv(ranges.back().size() * s.num_heads, unit_rows);
  }
  return num_units;
}

std::string CheckRows(const Step& s, const Planned& plan, int num_units,
                      const std::vector<TokenRange>& ranges) {
  // Of each row of the call: sequence, tokens that it sees.
  constexpr std::pair kNone(-1, 0);
  std::vector<std::pair<int, int>> rows(size_t(s.num_tokens) * s.num_heads, kNone);
  size_t num_rows = 0;
  for (int u = 0; u < num_units; ++u) {
    const Unit& unit = plan.units[u];
    if (unit.seq_len != plan.unit_lens[u]) return "a unit's length is not the schedule's";
    if (unit.num_rows < 1 || unit.num_rows > plan.unit_rows) return "number of rows";
    if (unit.seq_len > plan.schedule.max_seq_len) return "a unit longer than the call's bound";
    const int begin = unit.first_page * kPageSize, first = begin + unit.first_limit;
    const int unseen = s.sliding_window == kNoWindow ? 0 : std::max(first - s.sliding_window, 0);
    if (unit.first_page != unseen / kPageSize) return "where a unit's window begins";
    int most = 0;
    for (int r = 0; r < unit.num_rows; ++r) {
      const int sees = unit.first_limit + (unit.first_head + r) / s.num_heads;
      most = std::max(most, sees);
      const int row = unit.row_begin + r;
      if (row < 0 || row >= static_cast<int>(rows.size())) return "a row outside";
      if (rows[row] != kNone) return "a row twice";
      rows[row] = {unit.seq_idx, begin + sees};
      ++num_rows;
    }
    if (most != unit.seq_len) return "a unit does not end where its last row does";
  }
  size_t expected = 0;
  for (int b = 0; b < static_cast<int>(ranges.size()); ++b) {
    const int len = std::clamp(s.seq_lens[b], 0, s.max_seq_len);
    for (int t = ranges[b].begin; t < ranges[b].end; ++t) {
      for (int h = 0; h < s.num_heads; ++h, ++expected) {
        const int sees = TokenPosition(len, ranges[b].end, t) + 1;
        if (rows[t * s.num_heads + h] != std::pair(b, sees)) return "a row's sequence or limit";
      }
    }
  }
  return expected == num_rows ? "" : "rows that no sequence has";
}

std::string CheckPlaces(const Step& s, const Planned& plan, const std::vector<TokenRange>& ranges) {
  std::vector<std::pair<int, int>> expected(s.num_tokens, {kNoSequence, -1});
  for (int b = 0; b < static_cast<int>(ranges.size()); ++b) {
    const bool is_writable = IsWritable(s.seq_lens[b], s.max_seq_len);
    for (int t = ranges[b].begin; t < ranges[b].end; ++t) {
      expected[t] = {b, is_writable ? TokenPosition(s.seq_lens[b], ranges[b].end, t) : -1};
    }
  }
  for (int t = 0; t < s.num_tokens; ++t) {
    const TokenPlace& place = plan.places[t];
    if (std::pair(place.seq_idx, place.position) != expected[t]) return "a token's place";
  }
  return "";
}

// What a worker may have to do where units are dealt out.
int MostDealt(ScheduleParams schedule, const std::vector<int32_t>& lens, int num_units) {
  int total = 0, longest = 1;
  for (int u = 0; u < num_units; ++u) {
    total += CountedBlocks(lens[u]);
    longest = std::max(longest, CountedBlocks(lens[u]));
  }
  schedule.batch = num_units;
  schedule = AddQuotients(schedule);
  const int line = ChoosePolicy(schedule, total, longest).worker_cost;
  return line + schedule.slack.blocks + (line >> kDealShift);
}

bool IsSame(const Unit& a, const Unit& b) {
  return std::tie(a.seq_idx, a.row_begin, a.num_rows, a.first_limit, a.first_head, a.seq_len) ==
         std::tie(b.seq_idx, b.row_begin, b.num_rows, b.first_limit, b.first_head, b.seq_len);
}

std::string CheckWork(const Planned& plan, int num_units) {
  ScheduleParams schedule = plan.schedule;
  std::vector<int32_t> lens = plan.unit_lens;
  schedule.seq_lens = lens.data();
  const bool is_fixed = schedule.num_splits > 0;
  std::vector<std::vector<int>> visits(is_fixed ? lens.size() : num_units);
  for (size_t u = 0; u < visits.size(); ++u) visits[u].resize(CountedBlocks(lens[u]));
  std::set<int> slots;
  const int most_dealt = MostDealt(schedule, lens, num_units);
  const auto visit = [&](const WorkItem& item) -> std::string {
    if (item.seq_idx < 0 || item.seq_idx >= static_cast<int>(visits.size())) return "no such unit";
    auto& blocks = visits[item.seq_idx];
    const int end = std::max(item.block_end, item.block_begin + (NumBlocks(item.seq_len) == 0));
    if (item.block_begin < 0 || end > static_cast<int>(blocks.size())) return "blocks outside";
    for (int b = item.block_begin; b < end; ++b) ++blocks[b];
    if (item.is_final()) return "";
    const int num_slots =
        is_fixed ? schedule.batch * schedule.num_splits : 2 * schedule.num_workers;
    if (item.slot() < 0 || item.slot() >= num_slots) return "slot outside";
    return slots.insert(item.slot()).second ? "" : "a slot twice";
  };
  for (int worker = 0; worker < schedule.num_workers; ++worker) {
    const WorkStart& start = plan.starts[worker];
    WorkIterator work{{start.worker_cost, start.cost_step, start.may_cut != 0},
                      worker,
                      start.cursor,
                      start.seq_end};
    if (is_fixed) work = {{}, worker, worker, 0};
    const bool is_dealt = !is_fixed && start.worker_cost == kDealt;
    WorkItem item;
    if (is_dealt) {
      int cost = 0;
      for (int u = start.cursor; u < start.seq_end; ++u) {
        item = {u, lens[u], 0, NumBlocks(lens[u]), 0, 1, 0, false};
        cost += CountedBlocks(lens[u]) + schedule.seq_cost;
        if (std::string error = visit(item); !error.empty()) return error;
      }
      if (cost > most_dealt) return "a worker has too much";
      if (cost > 0 && !IsSame(start.first, plan.units[start.cursor])) return "another first unit";
    } else {
      while (work.Next(schedule, &item)) {
        if (std::string error = visit(item); !error.empty()) return error;
      }
    }
  }
  for (const auto& blocks : visits) {
    for (int count : blocks) {
      if (count != 1) return "a block " + std::to_string(count) + " times";
    }
  }
  return "";
}

}  // namespace

int main(int argc, char** argv) {
  const int num_steps = argc > 1 ? std::atoi(argv[1]) : 500;
  const int seed = argc > 2 ? std::atoi(argv[2]) : 1;
  Arena arena;
  int num_dealt = 0;
  for (int i = 0; i < num_steps; ++i) {
    std::mt19937 rng(seed * 1000003 + i);
    const Step step = RandomStep(rng);
    arena.Reset();
    const Planned plan = Run(step, arena);
    std::vector<TokenRange> ranges;
    const int num_units = NumUnits(step, plan.unit_rows, ranges);
    std::string error;
    if (num_units > static_cast<int>(plan.units.size())) error = "more units than places";
    if (error.empty()) error = CheckRows(step, plan, num_units, ranges);
    if (error.empty()) error = CheckPlaces(step, plan, ranges);
    if (error.empty()) error = CheckWork(plan, num_units);
    if (!error.empty()) {
      std::printf("FAIL step %d: %s (tokens %d, sequences %d, heads %d, units %d, splits %d)\n", i,
                  error.c_str(), step.num_tokens, step.batch, step.num_heads, num_units,
                  step.num_splits);
      return 1;
    }
    num_dealt += step.num_splits == 0 && plan.starts[0].worker_cost == kDealt;
  }
  std::printf("%d steps, of which %d are dealt out\n", num_steps, num_dealt);
  return 0;
}
