"""The indexer of sparse attention: index queries, keys and weights of a step's tokens."""

# pyright: reportMissingImports=false
# Type checkers need not have the engine.

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import scipy.linalg
from jax import lax
from sgl_jax.srt.layers.linear import LinearBase
from sgl_jax.srt.models.glm5_moe import GlmDsaIndexer, GlmNorm

import jax_mla

KEY_NORM_EPS = 1e-6  # whatever the model's rms_norm_eps is
ROPE_DIM = 64  # the first values of a query and of a key are rotated

_init = GlmDsaIndexer.__init__


def init(indexer: GlmDsaIndexer, hidden_size: int, *args: Any, **options: Any) -> None:
    """Stand for `GlmDsaIndexer.__init__`, which rounds the norm and the heads' weights."""
    _init(indexer, hidden_size, *args, **options)
    indexer.k_norm = GlmNorm(indexer.head_dim, jnp.float32)
    indexer.weights_proj = LinearBase(
        input_size=hidden_size,
        output_size=indexer.n_head,
        mesh=indexer.mesh,
        use_bias=False,
        kernel_axes=(None, None),
        params_dtype=jnp.float32,
        scope_name="weights_proj",
    )


def project(
    indexer: GlmDsaIndexer,
    hidden_states: jax.Array,
    qr: jax.Array,
    positions: jax.Array,
    rotary_emb: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Stand for `GlmDsaIndexer.project`.

    The engine's norm has another eps, its weights are rounded, and it multiplies queries and keys
    by a Hadamard matrix, which changes no score and is not needed for keys in 16 bits
    (`for_fp8_keys`).

    Args:
      indexer: the layer's indexer.
      hidden_states: [tokens, hidden_size], normalised.
      qr: [tokens, q_lora_rank]. The latents of the queries, normalised.
      positions: [tokens] int32.
      rotary_emb: the engine's rotary embedding of 64 values.

    Returns:
      q: [tokens, index_heads, d].
      k: [tokens, d].
      weights: [tokens, index_heads] float32, with every constant factor.
    """
    q, _ = indexer.wq_b(qr)
    q = q.reshape(-1, indexer.n_head, indexer.head_dim)
    k, _ = indexer.wk(hidden_states)
    norm = indexer.k_norm
    k = jax_mla.reference.layer_norm(k, norm.weight.value, norm.bias.value, KEY_NORM_EPS)
    q_rotated, k_rotated = rotary_emb(positions, q[:, :, :ROPE_DIM], k[:, None, :ROPE_DIM])
    q = jnp.concatenate([q_rotated, q[:, :, ROPE_DIM:]], axis=-1)
    k = jnp.concatenate([k_rotated[:, 0], k[:, ROPE_DIM:]], axis=-1)
    weights = lax.dot(hidden_states.astype(jnp.float32), indexer.weights_proj.weight.value)
    return q, k, weights * (indexer.n_head**-0.5 * indexer.head_dim**-0.5)


def for_fp8_keys(
    q: jax.Array, k: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return what `project` makes, for a pool of index keys in FP8.

    Queries and keys are multiplied by a Hadamard matrix, as in DeepSeek's own code: that spreads
    outliers over all values before they are rounded.

    Args:
      q: [tokens, index_heads, 128].
      k: [tokens, 128].
      weights: [tokens, index_heads] float32.

    Returns:
      q: the queries as codes in float8_e4m3fn.
      k: the keys in float32.
      weights: the weights times the scales of the codes.
    """
    codes, scales = jax_mla.reference.encode_index_keys(_spread(q), power_of_two_scales=False)
    return codes, _spread(k), weights * scales


def _spread(x: jax.Array) -> jax.Array:
    """Multiply vectors by the normalised Hadamard matrix, in float32."""
    size = x.shape[-1]
    matrix = jnp.asarray(scipy.linalg.hadamard(size), x.dtype)
    return jnp.matmul(x, matrix, preferred_element_type=jnp.float32) * size**-0.5
