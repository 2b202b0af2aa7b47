"""Checks that the ops share. Messages name the op, the argument, what was expected and got."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FLOATS = ("bfloat16", "float16", "float32")
INDICES = ("int32",)
POOL_DIMS = "[num_pages, page_size, d] or [num_layers, num_pages, page_size, d]"


def shaped(op: str, name: str, x: Any) -> None:
    """Refuse what has no shape and dtype, or has to be read first."""
    if isinstance(x, jax.Ref):
        raise TypeError(f"{op}: {name}: expected an array, got a Ref; read it with [...]")
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"{op}: {name}: expected an array, got {type(x).__name__}")


def array(op: str, name: str, x: Any, expected: Sequence[str] = FLOATS) -> jax.Array:
    """Return `x` as a JAX array; refuse what is none, so that no dtype is guessed.

    JAX would narrow 64 bits silently; `expected` says what to pass instead.
    """
    shaped(op, name, x)
    if isinstance(x, np.ndarray | np.generic) and x.dtype.itemsize == 8:
        dtype(op, name, x, expected)
    try:
        return jnp.asarray(x)
    except TypeError as error:
        raise TypeError(
            f"{op}: {name}: expected an array of numbers, got {type(x).__name__} of {x.dtype}"
        ) from error


def rank(op: str, name: str, x: Any, ranks: Sequence[int], dims: str) -> None:
    """Refuse a rank that is not in `ranks`."""
    if x.ndim not in ranks:
        raise ValueError(f"{op}: {name}: expected {dims}, got shape {tuple(x.shape)}")


def shape(op: str, name: str, x: Any, expected: Sequence[Any], why: str = "") -> None:
    """Refuse a shape that differs; None in `expected` matches any size."""
    same = len(x.shape) == len(expected) and all(
        want is None or have == want for have, want in zip(x.shape, expected, strict=True)
    )
    if not same:
        shown = ", ".join("*" if e is None else str(e) for e in expected)
        raise ValueError(f"{op}: {name}: expected shape ({shown}){why}, got {tuple(x.shape)}")


def dtype(op: str, name: str, x: Any, expected: Sequence[str], why: str = "") -> None:
    """Refuse a dtype that is not in `expected`."""
    is_extended = jnp.issubdtype(x.dtype, jax.dtypes.extended)  # such as a PRNG key's
    if is_extended or jnp.dtype(x.dtype).name not in expected:
        raise TypeError(f"{op}: {name}: expected {' or '.join(expected)}{why}, got {x.dtype}")


def values(op: str, name: str, x: Any, low: int, high: Any, what: str) -> None:
    """Refuse values outside [low, high), where they are concrete on the host.

    Nothing is above a symbolic `high`, whose value only the call knows; ops treat such values as
    they treat those of the device.
    """
    if isinstance(x, np.ndarray | np.generic | int):
        x = np.asarray(x)
        bad = x[(x < low) | (x >= high)] if isinstance(high, int) else x[x < low]
        if bad.size:
            raise ValueError(f"{op}: {name}: expected {what} in [{low}, {high}), got {bad.flat[0]}")


def pools(
    op: str, cache: Sequence[Any], d_ckv: int, d_kpe: int, dtype_: Any, has_layer: bool
) -> None:
    """Check the pools of a cache against the dims and dtype of the rows it has to hold."""
    packed = len(cache) == 1
    names = ["kv_pages"] if packed else ["kv_pages[0] (ckv)", "kv_pages[1] (kpe)"]
    widths = [d_ckv + d_kpe] if packed else [d_ckv, d_kpe]
    for name, pool, width in zip(names, cache, widths, strict=True):
        rank(op, name, pool, (3, 4), POOL_DIMS)
        why = " = d_ckv + d_kpe in the last dimension" if packed else ""
        shape(op, name, pool, (*(None,) * (pool.ndim - 1), width), why)
        if pool.dtype != dtype_:
            raise TypeError(
                f"{op}: {name}: expected the dtype of the new data, {jnp.dtype(dtype_)}, got "
                f"{pool.dtype}"
            )
        if pool.shape[-2] == 0 or pool.shape[-3] == 0:
            raise ValueError(
                f"{op}: {name}: expected num_pages and page_size of at least 1, got shape "
                f"{tuple(pool.shape)}"
            )
    if not packed:
        shape(op, names[1], cache[1], (*cache[0].shape[:-1], d_kpe), " as in kv_pages[0]")
    layer(op, cache[0], has_layer)


def layer(op: str, pool: Any, has_layer: bool) -> None:
    """Refuse a stacked pool without a layer, and a layer without one."""
    if pool.ndim == 4 and not has_layer:
        raise ValueError(f"{op}: layer: expected an int for a stacked pool (rank 4), got None")
    if pool.ndim == 3 and has_layer:
        raise ValueError(f"{op}: layer: expected None for a pool of rank 3, got a layer")


def scalar(op: str, name: str, x: Any, high: Any) -> jax.Array:
    """Return an int or an integer scalar array as int32 [1]."""
    if isinstance(x, bool) or not isinstance(x, int | np.integer | np.ndarray | jax.Array):
        raise TypeError(f"{op}: {name}: expected an int or an int32 scalar, got {type(x).__name__}")
    if not isinstance(x, int) and (not jnp.issubdtype(x.dtype, np.signedinteger) or x.size != 1):
        raise TypeError(
            f"{op}: {name}: expected an int32 scalar, got {x.dtype} of shape {tuple(x.shape)}"
        )
    if high is not None:
        values(op, name, x, 0, high, "an index")
    least, most = -(2**31), 2**31 - 1  # what is outside 32 bits stays outside the pool
    if isinstance(x, int):
        return jnp.full((1,), min(max(x, least), most), jnp.int32)
    if x.dtype.itemsize > 4:
        clip = jnp.clip if isinstance(x, jax.Array) else np.clip  # JAX may make it 32 bits first
        x = clip(x, least, most)
    return jnp.reshape(jnp.asarray(x, jnp.int32), (1,))
