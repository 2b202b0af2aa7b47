"""The DeepSeek decoder in plain JAX. Its attention layers call jax_mla.

This is all that a layer does with jax_mla (`paged_attention`):

    cache = jax_mla.append(cache, ckv, kpe, page_table, positions, layer=layer)
    q_latent = einsum(q_nope, w_uk)   # each head: qk_nope_head_dim -> d_ckv
    out = jax_mla.decode(q_latent, q_pe, cache, page_table, seq_lens, sm_scale=..., layer=layer)
    values = einsum(out, w_uv)        # each head: d_ckv -> v_head_dim

`attention` makes q_nope, q_pe, ckv and kpe, and multiplies the values by the output projection.
`paged_forward` runs the whole model; prefill and decode both call it.

The weights are a dict of arrays. Those of the layers are stacked, and `lax.scan` runs over them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jax_mla

from .config import Config
from .moe import gated_mlp, moe_mlp
from .rope import angles, rotate

Weights = Mapping[str, jax.Array]
Params = Mapping[str, Any]  # {"embed", "head", "final_norm", "dense": stacked, "moe": stacked}
# (layer weights, layer index, q_nope, q_pe, ckv, kpe, cache) -> (values of each head, cache)
Attend = Callable[..., tuple[jax.Array, Any]]

# The epsilon of the norms inside the low-rank projections. All published models use this value,
# whatever their rms_norm_eps is.
LATENT_NORM_EPS = 1e-6


def paged_attention(
    sm_scale: float,
    page_table: jax.Array,
    positions: jax.Array,
    backend: str | None,
    kv_format: str | None = None,
    kv_scale: float | None = None,
) -> Attend:
    """Append the new tokens to the paged cache and attend to it, with jax_mla.

    The cache holds one row `ckv | kpe` for each token, which all heads share. Keys and values are
    never made: `w_uk` is multiplied into the query and `w_uv` into the result (absorption).

    Args:
      sm_scale: softmax scale.
      page_table: [batch, max_pages_per_seq] int32.
      positions: [batch, q_len] int32, position of each new token. The tokens of a sequence are
        consecutive and right-aligned; -1 is padding.
      backend: passed to jax_mla.
      kv_format: how the cache is stored, passed to jax_mla.
      kv_scale: scale of the cache, if the format has one.

    Returns:
      A function for `attention`. Its cache is [layers, num_pages, page_size, width], see
      `pages.row_layout`.
    """
    seq_lens = positions[:, -1] + 1  # the cached tokens, the new ones included
    options: Any = {"backend": backend, "kv_format": kv_format, "kv_scale": kv_scale}

    def attend(weights, layer, q_nope, q_pe, ckv, kpe, cache):
        cache = jax_mla.append(cache, ckv, kpe, page_table, positions, layer=layer, **options)
        q_latent = jnp.einsum("bqhn,hnc->bqhc", q_nope, weights["w_uk"])
        out = jax_mla.decode(
            q_latent,  # [batch, q_len, heads, d_ckv]
            q_pe,  # [batch, q_len, heads, d_kpe]
            cache,
            page_table,
            seq_lens,
            sm_scale=sm_scale,
            layer=layer,
            **options,
        )  # [batch, q_len, heads, d_ckv]
        return jnp.einsum("bqhc,hcv->bqhv", out, weights["w_uv"]), cache

    return attend


def attention(
    config: Config,
    weights: Weights,
    layer: jax.Array,
    x: jax.Array,
    cos_sin: jax.Array,
    attend: Attend,
    cache: Any,
) -> tuple[jax.Array, Any]:
    """Multi-head latent attention: project, rotate, attend, project back.

    Args:
      config: sizes.
      weights: weights of this layer.
      layer: int32 scalar, the layer of the cache.
      x: [batch, q_len, hidden], normalised.
      cos_sin: rotary angles of the positions.
      attend: from `paged_attention`.
      cache: passed to `attend`.

    Returns:
      [batch, q_len, hidden] and the cache.
    """
    if config.q_lora_rank is None:
        q = jnp.einsum("bqd,dhk->bqhk", x, weights["q"])
    else:
        q_low_rank = rms_norm(x @ weights["q_a"], weights["q_a_norm"], LATENT_NORM_EPS)
        q = jnp.einsum("bqr,rhk->bqhk", q_low_rank, weights["q_b"])
    q_nope, q_pe = jnp.split(q, [config.qk_nope_head_dim], axis=-1)  # [batch, q_len, heads, ...]
    ckv, kpe = jnp.split(x @ weights["kv_a"], [config.kv_lora_rank], axis=-1)  # no heads
    ckv = rms_norm(ckv, weights["kv_a_norm"], LATENT_NORM_EPS)
    q_pe, kpe = rotate(q_pe, cos_sin), rotate(kpe, cos_sin)
    values, cache = attend(weights, layer, q_nope, q_pe, ckv, kpe, cache)
    return jnp.einsum("bqhv,hvd->bqd", values, weights["o"]), cache


def paged_forward(
    config: Config,
    params: Params,
    cache: jax.Array,
    page_table: jax.Array,
    tokens: jax.Array,
    positions: jax.Array,
    *,
    max_positions: int,
    backend: str | None = None,
    kv_format: str | None = None,
    kv_scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Run the model on the next `q_len` tokens of each sequence.

    Prefill calls it with a chunk of each prompt, decode with one token.

    Args:
      config: sizes.
      params: weights.
      cache: [layers, num_pages, page_size, width]. Donate it, so that it stays in place.
      page_table: [batch, max_pages_per_seq] int32.
      tokens: [batch, q_len] int32, right-aligned.
      positions: [batch, q_len] int32. Consecutive; the last column is the newest token of each
        sequence; -1 is padding.
      max_positions: longest sequence of this run. LongRoPE chooses its factors by it.
      backend: passed to jax_mla.
      kv_format: how the cache is stored, passed to jax_mla.
      kv_scale: scale of the cache, if the format has one.

    Returns:
      Hidden states [batch, q_len, hidden] for `logits`, and the cache. The hidden states of padding
      have no meaning.
    """
    cos_sin = angles(config.rope, config.qk_rope_head_dim, max_positions, positions)
    attend = paged_attention(config.sm_scale, page_table, positions, backend, kv_format, kv_scale)
    hidden = embed(config, params, tokens)
    hidden, cache, _ = run_layers(config, params, hidden, cos_sin, attend, cache)
    return hidden, cache


