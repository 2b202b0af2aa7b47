// What a row goes through before it is written: the definitions are in
// jax_mla/ops/append/transforms.py.
#pragma once

#include <cstdint>

#include "append/cpu/row.h"

namespace jax_mla::append {

// Divides the row by its root mean square and multiplies it by `weight`. The result of each step is
// rounded to the row's type.
void NormRow(const Row& row, const float* weight, float eps, char* to);

// Rotates pairs of the row by the angles in a row of the table: width / 2 cosines, then as many
// sines. `to` may be the row itself.
void RotateRow(const Row& row, const float* cos_sin, bool interleaved, char* to);

}  // namespace jax_mla::append
