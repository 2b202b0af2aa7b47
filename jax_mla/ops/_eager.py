"""Calls outside `jit`: the array operations of an op run as one compiled function.

Called one by one outside `jit`, the operations around a custom call would each cost a dispatch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding

Index = int | jax.Array | None
INT32 = np.iinfo(np.int32)


def is_eager(*operands: Any) -> bool:
    """Return whether no operand is traced."""
    return not any(isinstance(x, Tracer) for x in operands)


def place_index(x: Index, pool: jax.Array) -> Index:
    """Return an index of an eager call as an array beside the pool; None stays None."""
    return _index_array(x, pool.sharding, pool.committed) if isinstance(x, int) else x


def index_operand(x: Index, others: Sequence[jax.Array]) -> jax.Array:
    """Return an index as the operand that primitives take, int32 [1]; None is 0.

    An index that does not fit 32 bits is clipped, so that it stays outside the pool.

    Args:
      x: the index.
      others: the call's other operands, a pool last.
    """
    if x is None or isinstance(x, int):
        x = min(max(x or 0, INT32.min), INT32.max)
        if is_eager(*others):
            return _index_array(x, others[-1].sharding, others[-1].committed)
        return jnp.full((1,), x, jnp.int32)
    if x.dtype.itemsize > 4:
        x = jnp.clip(x, INT32.min, INT32.max)
    return jnp.reshape(x.astype(jnp.int32), (1,))


@functools.lru_cache(maxsize=1024)
def _index_array(x: int, sharding: Sharding, is_committed: bool) -> jax.Array:
    """Make the array by an explicit transfer, which `jax.transfer_guard("disallow")` lets pass."""
    host = np.full((1,), x, np.int32)
    with jax.ensure_compile_time_eval():  # the cache must never hold a tracer
        if not sharding.is_fully_addressable:
            return jax.device_put(host)
        if isinstance(sharding, NamedSharding):
            return jax.device_put(host, NamedSharding(sharding.mesh, PartitionSpec()))
        if is_committed:
            return jax.device_put(host, next(iter(sharding.device_set)))
        with jax.default_device(next(iter(sharding.device_set))):
            return jax.device_put(host)
