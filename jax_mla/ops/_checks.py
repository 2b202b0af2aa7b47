"""Argument checks that the ops share.

Every message names the op, the argument, what was expected and what came.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_mla import kv_cache

FLOATS = ("bfloat16", "float16", "float32")
E4M3 = kv_cache.E4M3
INDICES = ("int32",)
POOL_DIMS = (
    "[num_pages, page_size, d], or [num_pages, page_size / pack, pack, d] with packs=True, both "
    "with num_layers in front if layer is given"
)
MAX_TOKENS_PER_SEQ = 2**30  # a sequence's tokens are numbered in 32 bits
MAX_SLOTS = 2**31  # slots are int32
MAX_WIDTH = 2**20  # so that the bytes of a block of rows fit 32 bits in the kernels
MAX_SCALE_QUOTIENT = 2.0**90  # kernels multiply scores by it
LANES = 128  # multiple to which engines that come from TPUs pad each part of a row


def shaped(op: str, name: str, x: Any) -> None:
    """Refuse a value without shape and dtype, and a `Ref`."""
    if isinstance(x, jax.Ref):
        raise TypeError(
            f"{op}: {name}: expected an array, got a Ref; pass the value it holds, {name}[...], "
            "and assign the result back if the op updates it"
        )
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"{op}: {name}: expected an array, got {type(x).__name__}")


def array(op: str, name: str, x: Any, expected: Sequence[str] = FLOATS) -> jax.Array:
    """Return `x` as a JAX array.

    Python numbers and lists are refused, so that no dtype is guessed. A 64-bit numpy array is
    refused with the dtypes in `expected`, because JAX would narrow it silently.
    """
    if isinstance(x, jax.Array):
        return x
    shaped(op, name, x)
    if isinstance(x, np.ndarray | np.generic) and x.dtype.itemsize == 8:
        advice = f"; pass {name}.astype(np.int32)" if expected == INDICES else ""
        dtype(op, name, x, expected, advice=advice)
    try:
        return jnp.asarray(x)
    except TypeError as error:
        raise TypeError(
            f"{op}: {name}: expected an array of numbers, got {type(x).__name__} of {x.dtype}"
        ) from error


def array_or_none(op: str, name: str, x: Any) -> jax.Array | None:
    """Return `x` as `array` does; None stays None."""
    return None if x is None else array(op, name, x)


def indices(op: str, name: str, x: Any, shape_: Sequence[Any], why: str) -> jax.Array:
    """Return `x` as a JAX array of int32; a shape other than this, with `why`, is refused."""
    x = array(op, name, x, INDICES)
    shape(op, name, x, shape_, why)
    dtype(op, name, x, INDICES)
    return x


def static_kind(x: object) -> str:
    """Name the type of a static argument, for messages; a traced value gets advice."""
    if isinstance(x, Tracer):
        return (
            "a traced value; the argument is static: pass a Python value that jit does not trace "
            "(jax.jit(..., static_argnames=...), or close over it)"
        )
    if isinstance(x, jax.Array):
        return "a jax.Array; the argument is static: pass a Python value, for example x.item()"
    return type(x).__name__


def flag(op: str, name: str, value: bool) -> bool:
    """Return a static bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{op}: {name}: expected a bool, got {static_kind(value)}")
    return bool(value)


def axis_names(op: str, value: Any) -> tuple[str, ...]:
    """Return the argument `axis_name`: one or several mapped or manual mesh axes."""
    names = tuple(value) if isinstance(value, tuple | list) else (value,)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{op}: axis_name: expected names of mesh axes, got {value!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"{op}: axis_name: expected different axes, got {value!r}")
    for name in names:
        try:
            jax.lax.axis_size(name)
        except NameError:
            raise ValueError(
                f"{op}: axis_name: expected axes of a shard_map or vmap around the call, got "
                f"{name!r}, which none of them has"
            ) from None
    return names


