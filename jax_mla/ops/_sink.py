"""Attention sinks: one score per head that takes weight from the keys and has no value.

With a sink, the softmax of a row has one more term exp(sink), which adds nothing to `out`:

    out = out * exp(lse) / (exp(lse) + exp(sink))

`lse` is that of the keys alone, before and after, so that partial results can still be merged.
This is FlashMLA's definition.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jax_mla import _primitive
from jax_mla.ops import _checks


def check(op: str, sink: Any, num_heads: Any) -> jax.Array | None:
    """Return the argument `sink` as an array [num_heads] of float32; None for None.

    A derivative with respect to it is refused, because the ops have none.
    """
    if sink is None:
        return None
    sink = _checks.array(op, "sink", sink)
    _checks.shape(op, "sink", sink, (num_heads,), ", one number for each head")
    _checks.dtype(op, "sink", sink, ("float32",))
    return _primitive.without_derivative(op, sink)


def apply(out: jax.Array, lse: jax.Array, sink: jax.Array | None) -> jax.Array:
    """Return `out` with the weight of the sinks taken away.

    Args:
      out: [*rows, num_heads, d].
      lse: [*rows, num_heads] float32.
      sink: [num_heads] float32, infinities included; None for none.
    """
    if sink is None:
        return out
    sink = _sharded_like(sink, lse)
    sink = jnp.expand_dims(sink, range(lse.ndim - 1))
    # Minus infinity takes nothing, also from a row without keys, whose lse is minus infinity too.
    is_none = sink == -jnp.inf
    kept = jnp.where(is_none, 1.0, jax.nn.sigmoid(lse - jnp.where(is_none, 0.0, sink)))
    return (out.astype(jnp.float32) * kept[..., None]).astype(out.dtype)


def _sharded_like(sink: jax.Array, lse: jax.Array) -> jax.Array:
    """Return the sinks sharded over the Explicit axes of the heads."""
    own, heads = jax.typeof(sink).sharding, jax.typeof(lse).sharding.spec[-1]
    if not any(own.spec) or own.spec[0] == heads:
        return sink
    return jax.sharding.reshard(sink, NamedSharding(own.mesh, PartitionSpec(heads)))
