"""Pools, layouts and formats of the paged latent cache.

A *pool* is one array of pages. A cache is one *packed* pool, whose rows hold `ckv` and `kpe` side
by side, or a pair of pools (ckv, kpe). A *stacked* pool has a leading layer dimension. The rows of
a page may be cut into *packs*, which are a dimension of their own. See docs/cache_layouts.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import min_dim

Array = jax.Array
KvPages = Array | tuple[Array, Array]
Scale = Array | float
KvScale = Scale | tuple[Scale, Scale]
Cache = TypeVar("Cache", bound=KvPages)
Pool = TypeVar("Pool")
# What `jax_mla.backends` takes: only the shape and the dtype are read.
Shaped = jax.Array | jax.ShapeDtypeStruct | np.ndarray


@dataclasses.dataclass(frozen=True)
class KvFormat:
    """How the cache stores a row. docs/cache_layouts.md has the bytes.

    Attributes:
      name: name in `kv_format=`.
      dtype: element type of the pool; of a split cache, of the pool of ckv.
      kpe_dtypes: what the pool of kpe may be; empty if the cache cannot be split.
      has_scale: whether `kv_scale` gives the scale of its values.
      is_quantized: whether `dtype` is not that of the values.
    """

    name: str
    dtype: str
    kpe_dtypes: tuple[str, ...]
    has_scale: bool = False
    is_quantized: bool = False


FP8_E4M3 = "fp8_e4m3"
FP8_E4M3_KPE_BF16 = "fp8_e4m3+bf16"  # not a name in `kv_format=`: the pool of kpe says it
FP8_DS_MLA = "fp8_ds_mla"
E4M3 = "float8_e4m3fn"

KV_FORMATS: dict[str, KvFormat] = {
    f.name: f
    for f in (
        KvFormat("bf16", "bfloat16", ("bfloat16",)),
        KvFormat("f16", "float16", ("float16",)),
        KvFormat("f32", "float32", ("float32",)),
        KvFormat(FP8_E4M3, E4M3, (E4M3, "bfloat16"), has_scale=True, is_quantized=True),
        KvFormat(FP8_DS_MLA, "uint8", (), is_quantized=True),
    )
}

# A row of fp8_ds_mla: ckv as e4m3, a float32 scale for each tile of it, kpe as bfloat16.
DS_MLA_D_CKV, DS_MLA_D_KPE, DS_MLA_TILE = 512, 64, 128
_INT32_MAX = int(np.iinfo(np.int32).max)
DS_MLA_ROW_BYTES = 656
DS_MLA_ROW_ALIGNMENT = 16  # of a wider row, in bytes


def find_format(op: str, kv_format: str | None) -> KvFormat | None:
    """Return the format of this name; None for None.

    Raises:
      TypeError: it is not a string.
      ValueError: the format is unknown.
    """
    if kv_format is None:
        return None
    expected = f"{op}: kv_format: expected one of {', '.join(KV_FORMATS)}"
    if not isinstance(kv_format, str):
        raise TypeError(f"{expected}, got {kv_format!r}")
    fmt = KV_FORMATS.get(kv_format)
    if fmt is None:
        raise ValueError(f"{expected}, got {kv_format!r}")
    return fmt


def format_of_dtype(pool_dtype: str) -> str | None:
    """Return the name of the quantised format that stores `pool_dtype`."""
    found = (f.name for f in KV_FORMATS.values() if f.is_quantized and f.dtype == pool_dtype)
    return next(found, None)


def stored_format(fmt: KvFormat | None, pools: Sequence[Any]) -> str:
    """Return the extension's name of how a cache is stored; empty for the dtype of the call."""
    if fmt is None or not fmt.is_quantized:
        return ""
    is_mixed = len(pools) == 2 and jnp.dtype(pools[1].dtype) != jnp.dtype(pools[0].dtype)
    return FP8_E4M3_KPE_BF16 if is_mixed else fmt.name


