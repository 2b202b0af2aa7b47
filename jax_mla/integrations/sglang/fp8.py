"""Weights in FP8 with a float32 scale for each block, as DeepSeek-V3 and GLM-5 are published.

The engine loads them as they are, but multiplies by them with kernels for TPUs. Here they stay in
FP8 in memory too, and each layer is unpacked to the model's dtype when it is its turn.
"""

# pyright: reportMissingImports=false
# Type checkers need not have the engine.

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sgl_jax.srt.layers.moe import EPMoE
from sgl_jax.srt.models.deepseek_v3 import DeepseekV3Attention, DeepseekV3ForCausalLM
from sgl_jax.srt.models.glm5_moe import Glm5Attention, Glm5ForCausalLM

from jax_mla.integrations.sglang import tensors

_EXPERTS = ("wi_0", "wi_1", "wo")
PLAIN_IN_INDEX = "indexer.weights_proj"  # an indexer's weights of the heads are not in FP8
# GLM-5's config.json calls them `indexers_proj`, and lists all else that is not in FP8 as well.
_PLAIN = (PLAIN_IN_INDEX, "indexers_proj")
_MATRIX = r"(.*\.)?(\w+_proj|kv_a_proj_with_mqa|wq_b|wk)"


def unpack(codes: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """Return what codes and scales of the same shape stand for: one product, rounded once."""
    return (codes.astype(jnp.float32) * scales).astype(dtype)


# ---- What is refused ---------------------------------------------------------------------------


def check_blocks(config: Any, num_devices: int) -> None:
    """Refuse what could not be unpacked.

    Args:
      config: the engine's `ModelConfig`, with weights in blocks.
      num_devices: over how many devices heads and widths are split.

    Raises:
      ValueError: names what was expected and what came.
    """
    text, quantization = config.hf_text_config, config.quantization_config
    plain = sorted(n for n in quantization.ignored_layers or () if _is_matrix(n, text))
    if plain:
        raise ValueError(f"--model-path: expected all projections in FP8, got others: {plain}")
    block = quantization.weight_block_size[1]
    for names, is_split in (
        (("hidden_size",), False),
        (("q_lora_rank",), False),
        (("kv_lora_rank",), False),
        (("num_attention_heads", "v_head_dim"), True),
        (("intermediate_size",), True),
        (("n_shared_experts", "moe_intermediate_size"), True),
    ):
        size = math.prod(getattr(text, name, None) or 0 for name in names)
        num_parts = num_devices if is_split else 1
        # A single block may be smaller: the engine divides the size by the number of blocks.
        if size % (block * num_parts) and (size > block or num_parts > 1):
            devices = "" if num_parts == 1 else f" for --tp-size / --dp-size {num_parts}"
            raise ValueError(
                f"--model-path: expected {' * '.join(names)} to be a multiple of "
                f"{block * num_parts}{devices}, with FP8 weights in blocks of {block}, got {size}"
            )
    _check_tensors(config)


def _check_tensors(config: Any) -> None:
    """Refuse projections in another format; the engine would notice while serving, or never."""
    found = tensors.headers(config.model_path)
    for name, (dtype, shape) in found.items():
        matrix = name.removesuffix(".weight")
        if matrix == name or not _is_matrix(matrix, config.hf_text_config):
            continue
        size = config.quantization_config.weight_block_size
        blocks = [-(-n // b) for n, b in zip(shape, size, strict=True)]
        scales = found.get(f"{name}_scale_inv")
        if dtype != "F8_E4M3" or scales != ("F32", blocks):
            raise ValueError(
                f"--model-path: expected {name} in F8_E4M3 and {name}_scale_inv in F32 {blocks}, "
                f"got {dtype} and {' '.join(map(str, scales)) if scales else 'none'}"
            )


def _is_matrix(name: str, text: Any) -> bool:
    """Return whether a module is a projection that has to be in FP8, in a layer of the model."""
    layer = re.search(r"layers\.(\d+)\.", name)
    if layer and int(layer[1]) >= text.num_hidden_layers:  # predicts further tokens
        return False
    return re.fullmatch(_MATRIX, name) is not None and not name.endswith(_PLAIN)


# ---- Loading -----------------------------------------------------------------------------------

# What the engine's models do there.
_LOAD = {kind: kind.load_weights for kind in (DeepseekV3ForCausalLM, Glm5ForCausalLM)}
_AFTER_LOAD = {kind: kind.post_load_weights for kind in (DeepseekV3Attention, Glm5Attention)}
_create_layer_mappings = DeepseekV3ForCausalLM._create_layer_mappings


def _own(methods: dict[type, Any], instance: Any) -> Any:
    return next(method for kind, method in methods.items() if isinstance(instance, kind))


def load_weights(model: DeepseekV3ForCausalLM | Glm5ForCausalLM, config: Any) -> None:
    """Stand for `load_weights` of the models."""
    quantization = config.quantization_config
    is_in_blocks = quantization is not None and quantization.weight_block_size is not None
    if is_in_blocks:
        check_blocks(config, model.mesh.shape["tensor"])
    _own(_LOAD, model)(model, config)
    if is_in_blocks:
        # The runner ends if it sees blocks without a TPU. Layers keep what they need to know.
        config.quantization_config = None


def layer_mappings(model: DeepseekV3ForCausalLM, *args: Any) -> dict[str, Any]:
    """Stand for `DeepseekV3ForCausalLM._create_layer_mappings`: devices may cut blocks."""
    mappings = _create_layer_mappings(model, *args)
    for name, mapping in mappings.items():
        if name.endswith(".weight_scale_inv"):
            # Read whole. The loader gives each output a scale of its own before it splits them.
            mapping.sharding = (None, None)
    return mappings


def split_up_projection(attention: DeepseekV3Attention | Glm5Attention) -> None:
    """Stand for `post_load_weights` of attention, which rounds to bfloat16 in any model."""
    matrix = attention.kv_b_proj
    if not hasattr(matrix, "weight_q") or not attention.use_absorbed:
        return _own(_AFTER_LOAD, attention)(attention)
    scales = _for_each_input(matrix.weight_scale.value, matrix.weight_q.value.shape[1])
    both = unpack(matrix.weight_q.value, scales, attention.w_uk.value.dtype).T
    both = both.reshape(attention.kv_lora_rank, attention.num_heads, -1)
    attention.w_uk.value = both[:, :, : attention.qk_nope_head_dim]
    attention.w_uv.value = both[:, :, attention.qk_nope_head_dim :]
    attention.kv_b_proj = None


# ---- Matrices ----------------------------------------------------------------------------------


def _for_each_input(scales: jax.Array, num_inputs: int) -> jax.Array:
    """Return [outputs, inputs] of the engine's [blocks of inputs, 1, outputs]."""
    return jnp.repeat(scales[:, 0].T, num_inputs // scales.shape[0], axis=1)


def product(x: jax.Array, w_q: jax.Array, w_scale: jax.Array, **_: Any) -> jax.Array:
    """Multiply by a matrix, or by a device's part of one; the engine's `quantized_matmul`.

    Args:
      x: [tokens, inputs].
      w_q: [outputs, inputs] float8.
      w_scale: [blocks of inputs, 1, outputs] float32.

    Returns:
      [tokens, outputs], in the dtype of x.
    """
    # Not before x is there: XLA would unpack all layers at once.
    x, w_q = lax.optimization_barrier((x, w_q))
    weight = unpack(w_q, _for_each_input(w_scale, w_q.shape[1]), x.dtype)
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)


# ---- Experts -----------------------------------------------------------------------------------

_forward = EPMoE._forward


def place_scales(experts: EPMoE, is_static: bool = True) -> None:
    """Stand for `EPMoE.quantize_weights`: say where the scales of a checkpoint go.

    The engine has a scale for each output there. These are as published, one for each block.
    """
    if not is_static or experts.weight_block_size is None:
        raise NotImplementedError("jax_mla.integrations.sglang: experts not in FP8 in blocks")
    experts.activation_quantized_dtype = None  # tokens stay in the model's dtype
    for name in _EXPERTS:
        num_experts, *sizes = getattr(experts, name).value.shape
        blocks = (-(-n // b) for n, b in zip(sizes[::-1], experts.weight_block_size, strict=True))
        by_expert = NamedSharding(experts.moe_mesh, P("expert"))
        scales = jax.ShapeDtypeStruct((num_experts, *blocks), jnp.float32, sharding=by_expert)
        setattr(experts, f"{name}_scale", nnx.data(nnx.Param(scales)))


def whole_scales(
    experts: EPMoE, scale: jax.Array | None, weight: jax.Array, *, scale_name: str
) -> jax.Array | None:
    """Stand for `EPMoE._normalize_scale_for_gmm`: all scales of its experts for each device.

    The engine splits the last of four dimensions over the devices that split `wi_0` and `wi_1`,
    where devices could cut a block. So the last one has a copy for each of them.
    """
    if scale is None:
        return None
    scale = scale[:, :, None]
    if scale_name == "wo_scale":
        return scale
    copies = jnp.tile(scale, experts.tp_size)
    return jax.sharding.reshard(copies, P("expert", None, None, "tensor"))


def forward(
    experts: EPMoE,
    hidden: jax.Array,
    topk_weights: jax.Array,
    topk_ids: jax.Array,
    *weights: Any,
    **options: Any,
) -> jax.Array:
    """Stand for `EPMoE._forward`, a device's part of the experts: unpack them first."""
    codes, scales = weights[:3], weights[3:6]
    if scales[0] is not None:
        hidden, codes = lax.optimization_barrier((hidden, codes))  # as in `product`
        part = lax.axis_index("tensor")
        weights = (
            _unpack_experts(experts, codes[0], scales[0], (0, part), hidden.dtype),
            _unpack_experts(experts, codes[1], scales[1], (0, part), hidden.dtype),
            _unpack_experts(experts, codes[2], scales[2], (part, 0), hidden.dtype),
        )
    return _forward(experts, hidden, topk_weights, topk_ids, *weights, **options)


def _unpack_experts(
    experts: EPMoE, codes: jax.Array, scales: jax.Array, part: tuple[Any, Any], dtype: Any
) -> jax.Array:
    """Unpack [experts, inputs, outputs], a part of the inputs or of the outputs.

    `scales` are [experts, blocks of outputs, 1, blocks of inputs], of the whole matrices.
    """
    block_out, block_in = experts.weight_block_size
    _, num_in, num_out = codes.shape
    block_of_in = (part[0] * num_in + jnp.arange(num_in)) // block_in
    block_of_out = (part[1] * num_out + jnp.arange(num_out)) // block_out
    scales = scales[:, :, 0].swapaxes(1, 2)[:, block_of_in][:, :, block_of_out]
    return unpack(codes, scales, dtype)
