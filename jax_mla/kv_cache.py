"""What a paged latent cache is made of: pools, layouts and formats.

Words: a *pool* is one array of pages. A cache is one packed pool (`ckv` and `kpe` side by side in
each row) or a pair of pools. A *stacked* pool has a leading layer dimension. See
`docs/cache_layouts.md`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
KvPages = Array | tuple[Array, Array]
Cache = TypeVar("Cache", bound=KvPages)
Pool = TypeVar("Pool")
# Anything with a shape and a dtype: what a question about a call needs of its arguments.
Shaped = jax.Array | jax.ShapeDtypeStruct | np.ndarray


@dataclasses.dataclass(frozen=True)
class KvFormat:
    """How one cache row is stored.

    Attributes:
      name: what `kv_format=` calls it.
      dtype: element type of the pool.
      needs_scale: whether reading it needs the operand `kv_scale`.
    """

    name: str
    dtype: str
    needs_scale: bool


KV_FORMATS: dict[str, KvFormat] = {
    f.name: f
    for f in (
        KvFormat("bf16", "bfloat16", needs_scale=False),
        KvFormat("f16", "float16", needs_scale=False),
        KvFormat("f32", "float32", needs_scale=False),
        KvFormat("fp8_e4m3", "float8_e4m3fn", needs_scale=True),
        KvFormat("fp8_e5m2", "float8_e5m2", needs_scale=True),
        # FlashMLA's 656-byte row: 512 fp8 values, four f32 scales, 64 bf16 values; scales inside.
        KvFormat("fp8_ds_mla", "uint8", needs_scale=False),
    )
}
SERVED_FORMATS = ("bf16", "f16", "f32")


def check_format(op: str, kv_format: str | None, kv_scale: object, pool_dtype: object) -> None:
    """Refuse a cache format that nothing here can read.

    Args:
      op: name of the calling op, for the message.
      kv_format: a key of `KV_FORMATS`, or None for the pool's own dtype.
      kv_scale: the scale operand, or None.
      pool_dtype: dtype of the pool.

    Raises:
      ValueError: unknown or unserved format, dtype that is not the format's, a missing or a
        superfluous scale.
    """
    dtype = jnp.dtype(pool_dtype).name  # type: ignore[arg-type]
    served = ", ".join(SERVED_FORMATS)
    if kv_format is None:
        if kv_scale is not None:
            raise ValueError(
                f"{op}: kv_scale: expected None for a cache in its own dtype ({dtype}), got a "
                "scale; name the format it belongs to with kv_format="
            )
        return
    fmt = KV_FORMATS.get(kv_format) if isinstance(kv_format, str) else None
    if fmt is None:
        raise ValueError(
            f"{op}: kv_format: expected one of {', '.join(KV_FORMATS)}, got {kv_format!r}"
        )
    if fmt.needs_scale and kv_scale is None:
        raise ValueError(
            f"{op}: kv_scale: format {fmt.name!r} needs a scale and has no default, got None"
        )
    if not fmt.needs_scale and kv_scale is not None:
        raise ValueError(f"{op}: kv_scale: format {fmt.name!r} takes no scale, got one")
    if fmt.name not in SERVED_FORMATS:
        raise ValueError(
            f"{op}: kv_format: {fmt.name!r} is served by no backend of this version; served: "
            f"{served}"
        )
    if dtype != fmt.dtype:
        raise ValueError(
            f"{op}: kv_pages: format {fmt.name!r} is stored as {fmt.dtype}, got {dtype}"
        )


def as_pools(op: str, kv_pages: Pool | tuple[Pool, ...]) -> tuple[Pool, ...]:
    """Return the cache as a tuple of one (packed) or two (ckv, kpe) pools.

    Raises:
      TypeError: a list; a pair of pools is a tuple.
      ValueError: a tuple of another length than 2.
    """
    expected = f"{op}: kv_pages: expected an array or a tuple (ckv, kpe)"
    if isinstance(kv_pages, list):
        raise TypeError(f"{expected}, got list")
    if not isinstance(kv_pages, tuple):
        return (kv_pages,)
    if len(kv_pages) != 2:
        raise ValueError(f"{expected}, got a tuple of {len(kv_pages)}")
    return kv_pages


def like(kv_pages: Cache, pools: Sequence[Array]) -> Cache:
    """Return `pools` in the form that `kv_pages` has: an array, a tuple, or that named tuple."""
    if isinstance(kv_pages, tuple):
        return getattr(kv_pages, "_make", tuple)(pools)  # type: ignore[return-value]
    return pools[0]  # type: ignore[return-value]


def local_pages(page_table: Array, page_begin: Array | int, num_pages: int) -> tuple[Array, Array]:
    """Say where in a pool that begins with page `page_begin` each page is, and whether it is.

    Returns:
      local: index of the page in the pool, anything where the pool does not have it.
      owned: whether it has. The difference may wrap around: a wild id must not become an index.
    """
    local = page_table - page_begin
    return local, (page_table >= page_begin) & (local >= 0) & (local < num_pages)


def fold_groups(
    pools: Sequence[Array],
    page_table: Array,
    layer: Array,
    page_begin: Array,
    pool_dims: Sequence[int],
) -> tuple[list[Array], Array, Array, Array]:
    """Bring a batched call's cache to the form that handlers take: one pool, one layer.

    Under `vmap` the sequences can differ in pool, layer and first page. Pools are joined along
    pages, which moves nothing, and page ids are translated. Ids that a sequence's own pool does not
    own become -1 first: a wild id must not turn into a valid one of its neighbour's pool.

    Args:
      pools: [*groups, (num_layers,) num_pages, page_size, d], where groups are the batch dimensions
        listed in `pool_dims`.
      page_table: [*batch, max_pages_per_seq] int32.
      layer: [*batch] int32, any dimension may be 1.
      page_begin: like `layer`.
      pool_dims: which batch dimensions the pools have.

    Returns:
      pools without group dimensions, page_table [num_sequences, max_pages_per_seq], layer [1],
      page_begin [1].
    """
    batch = page_table.shape[:-1]
    max_pages = page_table.shape[-1]
    num_groups = len(pool_dims)
    groups = pools[0].shape[:num_groups]
    native = pools[0].shape[num_groups:]
    flat_table = page_table.reshape(-1, max_pages)
    one_pool = all(size == 1 for size in (*groups, *layer.shape, *page_begin.shape))
    if one_pool:
        pools = [p.reshape(p.shape[num_groups:]) if num_groups else p for p in pools]
        return pools, flat_table, layer.reshape(1), page_begin.reshape(1)

    num_layers, num_pages = native[0] if len(native) == 4 else 1, native[-3]
    total = num_pages * num_layers
    group = jnp.zeros((1,) * len(batch), jnp.int32)
    for size, dim in zip(groups, pool_dims, strict=True):
        shape = [1] * len(batch)
        shape[dim] = size
        group = group * size + jnp.arange(size, dtype=jnp.int32).reshape(shape)
        total *= size
    if isinstance(total, int) and total >= 2**31:  # a symbolic number is not known
        raise ValueError(f"vmap: pools: expected fewer than 2^31 pages in all, got {total}")
    layer, begin = layer[..., None], page_begin[..., None]  # [*batch, 1]
    local, owned = local_pages(page_table, begin, num_pages)
    owned &= (layer >= 0) & (layer < num_layers)
    ids = (group[..., None] * num_layers + layer) * num_pages + local
    ids = jnp.where(owned, ids, -1).reshape(-1, max_pages)
    zero = jnp.zeros((1,), jnp.int32)
    return [p.reshape(total, *p.shape[-2:]) for p in pools], ids, zero, zero
