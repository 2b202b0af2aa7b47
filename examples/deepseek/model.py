"""The DeepSeek decoder in plain JAX. Its attention layers call jax_mla.

This is all that a layer does with jax_mla (`PagedAttention`):

    q_latent = einsum(q_nope, w_uk)   # each head: qk_nope_head_dim -> d_ckv
    out, cache = jax_mla.ragged_paged_attention(
        q_latent, q_pe, ckv, kpe, cache, page_table, seq_lens, cu_q_lens, sm_scale=..., layer=layer)
    values = einsum(out, w_uv)        # each head: d_ckv -> v_head_dim

In a step with prompts `jax_mla.mixed_attention` does all three, and for long prompts it makes keys
and values of every head instead, which is cheaper there.

Models that choose the tokens they attend to (DeepSeek-V3.2, GLM-5) attend with `SparseAttention`
instead, see sparse.py.

`attention` makes q_nope, q_pe, ckv and kpe, and multiplies the values by the output projection.
`paged_forward` runs the whole model on the tokens of a step, whatever sequences they are of.

The weights are a dict of arrays, and those of the layers are a list of dicts (weights.py). The loop
over the layers is written out. A `lax.scan` over stacked weights would copy each layer's weights
out of the stack in every step. `layer` is jitted, so JAX traces a layer of each kind only once.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_mla

from .config import Config
from .moe import Experts, gated_mlp, linear, moe_mlp
from .rope import angles, query_scales, rotate
from .sparse import SparseAttention, SparseState, index_inputs
from .weights import Fp8

Weights = Mapping[str, Any]
Params = Mapping[str, Any]  # the tree of `weights.parameters`
# (weights, layer, q_nope, q_pe, ckv, kpe, cache, place) -> (values of each head, cache)
# Models with an indexer give it `index` too.
Attend = Callable[..., tuple[jax.Array, Any]]

# The epsilon of the norms inside the low-rank projections. All published models use this value,
# whatever their rms_norm_eps is.
LATENT_NORM_EPS = 1e-6


class Place(NamedTuple):
    """Where the tokens of a step are: the arrays that say it to jax_mla.

    Attributes:
      page_table: [seqs, max_pages_per_seq] int32.
      seq_lens: [seqs] int32, tokens in the cache, the new ones included.
      cu_q_lens: [seqs + 1] int32, or None if every sequence has one new token.
      positions: [tokens] int32, set by `paged_forward`; sparse attention writes by it, and the
        queries of Mistral 4 are scaled by it.
    """

    page_table: jax.typing.ArrayLike
    seq_lens: jax.typing.ArrayLike
    cu_q_lens: jax.typing.ArrayLike | None = None
    positions: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class PagedAttention:
    """Append the new tokens to the paged cache and attend to it, in one call of jax_mla.

    The cache holds one row `ckv | kpe` for each token, which all heads share. Sequences that decode
    never make keys and values: `w_uk` is multiplied into the query and `w_uv` into the result
    (absorption).

    Attributes:
      sm_scale: softmax scale.
      backend: passed to jax_mla, like the three below.
      kv_format: how the cache is stored.
      kv_scale: scale of the cache, if the format has one.
      mesh: which mesh axes split what, if the types do not say it.
      may_make_keys: whether steps with prompts may make keys and values. Then every device must
        have all sequences and the whole cache.
    """

    sm_scale: float
    backend: str | None = None
    kv_format: str | None = None
    kv_scale: float | None = None
    mesh: jax_mla.MeshAxes | None = None
    may_make_keys: bool = False

    def __call__(self, weights, layer, q_nope, q_pe, ckv, kpe, cache, place):
        """Return the values of each head, [tokens, heads, v_head_dim], and the cache."""
        options = {
            "sm_scale": self.sm_scale,
            "layer": layer,
            "kv_format": self.kv_format,
            "kv_scale": self.kv_scale,
            "backend": self.backend,
        }
        # q_pe is [tokens, heads, d_kpe], ckv [tokens, d_ckv], kpe [tokens, d_kpe], and cache
        # [layers, num_pages, page_size, d_ckv + d_kpe].
        w_uk, w_uv = weights["w_uk"], weights["w_uv"]
        if self.may_make_keys and place.cu_q_lens is not None:
            return jax_mla.mixed_attention(
                q_nope, q_pe, ckv, kpe, w_uk, w_uv, cache, *place[:3], **options
            )
        q_latent = jnp.einsum("thn,hnc->thc", q_nope, w_uk)  # [tokens, heads, d_ckv]
        out, cache = jax_mla.ragged_paged_attention(
            q_latent, q_pe, ckv, kpe, cache, *place[:3], mesh=self.mesh, **options
        )
        return jnp.einsum("thc,hcv->thv", out, w_uv), cache


def paged_attention(
    config: Config,
    backend: str | None = None,
    kv_format: str | None = None,
    kv_scale: float | None = None,
    mesh: jax_mla.MeshAxes | None = None,
    may_make_keys: bool = False,
) -> PagedAttention | SparseAttention:
    """Return how a model attends; the arguments are the attributes of `PagedAttention`."""
    if config.index is None:
        return PagedAttention(config.sm_scale, backend, kv_format, kv_scale, mesh, may_make_keys)
    return SparseAttention(config.sm_scale, config.index, backend, kv_format, kv_scale, mesh)


def attention(
    config: Config,
    attend: Attend,
    weights: Weights,
    index: jax.Array,
    x: jax.Array,
    cos_sin: jax.Array,
    cache: Any,
    place: Any,
) -> tuple[jax.Array, Any]:
    """Multi-head latent attention: project, rotate, attend, project back.

    Args:
      config: sizes.
      attend: `PagedAttention` or `SparseAttention`.
      weights: weights of this layer.
      index: int32 scalar, the layer of the cache.
      x: [*tokens, hidden], normalised.
      cos_sin: rotary angles of the positions.
      cache: passed to `attend`.
      place: passed to `attend`.

    Returns:
      [*tokens, hidden] and the cache.
    """
    rank, rope_dim = config.kv_lora_rank, config.qk_rope_head_dim
    qkv = linear(x, weights["qkv_a"])
    q, ckv, kpe = jnp.split(qkv, [qkv.shape[-1] - rank - rope_dim, qkv.shape[-1] - rope_dim], -1)
    options = {}
    if config.q_lora_rank is not None:
        q_latent = rms_norm(q, weights["q_a_norm"], LATENT_NORM_EPS)
        q = linear(q_latent, weights["q_b"])
        if config.index is not None:
            options["index"] = index_inputs(config.index, weights, x, q_latent, cos_sin)
    q = q.reshape(*x.shape[:-1], config.num_heads, config.q_dim)
    if config.rope.query_beta:
        q = q * query_scales(config.rope, place.positions)[..., None, None].astype(q.dtype)
    q_nope, q_pe = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
    ckv = rms_norm(ckv, weights["kv_a_norm"], LATENT_NORM_EPS)
    q_pe, kpe = (rotate(a, cos_sin, interleaved=config.rope_interleaved) for a in (q_pe, kpe))
    values, cache = attend(weights, index, q_nope, q_pe, ckv, kpe, cache, place, **options)
    return linear(values.reshape(*x.shape[:-1], -1), weights["o"]), cache


@functools.partial(jax.jit, static_argnames=("config", "attend", "experts"))
def layer(
    config: Config,
    attend: Attend,
    experts: Experts,
    weights: Weights,
    index: jax.Array,
    hidden: jax.Array,
    cos_sin: jax.Array,
    cache: Any,
    place: Any,
    is_live: jax.Array | None,
) -> tuple[jax.Array, Any, jax.Array | None]:
    """Run one layer.

    Args:
      config: sizes.
      attend: `PagedAttention` or `SparseAttention`.
      experts: how experts are computed.
      weights: weights of this layer.
      index: int32 scalar, the layer of the cache.
      hidden: [*tokens, hidden].
      cos_sin: rotary angles.
      cache: passed to `attend`.
      place: passed to `attend`.
      is_live: [*tokens] bool, which tokens are not padding; None if all are live.

    Returns:
      The hidden states, the cache, and the chosen experts [*tokens, num_experts_per_token], or None
      if the layer has no experts.
    """
    if any(isinstance(weight, Fp8) for weight in weights.values()):
        # Weights in FP8 are unpacked when the layer before them has been computed, and not earlier.
        hidden, weights = jax.lax.optimization_barrier((hidden, weights))
    x = rms_norm(hidden, weights["input_norm"], config.rms_norm_eps)
    x, cache = attention(config, attend, weights, index, x, cos_sin, cache, place)
    hidden = hidden + x * config.residual_scale
    x = rms_norm(hidden, weights["post_norm"], config.rms_norm_eps)
    chosen = None
    if config.moe is not None and "router" in weights:
        x, chosen = moe_mlp(config.moe, experts, weights, x, is_live)
    else:
        x = gated_mlp(weights["gate_up"], weights["down"], x)
    return hidden + x * config.residual_scale, cache, chosen


def run_layers(
    config: Config,
    attend: Attend,
    experts: Experts,
    params: Params,
    hidden: jax.Array,
    cos_sin: jax.Array,
    cache: Any = None,
    place: Any = None,
    is_live: jax.Array | None = None,
) -> tuple[jax.Array, Any, list[jax.Array]]:
    """Run all layers. The arguments are those of `layer`.

    Returns:
      The hidden states, the cache, and the chosen experts of each layer that has experts.
    """
    all_chosen = []
    for n, weights in enumerate(params["layers"]):
        hidden, cache, chosen = layer(
            config, attend, experts, weights, jnp.int32(n), hidden, cos_sin, cache, place, is_live
        )
        if chosen is not None:
            all_chosen.append(chosen)
    return hidden, cache, all_chosen


def paged_forward(
    config: Config,
    params: Params,
    cache: Any,
    tokens: jax.Array,
    positions: jax.Array,
    place: Place,
    *,
    max_positions: int,
    attend: PagedAttention | SparseAttention | None = None,
    experts: Experts | None = None,
) -> tuple[jax.Array, Any]:
    """Run the model on the tokens of a step: chunks of prompts, decoded tokens, or both.

    Args:
      config: sizes.
      params: weights.
      cache: [layers, num_pages, page_size, width], or a `SparseCache`. Donate it, so that it stays
        in place.
      tokens: [tokens] int32, those of a sequence together and in order.
      positions: [tokens] int32, position of each token in its sequence; -1 is padding.
      place: which sequences they belong to.
      max_positions: longest sequence of this run. LongRoPE chooses its factors by it.
      attend: how to attend. None: jax_mla's own choice of a backend.
      experts: how to compute experts. None: every expert for every token.

    Returns:
      Hidden states [tokens, hidden] for `logits`, and the cache. The hidden states of padding have
      no meaning.
    """
    attend = attend or paged_attention(config)
    place = place._replace(positions=positions)
    cos_sin = angles(config.rope, config.qk_rope_head_dim, max_positions, positions)
    hidden = embed(config, params, tokens)
    state = cache if config.index is None else SparseState(cache)
    hidden, state, _ = run_layers(
        config, attend, experts or Experts(), params, hidden, cos_sin, state, place, positions >= 0
    )
    return hidden, state if config.index is None else state.cache


def embed(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Embed tokens. A negative token is padding and embeds as token 0."""
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
