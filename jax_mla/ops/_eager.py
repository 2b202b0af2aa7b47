"""Calls outside `jit`: the array operations of an op run as one compiled function.

Outside `jit`, each operation around a custom call would otherwise cost a dispatch, and each
operation of a definition a compilation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jax_mla._mesh import _dispatch

INT32 = np.iinfo(np.int32)

Fun = TypeVar("Fun", bound=Callable[..., Any])

# The keyword-only arguments of definitions that are no arrays.
STATIC = (
    "causal",
    "interleaved",
    "k",
    "kv_format",
    "max_seq_len",
    "packs",
    "power_of_two_scales",
    "return_lse",
    "return_positions",
    "return_scores",
    "rope_interleaved",
)


def definition(fun: Fun) -> Fun:
    """Decorate a definition: it is compiled as a whole, and inlined where it is traced."""
    parameters = inspect.signature(fun).parameters.values()
    names = [x.name for x in parameters if x.name in STATIC and x.kind == x.KEYWORD_ONLY]
    return jax.jit(fun, static_argnames=names, inline=True)  # type: ignore[return-value]


def lets_infs_pass(fun: Fun) -> Fun:
    """Decorate a function whose lse is -inf where a row has no keys: no error for `debug_infs`."""

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with jax.debug_infs(False):
            return fun(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


# Below, `operands` is the named tuple of an op on the cache. Its field `kv_pages` or `index_pages`
# is a tuple of pools. Its fields `layer` and `page_begin` are indices: None, an int, or an array of
# one signed integer. So is `num_seqs`, if it exists. Its fields `kv_scale` and `q_scale`, if they
# exist, are None or tuples of scales: floats, or arrays of one float32.


def compiled(op: str) -> Callable[[Fun], Fun]:
    """Decorate what an op does with checked arguments: it is compiled where no argument is traced.

    Args:
      op: name of the op, for messages.

    Returns:
      A decorator of a function (operands, *arrays, params=, mesh=None, ...). A call with mesh= is
      not compiled: it compares the shardings of the arrays themselves, which jit would hide. Nor is
      one with further arguments. The attribute `compiled` is the compiled function.
    """

    def decorator(fun: Fun) -> Fun:
        jitted = jax.jit(fun, static_argnames="params", inline=True)

        @functools.wraps(fun)
        def wrapped(operands: Any, *arrays: Any, params: Any, mesh: Any = None, **more: Any) -> Any:
            if mesh is not None:
                return fun(operands, *arrays, params=params, mesh=mesh, **more)
            _dispatch.check_pools(op, *_pools(operands), params.has_layer)
            if is_eager((operands, arrays)) and not more:
                return jitted(place_scalars(operands), *arrays, params=params)
            return fun(operands, *arrays, params=params, **more)

        wrapped.compiled = jitted  # type: ignore[attr-defined]
        return wrapped  # type: ignore[return-value]

    return decorator


def is_eager(operands: Any) -> bool:
    """Return whether no operand is traced."""
    return not any(isinstance(x, Tracer) for x in jax.tree.leaves(operands))


def _pools(operands: Any) -> tuple[str, tuple[jax.Array, ...]]:
    """Return the name of the argument, and the pools."""
    name = "kv_pages" if hasattr(operands, "kv_pages") else "index_pages"
    return name, getattr(operands, name)


def place_scalars(operands: Any) -> Any:
    """Replace the ints and floats of an eager call by arrays; None stays None."""
    pool = _pools(operands)[1][0]
    placed: dict[str, Any] = {
        name: _place((x,), "int32", pool)
        for name in ("layer", "page_begin", "num_seqs")
        if isinstance(x := getattr(operands, name, None), int)
    }
    for name in ("kv_scale", "q_scale"):
        scales = getattr(operands, name, None)
        if scales is not None:
            placed[name] = _place_floats(scales, pool)
    return operands._replace(**placed) if placed else operands


def as_scalar(x: int | jax.Array, like: jax.Array) -> jax.Array:
    """Return an index as an array without dimensions; an int becomes int32, placed as `like`."""
    if isinstance(x, jax.Array):
        return jnp.reshape(x, ()).astype(jnp.int32)
    x = min(x, INT32.max)
    if isinstance(like, Tracer):
        return jnp.full((), x, jnp.int32)
    return _place((x,), "int32", like, ())


def expanded(operands: Any, names: tuple[str, ...], dims: tuple[int, ...]) -> dict[str, jax.Array]:
    """Return the operands of these names that are present, with dimensions of size 1 inserted."""
    given = {name: getattr(operands, name) for name in names}
    return {name: lax.expand_dims(x, dims) for name, x in given.items() if x is not None}


def with_scalar_arrays(operands: Any, num_groups: int = 1) -> Any:
    """Replace indices and scales by the operands that primitives take, int32 [1], float32 [1, n].

    For `layer` and `page_begin`, None becomes 0; otherwise it stays None. `num_seqs` becomes
    [num_groups].
    """
    on_host = is_eager(operands)
    pool = _pools(operands)[1][0]

    def index(x: int | jax.Array | None, size: int = 1) -> jax.Array:
        if x is None or isinstance(x, int):
            x = min(max(x or 0, INT32.min), INT32.max)
            if on_host:
                return _place((x,) * size, "int32", pool)
            return jnp.full((size,), x, jnp.int32)
        if x.dtype.itemsize > 4:
            x = jnp.clip(x, INT32.min, INT32.max)  # what was outside the pool stays outside
        return jnp.reshape(x.astype(jnp.int32), (size,))

    def row(scales: tuple[float | jax.Array, ...]) -> jax.Array:
        if on_host and all(isinstance(x, float) for x in scales):
            return _place(scales, "float32", pool, (1, len(scales)))
        scales = _place_floats(scales, pool) if on_host else scales
        return jnp.stack([jnp.asarray(x, jnp.float32).reshape(()) for x in scales])[None]

    arrays = {"layer": index(operands.layer), "page_begin": index(operands.page_begin)}
    for name in ("kv_scale", "q_scale"):
        scales = getattr(operands, name, None)
        if scales is not None:
            arrays[name] = row(scales)
    if getattr(operands, "num_seqs", None) is not None:
        arrays["num_seqs"] = index(operands.num_seqs, num_groups)
    return operands._replace(**arrays)


def _place_floats(scales: tuple[float | jax.Array, ...], like: jax.Array) -> tuple[Any, ...]:
    return tuple(_place((x,), "float32", like) if isinstance(x, float) else x for x in scales)


def _place(
    values: tuple[Any, ...], dtype: str, like: jax.Array, shape: tuple[int, ...] = (-1,)
) -> jax.Array:
    return _array(values, dtype, shape, like.sharding, like.committed)


@functools.lru_cache(maxsize=1024)
def _array(
    values: tuple[Any, ...],
    dtype: str,
    shape: tuple[int, ...],
    sharding: Sharding,
    is_committed: bool,
) -> jax.Array:
    """Make the array by an explicit transfer, which `jax.transfer_guard("disallow")` lets pass."""
    host = np.array(values, dtype).reshape(shape)
    with jax.ensure_compile_time_eval():  # the cache must never hold a tracer
        if not sharding.is_fully_addressable:
            return jax.device_put(host)
        if isinstance(sharding, NamedSharding):
            return jax.device_put(host, NamedSharding(sharding.mesh, PartitionSpec()))
        if is_committed:
            return jax.device_put(host, next(iter(sharding.device_set)))
        with jax.default_device(next(iter(sharding.device_set))):
            return jax.device_put(host)