def format_name(stored: str) -> str | None:
    """Return the name in `kv_format=` of a format named as by `stored_format`."""
    return FP8_E4M3 if stored == FP8_E4M3_KPE_BF16 else stored or None


def as_pools(op: str, kv_pages: Pool | tuple[Pool, ...]) -> tuple[Pool, ...]:
    """Return the cache as a tuple of one (packed) or two (ckv, kpe) pools.

    Raises:
      TypeError: `kv_pages` is a list or None.
      ValueError: `kv_pages` is a tuple that does not have two entries.
    """
    expected = f"{op}: kv_pages: expected an array or a tuple (ckv, kpe)"
    if kv_pages is None or isinstance(kv_pages, list):
        raise TypeError(f"{expected}, got {type(kv_pages).__name__}")
    if not isinstance(kv_pages, tuple):
        return (kv_pages,)
    if len(kv_pages) != 2:
        raise ValueError(f"{expected}, got a tuple of {len(kv_pages)}")
    return kv_pages


class PoolSizes(NamedTuple):
    """What the shape of a pool says, whatever its rank.

    Attributes:
      num_layers: layers of a stacked pool, otherwise 1.
      num_pages: pages of one layer.
      page_size: rows of one page.
    """

    num_layers: Any
    num_pages: Any
    page_size: Any


def pool_sizes(pool: Any, has_layer: bool, num_groups: int = 0) -> PoolSizes:
    """Return the sizes of a pool of shape [*groups, (num_layers,) num_pages, *rows, width].

    `rows` is page_size, or page_size / pack and pack. The rank alone does not say which, because a
    stacked pool has as many dimensions as a pool of packs.

    Args:
      pool: the pool; only its shape is read.
      has_layer: whether the pool is stacked.
      num_groups: how many batch dimensions the pool has in front.
    """
    native = pool.shape[num_groups:]
    num_layers, native = (native[0], native[1:]) if has_layer else (1, native)
    return PoolSizes(num_layers, native[0], math.prod(native[1:-1]))


def tokens_as_pages(pool: Pool, has_layer: bool, num_groups: int = 0) -> Pool:
    """View a pool, as `pool_sizes` takes it, with pages of one token: page ids are then slots."""
    _, num_pages, page_size = pool_sizes(pool, has_layer, num_groups)
    array: Any = pool  # of numpy or JAX
    front = array.shape[: num_groups + has_layer]
    return array.reshape(*front, num_pages * page_size, 1, array.shape[-1])


def width(x: Any) -> Any:
    """Return the last dimension of an array; 0 of None, which is a row without rotary part."""
    return 0 if x is None else x.shape[-1]


def has_packs(pools: Sequence[Any], has_layer: bool) -> bool:
    """Return whether the pages of a cache whose rank is right are cut into packs."""
    return len(pools[0].shape) == 4 + has_layer


def bound_of_lengths(capacity: Any, max_seq_len: int = 0) -> Any:
    """Return the most tokens that a sequence of a call may have; csrc/decode/params.h has it too.

    Args:
      capacity: tokens for which the page table has places, an int or a symbolic size.
      max_seq_len: the caller's bound; 0 if there is none.
    """
    bound = max_seq_len or _INT32_MAX
    if isinstance(capacity, int):
        return min(capacity, bound)
    return min_dim(capacity, bound) if max_seq_len else capacity


def row_alignment(pools: Sequence[Any]) -> int:
    """Return the largest number of bytes, up to 16, that divides the row of every pool."""
    known = [(p.shape[-1] if isinstance(p.shape[-1], int) else 1, p.dtype) for p in pools]
    return math.gcd(16, *(width * jnp.dtype(dtype).itemsize for width, dtype in known))


def packed_width(pools: Sequence[Any]) -> int:
    """Return the columns of a packed pool, padding included; 0 for a split one."""
    width = pools[0].shape[-1] if len(pools) == 1 else 0
    return width if isinstance(width, int) else 0