def rank(op: str, name: str, x: Any, ranks: Sequence[int], dims: str) -> None:
    """Refuse a rank that is not in `ranks`."""
    if x.ndim not in ranks:
        raise ValueError(f"{op}: {name}: expected {dims}, got shape {tuple(x.shape)}")


def numbers(op: str, name: str, x: Any, *, takes_codes: bool) -> None:
    """Refuse what is not an array of floats, or of e4m3 codes where those are taken."""
    if dtype_name(x.dtype) != E4M3:
        dtype(op, name, x, (*FLOATS, E4M3) if takes_codes else FLOATS)
    elif not takes_codes:
        raise TypeError(
            f"{op}: {name}: expected {' or '.join(FLOATS)}, got {x.dtype}; codes go with a cache "
            "of codes, whose format kv_format= names"
        )


def shape(op: str, name: str, x: Any, expected: Sequence[Any], why: str = "") -> None:
    """Refuse a shape that differs from `expected`, where None matches any size."""
    same = len(x.shape) == len(expected) and all(
        want is None or have == want for have, want in zip(x.shape, expected, strict=True)
    )
    if not same:
        shown = ", ".join("*" if e is None else str(e) for e in expected)
        raise ValueError(f"{op}: {name}: expected shape ({shown}){why}, got {tuple(x.shape)}")


@functools.cache
def dtype_name(x: Any) -> str:
    """Return the name of a dtype; extended ones, such as that of a PRNG key, have one as well."""
    return str(x) if jnp.issubdtype(x, jax.dtypes.extended) else np.dtype(x).name


def dtype(
    op: str, name: str, x: Any, expected: Sequence[str], why: str = "", advice: str = ""
) -> None:
    """Refuse a dtype whose name is not in `expected`."""
    if dtype_name(x.dtype) not in expected:
        raise TypeError(
            f"{op}: {name}: expected {' or '.join(expected)}{why}, got {x.dtype}{advice}"
        )


def values(op: str, name: str, x: Any, low: int, high: Any, what: str) -> None:
    """Refuse values outside [low, high), if `x` is a number or a numpy array.

    A symbolic `high` is known only when the call runs; then only `low` is checked here.
    """
    if not isinstance(x, int | np.ndarray | np.generic):
        return  # on the device; most eager calls end here
    expected = f"{op}: {name}: expected {what} in [{low}, {high})"
    if isinstance(x, int):  # of any size, and often: a layer of an eager call
        if x < low or (isinstance(high, int) and x >= high):
            raise ValueError(f"{expected}, got {x}")
    else:
        x = np.asarray(x)
        bad = np.argwhere((x < low) | (x >= high) if isinstance(high, int) else x < low)
        if len(bad):
            at = tuple(int(i) for i in bad[0])
            place = f" at index {at[0] if len(at) == 1 else at}" if at else ""
            raise ValueError(f"{expected}, got {x[at]}{place}")


def lengths(op: str, seq_lens: Any, capacity: Any, max_seq_len: int) -> None:
    """Check lengths, if they are known on the host, against what the call has room for."""
    if isinstance(seq_lens, jax.Array):
        return
    what = "lengths that fit max_seq_len" if max_seq_len else "lengths that fit page_table"
    high = kv_cache.bound_of_lengths(capacity, max_seq_len) + 1
    values(op, "seq_lens", seq_lens, 0, high, what)


def page_ids(
    op: str, page_table: Any, seq_lens: Any, sizes: kv_cache.PoolSizes, seen: Any = None
) -> None:
    """Refuse ids of pages that the pool does not have, if the host knows which of them are used.

    Args:
      op: name of the calling op, for messages.
      page_table: [seqs, max_pages_per_seq] int32, global ids, as the caller gave it. Entries past
        the end of a sequence may hold anything.
      seq_lens: [n] int32, as the caller gave them: tokens of the first n sequences; the others are
        absent.
      sizes: sizes of the pool.
      seen: how many tokens at the end of each sequence are used; None for all.
    """
    known = isinstance(page_table, np.ndarray) and isinstance(seq_lens, np.ndarray)
    if known and isinstance(sizes.page_size, int):
        first_token = np.arange(page_table.shape[1], dtype=np.int64) * sizes.page_size
        is_used = first_token < seq_lens[:, None]
        if seen is not None:
            first_seen = np.reshape(np.asarray(seq_lens, np.int64) - seen, (-1, 1))
            is_used &= first_token + sizes.page_size > first_seen
        used_ids(op, page_table[: len(seq_lens)], is_used, sizes.num_pages)


