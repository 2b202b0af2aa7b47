"""The local side of a sharded call: what one device runs on its blocks and communicates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_mla._mesh._sharding import PAGES, Axes, Plan
from jax_mla._op import Call


def run_local(
    call: Call,
    plan: Plan,
    local: Callable[[Any, Any], list[jax.Array]],
    blocks: Sequence[jax.Array],
) -> list[jax.Array]:
    """Run a call on this device's blocks, and merge the results if they are partial.

    Args:
      call: the call.
      plan: how it is split.
      local: (operands, params) -> results; runs it on one device's blocks of the operands, which
        are the op's NamedTuple.
      blocks: this device's blocks of the operands, flat.

    Returns:
      This device's blocks of the results.
    """
    op, operands = call.op, call.unflatten(blocks)
    if plan.pages:
        owned = call.layout(jax.tree.leaves(operands)).sizes[PAGES]
        begin = (lax.axis_index(plan.pages) * owned).astype(jnp.int32)
        operands = operands._replace(page_begin=operands.page_begin + begin)
    if plan.rows and op.take_rows is not None:
        operands = op.take_rows(operands, call.params, plan.rows)
    if plan.pages and op.keep_owned is not None:
        operands = op.keep_owned(operands, call.params)
    if plan.pages and op.parts is not None:
        found = local(operands, op.parts.params(call.params))
        return op.parts.merge(found, operands, call.params, plan.pages)
    results = local(operands, call.params)
    if not plan.merge:
        return results
    out, lse, *pools = results
    merged = merge_over_axes(out, lse, plan.pages, restore=plan.restore)
    return [*merged, *pools]


def merge_over_axes(
    out: jax.Array,
    lse: jax.Array,
    axes: Axes,
    *,
    restore: Sequence[tuple[int, Axes]] = (),
) -> tuple[jax.Array, jax.Array]:
    """Merge partial results over mesh axes by log-sum-exp: one max and one sum reduction.

    Args:
      out: [..., d_ckv], this device's partial result; 0 where it owns no key.
      lse: [...], its log-sum-exp; -inf where it owns no key.
      axes: mesh axes over which to merge.
      restore: (dimension, axes) pairs: return only this device's part along that dimension.

    Returns:
      The merged (out, lse), dtypes kept.
    """
    # Each device writes its lse into its own slot, and the maximum fills in the other slots. So
    # every device knows all weights before the sum: no weights travel with the values, and nothing
    # is divided afterwards. 128 rows of 512 float32 values are the 262,144 bytes up to which
    # XLA:GPU sums in one round.
    own_slot = jnp.arange(lax.axis_size(axes), dtype=jnp.int32) == lax.axis_index(axes)
    # A maximum may drop NaNs but not inf. The sum below turns the inf into NaN again.
    known = jnp.where(jnp.isnan(lse), jnp.inf, lse)
    slots = jnp.where(own_slot.reshape(-1, *(1,) * lse.ndim), known[None], -jnp.inf)
    # Unstacked, because XLA:GPU would make a kernel of each reduction over the slots.
    parts = jnp.unstack(_fill_slots(slots, axes))
    peak = lax.stop_gradient(functools.reduce(jnp.maximum, parts))
    safe_peak = jnp.where(peak == -jnp.inf, 0, peak)
    total = sum(jnp.exp(part - safe_peak) for part in parts)
    empty = total == 0
    safe_total = jnp.where(empty, 1, total)
    weight = jnp.exp(lse - safe_peak) / safe_total
    merged_lse = jnp.where(empty, -jnp.inf, safe_peak + jnp.log(safe_total))
    merged = out.astype(jnp.float32) * weight[..., None]
    if len(restore) == 1 and restore[0][1] == axes and len(axes) == 1:
        # Each device keeps one part of the sum: half the bytes of an all-reduce.
        merged = lax.psum_scatter(merged, axes, scatter_dimension=restore[0][0], tiled=True)
    else:
        merged = lax.psum(merged, axes)
        for dim, own in restore:
            merged = _own_part(merged, dim, own)
    for dim, own in restore:
        merged_lse = _own_part(merged_lse, dim, own)
    return merged.astype(out.dtype), merged_lse


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _fill_slots(slots: jax.Array, axes: Axes) -> jax.Array:
    """Return the slots of all devices: their maximum, because a device has -inf in other slots.

    JAX has no derivative for a maximum over devices. Here it is the sum of their tangents.
    """
    return lax.pmax(slots, axes)


@_fill_slots.defjvp
def _fill_slots_jvp(axes: Axes, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (slots,), (tangent,) = primals, tangents
    return _fill_slots(slots, axes), lax.psum(tangent, axes)


def _own_part(x: jax.Array, dim: int, axes: Axes) -> jax.Array:
    size = x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)
