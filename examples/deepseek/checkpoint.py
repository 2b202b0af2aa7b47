"""Load and save checkpoints with the published tensor names.

A process reads the parts of the tensors that its devices hold, out of memory-mapped files, and one
parameter after the other. So the host holds at most one parameter of a layer at a time. The devices
turn the matrices of the experts from [out, in] to [in, out].
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .config import Config, parse_config
from .names import (
    EXPERT_STACKS,
    KV_B,
    MATRICES,
    TOP,
    VECTORS,
    check_names,
    has_router_bias,
    input_projections,
    matrices,
    refuse_more_layers,
)
from .tensor_files import SINGLE, TensorFiles, write
from .weights import Fp8, Parameter, parameters

Index = tuple[slice, ...]
Read = Callable[[Index], np.ndarray]
Tensor = Callable[[str, tuple[int, ...]], np.ndarray]  # by name and shape
Build = Callable[[Parameter, Read], jax.Array]

# The order of the dimensions of stacked tensors in model.py; the stack has [..., out, in].
ORDER = {
    "gate_up": (1, 0, 2),
    "shared_gate_up": (1, 0, 2),
    "expert_gate_up": (0, 3, 1, 2),
    "expert_down": (0, 2, 1),
}


def on_one_device(parameter: Parameter, read: Read) -> jax.Array:
    """Place a parameter on the default device, whole."""
    return jnp.asarray(read(tuple(slice(0, n) for n in parameter.shape)))


def load(
    directory: str | Path,
    config: Config,
    dtype: Any = jnp.bfloat16,
    build: Build = on_one_device,
) -> dict[str, Any]:
    """Read a checkpoint into the parameter tree of model.py.

    Args:
      directory: holds safetensors files.
      config: configuration of the same checkpoint.
      dtype: dtype of all weights except those that are float32 (`weights.parameters`) or FP8.
      build: places a parameter on the devices, see `mesh.Placement.build`.

    Returns:
      The parameters.

    Raises:
      ValueError: a tensor is missing, or has another shape, or is not one of the model's, and the
        message names it. Or the files have more layers than the configuration.
    """
    dtype, files = np.dtype(dtype), TensorFiles(directory, config.tensor_prefix)
    tree = parameters(config, dtype)
    refuse_more_layers(files, config.num_layers)
    check_names(files, config, tree)
    reader = _Reader(files, config, dtype, build)
    layers = tree.pop("layers")
    params = {name: reader.tensor(f"{TOP[name]}.weight", tree[name]) for name in tree}
    return params | {"layers": [reader.layer(n, layer) for n, layer in enumerate(layers)]}


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads parameters from the files of a checkpoint."""

    files: TensorFiles
    config: Config
    dtype: np.dtype
    build: Build

    def layer(self, n: int, layer: dict[str, Any]) -> dict[str, jax.Array | Fp8]:
        """Read the parameters of layer `n`."""
        at, weights = f"model.layers.{n}.", {}
        for name, parameter in layer.items():
            if name in ("w_uk", "w_uv"):
                weights[name] = self._up_projection(at + KV_B, name, parameter)
            elif name in VECTORS:
                weights[name] = self.tensor(at + VECTORS[name], parameter)
            elif name == "qkv_a":
                weights[name] = self._input_projections(at, parameter)
            elif at + EXPERT_STACKS.get(name, "-") in self.files.names:
                weights[name] = self._expert_stack(at + EXPERT_STACKS[name], name, parameter)
            else:
                weights[name] = self._matrices(matrices(self.config, at, name), name, parameter)
            jax.block_until_ready(weights[name])  # what the host held for it can go
        return weights

    def tensor(self, name: str, parameter: Parameter) -> jax.Array:
        """Read a parameter that is one tensor in a wider format than FP8."""
        shape = parameter.shape
        if name.endswith(VECTORS["router_bias"]) and not has_router_bias(self.config):
            return self.build(parameter, lambda index: np.zeros(shape, np.float32)[index])
        view = self._plain(name, shape)
        return self.build(parameter, lambda index: view[index].astype(parameter.dtype))

    def _plain(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a tensor, unpacked if it is in FP8."""
        view = self.files.read(name, shape)
        if view.dtype.itemsize > 1:
            return view
        if view.ndim != 2:
            raise ValueError(f"{name}: expected a wider format, because it is no matrix, got FP8")
        rows, cols = self._block(name)
        blocks = (-(-shape[0] // rows), -(-shape[1] // cols))
        scales = self._scales(name, blocks).astype(np.float32)
        scales = scales.repeat(rows, axis=0)[: shape[0]].repeat(cols, axis=1)[:, : shape[1]]
        return view.astype(np.float32) * scales

    def _scales(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return the scales of a tensor in FP8."""
        scales = self.files.read(f"{name}_scale_inv", shape)
        if scales.dtype.itemsize == 1:
            raise ValueError(f"{name}_scale_inv: expected F32, F16 or BF16, got {scales.dtype}")
        return scales

    def _block(self, name: str) -> tuple[int, int]:
        if self.config.fp8_block is None:
            raise ValueError(
                f"{name}: expected quantization_config in config.json, because the weights are fp8"
            )
        return self.config.fp8_block

    def _up_projection(self, name: str, part: str, parameter: Parameter) -> jax.Array:
        """Read the keys' or the values' half of `kv_b_proj`."""
        config, nope = self.config, self.config.qk_nope_head_dim
        heads, rank = config.num_heads, config.kv_lora_rank
        tensor = self._plain(name, (heads * (nope + config.v_head_dim), rank))
        by_head = tensor.reshape(heads, -1, rank)
        view = by_head[:, :nope] if part == "w_uk" else by_head[:, nope:].transpose(0, 2, 1)
        return self.build(parameter, lambda index: view[index].astype(parameter.dtype))

    def _input_projections(self, at: str, parameter: Any) -> Any:
        """Read the query's first projection and the latent's, one below the other."""
        config = self.config
        q_name, kv_name = input_projections(config, at)

        def read(tensor: Tensor, part: Parameter, block: int) -> jax.Array:
            rows, cols = part.shape
            kv_rows = -(-(config.kv_lora_rank + config.qk_rope_head_dim) // block)
            q = tensor(q_name, (rows - kv_rows, cols))
            kv = tensor(kv_name, (kv_rows, cols))
            return self.build(part, lambda index: np.concatenate([q, kv])[index].astype(part.dtype))

        if not self._all_are_fp8([q_name, kv_name]):
            return read(self.files.read, self._wide(parameter), 1)
        block = self._block(q_name)
        codes = read(self.files.read, parameter.codes, 1)
        return Fp8(codes, read(self._scales, parameter.scales, block[0]), parameter.block)

    def _is_fp8(self, name: str) -> bool:
        return self.files.dtype(name).itemsize == 1

    def _all_are_fp8(self, names: Iterable[str]) -> bool:
        """Whether the tensors of one parameter are in FP8. All must be, or none."""
        first, *others = names
        is_fp8 = self._is_fp8(first)
        for other in others:
            if self._is_fp8(other) != is_fp8:
                raise ValueError(
                    f"{other}: expected {'' if is_fp8 else 'no '}FP8 like {first}, got "
                    f"{self.files.dtype(other)}"
                )
        return is_fp8

    def _wide(self, parameter: Any) -> Parameter:
        """Describe a matrix that is not in FP8, in this file or in this checkpoint."""
        if not isinstance(parameter, Fp8):
            return parameter
        return dataclasses.replace(parameter.codes, dtype=self.dtype)

    def _matrices(self, names: np.ndarray, name: str, parameter: Any) -> Any:
        """Read a parameter that is one matrix, or several stacked as `names` are."""
        if not self._all_are_fp8(names.flat):
            return self._stacked(names, name, self._wide(parameter))
        self._block(names.flat[0])
        codes = self._stacked(names, name, parameter.codes)
        return Fp8(
            codes, self._stacked(names, name, parameter.scales, is_scale=True), parameter.block
        )

    def _stacked(
        self, names: np.ndarray, name: str, parameter: Parameter, *, is_scale: bool = False
    ) -> jax.Array:
        stacked = _stack_of(parameter, name)
        shape, lead = stacked.shape, names.ndim
        tensor = self._scales if is_scale else self.files.read

        def read(index: Index) -> np.ndarray:
            chosen = np.asarray(names[index[:lead]], object)
            parts = [tensor(each, shape[lead:])[index[lead:]] for each in chosen.flat]
            stack = np.empty((*chosen.shape, *parts[0].shape), parameter.dtype)
            for place, part in zip(np.ndindex(chosen.shape), parts, strict=True):
                stack[place] = part
            return stack

        return _from_stack(self.build(stacked, read), name)

    def _expert_stack(self, tensor: str, name: str, parameter: Any) -> jax.Array:
        """Read a parameter whose experts are one tensor."""
        if self._is_fp8(tensor):
            raise ValueError(f"{tensor}: expected a tensor for each expert in FP8, got one for all")
        stacked = _stack_of(self._wide(parameter), name)
        experts, *rows, cols = stacked.shape
        view = self.files.read(tensor, (experts, math.prod(rows), cols)).reshape(stacked.shape)
        array = self.build(stacked, lambda index: view[index].astype(stacked.dtype))
        return _from_stack(array, name)


def _stack_of(parameter: Parameter, name: str) -> Parameter:
    """Describe a parameter with its dimensions in the order of the files."""
    order = ORDER.get(name, tuple(range(len(parameter.shape))))
    shape = tuple(parameter.shape[order.index(axis)] for axis in range(len(order)))
    split = tuple((order[axis], role) for axis, role in parameter.split)
    return Parameter(shape, parameter.dtype, split)


def _from_stack(array: jax.Array, name: str) -> jax.Array:
    """Put the dimensions in the order of model.py."""
    return array if name not in ORDER else _transpose(array, ORDER[name])


def _transpose(array: jax.Array, order: tuple[int, ...]) -> jax.Array:
    """Reorder the dimensions on the devices."""
    return jax.jit(jnp.transpose, static_argnums=1)(array, order)


def published_tensors(config: Config, params: Any) -> dict[str, np.ndarray]:
    """Undo `load`.

    Args:
      config: sizes.
      params: the parameter tree of model.py.

    Returns:
      Float32 tensors by published name, arranged as `transformers` stores them.
    """
    wide = jax.tree.map(
        lambda x: np.asarray(x.unpack(jnp.float32) if isinstance(x, Fp8) else x, np.float32),
        params,
        is_leaf=lambda x: isinstance(x, Fp8),
    )
    layers = wide.pop("layers")
    tensors = {f"{TOP[name]}.weight": tensor for name, tensor in wide.items()}
    for n, weights in enumerate(layers):
        tensors |= _published_layer(config, f"model.layers.{n}.", weights)
    return {config.tensor_prefix + name: tensor for name, tensor in tensors.items()}


def _published_layer(
    config: Config, at: str, weights: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    rank = config.kv_lora_rank
    kv_b = np.concatenate([weights["w_uk"], weights["w_uv"].transpose(0, 2, 1)], axis=1)
    q, kv_a = np.split(weights["qkv_a"], [-rank - config.qk_rope_head_dim])
    q_name, kv_name = input_projections(config, at)
    tensors = {q_name: q, kv_name: kv_a, at + KV_B: kv_b.reshape(-1, rank)}
    for name, weight in weights.items():
        if name in VECTORS and (name != "router_bias" or has_router_bias(config)):
            tensors[at + VECTORS[name]] = weight
        elif name in MATRICES:
            names = matrices(config, at, name)
            if name in ORDER:
                weight = weight.transpose(np.argsort(ORDER[name]))
            parts = weight.reshape(-1, *weight.shape[names.ndim :])
            tensors |= dict(zip(names.flat, parts, strict=True))
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
