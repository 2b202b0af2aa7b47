"""The DeepSeek decoder in plain JAX: weights are a dict of arrays, layers run under `lax.scan`.

Attention comes as an argument (`AttentionCore`): `paged_attention` appends to the paged latent
cache and attends with jax_mla; `plain_attention` is the same mathematics without a cache, in
differentiable jax.numpy, for training. Everything else is shared.
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
# (layer weights, layer index, q_nope, q_pe, ckv, kpe, cache) -> (per-head values, cache)
AttentionCore = Callable[..., tuple[jax.Array, Any]]

# The norms inside the low-rank projections keep this epsilon in every published model, whatever
# rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * scale


def attention(
    config: Config,
    weights: Weights,
    layer: jax.Array,
    x: jax.Array,
    cos_sin: jax.Array,
    core: AttentionCore,
    cache: Any,
) -> tuple[jax.Array, Any]:
    """Multi-head latent attention up to the output projection.

    Args:
      config: sizes.
      weights: this layer's weights.
      layer: int32 scalar, the layer of the cache.
      x: [batch, q_len, hidden], normalised.
      cos_sin: rotary angles of the positions.
      core: what attends.
      cache: passed through `core`.

    Returns:
      [batch, q_len, hidden] and the cache.
    """
    if config.q_lora_rank is None:
        q = jnp.einsum("bqd,dhk->bqhk", x, weights["q"])
    else:
        q_latent = rms_norm(x @ weights["q_a"], weights["q_a_norm"], LATENT_NORM_EPS)
        q = jnp.einsum("bqr,rhk->bqhk", q_latent, weights["q_b"])
    q_nope, q_pe = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
    ckv, kpe = jnp.split(x @ weights["kv_a"], [config.kv_lora_rank], axis=-1)
    ckv = rms_norm(ckv, weights["kv_a_norm"], LATENT_NORM_EPS)
    q_pe, kpe = rotate(q_pe, cos_sin), rotate(kpe, cos_sin)
    values, cache = core(weights, layer, q_nope, q_pe, ckv, kpe, cache)
    return jnp.einsum("bqhv,hvd->bqd", values, weights["o"]), cache


def paged_attention(
    sm_scale: float, page_table: jax.Array, positions: jax.Array, backend: str | None
) -> AttentionCore:
    """Absorbed attention over the paged cache: one `jax_mla.append` and one `jax_mla.decode`.

    Args:
      sm_scale: softmax scale.
      page_table: [batch, max_pages_per_seq] int32.
      positions: [batch, q_len] int32; consecutive, right-aligned; -1 is padding.
      backend: passed to jax_mla.

    Returns:
      The core; its cache is the stacked pool.
    """

    def core(weights, layer, q_nope, q_pe, ckv, kpe, cache):
        cache = jax_mla.append(cache, ckv, kpe, page_table, positions, layer=layer, backend=backend)
        latent = jax_mla.decode(
            jnp.einsum("bqhn,hnc->bqhc", q_nope, weights["w_uk"]),
            q_pe,
            cache,
            page_table,
            positions[:, -1] + 1,
            sm_scale=sm_scale,
            layer=layer,
            backend=backend,
        )
        return jnp.einsum("bqhc,hcv->bqhv", latent, weights["w_uv"]), cache

    return core


def plain_attention(sm_scale: float) -> AttentionCore:
    """Causal attention among the tokens given, unabsorbed and differentiable."""

    def core(weights, layer, q_nope, q_pe, ckv, kpe, cache):
        del layer
        k_nope = jnp.einsum("btc,hnc->bthn", ckv, weights["w_uk"])
        values = jnp.einsum("btc,hcv->bthv", ckv, weights["w_uv"])
        scores = jnp.einsum("bqhn,bthn->bhqt", q_nope, k_nope)
        scores = scores + jnp.einsum("bqhp,btp->bhqt", q_pe, kpe)
        causal = jnp.tril(jnp.ones(scores.shape[-2:], jnp.bool_))
        scores = jnp.where(causal, scores.astype(jnp.float32) * sm_scale, -jnp.inf)
        probabilities = jax.nn.softmax(scores).astype(values.dtype)
        return jnp.einsum("bhqt,bthv->bqhv", probabilities, values), cache

    return core


def run_layers(
    config: Config,
    params: Params,
    hidden: jax.Array,
    cos_sin: jax.Array,
    core: AttentionCore,
    cache: Any,
) -> tuple[jax.Array, Any, jax.Array | None]:
    """All layers: one scan over the dense ones, one over those with experts.

    The stacked cache is carried through the scans and indexed on the device by `layer`, so that
    each compiles to one body and the pool is updated in place.

    Args:
      config: sizes.
      params: stacked weights.
      hidden: [batch, q_len, hidden].
      cos_sin: rotary angles.
      core: what attends.
      cache: the stacked pool, or None for `plain_attention`.

    Returns:
      hidden, cache, and the routing weights [moe layers, batch, q_len, experts] or None.
    """

    def layer_step(carry, indexed_weights):
        layer, weights = indexed_weights
        hidden, cache = carry
        x = rms_norm(hidden, weights["input_norm"], config.rms_norm_eps)
        x, cache = attention(config, weights, layer, x, cos_sin, core, cache)
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
    """Embed tokens [batch, q_len]; a negative token is padding and embeds as token 0."""
    return params["embed"][jnp.maximum(tokens, 0)] * config.embed_scale


def logits(config: Config, params: Params, hidden: jax.Array) -> jax.Array:
    """Float32 logits [..., vocab] of hidden states [..., hidden]."""
    x = rms_norm(hidden, params["final_norm"], config.rms_norm_eps) * config.logit_scale
    head = params["embed"] if config.tied_head else params["head"]
    return jnp.einsum("...d,vd->...v", x, head, preferred_element_type=jnp.float32)


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
) -> tuple[jax.Array, jax.Array]:
    """Feed the next `q_len` tokens of each sequence; prefill and decode are both this.

    Args:
      config: sizes.
      params: weights.
      cache: [layers, num_pages, page_size, d_ckv + d_kpe]; donate it.
      page_table: [batch, max_pages_per_seq] int32.
      tokens: [batch, q_len] int32, right-aligned.
      positions: [batch, q_len] int32, consecutive, ending at the newest token; -1 is padding.
      max_positions: longest sequence of this run (LongRoPE chooses its factors by it).
      backend: passed to jax_mla.

    Returns:
      Hidden states [batch, q_len, hidden] before `logits`, without meaning where padded; and the
      cache.
    """
    cos_sin = angles(config.rope, config.qk_rope_head_dim, max_positions, positions)
    core = paged_attention(config.sm_scale, page_table, positions, backend)
    hidden = embed(config, params, tokens)
    hidden, cache, _ = run_layers(config, params, hidden, cos_sin, core, cache)
    return hidden, cache
