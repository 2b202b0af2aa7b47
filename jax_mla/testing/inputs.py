"""Random inputs. Whatever the op must not read holds NaN or a wild page id."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_mla.kv_cache import KvPages, has_packs
from jax_mla.testing import fp8

WILD_IDS = (2147480000, -1, -2147480000, 1 << 30)


@dataclasses.dataclass(frozen=True)
class DecodeInputs:
    """Arguments of one decode call, as numpy arrays.

    Attributes:
      q_nope: [batch, q_len, num_heads, d_ckv].
      q_pe: [batch, q_len, num_heads, d_kpe]; d_kpe is 0 without rotary part.
      kv_pages: one pool, or a tuple of two.
      page_table: [batch, max_pages_per_seq] int32; wild ids after the last page of a sequence.
      seq_lens: [batch] int32.
      sm_scale: factor on the scores.
      layer: layer of a stacked pool, or None.
      max_seq_len: bound of the lengths, or None.
      kv_format: format of the cache, or None.
      kv_scale: scale of ckv and kpe; None if the format has none.
      q_scale: scale of the queries; None unless they are e4m3.
    """

    q_nope: np.ndarray
    q_pe: np.ndarray
    kv_pages: np.ndarray | tuple[np.ndarray, np.ndarray]
    page_table: np.ndarray
    seq_lens: np.ndarray
    sm_scale: float
    layer: int | None
    max_seq_len: int | None = None
    kv_format: str | None = None
    kv_scale: tuple[float, float] | None = None
    q_scale: float | None = None

    def args(self) -> tuple[Any, ...]:
        """Return the positional arguments of `jax_mla.decode`, as JAX arrays."""
        pools: KvPages
        if isinstance(self.kv_pages, tuple):
            pools = (jnp.asarray(self.kv_pages[0]), jnp.asarray(self.kv_pages[1]))
        else:
            pools = jnp.asarray(self.kv_pages)
        rest = (jnp.asarray(self.page_table), jnp.asarray(self.seq_lens))
        return (jnp.asarray(self.q_nope), rotary_part(self.q_pe), pools, *rest)

    def kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of `jax_mla.decode`."""
        return keyword_arguments(self)

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which the call computes."""
        return fp8.dtype_of_call(self.q_nope)

    def plain(self) -> DecodeInputs:
        """Return the same call in float32: the values that codes stand for."""
        factor = np.float32(1 if self.q_scale is None else self.q_scale)
        pools = self.kv_pages
        if self.kv_format is not None:
            scales = self.kv_scale or (1.0, 1.0)
            pools = fp8.plain_pools(pools, self.kv_format, scales, self.q_nope.shape[-1])
        return dataclasses.replace(
            self,
            q_nope=self.q_nope.astype(np.float32) * factor,
            q_pe=self.q_pe.astype(np.float32) * factor,
            kv_pages=pools,
            kv_format=None,
            kv_scale=None,
            q_scale=None,
        )


def rotary_part(x: np.ndarray) -> Any:
    """Return the argument q_pe or kpe: a JAX array, or None if rows have no rotary part."""
    return jnp.asarray(x) if x.shape[-1] else None


def keyword_arguments(inputs: Any) -> dict[str, Any]:
    """Return the keyword arguments of an op for `DecodeInputs` or `RaggedInputs`.

    The layer and one of the scales are on the device. A cache whose kpe is bfloat16 has one scale,
    and so has one without kpe.
    """
    found = {
        "sm_scale": inputs.sm_scale,
        "layer": None if inputs.layer is None else jnp.int32(inputs.layer),
    }
    for name in ("max_seq_len", "kv_format", "q_scale"):
        if (value := getattr(inputs, name)) is not None:
            found[name] = value
    pools = inputs.kv_pages if isinstance(inputs.kv_pages, tuple) else (inputs.kv_pages,)
    if has_packs(pools, inputs.layer is not None):
        found["packs"] = True
    if inputs.kv_scale is not None:
        ckv, kpe = inputs.kv_scale
        is_one = fp8.is_mixed(inputs.kv_pages) or not inputs.q_pe.shape[-1]
        found["kv_scale"] = ckv if is_one else (ckv, jnp.float32(kpe))
    return found


def decode_inputs(
    *,
    seq_lens: Sequence[int],
    q_len: int = 1,
    num_heads: int = 16,
    d_ckv: int = 512,
    d_kpe: int = 64,
    page_size: int = 64,
    dtype: str = "bfloat16",
    cache: str = "packed",
    padding: int = 0,
    pack: int | None = None,
    num_layers: int | None = None,
    table_tokens: int | None = None,
    max_seq_len: int | None = None,
    num_spare_pages: int = 2,
    page_multiple: int = 1,
    magnitude: float = 1.0,
    kv_format: str | None = None,
    has_codes: bool = False,
    sliding_window: int | None = None,
    num_new: Sequence[int] | None = None,
    seed: int = 0,
) -> DecodeInputs:
    """Make inputs with permuted pages.

    Args:
      seq_lens: tokens of each sequence; its length is the batch size.
      q_len: query tokens in each sequence.
      num_heads: query heads.
      d_ckv: width of the latent.
      d_kpe: width of the rotary key; 0 for rows without one.
      page_size: tokens in a page.
      dtype: dtype of queries and cache.
      cache: "packed", "split" or "mixed".
      padding: columns at the end of every row of a pool that the op must not use.
      pack: rows of a pack, which divides page_size; None for pages without packs.
      num_layers: layers of a stacked pool; None for a pool without layers.
      table_tokens: tokens for which the page table has places; None for the longest sequence.
      max_seq_len: argument of `jax_mla.decode`. The rows of a sequence after it are NaN, on pages
        that exist.
      num_spare_pages: pages that no sequence uses.
      page_multiple: the number of pages is rounded up to a multiple of this, to shard them.
      magnitude: factor on the cache, whose inverse is in sm_scale, so that the scores stay as they
        are; a power of two.
      kv_format: "fp8_e4m3" or "fp8_ds_mla"; None for a cache in `dtype`. With `cache="mixed"` the
        cache is split, and kpe is bfloat16.
      has_codes: whether the queries are e4m3.
      sliding_window: argument of `jax_mla.decode`. What no query sees of a sequence is NaN, and
        whole pages of it have wild ids.
      num_new: queries of each sequence, by which the window goes; None for q_len.
      seed: seed of the random generator.

    Returns:
      Inputs with normally distributed rows. Unused pages, the tail of the last page of each
      sequence, the other layers and the padding are NaN. Unused entries of the page table are wild
      ids.
    """
    rng = np.random.default_rng(seed)
    as_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    batch = len(seq_lens)
    pages_of = [-(-n // page_size) for n in seq_lens]
    max_len = max(table_tokens or 0, *seq_lens, 1)
    max_pages = -(-max_len // page_size)
    num_pages = max(sum(pages_of) + num_spare_pages, 1)
    num_pages = -(-num_pages // page_multiple) * page_multiple

    table = rng.choice(np.array(WILD_IDS, np.int64), (batch, max_pages)).astype(np.int32)
    ids = rng.permutation(num_pages).astype(np.int32)
    pool = np.full((num_pages, page_size, d_ckv + d_kpe), np.nan, as_dtype)
    used = 0
    for b, (length, pages) in enumerate(zip(seq_lens, pages_of, strict=True)):
        own = ids[used : used + pages]
        used += pages
        table[b, :pages] = own
        rows = np.full((pages * page_size, d_ckv + d_kpe), np.nan, np.float32)
        live = length if max_seq_len is None else min(length, max_seq_len)
        rows[:live] = rng.standard_normal((live, d_ckv + d_kpe), dtype=np.float32)
        if sliding_window is not None:
            new = q_len if num_new is None else num_new[b]
            unseen = max(live - new - sliding_window + 1, 0)
            rows[:unseen] = np.nan
            table[b, : unseen // page_size] = WILD_IDS[b % len(WILD_IDS)]
        pool[own] = (
            (rows * np.float32(magnitude)).astype(as_dtype).reshape(pages, page_size, d_ckv + d_kpe)
        )
    layer = None
    if num_layers is not None:
        layer = num_layers // 2
        stacked = np.full((num_layers, *pool.shape), np.nan, as_dtype)
        stacked[layer] = pool
        pool = stacked

    def query(width: int) -> np.ndarray:
        shape = (batch, q_len, num_heads, width)
        return rng.standard_normal(shape, dtype=np.float32).astype(as_dtype)

    def laid_out(rows: np.ndarray) -> np.ndarray:
        width = rows.shape[-1]
        padded = np.full((*rows.shape[:-1], width + padding), np.nan, as_dtype)
        padded[..., :width] = rows
        packs = (page_size,) if pack is None else (page_size // pack, pack)
        return padded.reshape(*rows.shape[:-2], *packs, width + padding)

    split = (laid_out(pool[..., :d_ckv]), laid_out(pool[..., d_ckv:]))
    plain = DecodeInputs(
        q_nope=query(d_ckv),
        q_pe=query(d_kpe),
        kv_pages=laid_out(pool) if cache == "packed" else split,
        page_table=table,
        seq_lens=np.asarray(seq_lens, np.int32),
        sm_scale=(d_ckv + d_kpe) ** -0.5 * 2 / magnitude,
        layer=layer,
        max_seq_len=max_seq_len,
    )
    if kv_format is None:
        return plain
    return quantized(plain, kv_format, magnitude, keep_kpe=cache == "mixed", has_codes=has_codes)


def quantized(
    inputs: DecodeInputs, kv_format: str, magnitude: float, *, keep_kpe: bool, has_codes: bool
) -> DecodeInputs:
    """Return inputs with a cache in a format, and with codes as queries if `has_codes`."""
    scales = (0.0125 * magnitude, 0.02 * magnitude)
    q_scale = 0.01
    pools = fp8.quantized_pools(
        inputs.kv_pages, kv_format, scales, inputs.q_nope.shape[-1], keep_kpe=keep_kpe
    )
    inputs = dataclasses.replace(
        inputs,
        kv_pages=pools,
        kv_format=kv_format,
        kv_scale=None if kv_format == "fp8_ds_mla" else scales,
    )
    if not has_codes:
        return inputs
    return dataclasses.replace(
        inputs,
        q_nope=fp8.round_to_e4m3(inputs.q_nope.astype(np.float32) / q_scale),
        q_pe=fp8.round_to_e4m3(inputs.q_pe.astype(np.float32) / q_scale),
        q_scale=q_scale,
    )
