"""What a call of `prefill` is made of, after its arguments have been checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from jax_mla.kv_cache import pool_sizes
from jax_mla.ops import _ragged

OP = "jax_mla.prefill"
SM90, CUDNN, XLA, REFERENCE = "sm90", "cudnn", "xla", "reference"
IMPLEMENTATIONS = (SM90, CUDNN, XLA, REFERENCE)
# What None means where this process has a GPU that runs the kernel.
SM90_OR_XLA = "sm90 on cuda, xla elsewhere"


def at_most(bound: int, size: Any) -> int:
    """Return the smaller of the two; the bound if the size is symbolic."""
    return min(bound, size) if isinstance(size, int) else bound


class Tokens(NamedTuple):
    """The new tokens.

    Attributes:
      q_nope: [tokens, heads, d_nope].
      q_pe: [tokens, heads, d_kpe]; None, like kpe, if rows have no rotary part.
      ckv: [tokens, d_ckv].
      kpe: [tokens, d_kpe].
    """

    q_nope: Array
    q_pe: Array | None
    ckv: Array
    kpe: Array | None


class Weights(NamedTuple):
    """The up-projections.

    Attributes:
      w_uk: [heads, d_nope, d_ckv].
      w_uv: [heads, d_ckv, d_v].
    """

    w_uk: Array
    w_uv: Array


class Cache(NamedTuple):
    """The cache and the place of each sequence in it.

    Attributes:
      kv_pages: one pool or two.
      page_table: [seqs, max_pages_per_seq] int32.
      seq_lens: [seqs] int32.
      layer: [1] int32, any for a pool without layers.
      page_begin: [1] int32.
      kv_scale: [1, 2] float32, of ckv and kpe; None if the format has none.
    """

    kv_pages: tuple[Array, ...]
    page_table: Array
    seq_lens: Array
    layer: Any
    page_begin: Any
    kv_scale: Any = None


class Params(NamedTuple):
    """The static parameters of a call, see `prefill`.

    Attributes:
      implementation: one of IMPLEMENTATIONS, SM90_OR_XLA, or None: cuDNN on CUDA if the dtype lets
        it, XLA elsewhere.
    """

    sm_scale: float
    max_q_len: int
    prefix_chunk: int
    has_layer: bool
    axis_name: str | tuple[str, ...] | None
    implementation: str | None
    kv_format: str | None = None
    sliding_window: int = 0
    soft_cap: float = 0.0

    @property
    def has_masks(self) -> bool:
        """Whether scores need more than the causal mask; then XLA attends."""
        return self.sliding_window > 0 or self.soft_cap > 0


class Prompts(NamedTuple):
    """Where the new tokens of each sequence are.

    Attributes:
      begin: [seqs] int32, the first new token.
      end: [seqs] int32, one past the last new token.
      prefix_lens: [seqs] int32, the tokens before the new ones.
    """

    begin: Array
    end: Array
    prefix_lens: Array


def find_prompts(
    num_tokens: int, cu_q_lens: Array, num_seqs: Array | None, cache: Cache | None,
    params: Params,
) -> Prompts:  # fmt: skip
    """Read `cu_q_lens` and the lengths, so that no bad value leads out of bounds.

    Args:
      num_tokens: rows of the new tokens.
      cu_q_lens: [seqs + 1] int32.
      num_seqs: sequences that are present, or None for all.
      cache: the cache, or None if nothing is cached.
      params: the static parameters.
    """
    bounds = _ragged.bounds(cu_q_lens, num_seqs, num_tokens)
    end = bounds[1:]
    q_lens = end - bounds[:-1]
    prefix_lens = jnp.zeros_like(q_lens)
    if cache is not None:
        page_size = pool_sizes(cache.kv_pages[0], params.has_layer).page_size
        capacity = cache.page_table.shape[1] * page_size
        seq_lens = jnp.clip(cache.seq_lens, 0, capacity)
        # Tokens before the start of a sequence are padding, as in `decode`.
        q_lens = jnp.minimum(q_lens, seq_lens)
        prefix_lens = jnp.where(q_lens > 0, seq_lens - q_lens, 0)
    begin = end - q_lens
    return Prompts(begin, begin + jnp.minimum(q_lens, params.max_q_len), prefix_lens)
