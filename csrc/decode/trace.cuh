// Roles and phases of the decode kernels in an in-kernel trace (gpu/trace.cuh).
#pragma once

#include <cstdint>
#include <iterator>

#include "gpu/trace.cuh"

namespace jax_mla::decode {

namespace trace = gpu::trace;

enum class TraceRole : uint16_t { kMath0, kMath1, kProducer, kHelper, kCombine, kCount };
inline constexpr const char* kTraceRoleNames[] = {"math 0", "math 1", "producer", "helper",
                                                  "combine"};
static_assert(std::size(kTraceRoleNames) == static_cast<int>(TraceRole::kCount), "name every role");

enum class Phase : uint32_t {
  kStart,      // set-up, and the wait for the kernel before this one
  kFindWork,   // the schedule: which part of which sequence
  kLookUp,     // page ids are looked up
  kSendItem,   // an item and its queries are sent to the math, once it has room for them
  kWaitStage,  // for a free stage of the KV ring
  kIssue,      // copies are issued
  kWaitItem,   // math: for an item and its queries
  kWaitKv,     // math: for the first chunk of a block
  kQk,         // scores are issued, chunk by chunk as they land
  kWaitMma,    // for the tensor cores
  kExchange,   // warpgroups exchange partial scores
  kSoftmax,    // mask, maximum, exponentials
  kStoreP,
  kConvert,   // codes become bf16, or queries codes
  kWaitTurn,  // for another warpgroup's scores, which go first
  kWaitP,     // for another warpgroup's P
  kPv,
  kWrite,        // a result or a partial result is written
  kWaitPartial,  // merge: for partial results
  kMerge,
  kCount
};
inline constexpr const char* kPhaseNames[] = {"start",
                                              "find work",
                                              "look up pages",
                                              "send item",
                                              "wait for stage",
                                              "issue",
                                              "wait item",
                                              "wait for KV",
                                              "QK",
                                              "wait for MMA",
                                              "exchange",
                                              "softmax",
                                              "store P",
                                              "convert",
                                              "wait for turn",
                                              "wait for P",
                                              "PV",
                                              "write",
                                              "wait partials",
                                              "merge"};
static_assert(std::size(kPhaseNames) == static_cast<int>(Phase::kCount), "name every phase");

}  // namespace jax_mla::decode
