"""Sparse attention of DeepSeek-V3.2 and GLM-5: an indexer chooses the tokens to attend to.

This is all that a layer does with jax_mla:

    kv_pages = jax_mla.append(kv_pages, ckv, kpe, page_table, positions, layer=...)
    index_keys = jax_mla.index_append(index_keys, k, page_table, positions, layer=...)
    slots, lens = jax_mla.index_topk(q, w, index_keys, page_table, seq_lens, k=2048, layer=...)
    out = jax_mla.sparse_attention(q_latent, q_pe, kv_pages, slots, topk_lens=lens, layer=...)

The choice is exact, in steps that decode and in steps with prompts. Layers without an indexer
(GLM-5.2) attend to the tokens that the layer below chose: slots are the same in every layer.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_mla

from .config import Config, Index
from .moe import linear
from .rope import rotate

KEY_NORM_EPS = 1e-6  # whatever the model's rms_norm_eps is
# In FP8 a key has a code for each of its values, and a float32 scale.
FP8_HEAD_DIM, FP8_KEY_BYTES = 128, 132


class SparseCache(NamedTuple):
    """What a model with an indexer keeps of each token.

    Attributes:
      rows: [layers, num_pages, page_size, width], as without an indexer.
      index_keys: [layers with an indexer, num_pages, page_size, width], see `index_pool`.
    """

    rows: Any
    index_keys: Any


class SparseState(NamedTuple):
    """What a layer gives to the next.

    Attributes:
      cache: the cache.
      slots: [tokens, topk] int32, the cached tokens that each token attends to. None before the
        first layer.
      lens: [tokens] int32, how many of them count.
    """

    cache: SparseCache
    slots: jax.Array | None = None
    lens: jax.Array | None = None


class IndexInputs(NamedTuple):
    """What an indexer makes of the new tokens.

    Attributes:
      q: [tokens, index heads, head_dim], rotated.
      weights: [tokens, index heads] float32, with every constant factor.
      k: [tokens, head_dim], normalised and rotated.
    """

    q: jax.Array
    weights: jax.Array
    k: jax.Array


def require_indexer(config: Config, index_format: str | None) -> None:
    """Refuse a format of index keys for a model that has none.

    Raises:
      ValueError: the model has no indexer.
    """
    if index_format is not None and config.index is None:
        raise ValueError(
            f"--index-format: expected a model with an indexer, got {config.model_type}"
        )


def index_pool(
    index: Index, pages: int, page_size: int, dtype: jnp.dtype, index_format: str | None = None
) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of `SparseCache.index_keys`.

    Args:
      index: sizes.
      pages: number of pages.
      page_size: tokens in a page.
      dtype: dtype of the model.
      index_format: "fp8", or None for `dtype`.

    Raises:
      ValueError: index keys have another size than "fp8" holds.
    """
    shape = (index.num_layers, pages, page_size)
    if index_format is None:
        return jax.ShapeDtypeStruct((*shape, index.head_dim), dtype)
    if index.head_dim != FP8_HEAD_DIM:
        raise ValueError(
            f"--index-format: expected index keys of {FP8_HEAD_DIM} values for {index_format}, got "
            f"{index.head_dim}"
        )
    return jax.ShapeDtypeStruct((*shape, FP8_KEY_BYTES), jnp.uint8)


def index_inputs(
    index: Index, weights: Mapping[str, Any], x: jax.Array, q_latent: jax.Array, cos_sin: jax.Array
) -> IndexInputs | None:
    """Make the index queries, their weights and the index keys.

    Args:
      index: sizes.
      weights: weights of this layer.
      x: [tokens, hidden], normalised.
      q_latent: [tokens, q_lora_rank], normalised.
      cos_sin: rotary angles of the positions.

    Returns:
      Them, or None if the layer has no indexer.
    """
    if "index_k" not in weights:
        return None
    q = linear(q_latent, weights["index_q"])
    q = q.reshape(*x.shape[:-1], index.num_heads, index.head_dim)
    k = linear(x, weights["index_k"])
    k = layer_norm(k, weights["index_k_norm"], weights["index_k_bias"])
    q, k = (_rotate_first(a, cos_sin, index.rope_interleaved) for a in (q, k))
    scale = index.num_heads**-0.5 * index.head_dim**-0.5
    head_weights = jnp.einsum("td,hd->th", x.astype(jnp.float32), weights["index_weights"])
    return IndexInputs(q, head_weights * scale, k)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Subtract the mean, divide by the deviation, scale and shift, in float32."""
    x32 = x.astype(jnp.float32)
    x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + KEY_NORM_EPS)
    return (x32 * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def _rotate_first(x: jax.Array, cos_sin: jax.Array, interleaved: bool) -> jax.Array:
    """Rotate the first values of an index query or key, as many as there are angles for."""
    rotated, rest = jnp.split(x, [2 * cos_sin.shape[-1]], axis=-1)
    return jnp.concatenate([rotate(rotated, cos_sin, interleaved=interleaved), rest], axis=-1)


def encode_queries(q: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return index queries as e4m3 codes, and weights that hold the scales of the codes."""
    codes, scales = jax_mla.reference.encode_index_keys(q, power_of_two_scales=False)
    return codes, weights * scales


@dataclasses.dataclass(frozen=True)
class SparseAttention:
    """Append the new tokens, choose what each of them attends to, and attend.

    Attributes:
      sm_scale: softmax scale.
      index: sizes of the indexer.
      backend: passed to jax_mla, like the three below.
      kv_format: how the rows are stored. The pool says how index keys are.
      kv_scale: scale of the rows, if the format has one.
      mesh: which mesh axes split what, if the types do not say it.
    """

    sm_scale: float
    index: Index
    backend: str | None = None
    kv_format: str | None = None
    kv_scale: float | None = None
    mesh: jax_mla.MeshAxes | None = None

    def __call__(self, weights, layer, q_nope, q_pe, ckv, kpe, state, place, index):
        """Return the values of each head, [tokens, heads, v_head_dim], and the state."""
        options = {"backend": self.backend, "mesh": self.mesh}
        stored = {"kv_format": self.kv_format, "kv_scale": self.kv_scale}
        where = (place.page_table, place.positions)
        (rows, keys), slots, lens = state
        rows = jax_mla.append(
            rows, ckv, kpe, *where, cu_q_lens=place.cu_q_lens, layer=layer, **stored, **options
        )
        if index is not None:
            # The pool of index keys has only the layers with an indexer.
            own = jnp.asarray(np.cumsum(self.index.own) - 1, jnp.int32)[layer]
            keys = jax_mla.index_append(
                keys, index.k, *where, cu_q_lens=place.cu_q_lens, layer=own, **options
            )
            q, head_weights = index.q, index.weights
            if keys.dtype == jnp.uint8:
                q, head_weights = encode_queries(q, head_weights)
            slots, lens = jax_mla.index_topk(
                q, head_weights, keys, place.page_table, place.seq_lens, place.cu_q_lens,
                k=self.index.topk, layer=own, **options,
            )  # fmt: skip
        q_latent = jnp.einsum("thn,hnc->thc", q_nope, weights["w_uk"])  # [tokens, heads, d_ckv]
        out = jax_mla.sparse_attention(
            q_latent, q_pe, rows, slots, sm_scale=self.sm_scale, topk_lens=lens, layer=layer,
            **stored, **options,
        )  # fmt: skip
        values = jnp.einsum("thc,hcv->thv", out, weights["w_uv"])
        return values, SparseState(SparseCache(rows, keys), slots, lens)
