// A ragged call as a call of units, and the scratch that it takes. Plain C++: the scratch is sized
// when a call is lowered, possibly on a machine without a GPU.
#pragma once

#include <cstdint>

#include "core/ragged.h"
#include "decode/params.h"
#include "decode/schedule/units.h"

namespace jax_mla::decode {

// A sequence's tokens of the step, and its first unit. 16 bytes, which one load takes.
struct alignas(16) PlannedSequence {
  int32_t q_begin;
  int32_t q_len;
  int32_t first_unit;
  int32_t seq_len;  // as given
};

// Where the arrays of a plan lie: device pointers.
struct UnitPlan {
  Unit* units;                 // [max_units]
  int32_t* unit_lens;          // [max_units]
  WorkStart* starts;           // [kMaxUnitWorkers]
  int32_t* num_busy;           // [1]
  TokenPlace* places;          // [num_tokens]
  PlannedSequence* sequences;  // [num_seqs]
  int32_t* cost_ends;          // [max_units], where units end on the line
  int32_t* ranked;             // [max_units], units by length
  int64_t num_bytes;
};

// Workers that the plan has room for: more than any GPU has SMs.
inline constexpr int32_t kMaxUnitWorkers = 1024;

// Whether a call with this shape is one of units: if its sequences may have different numbers of
// tokens (q_len 0), or if they are chunks of prompts, whose first rows see much less than the last.
bool HasUnits(const DecodeShape& step);

// The call of units that a step becomes. In `step`, batch counts sequences.
DecodeShape UnitCallShape(const DecodeShape& step, int32_t num_tokens);

// Its plan at `plan`. With null, only the size means something.
UnitPlan MakeUnitPlan(const DecodeShape& step, int32_t num_tokens, void* plan);

// Bytes of the plan of a step, or 0 if it does not become a call of units.
int64_t UnitPlanBytes(const DecodeShape& step, int32_t num_tokens);

// Bytes of scratch that a step may need besides, whatever backend and GPU run it.
int64_t RaggedScratchBytes(const DecodeShape& step, int32_t num_tokens);

// Bytes that the queries of a step take once they are rotated, rounded up. On CUDA they lie in
// front of that scratch.
int64_t RotatedQueryBytes(const DecodeShape& step, int32_t num_tokens);

}  // namespace jax_mla::decode
