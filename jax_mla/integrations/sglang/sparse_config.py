"""What sparse models say of their indexer in config.json: how it is read, and what is refused."""

# pyright: reportMissingImports=false
# Type checkers need not have the engine.

from __future__ import annotations

import re
from typing import Any

from jax_mla.integrations.sglang import tensors

V32, GLM5 = ARCHITECTURES = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
BACKEND = "dsa_sparse"
MAX_TOPK = 4096  # of the kernels for GPUs (csrc/index/params.h)
HEAD_DIM = 128  # the engine rounds the width of its pools up to it
# Fields that the engine's models do not read, or whose value is written into them.
_FIXED: dict[str, dict[str, Any]] = {
    V32: dict(
        index_head_dim=HEAD_DIM, qk_rope_head_dim=64, hidden_act="silu", attention_bias=False,
        mlp_bias=False, rope_interleave=True, indexer_rope_interleave=False,
        tie_word_embeddings=False, rms_norm_eps=1e-6,
    ),
    GLM5: dict(
        index_head_dim=HEAD_DIM, index_n_heads=32, kv_lora_rank=512, q_lora_rank=2048,
        qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, hidden_act="silu",
        attention_bias=False, mlp_bias=False, rope_interleave=True, indexer_rope_interleave=True,
    ),
}  # fmt: skip
_REQUIRED = ("index_topk", "index_n_heads", "index_head_dim", "q_lora_rank")
_INDEX_FIELDS = {
    "index_topk", "index_n_heads", "index_head_dim", "indexer_types", "index_topk_freq",
    "index_topk_pattern", "index_skip_topk_offset", "indexer_rope_interleave",
    "index_share_for_mtp_iteration",  # about layers that only predict further tokens
}  # fmt: skip
_NAMES = {"F": "full", "S": "shared"}


def is_sparse(config: Any) -> bool:
    """Return whether a model has an indexer, by the engine's `ModelConfig`."""
    return config.hf_config.architectures[0] in ARCHITECTURES


def indexer_types(text: Any) -> list[str]:
    """Return "full" for each layer with an indexer, and "shared" for those without (GLM-5.2)."""
    types = getattr(text, "indexer_types", None)
    if types is not None:
        return list(types)
    pattern = getattr(text, "index_topk_pattern", None)
    if pattern is not None:
        return [str(_NAMES.get(letter, letter)) for letter in pattern]
    every = max(getattr(text, "index_topk_freq", None) or 1, 1)
    offset = getattr(text, "index_skip_topk_offset", 2)
    num_layers = text.num_hidden_layers
    return ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(num_layers)]


def index_layers(text: Any) -> tuple[int, ...]:
    """Return the layers with an indexer."""
    return tuple(i for i, kind in enumerate(indexer_types(text)) if kind == "full")


def check(args: Any, config: Any) -> None:
    """Refuse a sparse model that would not be computed as it is meant.

    Raises:
      ValueError: names the argument or field, what was expected and what came.
    """
    if args.attention_backend != BACKEND:
        raise ValueError(
            f"--attention-backend: expected {BACKEND} for a model with an indexer, got "
            f"{args.attention_backend}"
        )
    text, architecture = config.hf_text_config, config.hf_config.architectures[0]
    _check_fields(text, architecture)
    _check_layers(text, architecture)
    _check_weights(config)


def _check_fields(text: Any, architecture: str) -> None:
    unknown = [n for n in vars(text) if n.startswith("index") and n not in _INDEX_FIELDS]
    if unknown:
        raise ValueError(
            f"--model-path: expected no fields of an indexer but {sorted(_INDEX_FIELDS)}, got "
            f"{unknown}"
        )
    for name in _REQUIRED:
        size = getattr(text, name, None)
        if not isinstance(size, int) or size < 1:
            raise ValueError(
                f"--model-path: expected {name} to be an int of at least 1, got {size!r}"
            )
    if text.index_topk > MAX_TOPK:
        raise ValueError(
            f"--model-path: expected index_topk to be at most {MAX_TOPK}, got {text.index_topk}"
        )
    for name, expected in _FIXED[architecture].items():
        got = getattr(text, name, expected)
        if got != expected:
            raise ValueError(
                f"--model-path: expected {name} to be {expected!r} for {architecture}, got {got!r}"
            )
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if architecture == GLM5 and kind != "default":
        raise ValueError(
            f"--model-path: expected plain rotary embeddings (rope_type default) for {architecture}"
            f", got {kind!r}"
        )


def _check_layers(text: Any, architecture: str) -> None:
    types, num_layers = indexer_types(text), text.num_hidden_layers
    kinds = ("full",) if architecture == V32 else ("full", "shared")
    if len(types) != num_layers or not {*types} <= {*kinds} or types[0] != "full":
        raise ValueError(
            f"--model-path: expected indexer_types (or index_topk_pattern) to have {num_layers} "
            f"entries {' or '.join(kinds)}, the first of them full, got {types}"
        )
    num_dense = getattr(text, "first_k_dense_replace", 0)
    dense = ["dense" if i < num_dense else "sparse" for i in range(num_layers)]
    mlps = getattr(text, "mlp_layer_types", None)
    if mlps is not None and list(mlps) != dense:
        raise ValueError(
            "--model-path: expected mlp_layer_types to be dense in the first first_k_dense_replace "
            f"({num_dense}) layers and sparse in the others, got {mlps}"
        )


def _check_weights(config: Any) -> None:
    """Refuse a checkpoint without an indexer's weights; the engine would only write a warning."""
    found, text = tensors.headers(config.model_path), config.hf_text_config
    if not found:  # before the download
        return
    width = text.index_n_heads * text.index_head_dim
    shapes = {
        "wq_b.weight": [width, text.q_lora_rank],
        "wk.weight": [text.index_head_dim, text.hidden_size],
        "k_norm.weight": [text.index_head_dim],
        "k_norm.bias": [text.index_head_dim],
        "weights_proj.weight": [text.index_n_heads, text.hidden_size],
    }
    for layer in index_layers(text):
        for name, shape in shapes.items():
            name = f"model.layers.{layer}.self_attn.indexer.{name}"
            got = found[name].shape if name in found else "none"
            if got != shape:
                raise ValueError(f"--model-path: expected {name} of shape {shape}, got {got}")
    extra = {int(m[1]) for n in found if (m := re.match(r"model\.layers\.(\d+)\..*\.indexer\.", n))}
    extra -= {*index_layers(text), *range(text.num_hidden_layers, max(extra, default=0) + 1)}
    if extra:
        raise ValueError(
            f"--model-path: expected indexers in the layers {list(index_layers(text))}, which "
            f"config.json names, got more in {sorted(extra)}"
        )