def run_layers(
    config: Config,
    params: Params,
    hidden: jax.Array,
    cos_sin: jax.Array,
    attend: Attend,
    cache: Any,
) -> tuple[jax.Array, Any, jax.Array | None]:
    """Run all layers: one scan over the dense layers, one over the layers with experts.

    Each scan compiles one layer. It carries the cache of all layers, so that XLA updates the cache
    in place, and jax_mla picks the layer on the device.

    Args:
      config: sizes.
      params: stacked weights.
      hidden: [batch, q_len, hidden].
      cos_sin: rotary angles.
      attend: from `paged_attention`.
      cache: passed to `attend`.

    Returns:
      The hidden states, the cache, and the routing weights [moe layers, batch, q_len, experts], or
      None if no layer has experts.
    """

    def layer_step(carry, indexed_weights):
        layer, weights = indexed_weights
        hidden, cache = carry
        x = rms_norm(hidden, weights["input_norm"], config.rms_norm_eps)
        x, cache = attention(config, weights, layer, x, cos_sin, attend, cache)
        hidden = hidden + x * config.residual_scale
        x = rms_norm(hidden, weights["post_norm"], config.rms_norm_eps)
        routed = None
        if config.moe is not None and "router" in weights:
            x, routed = moe_mlp(config.moe, weights, x)
        else:
            x = gated_mlp(weights["gate"], weights["up"], weights["down"], x)
        return (hidden + x * config.residual_scale, cache), routed

    carry, routed = (hidden, cache), None
    layers = jnp.arange(config.num_layers, dtype=jnp.int32)
    if config.num_dense_layers:
        dense_layers = layers[: config.num_dense_layers]
        carry, _ = jax.lax.scan(layer_step, carry, (dense_layers, params["dense"]))
    if config.num_dense_layers < config.num_layers:
        moe_layers = layers[config.num_dense_layers :]
        carry, routed = jax.lax.scan(layer_step, carry, (moe_layers, params["moe"]))
    return *carry, routed


def embed(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Embed tokens [batch, q_len]. A negative token is padding and embeds as token 0."""
    return params["embed"][jnp.maximum(tokens, 0)] * config.embed_scale


def logits(config: Config, params: Params, hidden: jax.Array) -> jax.Array:
    """Turn hidden states [..., hidden] into float32 logits [..., vocab]."""
    x = rms_norm(hidden, params["final_norm"], config.rms_norm_eps) * config.logit_scale
    head = params["embed"] if config.tied_head else params["head"]
    return jnp.einsum("...d,vd->...v", x, head, preferred_element_type=jnp.float32)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * scale
