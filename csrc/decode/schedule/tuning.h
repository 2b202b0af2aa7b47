// Constants that decide how any CUDA backend splits a call and merges its parts. They were measured
// on an H200, where a comment does not say otherwise. "log" is docs/kernels/decode_sm90_log.md.
#pragma once

#include <cstdint>

namespace jax_mla::decode {

// Up to how many blocks a call may have parts of a single one. With more, one block each on very
// many workers is slower than two on half of them: more partials to merge for the same latency
// (1 x 8192: 11.2 -> 10.3 us).
inline constexpr int32_t kMaxSingleBlocks = 66;

// Where lengths differ, the workers of the longest sequence stream on alone at the end. So whole
// sequences may cost 2^-4 of a worker's blocks there, whatever the backend's slack.
inline constexpr int32_t kUnequalShift = 4;

// CTAs of the combine kernel for each worker with a fixed number of parts: one, and one more for
// every 8 rows. By the rows alone: what a batch-invariant call launches may not depend on anything
// else.
inline constexpr int32_t kRowsPerSlice = 8;
inline constexpr int32_t kMaxSlices = 8;

// In automatic mode a small call is spread over as many CTAs as a large one: where sequences are
// likely to be split, kSlices for each worker and one more for every 16 rows. Fewer work in serial
// rounds, more start late. Best of 1 to 8 (log). Where nothing is split every slice is waste.
inline constexpr int32_t kMinWorkers = 132;
inline constexpr int32_t kSlices = 4;
inline constexpr int32_t kRowsPerSplitSlice = 16;

// CTAs of the combine kernel that start late: what one round takes. 8 x 4096 at 64 heads, which one
// round of 512 serves: 264 CTAs 19.0 us, 396 18.8, 528 18.6, 660 19.7 ("Merging").
inline constexpr int32_t kMaxLateCtas = 528;

// The same behind query codes and two teams: with up to so many workers for each sequence a lane
// takes 4 parts at once, with more 8, and with more than kMaxLateParts 16. 64 heads, queries in
// e4m3, us, a lane with 4, 8 and 16 parts: 32 x 4096 (4 workers) 33.4, 33.9, -; 24 x 4096
// (5) 30.9, 28.9, -; 8 x 1024 (16) 11.7, 11.3, 12.4; 4 x 4096 (33) 15.1, 13.2, 13.6; 2 x 8192
// (66) 18.3, 14.4, 13.9 (log, "Late merges of packed rows").
inline constexpr int32_t kMaxFewLateParts = 4, kMaxLateParts = 40;

// A ragged call's units are dealt out whole if the busiest worker then has at most so much more
// than on the line: the backend's Slack::blocks, and 2^-kDealShift. With 4, 64 x 4096 and four
// chunks of 64 behind 16384 at 64 heads take 1155 us instead of 1010, and no step gains more than
// 3 % (docs/kernels/ragged.md).
inline constexpr int32_t kDealShift = 3;

// A uniform call whose sequences have so many query tokens, or more, is one of units too, because
// the first rows of a prompt see much less than the last. Chosen, not measured.
inline constexpr int32_t kMinUnitQLen = 512;

}  // namespace jax_mla::decode
