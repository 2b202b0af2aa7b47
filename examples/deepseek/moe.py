"""Feed-forward layers: a gated SiLU network, or a mixture of such networks (experts).

There are two ways to compute the chosen experts:

* "tokamax": the rows of all tokens are sorted by expert, and a grouped product multiplies each run
  of rows by its own expert's matrix. It reads only the experts that some token has chosen.
* "dense": every expert processes every token, and the weights of experts that were not chosen are
  0. This is simple, and the arithmetic is num_experts / num_experts_per_token times what is needed.

Under a mesh, every device computes a share of the experts for all tokens. The shares are summed.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .config import Moe
from .weights import unpack

Weights = Mapping[str, Any]
PRODUCTS = ("tokamax", "ragged_dot", "dense")
# For few tokens, comparing all with all takes a GPU fewer kernels than sorting: 17 a layer instead
# of 22 with 32 tokens of V2-Lite. So many comparisons rank 256 experts for 128 tokens.
MAX_COMPARISONS = 2**23


@dataclasses.dataclass(frozen=True)
class Experts:
    """How the chosen experts are computed. It is hashable, so it can be a static argument of jit.

    Attributes:
      product: "tokamax", "ragged_dot" (the same with JAX's grouped product), or "dense".
      mesh: the mesh, or None for one device.
      split: what the devices of the mesh share out, "number" or "width".
    """

    product: str = "dense"
    mesh: Mesh | AbstractMesh | None = None
    split: str = "number"


def best_product(platform: str, dtype: Any) -> str:
    """Choose tokamax on a GPU if it is installed, and every expert for every token elsewhere."""
    has_tokamax = importlib.util.find_spec("tokamax") is not None
    on_gpu = platform in ("gpu", "cuda")
    return "tokamax" if on_gpu and has_tokamax and dtype.itemsize == 2 else "dense"


def linear(x: jax.Array, weight: Any) -> jax.Array:
    """Multiply `x` [..., in] by a published matrix [out, in]."""
    return jnp.einsum("...d,kd->...k", x, unpack(weight, x.dtype))


def gated_mlp(gate_up: Any, down: Any, x: jax.Array) -> jax.Array:
    """Compute `down(silu(gate(x)) * up(x))`. `gate_up` is [f, 2, d], `down` is [d, f]."""
    inner = linear(x, unpack(gate_up, x.dtype).reshape(-1, x.shape[-1]))
    gate, up = jnp.moveaxis(inner.reshape(*x.shape[:-1], -1, 2), -1, 0)
    return linear(jax.nn.silu(gate) * up, down)


def route(
    config: Moe, router: jax.Array, bias: jax.Array, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Choose experts for every token.

    Softmax routing (V2) ranks experts by their probability, and groups by their best expert.
    Sigmoid routing (V3) ranks experts by affinity + bias, and groups by the sum of their two best
    experts. The bias balances the load of the experts; it is not part of the weights.

    Args:
      config: routing rule.
      router: [num_experts, hidden] float32.
      bias: [num_experts] float32. Softmax routing does not use it.
      x: [..., hidden].

    Returns:
      The weights of the chosen experts, [..., num_experts_per_token] float32, and their numbers,
      int32 of the same shape.

    Source: DeepSeek-V2, arXiv:2405.04434, sec. 2.2; DeepSeek-V3, arXiv:2412.19437, sec. 2.1.2.
    """
    logits = jnp.einsum("...d,ed->...e", x.astype(jnp.float32), router)
    if config.scoring == "softmax":
        affinity = jax.nn.softmax(logits)
        score, closed, group_depth = affinity, 0.0, 1
    else:
        affinity = jax.nn.sigmoid(logits)
        score, closed, group_depth = affinity + bias, -jnp.inf, 2
    score = jax.lax.stop_gradient(score)
    if config.num_groups > 1:
        grouped = score.reshape(*score.shape[:-1], config.num_groups, -1)
        depth = min(group_depth, grouped.shape[-1])
        is_open = _ranks(_sum_of_largest(grouped, depth)) < config.num_groups_per_token
        score = jnp.where(is_open[..., None], grouped, closed).reshape(score.shape)
    k = config.num_experts_per_token
    if score.size * config.num_experts > MAX_COMPARISONS:
        chosen = jax.lax.top_k(score, k)[1]
        weights = jnp.take_along_axis(affinity, chosen, axis=-1)
    else:
        ranks = _ranks(score)
        chosen = _at_ranks(ranks, jnp.arange(config.num_experts, dtype=jnp.int32), k)
        weights = _at_ranks(ranks, affinity, k)
    if config.normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights * config.scale, chosen


def _sum_of_largest(values: jax.Array, num: int) -> jax.Array:
    """Sum the `num` largest values of the last axis, 1 or 2."""
    if num == 1:
        return values.max(-1)
    # The two largest are the pair with the largest sum. Rounding does not change the order.
    pairs = values[..., :, None] + values[..., None, :]
    return jnp.where(jnp.eye(values.shape[-1], dtype=jnp.bool_), -jnp.inf, pairs).max((-2, -1))


def _ranks(values: jax.Array) -> jax.Array:
    """Return the place of each value of the last axis in the order of jax.lax.top_k, from 0.

    This compares all with all, for which a GPU needs one small kernel or a part of one.
    """
    values = jnp.where(jnp.isnan(values), jnp.inf, values)  # NaN does not compare
    value, other = values[..., :, None], values[..., None, :]
    n = jnp.arange(values.shape[-1])
    return ((other > value) | ((other == value) & (n < n[:, None]))).sum(-1, dtype=jnp.int32)


def _at_ranks(ranks: jax.Array, values: jax.Array, num: int) -> jax.Array:
    """Return the values, which are not negative, at the ranks 0 .. num - 1 of the last axis."""
    is_it = ranks[..., None, :] == jnp.arange(num)[:, None]
    # All but one are 0. Not their sum: XLA would merge it with the sum of the weights, and that one
    # would be rounded in another order.
    return jnp.where(is_it, values[..., None, :], 0).max(-1)


def _sort(chosen: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sort choices by expert. Those of one expert keep their order.

    Args:
      chosen: [choices] int32, the expert of each. Numbers from `num_experts` on are no expert.
      num_experts: number of experts.

    Returns:
      Which choice is row n of the sorted ones, which row is choice c, and the rows of each expert.
    """
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    n = jnp.arange(chosen.size, dtype=jnp.int32)
    if chosen.size**2 > MAX_COMPARISONS:
        order = jnp.argsort(chosen)
        sizes = (experts[:, None] == chosen).sum(-1, dtype=jnp.int32)
        return order, jnp.zeros_like(order).at[order].set(n), sizes
    # An expert's number behind all choices is the end of its rows: one kernel counts both.
    key = jnp.concatenate([chosen, experts])[:, None]
    is_later = jnp.arange(key.size)[:, None] > n
    before = ((chosen < key) | ((chosen == key) & is_later)).sum(-1, dtype=jnp.int32)
    place, ends = before[: chosen.size], before[chosen.size :]
    return _at_ranks(place, n, chosen.size), place, jnp.diff(ends, prepend=0)


def moe_mlp(
    config: Moe,
    experts: Experts,
    weights: Weights,
    x: jax.Array,
    is_live: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute the sum of routed and shared experts.

    Args:
      config: sizes and routing rule.
      experts: how the routed experts are computed.
      weights: this layer's `router`, `router_bias`, `expert_*` and `shared_*`.
      x: [..., hidden].
      is_live: [...] bool. No expert is read for the other tokens, which are padding.

    Returns:
      Like `x`, and the chosen experts [..., num_experts_per_token].
    """
    scale, chosen = route(config, weights["router"], weights["router_bias"], x)
    places = (
        chosen if is_live is None else jnp.where(is_live[..., None], chosen, config.num_experts)
    )
    rows = (x.reshape(-1, x.shape[-1]), *(a.reshape(-1, a.shape[-1]) for a in (scale, places)))
    out = _routed(config, experts, weights["expert_gate_up"], weights["expert_down"], *rows)
    out = out.reshape(x.shape)
    if config.num_shared_experts:
        out = out + gated_mlp(weights["shared_gate_up"], weights["shared_down"], x)
    return out, chosen


def _routed(
    config: Moe, experts: Experts, gate_up: Any, down: Any, x: Any, scale: Any, chosen: Any
) -> jax.Array:
    """Compute the routed experts of `x` [tokens, hidden] on all devices of the mesh."""
    compute = _dense if experts.product == "dense" else functools.partial(_grouped, experts.product)
    mesh = experts.mesh
    if mesh is None or mesh.size == 1:
        return compute(gate_up, down, x, scale, chosen)
    axes = mesh.axis_names
    by_number = experts.split == "number"

    def share(gate_up, down, x, scale, chosen):
        if by_number:  # the device's own experts count from 0, and all others come behind them
            first = jax.lax.axis_index(axes) * (config.num_experts // mesh.size)
            own = (chosen >= first) & (chosen < config.num_experts)
            chosen = jnp.where(own, chosen - first, config.num_experts)
        return jax.lax.psum(compute(gate_up, down, x, scale, chosen), axes)

    whole = PartitionSpec()
    specs = (PartitionSpec(axes),) * 2
    if not by_number:
        specs = PartitionSpec(None, None, None, axes), PartitionSpec(None, axes)
    return jax.shard_map(
        share,
        mesh=mesh,
        in_specs=(*specs, whole, whole, whole),
        out_specs=whole,
        check_vma=False,
    )(gate_up, down, x, scale, chosen)


def _dense(gate_up: Any, down: Any, x: jax.Array, scale: jax.Array, chosen: jax.Array) -> jax.Array:
    """Compute every expert for every token; the others count 0."""
    gate_up, down = unpack(gate_up, x.dtype), unpack(down, x.dtype)
    num_experts, _, _, width = gate_up.shape
    one_hot = jax.nn.one_hot(chosen, num_experts, dtype=jnp.float32)
    share = jnp.einsum("tk,tke->et", scale, one_hot).astype(x.dtype)
    # A copy of the tokens for each expert: a product of batches leaves the weights where they are.
    copies = jnp.broadcast_to(x, (num_experts, *x.shape))
    inner = jnp.einsum("etd,edn->etn", copies, gate_up.reshape(num_experts, -1, 2 * width))
    inner = jax.nn.silu(inner[..., :width]) * inner[..., width:] * share[..., None]
    return jnp.einsum("etf,efd->td", inner, down)


def _grouped(
    product: str, gate_up: Any, down: Any, x: jax.Array, scale: jax.Array, chosen: jax.Array
) -> jax.Array:
    gate_up, down = unpack(gate_up, x.dtype), unpack(down, x.dtype)
    num_experts, hidden, _, width = gate_up.shape
    tokens, k = chosen.shape
    dot = _grouped_dot(product, chosen.size // num_experts, hidden, 2 * width)
    own = chosen < num_experts
    # Row n of the sorted ones is choice order[n]; choice c is row place[c].
    order, place, sizes = _sort(chosen.reshape(-1), num_experts)
    inner = dot(x[order // k], gate_up.reshape(num_experts, hidden, 2 * width), sizes)
    inner = jax.nn.silu(inner[:, :width]) * inner[:, width:]
    out = dot(inner, down, sizes)[place].reshape(tokens, k, hidden)
    # Rows behind the last expert's are not written by the product: they may hold anything.
    out = jnp.where(own[..., None], out, 0) * scale[..., None].astype(x.dtype)
    return out.sum(1)


def _grouped_dot(product: str, rows_per_expert: int, *widths: int) -> Any:
    if product == "ragged_dot":
        return jax.lax.ragged_dot
    import tokamax  # type: ignore[import-not-found]

    is_hopper = getattr(jax.devices()[0], "compute_capability", "") == "9.0"
    if not is_hopper or any(width % 128 for width in widths):
        return tokamax.ragged_dot
    return functools.partial(tokamax.ragged_dot, implementation=(hopper_product(rows_per_expert),))


def hopper_product(rows_per_expert: int) -> Any:
    """Return tokamax's grouped product with tiles for the H200. tokamax has chosen none for it.

    With few rows the product reads weights. Then wide tiles that follow each other along a row of
    the weights read them in longer runs. docs/performance.md has the times of each choice.
    """
    # tokamax.ops.gpu has these names too, but does not import without jax_triton.
    from tokamax._src.ops.ragged_dot import (  # type: ignore[import-not-found]
        pallas_mosaic_gpu as mosaic,
    )

    minor = mosaic.common.MatmulDimension
    if rows_per_expert <= 64:
        tile = {"block_m": 64, "block_n": 128, "block_k": 128, "grid_minor_dim": minor.N}
    else:
        tile = {"block_m": 128, "block_n": 128, "block_k": 64, "grid_minor_dim": minor.M}
    config = mosaic.Config(**tile, num_stages=4, split_k=1, persistent=False)
    return mosaic.PallasMosaicGpuRaggedDot(config=config)