def used_ids(op: str, page_table: np.ndarray, is_used: np.ndarray, num_pages: Any) -> None:
    """Refuse ids outside [0, num_pages) at the places of the page table that are used."""
    if not is_used.any():  # also of a pool without pages
        return
    used = np.where(is_used, page_table, page_table[is_used][0])
    values(op, "page_table", used, 0, num_pages, "ids of the pool's pages")


def widths(op: str, names: str, d_ckv: Any, d_kpe: Any) -> None:
    """Refuse a rotary part wider than the latent, which a packed pool could not tell apart.

    `d_kpe` is 0 if there is none.
    """
    if isinstance(d_ckv, int) and isinstance(d_kpe, int) and d_kpe > d_ckv:
        raise ValueError(
            f"{op}: {names}: expected d_ckv >= d_kpe, got d_ckv {d_ckv} and d_kpe {d_kpe}; the two "
            "arguments look swapped"
        )


def pools(
    op: str,
    cache: Sequence[Any],
    d_ckv: int,
    d_kpe: int,
    dtype_: Any,
    like: str,
    *,
    has_layer: bool,
    packs: bool,
    fmt: kv_cache.KvFormat | None = None,
) -> None:
    """Check the pools of a cache.

    Args:
      op: name of the calling op.
      cache: one packed pool, or the pools of ckv and kpe.
      d_ckv: width of the latent.
      d_kpe: width of the rotary key; 0 if rows have none.
      dtype_: dtype of the call, which the pools have too unless the format is quantised.
      like: name of the argument that has this dtype.
      has_layer: whether the call selects a layer.
      packs: the argument `packs`.
      fmt: the format of the cache; None for `dtype_`.
    """
    packed = len(cache) == 1
    names = ["kv_pages"] if packed else ["kv_pages[0] (ckv)", "kv_pages[1] (kpe)"]
    rows = (
        [((d_ckv, d_kpe), "d_ckv + d_kpe")]
        if packed
        else [((d_ckv,), "d_ckv"), ((d_kpe,), "d_kpe")]
    )
    if isinstance(d_kpe, int) and d_kpe == 0:
        if not packed:
            raise ValueError(
                f"{op}: kv_pages: expected one pool for rows without rotary part, got two"
            )
        rows = [((d_ckv, 0), "d_ckv, of rows without rotary part,")]
    if fmt is not None and fmt.name == kv_cache.FP8_DS_MLA:
        _ds_mla(op, cache, d_ckv, d_kpe)
        rows = [((kv_cache.DS_MLA_ROW_BYTES,), f"the bytes of a row in format {fmt.name!r}")]
    for name, pool, (parts, what) in zip(names, cache, rows, strict=True):
        rank_of_pool(op, name, pool, has_layer=has_layer, packs=packs)
        if fmt is not None:
            expected = (fmt.dtype,) if pool is cache[0] else fmt.kpe_dtypes
            dtype(op, name, pool, expected, f" for format {fmt.name!r}")
        if fmt is None or not fmt.is_quantized:
            dtype_of_pool(op, name, pool, dtype_, like)
        width_of_pool(op, name, pool, parts, what, like)
        if 0 in pool.shape[has_layer + 1 :]:
            raise ValueError(
                f"{op}: {name}: expected a page_size of at least 1, got shape {tuple(pool.shape)}"
            )
    if not packed:
        shape(op, names[1], cache[1], (*cache[0].shape[:-1], None), " as in kv_pages[0]")


