// Random numbers for the cases of a stress, and values that no call should crash on. Plain C++.
#pragma once

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "decode/schedule/schedule.h"

namespace jax_mla::decode::stress {

inline constexpr int kPageSizes[] = {1,  2,  4,  7,  8,  8,   16,  16, 20,
                                     24, 32, 64, 64, 96, 100, 128, 256};
inline constexpr int kWildIds[] = {INT_MAX - 100, -1, INT_MIN};
inline constexpr int kWildLengths[] = {INT_MIN, -1, 1 << 20, INT_MAX};
inline constexpr int kWildLayers[] = {INT_MIN, -1, 1 << 30, INT_MAX};

class Draw {
 public:
  explicit Draw(uint64_t seed) : rng_(seed) {}
  int Below(int n) { return static_cast<int>(rng_() % n); }
  bool OneIn(int n) { return Below(n) == 0; }
  template <size_t kSize>
  int Of(const int (&values)[kSize]) {
    return values[Below(kSize)];
  }
  std::mt19937_64& rng() { return rng_; }

 private:
  std::mt19937_64 rng_;
};

// The global ids of a pool's pages.
struct PageIds {
  int num_pages, begin;

  int Id(int page) const { return static_cast<int>(int64_t{begin} + page); }
  // An id that the pool does not have.
  int Wild(Draw& draw) const {
    for (;;) {
      const int id = draw.Of(kWildIds);
      const int64_t page = int64_t{id} - begin;
      if (page < 0 || page >= num_pages) return id;
    }
  }
};

// Global id of a pool's page 0. Near INT_MAX, the ids of the last pages wrap: as 64-bit numbers,
// which they are, these are far from the pool, and modulo 2^32 they are pages of it.
inline PageIds DrawPageIds(Draw& draw, int num_pages) {
  switch (draw.Below(16)) {
    case 0:
      return {num_pages, INT_MAX - draw.Below(num_pages)};
    case 1:
      return {num_pages, INT_MIN + draw.Below(100)};
    case 2:
      return {num_pages, -1 - draw.Below(100)};
    default:
      return {num_pages, draw.Below(2) ? 0 : draw.Below(100)};
  }
}

// A page table [lens.size(), columns]. The pages of a sequence up to its length are its own; in
// some tables a few of them are wild, in others long spans of them. All behind them are wild.
inline std::vector<int> DrawPageTable(Draw& draw, const PageIds& ids, const std::vector<int>& lens,
                                      int columns, int page_size) {
  std::vector<int> order(ids.num_pages), table(lens.size() * columns);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), draw.rng());
  const int wild_percent = draw.Below(3) ? 0 : 30;
  const bool has_spans = draw.OneIn(8);
  int span_left = 0;  // pages until the next span begins or ends
  bool is_in_span = true;
  for (size_t i = 0, next = 0; i < table.size(); ++i) {
    const int seq = i / columns, index = i % columns;
    if (has_spans && span_left-- == 0) {
      is_in_span = !is_in_span;
      span_left = draw.Below(40 * kScheduleBlock / page_size + 1);
    }
    const bool is_wild = has_spans ? is_in_span : draw.Below(100) < wild_percent;
    const bool is_used = index * page_size < lens[seq] && !is_wild;
    table[i] = is_used ? ids.Id(order[next++]) : ids.Wild(draw);
  }
  return table;
}

// Now and then a layer that the pool does not have: then no key is there.
inline int DrawLayer(Draw& draw, int num_layers) {
  if (!draw.OneIn(16)) return draw.Below(num_layers);
  return draw.OneIn(4) ? num_layers : draw.Of(kWildLayers);
}

}  // namespace jax_mla::decode::stress
