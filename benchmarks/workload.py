"""The data of a timed call: rotating caches of random values, queries, page table and lengths.

Values are random normal, because a card that multiplies zeros clocks higher. Pages are randomly
permuted over the pool. Together the caches exceed every on-chip cache, as the layers of a model do.
"""

import dataclasses
import functools
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from bars import QUERY_CODES
from grid import SM_SCALE, Case

from jax_mla import reference

# Rows of the pools repeat with this period, because it would take longer to make and transfer
# gigabytes of distinct random numbers than to time everything. It is a prime, so that no pattern of
# pages repeats with it.
_TILE_TOKENS = 104_729

# The output of each call is the next call's q_nope. It is an average of random rows and nearly
# zero, so the scores come from q_pe alone. This scale gives them the spread that a normal q_nope
# would.
_Q_PE_SCALE = 3.0

# The scale of a cache in fp8_e4m3. It holds values up to 7; the largest random ones are about 5.
# FlashInfer rounds the scale and each scaled code to bf16. With a power of two that loses nothing.
KV_SCALE = 2.0**-6

Pool = jax.Array | tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Workload:
    """Operands of one case.

    Attributes:
      pools: [num_caches, num_pages, page_size, d_ckv + d_kpe], or a pair of such for a split
      layout.
      page_table: [batch, max_pages_per_seq] int32, one table for all caches, as for a model's
      layers.
      tile: [tile_pages, page_size, d_ckv + d_kpe] float32, the values; page p of cache c holds
        `tile[(c * num_pages + p) % tile_pages]`.
    """

    case: Case
    q_nope: jax.Array
    q_pe: jax.Array
    pools: Pool
    page_table: jax.Array
    seq_lens: jax.Array
    tile: np.ndarray
    num_caches: int
    sm_scale: float = SM_SCALE
    kv_format: str | None = None
    has_query_codes: bool = False

    @property
    def operands(self) -> tuple[jax.Array, jax.Array | None, Pool, jax.Array, jax.Array]:
        """The arguments of a decode call before its layer."""
        q_nope, q_pe = self.q_nope, self.q_pe
        if self.has_query_codes:
            q_nope, q_pe = (q.astype(jnp.float8_e4m3fn) for q in (q_nope, q_pe))
        rotary_part = q_pe if self.case.d_kpe else None
        return q_nope, rotary_part, self.pools, self.page_table, self.seq_lens

    @property
    def options(self) -> dict[str, Any]:
        """What a call of ours must be told of the cache."""
        if self.kv_format is None:
            return {}
        scale = KV_SCALE if self.kv_format == "fp8_e4m3" else None
        q_scale = {"q_scale": 1.0} if self.has_query_codes else {}
        return {"kv_format": self.kv_format, "kv_scale": scale, **q_scale}

    def named(self, name: str) -> str:
        """Return a contender's name and the format of these caches if they are not plain."""
        with_format = name if self.kv_format is None else f"{name} {self.kv_format}"
        return with_format + QUERY_CODES * self.has_query_codes

    def with_query_codes(self) -> Self:
        """Return the same call with queries in e4m3. The check sees the values that they hold."""
        rounded = {
            name: getattr(self, name).astype(jnp.float8_e4m3fn).astype(self.q_nope.dtype)
            for name in ("q_nope", "q_pe")
        }
        return dataclasses.replace(self, has_query_codes=True, **rounded)

    def stored_as(self, kv_format: str) -> Self:
        """Return the same call with packed caches in another format, and the values these hold."""
        case, pages = self.case, int(self.case.pages_per_seq.sum())
        rows, tile = _encoded_tile(
            _tile_pages(case, self.num_caches), case.page_size, (case.d_ckv, case.d_kpe),
            case.dtype, kv_format,
        )  # fmt: skip
        pools = _fill(rows, self.num_caches, pages, None)
        return dataclasses.replace(self, pools=pools, tile=tile, kv_format=kv_format)

    def in_wide_table(self, tokens: int) -> Self:
        """Return the same call with a page table that has places for `tokens` a sequence."""
        columns = -(-tokens // self.case.page_size) - self.page_table.shape[1]
        table = jnp.pad(self.page_table, ((0, 0), (0, max(columns, 0))))
        return dataclasses.replace(self, page_table=table)

    def host_cache(self, cache: int, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a small pool with the pages of a few sequences, and its page table.

        Args:
          cache: Which cache.
          sequences: [n] indices of sequences.

        Returns:
          [sum of pages, page_size, d_ckv + d_kpe] and [n, max pages] int32.
        """
        pages = self.case.pages_per_seq[sequences]
        table = np.zeros((len(sequences), max(int(pages.max()), 1)), np.int32)
        source = np.asarray(self.page_table)
        num_pages = int(self.case.pages_per_seq.sum())
        picked: list[np.ndarray] = []
        filled = 0
        for row, (sequence, count) in enumerate(zip(sequences, pages, strict=True)):
            picked.append((cache * num_pages + source[sequence, :count]) % len(self.tile))
            table[row, :count] = np.arange(filled, filled + count)
            filled += int(count)
        return self.tile[np.concatenate(picked)], table


def num_caches(case: Case, min_bytes: float, *, most: int | None = None) -> int:
    """Return how many caches hold `min_bytes` together; at least two, at most `most`."""
    wanted = max(2, math.ceil(min_bytes / max(case.cache_bytes, 1)))
    return min(wanted, most) if most else wanted


def page_table(case: Case, seed: int = 0) -> np.ndarray:
    """Return [batch, max_pages_per_seq] int32: all pages of a pool in random order."""
    pages = case.pages_per_seq
    order = np.random.default_rng(seed).permutation(int(pages.sum())).astype(np.int32)
    table = np.zeros((case.batch, int(pages.max())), np.int32)
    # Fills the first pages[b] entries of each row b.
    table[np.arange(table.shape[1]) < pages[:, None]] = order
    return table


@functools.lru_cache(maxsize=1)
def _tile(pages: int, page_size: int, dim: int, dtype: str) -> tuple[np.ndarray, jax.Array]:
    """Random pages, on the host (as float32, once for all checks) and on the device."""
    shape = (pages, page_size, dim)
    on_device = jax.random.normal(jax.random.key(7), shape, jnp.dtype(dtype))
    return np.asarray(on_device.astype(jnp.float32)), on_device


def _tile_pages(case: Case, caches: int) -> int:
    """How many random pages the caches of a case are filled with."""
    return max(1, min(_TILE_TOKENS // case.page_size, caches * int(case.pages_per_seq.sum())))


def _tile_for(case: Case, caches: int) -> tuple[np.ndarray, jax.Array]:
    width = case.d_ckv + case.d_kpe
    return _tile(_tile_pages(case, caches), case.page_size, width, case.dtype)


@functools.lru_cache(maxsize=2)
def _encoded_tile(
    pages: int, page_size: int, dims: tuple[int, int], dtype: str, kv_format: str
) -> tuple[jax.Array, np.ndarray]:
    """The random pages in an FP8 format, on the device, and the values that they hold."""
    tile = _tile(pages, page_size, sum(dims), dtype)[1]
    scale = KV_SCALE if kv_format == "fp8_e4m3" else None

    @jax.jit
    def encode(tile):
        kpe = tile[..., dims[0] :] if dims[1] else None
        return reference.encode_rows(
            tile[..., : dims[0]], kpe, kv_format, scale, [jnp.float8_e4m3fn]
        )

    # In one program with `encode`, XLA for GPUs would leave out the way through the codes.
    @jax.jit
    def decode(rows):
        return jnp.concatenate(reference.decode_rows(rows, *dims, kv_format, scale), axis=-1)

    rows = encode(tile)
    return rows[0], np.asarray(decode(rows))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _fill(tile: jax.Array, caches: int, pages: int, split_at: int | None) -> Pool:
    index = (jnp.arange(caches)[:, None] * pages + jnp.arange(pages)) % tile.shape[0]
    pool = tile[index]
    return pool if split_at is None else (pool[..., :split_at], pool[..., split_at:])


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_normal(key: jax.Array, shape: tuple[int, ...], dtype: str, scale=1.0) -> jax.Array:
    """Random normal values, drawn in float32 on the device: a long prompt has gigabytes of them."""
    return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def host_tile(case: Case, caches: int) -> np.ndarray:
    """The random pages that pools are filled with, on the host."""
    return _tile_for(case, caches)[0]


def make_pools(case: Case, caches: int) -> tuple[Pool, np.ndarray]:
    """Make the caches of a group of cases, and the host's copy of their values."""
    host, tile = _tile_for(case, caches)
    split_at = case.d_ckv if case.layout == "split" else None
    return _fill(tile, caches, int(case.pages_per_seq.sum()), split_at), host


def make_workload(case: Case, pools: Pool, tile: np.ndarray, seed: int = 0) -> Workload:
    """Complete the caches of `make_pools` with queries, lengths and a page table."""
    caches = (pools[0] if isinstance(pools, tuple) else pools).shape[0]
    keys = jax.random.split(jax.random.key(seed))
    return Workload(
        case=case,
        q_nope=random_normal(keys[0], (*case.query_shape, case.d_ckv), case.dtype),
        q_pe=random_normal(keys[1], (*case.query_shape, case.d_kpe), case.dtype, _Q_PE_SCALE),
        pools=pools,
        page_table=jnp.asarray(page_table(case, seed)),
        seq_lens=jnp.asarray(case.seq_lens),
        tile=tile,
        num_caches=caches,
    )