def like(kv_pages: Cache, pools: Sequence[Array]) -> Cache:
    """Return `pools` in the form of `kv_pages`: an array, a tuple or its type of named tuple."""
    if isinstance(kv_pages, tuple):
        return getattr(kv_pages, "_make", tuple)(pools)  # type: ignore[return-value]
    return pools[0]  # type: ignore[return-value]


def local_pages(page_table: Array, page_begin: Array | int, num_pages: int) -> tuple[Array, Array]:
    """Translate global page ids into indices of a pool whose first page is `page_begin`.

    Returns:
      local: index of each page in the pool; arbitrary where the pool does not hold the page.
      owned: whether the pool holds the page.
    """
    local = page_table - page_begin  # wraps around for wild ids, hence the first condition below
    return local, (page_table >= page_begin) & (local >= 0) & (local < num_pages)


def fold_groups(
    op: str,
    name: str,
    pools: Sequence[Array],
    page_table: Array,
    layer: Array,
    page_begin: Array,
    pool_dims: Sequence[int],
    has_layer: bool,
) -> tuple[list[Array], Array, Array, Array]:
    """Turn the cache of a batched call into what handlers take: one pool and one layer.

    Under `vmap`, sequences can differ in pool, layer and first page. The pools are joined along
    their pages, which moves no data, and the page ids are translated. An id that is not in a
    sequence's own pool becomes -1, so that it cannot name a page of another sequence's pool.

    Args:
      op: name of the calling op, for the message.
      name: that of the pools in the call.
      pools: [*groups, (num_layers,) num_pages, *rows, width], see `pool_sizes`; the dimensions in
        `groups` are the batch dimensions listed in `pool_dims`.
      page_table: [*batch, max_pages_per_seq] int32.
      layer: [*batch] int32; each dimension may also be 1.
      page_begin: like `layer`.
      pool_dims: the batch dimensions that the pools have.
      has_layer: whether the pools are stacked; those returned are then stacked too.

    Returns:
      pools without group dimensions, page_table [num_sequences, max_pages_per_seq], layer [1],
      page_begin [1].
    """
    batch = page_table.shape[:-1]
    max_pages = page_table.shape[-1]
    num_groups = len(pool_dims)
    groups = pools[0].shape[:num_groups]
    flat_table = page_table.reshape(-1, max_pages)
    one_pool = all(size == 1 for size in (*groups, *layer.shape, *page_begin.shape))
    if one_pool:
        pools = [p.reshape(p.shape[num_groups:]) if num_groups else p for p in pools]
        return pools, flat_table, layer.reshape(1), page_begin.reshape(1)

    num_layers, num_pages, _ = pool_sizes(pools[0], has_layer, num_groups)
    total = num_pages * num_layers
    group = jnp.zeros((1,) * len(batch), jnp.int32)
    for size, dim in zip(groups, pool_dims, strict=True):
        shape = [1] * len(batch)
        shape[dim] = size
        group = group * size + jnp.arange(size, dtype=jnp.int32).reshape(shape)
        total *= size
    if isinstance(total, int) and total >= 2**31:  # a symbolic number is not known yet
        raise ValueError(
            f"{op}: {name}: expected fewer than 2^31 pages in all pools of a vmap, got {total}"
        )
    layer, begin = layer[..., None], page_begin[..., None]  # [*batch, 1]
    local, owned = local_pages(page_table, begin, num_pages)
    owned &= (layer >= 0) & (layer < num_layers)
    ids = (group[..., None] * num_layers + layer) * num_pages + local
    ids = jnp.where(owned, ids, -1).reshape(-1, max_pages)
    zero = jnp.zeros((1,), jnp.int32)
    front = (1, total) if has_layer else (total,)
    pools = [p.reshape(*front, *p.shape[num_groups + len(front) :]) for p in pools]
    return pools, ids, zero, zero
