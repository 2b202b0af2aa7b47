// Random engine steps, valid and wild ones, and where their tokens belong by the words of
// ragged_paged_attention's documentation. Plain C++: random_step.cc checks it without a GPU.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <vector>

#include "draw.h"

namespace jax_mla::decode::stress {

inline constexpr int kMaxStepTokens = 1500;
inline constexpr int kMaxStepRows = 1 << 16;        // tokens times heads
inline constexpr int kMaxCachedTokens = 32 * 1024;  // of all sequences

struct StepLimits {
  int longest = INT_MAX;     // sequence
  bool prefers_few = false;  // heads
};

struct Step {
  // Static sizes.
  int batch, num_tokens, num_heads;
  int q_len;  // 0 with cu_q_lens
  int page_size, max_pages_per_seq;
  int max_seq_len;  // bound of the lengths, at most what the page table has places for
  int num_splits;
  bool batch_invariant;

  // What lies on the device.
  std::vector<int> seq_lens;
  std::vector<int> cu_q_lens;  // empty: every sequence has q_len tokens
  bool has_num_seqs;
  int num_seqs;

  bool is_wild;
  std::vector<int> planned_lens;  // the lengths that the pool has pages for

  int num_present() const { return has_num_seqs ? std::clamp(num_seqs, 0, batch) : batch; }
  int ClampedLength(int seq) const { return std::clamp(seq_lens[seq], 0, max_seq_len); }
  // A length outside the table is a mistake, and nothing says where its new rows should go.
  bool IsWritten(int seq) const { return seq_lens[seq] >= 0 && seq_lens[seq] <= max_seq_len; }
};

// Where the tokens of the present sequences begin and end: [present + 1]. The tokens of sequence b
// end at the largest of cu_q_lens[0] to cu_q_lens[b + 1], clipped to the tokens that there are.
inline std::vector<int> BoundsOf(const Step& step) {
  std::vector<int> bounds(step.num_present() + 1);
  int largest = INT_MIN;
  for (int j = 0; j < static_cast<int>(bounds.size()); ++j) {
    largest = std::max(largest, step.cu_q_lens.empty() ? j * step.q_len : step.cu_q_lens[j]);
    bounds[j] = std::clamp(largest, 0, step.num_tokens);
  }
  return bounds;
}

// A token's sequence and its place there. Padding has no sequence, and the token of a sequence that
// is shorter than its tokens may have no place: -1.
struct PlannedToken {
  int seq = -1;
  int place = -1;
  bool is_written = false;  // if its page is in the pool
};

inline std::vector<PlannedToken> PlacesOf(const Step& step) {
  std::vector<PlannedToken> places(step.num_tokens);
  const std::vector<int> bounds = BoundsOf(step);
  for (int seq = 0; seq + 1 < static_cast<int>(bounds.size()); ++seq) {
    const int end = bounds[seq + 1];
    for (int token = bounds[seq]; token < end; ++token) {
      const int place = std::max(step.ClampedLength(seq) - (end - token), -1);
      places[token] = {seq, place, place >= 0 && step.IsWritten(seq)};
    }
  }
  return places;
}

// How many tokens of each sequence are in the cache before the step: all that are not written.
inline std::vector<int> OldLengthsOf(const Step& step) {
  std::vector<int> lengths(step.batch);
  const std::vector<int> bounds = BoundsOf(step);
  for (int seq = 0; seq + 1 < static_cast<int>(bounds.size()); ++seq) {
    const int num_new = step.IsWritten(seq) ? bounds[seq + 1] - bounds[seq] : 0;
    lengths[seq] = std::max(step.ClampedLength(seq) - num_new, 0);
  }
  return lengths;
}

namespace internal {

// Numbers of new tokens, one for each sequence.
inline std::vector<int> DrawNewTokens(Draw& draw, Step& step, const StepLimits& limits) {
  const int most = std::max(std::min(kMaxStepTokens, kMaxStepRows / step.num_heads), 1);
  const auto chunk = [&] { return 10 + draw.Below(draw.OneIn(3) ? 500 : 100); };
  const auto few = [&] { return 2 + draw.Below(8); };
  std::vector<int> new_tokens;
  if (draw.OneIn(4)) {  // the same number for all
    int q_len = draw.OneIn(2) ? 1 : draw.OneIn(2) ? 512 + few() : draw.OneIn(2) ? few() : chunk();
    q_len = std::min({q_len, most, limits.longest});
    step.batch = std::clamp(most / q_len, 1, step.batch);
    step.q_len = q_len;
    return std::vector<int>(step.batch, q_len);
  }
  const bool is_decode = draw.OneIn(4);
  for (int seq = 0, total = 0; seq < step.batch; ++seq) {
    const int kind = draw.Below(12);
    int q_len = is_decode ? kind > 0 : kind < 2 ? 0 : kind < 7 ? 1 : kind < 10 ? few() : chunk();
    q_len = std::min({q_len, most - total, limits.longest});
    total += q_len;
    new_tokens.push_back(q_len);
  }
  return new_tokens;
}

inline void DrawLengths(Draw& draw, Step& step, const StepLimits& limits,
                        const std::vector<int>& new_tokens) {
  const int scale = draw.OneIn(4) ? 4000 : draw.OneIn(3) ? 1500 : draw.OneIn(2) ? 400 : 70;
  const bool are_equal = draw.OneIn(4);  // about: then units may be dealt out
  int longest = 0, room = kMaxCachedTokens;
  for (int q_len : new_tokens) {
    int cached = draw.OneIn(5) ? 0
                 : are_equal   ? std::max(scale - draw.Below(80), 0)
                               : draw.Below(scale + 1);
    cached = std::max(std::min({cached, room, limits.longest - q_len}), 0);
    room -= cached;
    step.planned_lens.push_back(cached + q_len);
    longest = std::max(longest, cached + q_len);
  }
  step.seq_lens = step.planned_lens;
  step.max_pages_per_seq = (longest + step.page_size - 1) / step.page_size + 1 + draw.Below(3);
  step.max_seq_len = step.max_pages_per_seq * step.page_size;
  if (draw.OneIn(6)) step.max_seq_len = 1 + draw.Below(step.max_seq_len);
}

inline void DrawBounds(Draw& draw, Step& step, const std::vector<int>& new_tokens) {
  step.cu_q_lens = {0};
  for (int q_len : new_tokens) step.cu_q_lens.push_back(step.cu_q_lens.back() + q_len);
  const int total = step.cu_q_lens.back();
  const bool fits_batch = total <= step.batch && !draw.OneIn(3);  // as when all decode
  const int padding = draw.OneIn(2) ? 0 : draw.Below(total / 4 + 6);
  step.num_tokens = fits_batch ? step.batch : std::max(total + padding, 1);
  step.has_num_seqs = !draw.OneIn(4);
  step.num_seqs = draw.OneIn(3) ? draw.Below(step.batch + 1) : step.batch;
  // Nobody reads what lies behind the present sequences. If it looks right, a kernel that does read
  // it is found out.
  if (!step.has_num_seqs || draw.OneIn(2)) return;
  for (int seq = step.num_seqs; seq < step.batch; ++seq) {
    step.cu_q_lens[seq + 1] = draw.OneIn(2) ? draw.Of(kWildLengths) : draw.Below(step.num_tokens);
    step.seq_lens[seq] = draw.OneIn(2) ? draw.Of(kWildLengths) : step.seq_lens[seq];
  }
}

inline int WildBound(Draw& draw, const Step& step, int bound) {
  switch (draw.Below(5)) {
    case 0:
      return draw.Of(kWildLengths);
    case 1:
      return -1 - draw.Below(1000);
    case 2:
      return step.num_tokens + draw.Below(100000);
    case 3:
      return draw.Below(step.num_tokens + 1);
    default:
      return static_cast<int>(std::clamp<int64_t>(int64_t{bound} + draw.Below(601) - 300,  //
                                                  INT_MIN, INT_MAX));
  }
}

inline void MakeWild(Draw& draw, Step& step) {
  constexpr int kWildNumSeqs[] = {INT_MIN, -1, INT_MAX};
  const bool has_bounds = !step.cu_q_lens.empty();
  const int percent = draw.OneIn(2) ? 40 : 5;
  for (int& bound : step.cu_q_lens) {
    if (draw.Below(100) < percent) bound = WildBound(draw, step, bound);
  }
  if (has_bounds && draw.OneIn(4)) {
    step.has_num_seqs = true;
    step.num_seqs = draw.OneIn(2) ? step.batch + 1 + draw.Below(5) : draw.Of(kWildNumSeqs);
  }
  for (int& len : step.seq_lens) {
    if (draw.Below(100) >= percent) continue;
    len = draw.OneIn(3)   ? draw.Of(kWildLengths)
          : draw.OneIn(2) ? step.max_seq_len + draw.Below(2)
                          : draw.Below(20);  // often shorter than the sequence's tokens
  }
}

}  // namespace internal

inline Step DrawStep(Draw& draw, const StepLimits& limits) {
  constexpr int kHeads[] = {1, 2, 5, 8, 16, 16, 20, 32, 64, 64, 96, 100, 128, 128};
  Step step{};
  const bool has_few = limits.prefers_few ? !draw.OneIn(6) : draw.OneIn(4);
  step.num_heads = has_few         ? 1 + draw.Below(16)
                   : draw.OneIn(4) ? 1 + draw.Below(128)
                                   : draw.Of(kHeads);
  step.batch = draw.OneIn(3) ? 13 + draw.Below(68) : 1 + draw.Below(12);
  step.page_size = draw.Of(kPageSizes);
  step.num_splits = draw.Below(3) ? 0 : 1 + draw.Below(8);
  step.batch_invariant = draw.OneIn(6);
  const std::vector<int> new_tokens = internal::DrawNewTokens(draw, step, limits);
  internal::DrawLengths(draw, step, limits, new_tokens);
  if (step.q_len > 0) {
    step.num_tokens = step.batch * step.q_len;
  } else {
    internal::DrawBounds(draw, step, new_tokens);
  }
  step.is_wild = draw.OneIn(4);
  if (step.is_wild) internal::MakeWild(draw, step);
  return step;
}

}  // namespace jax_mla::decode::stress
