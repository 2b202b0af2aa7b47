"""Load and save checkpoints with the published tensor names.

The loader rearranges the weights for model.py:

* Projections are transposed to [in, ..., out].
* Rotated pairs are put in half-split order (rope.py).
* The layers are stacked for `lax.scan`.
* `kv_b_proj` is split into `w_uk`, which model.py multiplies into the query, and `w_uv`, which it
  multiplies into the attention output. The loader does not multiply them into the query and output
  projections: for V3 the products would be four and three times as large as their factors.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .config import Config, parse_config
from .rope import half_split_order
from .tensor_files import SINGLE, TensorFiles, write

Put = Callable[[str, np.ndarray], jax.Array]
PROJECTIONS = ("gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads tensors whose names start with `prefix`, dequantises them and casts them."""

    files: TensorFiles
    config: Config
    dtype: np.dtype
    prefix: str

    def __call__(self, name: str, *shape: int, dtype: object = None) -> np.ndarray:
        """Return the tensor `prefix + name` as `dtype`, or as `self.dtype` if that is None."""
        name, target = self.prefix + name, np.dtype(dtype or self.dtype)  # type: ignore[arg-type]
        tensor = self.files.read(name, shape)
        if tensor.dtype.itemsize > 1:
            return tensor.astype(target)
        if self.config.fp8_block is None:
            raise ValueError(
                f"{name}: expected quantization_config in config.json, because the weights are fp8"
            )
        rows, cols = self.config.fp8_block
        blocks = (-(-shape[0] // rows), -(-shape[1] // cols))
        scale = self.files.read(name + "_scale_inv", blocks).astype(np.float32)
        scale = scale.repeat(rows, axis=0)[: shape[0]].repeat(cols, axis=1)[:, : shape[1]]
        return (tensor.astype(np.float32) * scale).astype(target)


def load(
    directory: str | Path, config: Config, dtype: object = jnp.bfloat16, put: Put | None = None
) -> dict[str, Any]:
    """Read a checkpoint into the parameter tree of model.py.

    Args:
      directory: holds safetensors files.
      config: configuration of the same checkpoint.
      dtype: dtype of all weights except the router's, which are float32.
      put: places a host array on the devices, given the parameter's name. None means one device.

    Returns:
      The parameters.

    Raises:
      ValueError: a tensor is missing or has another shape. The message names it.
    """
    put = put or (lambda _, array: jnp.asarray(array))
    files = TensorFiles(directory)
    read = _Reader(files, config, np.dtype(dtype), "")  # type: ignore[arg-type]
    vocab, hidden = config.vocab_size, config.hidden_size
    params: dict[str, Any] = {
        "embed": put("embed", read("model.embed_tokens.weight", vocab, hidden)),
        "final_norm": put("final_norm", read("model.norm.weight", hidden)),
    }
    if not config.tied_head:
        params["head"] = put("head", read("lm_head.weight", vocab, hidden))
    split = config.num_dense_layers
    for kind, layers in (("dense", range(split)), ("moe", range(split, config.num_layers))):
        rows = []
        for layer in layers:
            layer_read = dataclasses.replace(read, prefix=f"model.layers.{layer}.")
            mlp = _read_dense if kind == "dense" else _read_moe
            rows.append(_read_attention(config, layer_read) | mlp(config, layer_read))
        if rows:
            params[kind] = {
                name: put(name, np.stack([row.pop(name) for row in rows])) for name in list(rows[0])
            }
    return params


def _rope_order(config: Config, begin: int) -> np.ndarray:
    """Return the order of columns for model.py: `begin` unrotated ones, then the rotated ones."""
    dim = config.qk_rope_head_dim
    tail = half_split_order(dim) if config.rope_interleaved else np.arange(dim)
    return np.concatenate([np.arange(begin), begin + tail])


def _read_attention(config: Config, read: _Reader) -> dict[str, np.ndarray]:
    hidden, heads = config.hidden_size, config.num_heads
    nope, v_dim, rank = config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
    q_dim, kv_dim = nope + config.qk_rope_head_dim, rank + config.qk_rope_head_dim
    weights = {
        "input_norm": read("input_layernorm.weight", hidden),
        "post_norm": read("post_attention_layernorm.weight", hidden),
        "kv_a_norm": read("self_attn.kv_a_layernorm.weight", rank),
    }
    q_name, q_in = "q", hidden
    if config.q_lora_rank is not None:
        q_name, q_in = "q_b", config.q_lora_rank
        weights["q_a"] = read("self_attn.q_a_proj.weight", q_in, hidden).T
        weights["q_a_norm"] = read("self_attn.q_a_layernorm.weight", q_in)
    q = read(f"self_attn.{q_name}_proj.weight", heads * q_dim, q_in)
    weights[q_name] = q.T.reshape(q_in, heads, q_dim)[..., _rope_order(config, nope)]
    kv_a = read("self_attn.kv_a_proj_with_mqa.weight", kv_dim, hidden)
    weights["kv_a"] = kv_a.T[:, _rope_order(config, rank)]
    kv_b = read("self_attn.kv_b_proj.weight", heads * (nope + v_dim), rank)
    kv_b = kv_b.reshape(heads, nope + v_dim, rank)
    weights["w_uk"], weights["w_uv"] = kv_b[:, :nope], kv_b[:, nope:].transpose(0, 2, 1)
    o = read("self_attn.o_proj.weight", hidden, heads * v_dim)
    weights["o"] = o.T.reshape(heads, v_dim, hidden)
    return weights


def _read_mlp(read: _Reader, prefix: str, hidden: int, width: int) -> tuple[np.ndarray, ...]:
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    return tuple(read(f"{prefix}{name}_proj.weight", *shapes[name]).T for name in PROJECTIONS)


def _read_dense(config: Config, read: _Reader) -> dict[str, np.ndarray]:
    mlp = _read_mlp(read, "mlp.", config.hidden_size, config.intermediate_size)
    return dict(zip(PROJECTIONS, mlp, strict=True))


def _read_moe(config: Config, read: _Reader) -> dict[str, np.ndarray]:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    experts, f32 = moe.num_experts, np.float32
    weights = {
        "router": read("mlp.gate.weight", experts, hidden, dtype=f32).T,
        "router_bias": np.zeros(experts, f32)
        if moe.scoring == "softmax"
        else read("mlp.gate.e_score_correction_bias", experts, dtype=f32),
    }
    names = [f"mlp.experts.{e}." for e in range(experts)]
    mlps = [_read_mlp(read, name, hidden, moe.intermediate_size) for name in names]
    for name, stack in zip(PROJECTIONS, zip(*mlps, strict=True), strict=True):
        weights[f"expert_{name}"] = np.stack(stack)
    if moe.num_shared_experts:
        width = moe.intermediate_size * moe.num_shared_experts
        mlp = _read_mlp(read, "mlp.shared_experts.", hidden, width)
        weights |= {f"shared_{name}": w for name, w in zip(PROJECTIONS, mlp, strict=True)}
    return weights


def published_tensors(config: Config, params: Any) -> dict[str, np.ndarray]:
    """Undo `load`.

    Args:
      config: sizes.
      params: the parameter tree of model.py.

    Returns:
      Float32 tensors by published name, arranged as `transformers` stores them.
    """
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), params)
    tensors = {
        "model.embed_tokens.weight": params["embed"],
        "model.norm.weight": params["final_norm"],
    }
    if not config.tied_head:
        tensors["lm_head.weight"] = params["head"]
    for layer in range(config.num_layers):
        kind = "dense" if layer < config.num_dense_layers else "moe"
        row = layer if kind == "dense" else layer - config.num_dense_layers
        weights = {name: stack[row] for name, stack in params[kind].items()}
        for name, tensor in _published_layer(config, weights).items():
            tensors[f"model.layers.{layer}.{name}"] = tensor
    return tensors


