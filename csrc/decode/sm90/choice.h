// Which of Hopper's kernels a call runs on, and with how many rows a tile. What is chosen may have
// no kernel (kernels.h).
#pragma once

#include <cstdint>
#include <string_view>

#include "decode/params.h"
#include "decode/sm90/kernel_key.h"

namespace jax_mla::decode::sm90 {

// What backend="sm90:name" asks for. A tile is repeated until the tiles hold all rows.
struct Variant {
  std::string_view name;
  KernelKind kernel;
  int32_t tile_rows;  // 0: what the rows say, by any kernel but the wide one
  int32_t num_teams;
};

// Null: there is none of this name.
const Variant* FindVariant(std::string_view name);

// The kernel for a call, from what the host knows. `variant`: what is asked for, or null.
// `has_units`: the call is one of units (schedule/units.h).
KernelKey ChooseKernel(const DecodeShape& shape, const Variant* variant, bool has_units,
                       int32_t num_sms);

struct Tiling {
  KernelKind kernel;
  int32_t tile_rows;
  int32_t num_teams = 1;  // of the narrow kernel: with 16 rows also 2 (HasTeams)
};

// By the number of rows alone: a result that may not depend on the batch needs a kernel that does
// not.
Tiling TilingByRows(int32_t rows);

// The same for caches of codes, which have tiles of kLargeTileRows rows of kernels of their own.
// Pages decide as well: where codes are gathered, fewer tiles have a kernel.
Tiling CodesTilingByRows(const DecodeShape& shape);

// With codes, for a call whose batch may decide. Little work goes to the narrow kernel's tiles of 8
// or 16 rows, repeated until they hold all rows, because it starts and merges soonest. Whether the
// call has new rows does not count, so that a step has the bits of `append` and `decode`.
Tiling ChooseCodesTiling(const DecodeShape& shape, int32_t num_sms);

// Whether tiles of kLargeTileRows rows have query codes (codes64/). Scores are then summed with 13
// bits (docs/numerics.md).
bool HasQueryCodes(const DecodeShape& shape);

// Whether the narrow kernel has two teams for the cache of a call. `has_units`: of units.
bool HasTeams(const DecodeShape& shape, bool has_units);

// How many it takes, by the work that there may be.
int32_t ChooseNumTeams(const DecodeShape& shape, bool has_units, int32_t num_sms);

// The kernel that takes least time by the model, from what the host knows: the batch, the bound
// of the lengths, the rows, the number of SMs.
Tiling ChooseTiling(const DecodeShape& shape, int32_t num_sms);

}  // namespace jax_mla::decode::sm90
