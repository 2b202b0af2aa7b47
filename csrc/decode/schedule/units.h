// Units: what the schedule's sequences are in a call whose sequences have different numbers of
// query tokens. The query rows of a sequence, token by token and head by head, are cut into units
// of equally many. Each unit goes through schedule, kernel and merge as a sequence of its own,
// which is as long as what its last query sees. So work is balanced for any mix, and a chunk of a
// prompt does not stream keys that none of its rows may see. A kernel that takes units
// (DecodeParams::units) gets num_heads = rows of a unit and q_len = 1. A kernel on the device makes
// them (ragged/plan_units.cuh).
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/divisor.h"

namespace jax_mla::decode {

// Row r of a unit, of num_rows, is row row_begin + r of the call, and sees
// first_limit + (first_head + r) / heads_per_token tokens of its sequence.
struct alignas(16) Unit {
  int32_t seq_idx;    // in page_table
  int32_t row_begin;  // token * heads_per_token + head
  int32_t num_rows;   // 0: there is no such unit
  int32_t first_limit;
  int32_t first_head;  // of the first row
  int32_t seq_len;     // what its last row sees: the length of the unit in the schedule
  // With a sliding window: where the unit's part of its sequence begins, in the page table. Its
  // tokens count from there.
  int32_t first_page;
  int32_t unused;
};

// worker_cost of a call whose units are dealt out whole: a worker has those from `cursor` to
// `seq_end`.
inline constexpr int32_t kDealt = 0;

// Where a worker starts in automatic mode: what a WorkIterator of schedule.h has, and its first
// unit. Padded, so that it is loaded 16 bytes at a time.
struct alignas(16) WorkStart {
  int32_t worker_cost, cost_step, may_cut;  // the policy
  int32_t worker_idx, cursor, seq_end;
  int32_t unused[2];
  Unit first;  // the unit at the cursor, if there is one: the worker begins with it
};

// What the kernels of a call of units are told besides. Device pointers.
struct UnitTable {
  const Unit* units;        // [batch]; null: the call has no units
  const WorkStart* starts;  // [workers of the schedule]
  const int32_t* num_busy;  // [1], workers that have work
  int32_t num_rows;         // query rows of the whole call
  int32_t heads_per_token;
};

// How a call is cut into units, from what the host knows.
struct UnitShape {
  int32_t rows;       // of a unit
  int32_t max_units;  // of the call
};

// With as many tokens as sequences a step most likely has one token a sequence: then a unit is a
// token, as in a uniform call. Otherwise it is as many whole row tiles as the heads of a token
// fill, so that these tiles stream a sequence together.
inline UnitShape MakeUnitShape(int32_t num_tokens, int32_t num_seqs, int32_t num_heads) {
  constexpr int32_t kTileRows = 64;
  const int32_t heads = std::max(num_heads, 1);  // a call without heads does nothing
  const int32_t rows = num_tokens == num_seqs ? heads : CeilDiv(heads, kTileRows) * kTileRows;
  const int64_t full_units = int64_t{num_tokens} * num_heads / rows;
  if (rows == heads) return {rows, num_tokens};
  return {rows, static_cast<int32_t>(full_units) + std::min(num_seqs, num_tokens)};
}

}  // namespace jax_mla::decode
