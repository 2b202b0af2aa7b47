"""The definition of ragged_paged_attention in float32 jax.numpy."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_mla.kv_cache import (
    Cache,
    KvScale,
    Scale,
    as_pools,
    bound_of_lengths,
    pool_sizes,
)
from jax_mla.ops import _eager, _ragged
from jax_mla.ops.append import checks
from jax_mla.ops.append.reference import append
from jax_mla.ops.append.transforms import rms_norm, rotate
from jax_mla.ops.decode.reference import decode

TOKENS_AT_ONCE = 8  # bounds the memory: the keys of each are gathered


@_eager.lets_infs_pass
@_eager.definition
def ragged_paged_attention(
    q_nope: Annotated[Array, "[tokens, num_heads, d_ckv]"],
    q_pe: Annotated[Array | None, "[tokens, num_heads, d_kpe]"],
    ckv: Annotated[Array, "[tokens, d_ckv]"],
    kpe: Annotated[Array | None, "[tokens, d_kpe]"],
    kv_pages: Cache,
    page_table: Annotated[Array, "[seqs, max_pages_per_seq] int32"],
    seq_lens: Annotated[Array, "[seqs] int32"],
    cu_q_lens: Annotated[Array, "[seqs + 1] int32"] | None = None,
    num_seqs: Array | int | None = None,
    *,
    sm_scale: float,
    sink: Annotated[Array | None, "[num_heads] float32"] = None,
    layer: Array | int | None = None,
    packs: bool = False,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    max_seq_len: int | None = None,
    page_begin: Array | int = 0,
    kv_format: str | None = None,
    kv_scale: KvScale | None = None,
    q_scale: Scale | None = None,
    norm_weight: Annotated[Array, "[d_ckv]"] | None = None,
    norm_eps: float = 1e-6,
    rope_table: Annotated[Array, "[num_positions, d_kpe] float32"] | None = None,
    rope_interleaved: bool | None = None,
) -> tuple[Array, Cache] | tuple[Array, Array, Cache]:
    """Write the new rows of a step into the cache and attend to it, by definition.

    Each token is treated as its own sequence, which ends at the token's position: `append` writes
    its row there, and `decode` attends from it. Everything is computed in float32 at the highest
    precision.

    Args:
      q_nope: [tokens, num_heads, d_ckv], any float dtype. The query without rotary part, multiplied
        by W_UK.
      q_pe: [tokens, num_heads, d_kpe]. The rotary part; None, like kpe, if the rows have none.
      ckv: [tokens, d_ckv]. The new latents, stored in the dtype of the pool.
      kpe: [tokens, d_kpe]. The new rotary keys.
      kv_pages: one pool or a tuple of two, as for `jax_mla.decode`.
      page_table: [seqs, max_pages_per_seq] int32, global page ids.
      seq_lens: [seqs] int32. Tokens in the cache, including the new ones.
      cu_q_lens: [seqs + 1] int32, as for `jax_mla.ragged_paged_attention`.
      num_seqs: how many sequences the step has; None for all.
      sm_scale: factor on the scores.
      sink: [num_heads] float32. out is multiplied by exp(lse) / (exp(lse) + exp(sink)).
      layer: which layer of a stacked pool.
      packs: whether the pages of the pool are cut into packs.
      sliding_window: the most tokens that a query sees, its own and those before it; None for all.
      soft_cap: soft_cap * tanh(score / soft_cap) takes the place of score. None for no limit.
      return_lse: whether to also return the log-sum-exp of the scores.
      max_seq_len: bound of the lengths; None for the width of page_table.
      page_begin: global id of the pool's first page.
      kv_format: name of the format in which the cache is stored; see `reference.encode_rows`.
      kv_scale: scale of the cache, or a tuple of those of ckv and kpe.
      q_scale: factor on the queries; None for 1.
      norm_weight: [d_ckv]. ckv goes through `rms_norm` with it first; None for no norm.
      norm_eps: see `rms_norm`.
      rope_table: [num_positions, d_kpe] float32. kpe and q_pe go through `rotate` first; None if
        they are rotated already.
      rope_interleaved: see `rotate`; required with rope_table.

    Returns:
      out: shape of q_nope, float32.
      lse: only with return_lse. [tokens, num_heads] float32, natural logarithm, without the sink.
      kv_pages: the cache with the new rows, in the form of kv_pages.
      For padding, and for a token whose position is negative, out is 0 and lse is -inf.
    """
    op = "jax_mla.reference.ragged_paged_attention"
    page_table, seq_lens = jnp.asarray(page_table), jnp.asarray(seq_lens)
    num_tokens, num_rows = q_nope.shape[0], page_table.shape[0]
    pools = [jnp.asarray(pool) for pool in as_pools(op, kv_pages)]
    capacity = page_table.shape[1] * pool_sizes(pools[0], layer is not None).page_size
    bound = bound_of_lengths(capacity, max_seq_len or 0)
    if cu_q_lens is None:
        cu_q_lens = jnp.arange(num_rows + 1, dtype=jnp.int32) * (num_tokens // num_rows)
    bounds = _ragged.bounds(jnp.asarray(cu_q_lens), num_seqs, num_tokens)
    sequence, place = _ragged.places(bounds, jnp.clip(seq_lens, 0, bound), num_tokens)
    own = jnp.maximum(sequence, 0)
    table = page_table[own]  # [tokens, max_pages_per_seq]
    if norm_weight is not None:
        ckv = rms_norm(ckv, norm_weight, norm_eps)
    interleaved = checks.interleaved(op, rope_interleaved, rope_table)
    if rope_table is not None and kpe is not None and q_pe is not None:
        kpe, q_pe = (rotate(x, rope_table, place, interleaved=interleaved) for x in (kpe, q_pe))
    # Nothing says where the rows of a length belong for which the call has no room.
    is_writable = ((seq_lens >= 0) & (seq_lens <= bound))[own]
    written = jnp.where(is_writable, place, -1)
    kv_pages = append(
        kv_pages, ckv, kpe, table, written, layer=layer, packs=packs, page_begin=page_begin,
        kv_format=kv_format, kv_scale=kv_scale,
    )  # fmt: skip

    def attend(one: tuple[Array | None, ...]) -> tuple[Array, Array]:
        q_nope, q_pe, table, length = jax.tree.map(lambda x: x[None], one)
        out, lse = decode(
            q_nope, q_pe, kv_pages, table, length,
            sm_scale=sm_scale, sink=sink, layer=layer, packs=packs,
            sliding_window=sliding_window, soft_cap=soft_cap, return_lse=True,
            max_seq_len=max_seq_len, page_begin=page_begin, kv_format=kv_format,
            kv_scale=kv_scale, q_scale=q_scale,
        )  # fmt: skip
        return out[0], lse[0]

    tokens = (q_nope, q_pe, table, place + 1)
    at_once = TOKENS_AT_ONCE if isinstance(num_tokens, int) else None  # of symbolically many, one
    out, lse = lax.map(attend, tokens, batch_size=at_once)
    return (out, lse, kv_pages) if return_lse else (out, kv_pages)