def rotary_part(op: str, name: str, x: Any) -> None:
    """Refuse an array without values, which stands for no rotary part elsewhere."""
    if 0 in x.shape:
        raise ValueError(
            f"{op}: {name}: expected no dimension of size 0, or None for rows without rotary part, "
            f"got shape {tuple(x.shape)}"
        )


def takes_codes(fmt: kv_cache.KvFormat | None, cache: Sequence[Any]) -> bool:
    """Return whether new rows may be codes: only where the cache stores both parts as such."""
    return kv_cache.stored_format(fmt, cache) == kv_cache.FP8_E4M3


def _ds_mla(op: str, cache: Sequence[Any], d_ckv: Any, d_kpe: Any) -> None:
    """Refuse what a row of fp8_ds_mla has no place for."""
    fmt = kv_cache.FP8_DS_MLA
    if len(cache) != 1:
        raise ValueError(f"{op}: kv_pages: expected one packed pool for format {fmt!r}, got two")
    dims = kv_cache.DS_MLA_D_CKV, kv_cache.DS_MLA_D_KPE
    if (d_ckv, d_kpe) != dims:
        raise ValueError(
            f"{op}: kv_format: expected d_ckv, d_kpe = {dims[0]}, {dims[1]} for {fmt!r}, got "
            f"{d_ckv}, {d_kpe}"
        )
    width, multiple = cache[0].shape[-1], kv_cache.DS_MLA_ROW_ALIGNMENT
    if isinstance(width, int) and width % multiple:
        raise ValueError(
            f"{op}: kv_pages: expected a last dimension that is a multiple of {multiple} for "
            f"format {fmt!r}, got {width}"
        )


def as_float(x: float | np.number) -> float:
    """Return a Python or numpy number as a float; infinity if it is too large for one."""
    try:
        return float(x)
    except OverflowError:
        return math.inf


def absent_together(op: str, **given: Any) -> None:
    """Refuse arrays of which some are None: the rotary parts of the query and of the new rows."""
    missing = [name for name, x in given.items() if x is None]
    if missing and len(missing) < len(given):
        others = " and ".join(name for name in given if name not in missing)
        raise ValueError(
            f"{op}: {', '.join(missing)}: expected an array, or None for {others} too, for rows "
            "without rotary part, got None"
        )


def number(op: str, name: str, x: float | np.number) -> float:
    """Return a static number as a float; infinity if it is too large for one."""
    if isinstance(x, bool) or not isinstance(x, float | int | np.floating | np.integer):
        raise TypeError(f"{op}: {name}: expected a Python number, got {static_kind(x)}")
    return as_float(x)


def integer(op: str, name: str, x: int | np.integer, *, expected: str = "an int") -> int:
    """Return a static int; `expected` is what the message says."""
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise TypeError(f"{op}: {name}: expected {expected}, got {static_kind(x)}")
    return int(x)


def scale(op: str, name: str, x: Any) -> float | jax.Array:
    """Return a scale: a float if it is known on the host, otherwise the array of one float32.

    Raises:
      TypeError: it is no number, or not in float32.
      ValueError: it is not one number, or not between 2^-60 and 2^60.
    """
    if isinstance(x, np.ndarray | jax.Array):
        dtype(op, name, x, ("float32",))
        if x.size != 1:
            raise ValueError(
                f"{op}: {name}: expected a scalar or shape (1,), got shape {tuple(x.shape)}; where "
                "layers have scales of their own, pass that of the layer"
            )
        if isinstance(x, jax.Array):
            return x
        x = x.item()
    if isinstance(x, bool) or not isinstance(x, int | float | np.integer | np.floating):
        raise TypeError(f"{op}: {name}: expected a number or an array, got {type(x).__name__}")
    value = as_float(x)
    low, high = 2.0**-60, 2.0**60  # products and quotients of scales are far from float32's limits
    if not low <= value <= high:
        raise ValueError(
            f"{op}: {name}: expected a positive finite number (from 2^-60 to 2^60), got {value}"
        )
    return value