def _published_layer(config: Config, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    nope, rank = config.qk_nope_head_dim, config.kv_lora_rank
    q_name = "q" if config.q_lora_rank is None else "q_b"
    q = weights[q_name][..., np.argsort(_rope_order(config, nope))]
    kv_b = np.concatenate([weights["w_uk"], weights["w_uv"].transpose(0, 2, 1)], axis=1)
    tensors = {
        "input_layernorm.weight": weights["input_norm"],
        "post_attention_layernorm.weight": weights["post_norm"],
        "self_attn.kv_a_layernorm.weight": weights["kv_a_norm"],
        f"self_attn.{q_name}_proj.weight": q.reshape(q.shape[0], -1).T,
        "self_attn.kv_a_proj_with_mqa.weight": weights["kv_a"][
            :, np.argsort(_rope_order(config, rank))
        ].T,
        "self_attn.kv_b_proj.weight": kv_b.reshape(-1, rank),
        "self_attn.o_proj.weight": weights["o"].reshape(-1, config.hidden_size).T,
    }
    if config.q_lora_rank is not None:
        tensors["self_attn.q_a_proj.weight"] = weights["q_a"].T
        tensors["self_attn.q_a_layernorm.weight"] = weights["q_a_norm"]
    for name in PROJECTIONS:
        if name in weights:
            tensors[f"mlp.{name}_proj.weight"] = weights[name].T
        if f"shared_{name}" in weights:
            tensors[f"mlp.shared_experts.{name}_proj.weight"] = weights[f"shared_{name}"].T
        for expert, weight in enumerate(weights.get(f"expert_{name}", ())):
            tensors[f"mlp.experts.{expert}.{name}_proj.weight"] = weight.T
    if "router" in weights:
        tensors["mlp.gate.weight"] = weights["router"].T
        if config.moe is not None and config.moe.scoring == "sigmoid":
            tensors["mlp.gate.e_score_correction_bias"] = weights["router_bias"]
    return tensors


def save(directory: Path, raw_config: dict[str, Any], params: Any, vocabulary: list[str]) -> None:
    """Write config.json, vocabulary.json and a safetensors file.

    All tensors are bfloat16, except the router's bias, which is float32.

    Args:
      directory: is made if it does not exist.
      raw_config: fields of config.json.
      params: the parameter tree of model.py.
      vocabulary: text of every token id.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw_config, indent=2) + "\n")
    (directory / "vocabulary.json").write_text(json.dumps(vocabulary) + "\n")
    tensors = published_tensors(parse_config(raw_config), params)
    for name, tensor in tensors.items():
        if "e_score_correction_bias" not in name:
            tensors[name] = tensor.astype(jnp.bfloat16)
    write(directory / SINGLE, tensors)
