"""Random inputs of `ragged_paged_attention`. What it must not read holds NaN or wild values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_mla.kv_cache import KvPages, pool_sizes
from jax_mla.testing import fp8
from jax_mla.testing.inputs import (
    WILD_IDS,
    DecodeInputs,
    decode_inputs,
    keyword_arguments,
    quantized,
    rotary_part,
)


@dataclasses.dataclass(frozen=True)
class RaggedInputs:
    """Arguments of one call, as numpy arrays.

    Attributes:
      q_nope: [tokens, num_heads, d_ckv].
      q_pe: [tokens, num_heads, d_kpe].
      ckv: [tokens, d_ckv].
      kpe: [tokens, d_kpe].
      kv_pages: one pool, or a tuple of two.
      page_table: [seqs, max_pages_per_seq] int32.
      seq_lens: [seqs] int32.
      cu_q_lens: [seqs + 1] int32, or None.
      num_seqs: sequences of the step, or None.
      sm_scale: factor on the scores.
      layer: layer of a stacked pool, or None.
      max_seq_len: bound of the lengths, or None.
      kv_format: format of the cache, or None.
      kv_scale: scale of ckv and kpe; None if the format has none.
      q_scale: scale of the queries; None unless they are e4m3. Then the new rows are codes as well,
        if the cache holds codes alone.
    """

    q_nope: np.ndarray
    q_pe: np.ndarray
    ckv: np.ndarray
    kpe: np.ndarray
    kv_pages: np.ndarray | tuple[np.ndarray, np.ndarray]
    page_table: np.ndarray
    seq_lens: np.ndarray
    cu_q_lens: np.ndarray | None
    num_seqs: int | None
    sm_scale: float
    layer: int | None
    max_seq_len: int | None = None
    kv_format: str | None = None
    kv_scale: tuple[float, float] | None = None
    q_scale: float | None = None

    def args(self) -> tuple[Any, ...]:
        """Return the positional arguments of the op, as JAX arrays."""
        pools: KvPages
        if isinstance(self.kv_pages, tuple):
            pools = (jnp.array(self.kv_pages[0]), jnp.array(self.kv_pages[1]))
        else:
            pools = jnp.array(self.kv_pages)
        rows = [
            jnp.asarray(self.q_nope),
            rotary_part(self.q_pe),
            jnp.asarray(self.ckv),
            rotary_part(self.kpe),
        ]
        bounds = None if self.cu_q_lens is None else jnp.asarray(self.cu_q_lens)
        num_seqs = None if self.num_seqs is None else jnp.int32(self.num_seqs)
        place = jnp.asarray(self.page_table), jnp.asarray(self.seq_lens)
        return (*rows, pools, *place, bounds, num_seqs)

    def kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of the op."""
        return keyword_arguments(self)

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which the call computes."""
        return fp8.dtype_of_call(self.q_nope)

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        pool = self.kv_pages[0] if isinstance(self.kv_pages, tuple) else self.kv_pages
        return pool_sizes(pool, self.layer is not None).page_size

    @property
    def bound(self) -> int:
        """The most tokens that a sequence may have."""
        capacity = self.page_table.shape[1] * self.page_size
        return capacity if self.max_seq_len is None else min(capacity, self.max_seq_len)

    def places(self) -> list[tuple[int, int]]:
        """Return each token's sequence and its place there, by definition; (-1, -1) for padding."""
        num_tokens, num_rows = len(self.q_nope), len(self.page_table)
        bounds = self.cu_q_lens
        if bounds is None:
            bounds = np.arange(num_rows + 1) * (num_tokens // num_rows)
        present = num_rows if self.num_seqs is None else min(max(self.num_seqs, 0), num_rows)
        found = []
        for t in range(num_tokens):
            j = next((j for j in range(present + 1) if bounds[j] > t), 0)
            if j == 0:
                found.append((-1, -1))
                continue
            length = min(max(int(self.seq_lens[j - 1]), 0), self.bound)
            found.append((j - 1, length - (min(int(bounds[j]), num_tokens) - t)))
        return found

    def stored_rows(self) -> list[np.ndarray]:
        """Return the new rows as each pool stores them, without padding."""
        parts = (self.ckv, self.kpe)
        rows = parts if isinstance(self.kv_pages, tuple) else np.concatenate(parts, axis=-1)
        if self.kv_format is not None and self.ckv.dtype != fp8.E4M3:
            rows = fp8.quantized_pools(
                rows, self.kv_format, self.kv_scale or (1.0, 1.0), self.ckv.shape[-1],
                keep_kpe=fp8.is_mixed(self.kv_pages),
            )  # fmt: skip
        return list(rows) if isinstance(rows, tuple) else [rows]

    def new_pools(self) -> list[np.ndarray]:
        """Return the pools with the new rows, by loops over the definition, without JAX."""
        given = self.kv_pages if isinstance(self.kv_pages, tuple) else (self.kv_pages,)
        new = [np.array(pool) for pool in given]
        layers = [pool if self.layer is None else pool[self.layer] for pool in new]
        rows = self.stored_rows()
        for t, (b, place) in enumerate(self.places()):
            if place < 0 or not 0 <= self.seq_lens[b] <= self.bound:
                continue
            page = self.page_table[b, place // self.page_size]
            if not 0 <= page < len(layers[0]):
                continue
            for layer, row in zip(layers, rows, strict=True):
                page_rows(layer)[page, place % self.page_size, : row.shape[1]] = row[t]
        return new

    def token_by_token(self, pools: Sequence[np.ndarray]) -> DecodeInputs:
        """Return the same attention as a call of decode in which each token is a sequence.

        Args:
          pools: the cache with the new rows, one pool or two.
        """
        sequence, place = (np.array(x) for x in zip(*self.places(), strict=True))
        return DecodeInputs(
            q_nope=self.q_nope[:, None],
            q_pe=self.q_pe[:, None],
            kv_pages=pools[0] if len(pools) == 1 else (pools[0], pools[1]),
            page_table=self.page_table[np.maximum(sequence, 0)],
            seq_lens=np.maximum(place + 1, 0).astype(np.int32),
            sm_scale=self.sm_scale,
            layer=self.layer,
            kv_format=self.kv_format,
            kv_scale=self.kv_scale,
            q_scale=self.q_scale,
        )


def page_rows(pool: np.ndarray) -> np.ndarray:
    """Return a pool without layers as a view [num_pages, page_size, width], whatever its packs."""
    return pool.reshape(pool.shape[0], -1, pool.shape[-1])


def ragged_inputs(
    *,
    seqs: Sequence[tuple[int, int]],
    num_padding: int = 0,
    num_absent: int = 0,
    num_shared_pages: int = 0,
    is_uniform: bool = False,
    num_heads: int = 16,
    kv_format: str | None = None,
    has_codes: bool = False,
    seed: int = 0,
    **cache: Any,
) -> RaggedInputs:
    """Make inputs with permuted pages.

    Args:
      seqs: (new tokens, length with them) of each sequence. A sequence may be shorter than its new
        tokens.
      num_padding: tokens after those of the last sequence.
      num_absent: rows for absent sequences, with garbage that names other sequences' pages.
      num_shared_pages: how many pages all sequences share, the first ones of the first sequence.
      is_uniform: leave out cu_q_lens.
      num_heads: query heads.
      kv_format: see `decode_inputs`.
      has_codes: whether queries and, where the cache holds codes alone, new rows are e4m3.
      seed: seed of the random generator.
      **cache: d_ckv, d_kpe, page_size, dtype, cache, padding, pack, num_layers, table_tokens,
        max_seq_len, sliding_window of `decode_inputs`.

    Returns:
      Inputs with normally distributed rows. In the cache the places of the new rows are NaN, and so
      is all that `decode_inputs` poisons. Tokens without a place are NaN, and so are the new rows
      of a sequence that is longer than max_seq_len, which are not written.
    """
    rng = np.random.default_rng(seed)
    base = decode_inputs(
        seq_lens=[length for _, length in seqs],
        num_new=[q_len for q_len, _ in seqs],
        num_heads=1,
        seed=seed,
        **cache,
    )
    table, page_size = base.page_table.copy(), cache.get("page_size", 64)
    d_ckv, d_kpe = base.q_nope.shape[-1], base.q_pe.shape[-1]
    is_split = isinstance(base.kv_pages, tuple)
    pools, widths = (
        (base.kv_pages, (d_ckv, d_kpe)) if is_split else ((base.kv_pages,), (d_ckv + d_kpe,))
    )
    layers = [
        page_rows(pool if base.layer is None else pool[base.layer])[..., :width]
        for pool, width in zip(pools, widths, strict=True)
    ]
    for row in table[1:]:
        for layer in layers:
            layer[row[:num_shared_pages]] = np.nan
        row[:num_shared_pages] = table[0, :num_shared_pages]

    q_lens = [q_len for q_len, _ in seqs]
    num_tokens = sum(q_lens) + num_padding
    if is_uniform:
        num_tokens += num_absent * q_lens[0]
    dtype = base.q_nope.dtype
    rows = np.full((num_tokens, d_ckv + d_kpe), np.nan, dtype)
    query = np.full((num_tokens, num_heads, d_ckv + d_kpe), np.nan, dtype)
    bounds = np.concatenate([[0], np.cumsum(q_lens)])
    for b, (q_len, length) in enumerate(seqs):
        end = length if base.max_seq_len is None else min(length, base.max_seq_len)
        for place in range(max(end - q_len, 0), end):
            token = bounds[b + 1] - (end - place)
            page, slot = table[b, place // page_size], place % page_size
            if end == length:
                rows[token] = np.concatenate([layer[page, slot] for layer in layers])
                for layer in layers:
                    layer[page, slot] = np.nan
            query[token] = rng.standard_normal(query.shape[1:], dtype=np.float32).astype(dtype)

    garbage = rng.choice(np.array([*WILD_IDS, 3, num_tokens], np.int64), 2 * num_absent)
    absent = np.repeat(table[:1], num_absent, axis=0)
    base = dataclasses.replace(base, q_nope=query[..., :d_ckv], q_pe=query[..., d_ckv:])
    ckv, kpe = rows[:, :d_ckv], rows[:, d_ckv:]
    if kv_format is not None:
        keep_kpe = cache.get("cache") == "mixed"
        base = quantized(base, kv_format, 1.0, keep_kpe=keep_kpe, has_codes=has_codes)
        if has_codes and base.kv_scale is not None and not keep_kpe:
            ckv, kpe = (
                fp8.round_to_e4m3(x.astype(np.float32) / scale)
                for x, scale in zip((ckv, kpe), base.kv_scale, strict=True)
            )
    return RaggedInputs(
        q_nope=base.q_nope,
        q_pe=base.q_pe,
        ckv=ckv,
        kpe=kpe,
        kv_pages=base.kv_pages,
        page_table=np.concatenate([table, absent]),
        seq_lens=np.concatenate([base.seq_lens, garbage[:num_absent]]).astype(np.int32),
        cu_q_lens=None
        if is_uniform
        else np.concatenate([bounds, garbage[num_absent:]]).astype(np.int32),
        num_seqs=len(seqs) if num_absent else None,
        sm_scale=base.sm_scale,
        layer=base.layer,
        max_seq_len=base.max_seq_len,
        kv_format=base.kv_format,
        kv_scale=base.kv_scale,
        q_scale=base.q_scale,
    )