def kv_scale(
    op: str, fmt: kv_cache.KvFormat | None, x: Any, cache: Sequence[Any], d_kpe: Any
) -> tuple[float | jax.Array, float | jax.Array] | None:
    """Return the scales of ckv and kpe, of a cache whose pools are right; None if it has none."""
    if fmt is None or not fmt.has_scale:
        if x is None:
            return None
        if fmt is not None:
            raise ValueError(f"{op}: kv_scale: expected None for format {fmt.name!r}, got a scale")
        raise ValueError(
            f"{op}: kv_scale: expected None for a cache in its own dtype "
            f"({dtype_name(cache[0].dtype)}), got a scale; name the format it belongs to with "
            "kv_format="
        )
    if x is None:
        raise ValueError(
            f"{op}: kv_scale: expected a scale for format {fmt.name!r}, got None; pass that of the "
            "rows, such as 1.0"
        )
    is_mixed = kv_cache.stored_format(fmt, cache) == kv_cache.FP8_E4M3_KPE_BF16
    if not isinstance(x, tuple):
        one = scale(op, "kv_scale", x)
        return one, 1.0 if is_mixed else one
    if d_kpe == 0:
        raise ValueError(
            f"{op}: kv_scale: expected one scale for rows without rotary part, got {len(x)}"
        )
    if len(x) != 2:
        raise ValueError(f"{op}: kv_scale: expected one scale or (ckv, kpe), got {len(x)}")
    if is_mixed:
        raise ValueError(
            f"{op}: kv_scale: expected one scale, that of ckv, since kpe is bfloat16, got two"
        )
    ckv, kpe = scale(op, "kv_scale[0]", x[0]), scale(op, "kv_scale[1]", x[1])
    are_known = isinstance(ckv, float) and isinstance(kpe, float)
    if are_known and ckv > MAX_SCALE_QUOTIENT * kpe:
        raise ValueError(
            f"{op}: kv_scale: expected a scale of ckv of at most 2^90 times that of kpe, got {ckv} "
            f"and {kpe}"
        )
    return ckv, kpe


def capacity(op: str, name: str, page_table: Any, page_size: Any) -> Any:
    """Return how many tokens of a sequence the page table has places for, and refuse too many."""
    tokens = page_table.shape[-1] * page_size
    if isinstance(tokens, int) and tokens > MAX_TOKENS_PER_SEQ:  # not symbolic
        raise ValueError(
            f"{op}: {name}: expected places for at most 2^30 tokens a sequence, got {tokens}"
        )
    return tokens


def slots(op: str, name: str, sizes: kv_cache.PoolSizes) -> None:
    """Refuse a pool whose last slot is no int32."""
    number = sizes.num_pages * sizes.page_size
    if isinstance(number, int) and number >= MAX_SLOTS:  # not symbolic
        raise ValueError(
            f"{op}: {name}: expected fewer than 2^31 tokens in a layer, which slots can name, got "
            f"{number}"
        )


