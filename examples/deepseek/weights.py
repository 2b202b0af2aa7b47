"""Describe every parameter of a model: its shape, its dtype, and what a mesh may split.

The tree of `parameters` says what `checkpoint.load` reads, what `generate.py --plan` counts, and
what the benchmark draws at random. Most matrices lie as published, [out, in].
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .config import Config

F8 = jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One array.

    Attributes:
      shape: its shape.
      dtype: its dtype.
      split: the role of each dimension that a mesh may split, see `mesh.Placement.axes_of`.
    """

    shape: tuple[int, ...]
    dtype: Any
    split: tuple[tuple[int, str], ...] = ()


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("codes", "scales"), meta_fields=("block",)
)
@dataclasses.dataclass(frozen=True)
class Fp8:
    """A matrix in the FP8 format of DeepSeek-V3: one scale for each block of codes.

    Attributes:
      codes: float8_e4m3fn, in the shape of the matrix.
      scales: float32, one for each block.
      block: size of a block along each dimension.
    """

    codes: Any
    scales: Any
    block: tuple[int, ...]

    def unpack(self, dtype: Any) -> jax.Array:
        """Return the matrix in `dtype`."""
        scales = self.scales
        for axis, (size, block) in enumerate(zip(self.codes.shape, self.block, strict=True)):
            scales = jnp.repeat(scales, block, axis) if block > 1 else scales
            scales = jax.lax.slice_in_dim(scales, 0, size, axis=axis)
        return (self.codes.astype(jnp.float32) * scales).astype(dtype)


def unpack(weight: Any, dtype: Any) -> jax.Array:
    """Return a weight as it is, or unpacked if it is in FP8."""
    return weight.unpack(dtype) if isinstance(weight, Fp8) else weight


def parameters(config: Config, dtype: Any) -> dict[str, Any]:
    """Describe all parameters.

    Args:
      config: sizes. With `fp8_block`, all matrices that DeepSeek-V3 publishes in FP8 are `Fp8`.
      dtype: dtype of the others, except those of the router and of the index heads' weights, which
        are float32.

    Returns:
      The tree that model.py takes, with a `Parameter` in the place of each array.
    """
    vocab, hidden = config.vocab_size, config.hidden_size
    tree: dict[str, Any] = {
        "embed": Parameter((vocab, hidden), dtype),
        "final_norm": Parameter((hidden,), dtype),
    }
    if not config.tied_head:
        tree["head"] = Parameter((vocab, hidden), dtype, ((0, "vocab"),))
    matrix = functools.partial(_matrix, config.fp8_block, dtype)
    tree["layers"] = [
        _attention(config, dtype, matrix)
        | _index(config, n, dtype, matrix)
        | (_dense(config, matrix) if n < config.num_dense_layers else _moe(config, matrix))
        for n in range(config.num_layers)
    ]
    return tree


def is_parameter(x: Any) -> bool:
    """Whether `x` is a leaf of `parameters`."""
    return isinstance(x, Parameter)


def _matrix(
    fp8_block: tuple[int, int] | None,
    dtype: Any,
    *shape: int,
    split: tuple[tuple[int, str], ...] = (),
    out_in: tuple[int, int] = (-2, -1),
) -> Any:
    """Describe a matrix, or several; `out_in` are its dimensions of outputs and inputs."""
    if fp8_block is None:
        return Parameter(shape, dtype, split)
    block = [1] * len(shape)
    for axis, size in zip(out_in, fp8_block, strict=True):
        block[axis] = size
    blocks = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
    return Fp8(Parameter(shape, F8, split), Parameter(blocks, jnp.float32, split), tuple(block))


def _attention(config: Config, dtype: Any, matrix: Callable[..., Any]) -> dict[str, Any]:
    hidden, heads, rank = config.hidden_size, config.num_heads, config.kv_lora_rank
    q_dim, kv_dim = config.q_dim, rank + config.qk_rope_head_dim
    by_head: Any = ((0, "heads"),)
    weights = {
        "input_norm": Parameter((hidden,), dtype),
        "post_norm": Parameter((hidden,), dtype),
        "kv_a_norm": Parameter((rank,), dtype),
        "w_uk": Parameter((heads, config.qk_nope_head_dim, rank), dtype, by_head),
        "w_uv": Parameter((heads, rank, config.v_head_dim), dtype, by_head),
        "o": matrix(hidden, heads * config.v_head_dim, split=((1, "heads"),)),
    }
    if config.q_lora_rank is not None:
        weights["q_a_norm"] = Parameter((config.q_lora_rank,), dtype)
        weights["q_b"] = matrix(heads * q_dim, config.q_lora_rank, split=by_head)
    # The query's first projection and the latent's have the same input: one product serves both.
    weights["qkv_a"] = matrix((config.q_lora_rank or heads * q_dim) + kv_dim, hidden)
    return weights


def _index(config: Config, n: int, dtype: Any, matrix: Callable[..., Any]) -> dict[str, Any]:
    """The indexer of layer `n`, if it has one. Every device has all index heads."""
    index, hidden, q_rank = config.index, config.hidden_size, config.q_lora_rank
    if index is None or not index.own[n]:
        return {}
    assert q_rank is not None
    return {
        "index_q": matrix(index.num_heads * index.head_dim, q_rank),
        "index_k": matrix(index.head_dim, hidden),
        "index_k_norm": Parameter((index.head_dim,), dtype),
        "index_k_bias": Parameter((index.head_dim,), dtype),
        # Rounded weights choose other tokens.
        "index_weights": Parameter((index.num_heads, hidden), jnp.float32),
    }


def _mlp(hidden: int, width: int, matrix: Callable[..., Any], prefix: str = "") -> dict[str, Any]:
    """A gated network; the rows of `gate` and `up` take turns, so that one product serves both."""
    return {
        f"{prefix}gate_up": matrix(width, 2, hidden, split=((0, "width"),), out_in=(0, 2)),
        f"{prefix}down": matrix(hidden, width, split=((1, "width"),)),
    }


def _dense(config: Config, matrix: Callable[..., Any]) -> dict[str, Any]:
    return _mlp(config.hidden_size, config.intermediate_size, matrix)


def _moe(config: Config, matrix: Callable[..., Any]) -> dict[str, Any]:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    experts, width = moe.num_experts, moe.intermediate_size
    weights = {
        "router": Parameter((experts, hidden), jnp.float32),
        "router_bias": Parameter((experts,), jnp.float32),
        # [in, out] for each expert: what grouped products read fastest
        "expert_gate_up": matrix(
            experts, hidden, 2, width,
            split=((0, "experts"), (3, "expert_width")), out_in=(3, 1),
        ),
        "expert_down": matrix(
            experts, width, hidden, split=((0, "experts"), (1, "expert_width")), out_in=(2, 1)
        ),
    }  # fmt: skip
    if moe.num_shared_experts:
        weights |= _mlp(hidden, width * moe.num_shared_experts, matrix, "shared_")
    return weights
