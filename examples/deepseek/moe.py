"""Feed-forward layers: a gated SiLU network, or a mixture of such networks (experts)."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from .config import Moe

Weights = Mapping[str, jax.Array]


def gated_mlp(gate: jax.Array, up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
    """Compute `down(silu(gate(x)) * up(x))`. `gate` and `up` are [d, f], `down` is [f, d]."""
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def route(config: Moe, router: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
    """Choose experts for every token.

    Softmax routing (V2) ranks experts by their probability, and groups by their best expert.
    Sigmoid routing (V3) ranks experts by affinity + bias, and groups by the sum of their two best
    experts. The bias balances the load of the experts; it is not part of the weights.

    Args:
      config: routing rule.
      router: [hidden, num_experts] float32.
      bias: [num_experts] float32. Softmax routing does not use it.
      x: [..., hidden].

    Returns:
      [..., num_experts] float32, the weights of the chosen experts. All others are 0.

    Source: DeepSeek-V2, arXiv:2405.04434, sec. 2.2; DeepSeek-V3, arXiv:2412.19437, sec. 2.1.2.
    """
    logits = x.astype(jnp.float32) @ router
    if config.scoring == "softmax":
        affinity = jax.nn.softmax(logits)
        rank, closed, group_depth = affinity, 0.0, 1
    else:
        affinity = jax.nn.sigmoid(logits)
        rank, closed, group_depth = affinity + bias, -jnp.inf, 2
    if config.num_groups > 1:
        grouped = rank.reshape(*rank.shape[:-1], config.num_groups, -1)
        depth = min(group_depth, grouped.shape[-1])
        group_rank = jax.lax.top_k(grouped, depth)[0].sum(-1)
        is_open = _top_mask(group_rank, config.num_groups_per_token)
        rank = jnp.where(is_open[..., None], grouped, closed).reshape(rank.shape)
    weights = jnp.where(_top_mask(rank, config.num_experts_per_token), affinity, 0.0)
    if config.normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights * config.scale


def _top_mask(rank: jax.Array, k: int) -> jax.Array:
    """True at the `k` largest entries of the last axis."""
    chosen = jax.lax.top_k(jax.lax.stop_gradient(rank), k)[1]
    return jax.nn.one_hot(chosen, rank.shape[-1], dtype=jnp.bool_).any(-2)


def moe_mlp(config: Moe, weights: Weights, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute the sum of routed and shared experts.

    This is the simplest way, not the fastest: every expert processes every token, and the weights
    of experts that were not chosen are 0. The shapes do not depend on the routing, and any sharding
    works. The arithmetic is num_experts / num_experts_per_token times what is needed.

    Args:
      config: sizes and routing rule.
      weights: this layer's `router`, `router_bias`, `expert_*` and `shared_*`.
      x: [batch, q_len, hidden].

    Returns:
      Like `x`, and the routing weights [batch, q_len, num_experts].
    """
    routed = route(config, weights["router"], weights["router_bias"], x)
    inner = jax.nn.silu(jnp.einsum("bqd,edf->bqef", x, weights["expert_gate"]))
    inner = inner * jnp.einsum("bqd,edf->bqef", x, weights["expert_up"])
    inner = inner * routed[..., None].astype(x.dtype)
    out = jnp.einsum("bqef,efd->bqd", inner, weights["expert_down"])
    if config.num_shared_experts:
        shared = (weights["shared_gate"], weights["shared_up"], weights["shared_down"])
        out = out + gated_mlp(*shared, x)
    return out, routed