def width_of_pool(
    op: str, name: str, pool: Any, parts: Sequence[Any], what: str, like: str
) -> None:
    """Refuse a pool whose rows are narrower than a row of the call, or far too wide.

    A row may be padded. But padding as large as the row is more likely a mistake: a query that was
    not multiplied by W_UK would be read as a narrow row.

    Args:
      op: name of the calling op.
      name: name of the pool.
      pool: the pool.
      parts: the widths of the parts of a row.
      what: what their sum is.
      like: name of the argument whose width is d_ckv.
    """
    width, expected = pool.shape[-1], sum(parts)
    if width == expected:
        return
    if 0 in parts:  # a row with a rotary part that the call lacks is not a padded one
        padded = -(-expected // LANES) * LANES
        if width == padded:
            return
        or_padded = "" if padded == expected else f" or {padded}"
        raise ValueError(
            f"{op}: {name}: expected a last dimension of {expected} = {what}{or_padded}, got "
            f"shape {tuple(pool.shape)}; rows with a rotary part come with kpe and q_pe"
        )
    high = None
    if isinstance(width, int) and isinstance(expected, int):  # not symbolic
        padded = sum(-(-part // LANES) * LANES for part in parts)
        high = min(max(2 * expected - 1, padded), MAX_WIDTH)
        if expected < width <= high:
            return
    at_most = "" if high is None else f" and at most {high}"
    advice = ""
    if high is not None and width > high and "d_ckv" in what:
        advice = f"; {like} is as wide as the latent: was the query multiplied by W_UK?"
    elif width == parts[0] and len(parts) > 1:
        advice = "; rows without rotary part come without kpe and q_pe (None)"
    raise ValueError(
        f"{op}: {name}: expected a last dimension of at least {expected} = {what}{at_most}, got "
        f"shape {tuple(pool.shape)}{advice}"
    )


def dtype_of_pool(op: str, name: str, pool: Any, expected: Any, like: str) -> None:
    """Refuse a pool whose dtype is not that of the call's other arrays."""
    if pool.dtype == expected:
        return
    fmt = kv_cache.format_of_dtype(dtype_name(pool.dtype))
    advice = ""
    if fmt:
        advice = f"; pass kv_format={fmt!r} if the cache has this format"
    elif dtype_name(pool.dtype) in FLOATS:
        advice = f"; cast {like} to the dtype of the cache"
    raise TypeError(
        f"{op}: {name}: expected {dtype_name(expected)} as in {like}, got {pool.dtype}{advice}"
    )


def rank_of_pool(op: str, name: str, pool: Any, *, has_layer: bool, packs: bool) -> None:
    """Refuse a pool whose rank is not what `layer` and `packs` say.

    Rank 4 alone does not say whether the pool is stacked or has packs, and a guess would be silent.
    """
    rank(op, name, pool, (3, 4, 5), POOL_DIMS)
    packs = flag(op, "packs", packs)
    ndim = len(pool.shape)
    if ndim == 3 + has_layer + packs:
        if has_layer and pool.shape[0] == 0:
            raise ValueError(f"{op}: {name}: expected at least one layer, got {tuple(pool.shape)}")
        return
    given = f"got rank {ndim} with layer={'given' if has_layer else None} and packs={packs}"
    if ndim == 5:
        missing = [word for word, has in (("layer=", has_layer), ("packs=True", packs)) if not has]
        raise ValueError(
            f"{op}: {name}: expected {' and '.join(missing)} for a pool of rank 5, which is "
            f"[num_layers, num_pages, page_size / pack, pack, d]; {given}"
        )
    if ndim == 4 and not has_layer:
        raise ValueError(
            f"{op}: {name}: expected layer= for a stacked pool of rank 4, [num_layers, num_pages, "
            "page_size, d], or packs=True for [num_pages, page_size / pack, pack, d]; " + given
        )
    if ndim == 4:
        raise ValueError(
            f"{op}: packs: expected False for a pool of rank 4 with layer=, [num_layers, "
            f"num_pages, page_size, d]; {given}"
        )
    name_, value = ("layer", "None") if has_layer else ("packs", "False")
    raise ValueError(f"{op}: {name_}: expected {value} for a pool of rank 3; {given}")


def index(op: str, name: str, x: Any, high: Any, what: str = "an index") -> int | jax.Array | None:
    """Check an optional index, or what else is counted, in [0, high).

    Returns:
      None or an int if the value is known on the host, otherwise the array of one signed integer.
    """
    if x is None:
        return None
    if isinstance(x, bool) or not isinstance(x, int | np.integer | np.ndarray | jax.Array):
        raise TypeError(f"{op}: {name}: expected an int or an int32 scalar, got {type(x).__name__}")
    if not isinstance(x, int) and (not jnp.issubdtype(x.dtype, np.signedinteger) or x.size != 1):
        raise TypeError(
            f"{op}: {name}: expected an int32 scalar, got {x.dtype} of shape {tuple(x.shape)}"
        )
    if isinstance(x, jax.Array):
        return x
    values(op, name, x, 0, high, what)
    return int(x) if isinstance(x, int) else int(x.item())
