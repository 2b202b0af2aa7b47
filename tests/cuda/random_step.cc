// Checks random_step.h without a GPU: the places of tokens are those of core/ragged.h, which every
// platform uses, and the steps are of all kinds.
//
//   c++ -std=c++20 -Icsrc tests/cuda/random_step.cc && ./a.out 3000
#include "random_step.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "core/ragged.h"

namespace {

using namespace jax_mla;                  // NOLINT: a program, not a header
using namespace jax_mla::decode::stress;  // NOLINT

int NumPresent(const Step& s) {
  return NumPresentSeqs(s.has_num_seqs ? &s.num_seqs : nullptr, s.batch);
}

std::string CheckPlaces(const Step& s, const std::vector<PlannedToken>& places) {
  const struct {
    const int32_t* cu_q_lens;
    int32_t q_len, num_tokens;
  } tokens{s.cu_q_lens.empty() ? nullptr : s.cu_q_lens.data(), s.q_len, s.num_tokens};
  TokenRanges find(tokens);
  std::vector<TokenRange> ranges;
  for (int b = 0; b < NumPresent(s); ++b) ranges.push_back(find.Next());
  for (int t = 0; t < s.num_tokens; ++t) {
    const int seq =
        s.cu_q_lens.empty() ? t / s.q_len : SequenceOfToken(s.cu_q_lens.data(), NumPresent(s), t);
    if (places[t].seq != seq) return "sequence of token " + std::to_string(t);
    if (seq == kNoSequence) {
      if (places[t].place != -1 || places[t].is_written) return "a place of padding";
      continue;
    }
    const int place = TokenPosition(s.ClampedLength(seq), ranges[seq].end, t);
    if (places[t].place != std::max(place, -1)) return "place of token " + std::to_string(t);
    const bool is_written = place >= 0 && IsWritable(s.seq_lens[seq], s.max_seq_len);
    if (places[t].is_written != is_written) return "whether a token is written";
  }
  return "";
}

// What is written and what was there before are the whole sequence, and do not overlap.
std::string CheckOldLengths(const Step& s, const std::vector<PlannedToken>& places) {
  const std::vector<int> old = OldLengthsOf(s);
  std::vector<int> num_written(s.batch);
  for (const PlannedToken& place : places) {
    if (!place.is_written) continue;
    if (place.place < old[place.seq]) return "an old row is written";
    ++num_written[place.seq];
  }
  for (int b = 0; b < NumPresent(s); ++b) {
    if (old[b] + num_written[b] != s.ClampedLength(b)) return "old and new rows of a sequence";
  }
  return "";
}

std::string CheckLimits(const Step& s, const StepLimits& limits) {
  if (s.num_tokens < 1 || s.num_tokens > 2 * kMaxStepTokens) return "number of tokens";
  if (int64_t{s.num_tokens} * s.num_heads > 2 * kMaxStepRows) return "number of rows";
  int64_t total = 0;
  for (int b = 0; b < s.batch; ++b) {
    total += s.planned_lens[b];
    if (s.planned_lens[b] > s.max_pages_per_seq * s.page_size || s.planned_lens[b] > limits.longest)
      return "a length";
  }
  if (total > kMaxCachedTokens + kMaxStepTokens) return "number of cached tokens";
  if (s.is_wild) return "";
  for (int b = 0; b < s.num_present(); ++b) {
    if (s.seq_lens[b] != s.planned_lens[b]) return "a length of a valid step";
  }
  return "";
}

void Count(const Step& s, const std::vector<PlannedToken>& places,
           std::map<std::string, int>& kinds) {
  kinds["wild"] += s.is_wild;
  kinds["valid"] += !s.is_wild;
  kinds["without cu_q_lens"] += s.cu_q_lens.empty();
  kinds["units without cu_q_lens"] += s.q_len >= 512 && s.num_splits == 0 && !s.batch_invariant;
  kinds["as many tokens as sequences"] += s.q_len == 0 && s.num_tokens == s.batch;
  kinds["fewer sequences"] += s.num_present() < s.batch;
  kinds["no sequence"] += s.num_present() == 0;
  kinds["fixed splits"] += s.num_splits > 0;
  kinds["batch invariant"] += s.batch_invariant;
  kinds["128 heads"] += s.num_heads == 128;
  bool has_padding = false, has_no_place = false, is_not_written = false;
  for (const PlannedToken& place : places) {
    has_padding |= place.seq == -1;
    has_no_place |= place.seq >= 0 && place.place < 0;
    is_not_written |= place.place >= 0 && !place.is_written;
  }
  kinds["padding"] += has_padding;
  kinds["tokens without a place"] += has_no_place;
  kinds["rows that are not written"] += is_not_written;
}

}  // namespace

int main(int argc, char** argv) {
  const int num_steps = argc > 1 ? std::atoi(argv[1]) : 3000;
  const StepLimits all_limits[] = {{}, {.prefers_few = true}, {.longest = 100}};
  std::map<std::string, int> kinds;
  for (int i = 0; i < num_steps; ++i) {
    Draw draw(i);
    const StepLimits& limits = all_limits[i % 3];
    const Step step = DrawStep(draw, limits);
    const std::vector<PlannedToken> places = PlacesOf(step);
    std::string error = CheckPlaces(step, places);
    if (error.empty()) error = CheckOldLengths(step, places);
    if (error.empty()) error = CheckLimits(step, limits);
    if (!error.empty()) {
      std::printf("FAIL step %d: %s\n", i, error.c_str());
      return 1;
    }
    Count(step, places, kinds);
  }
  bool has_all = true;
  for (const auto& [kind, count] : kinds) {
    std::printf("%6d %s\n", count, kind.c_str());
    has_all = has_all && count >= num_steps / 200;
  }
  if (!has_all) std::printf("FAIL: too few steps of some kind\n");
  return has_all ? 0 : 1;
}
