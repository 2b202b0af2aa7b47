"""The published names of a model's tensors: which ones a parameter comes from, and which are left.

Every tensor of the text model is read, or is known to change nothing, or is refused by its name. So
a checkpoint with something new in its attention is an error, and not a wrong text.
"""

import re
from collections.abc import Set
from typing import Any

import numpy as np

from .config import Config
from .fields import PICTURE_WORDS
from .tensor_files import TensorFiles

TOP = {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
VECTORS = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "q_a_norm": "self_attn.q_a_layernorm.weight",
    "index_k_norm": "self_attn.indexer.k_norm.weight",
    "index_k_bias": "self_attn.indexer.k_norm.bias",
    "index_weights": "self_attn.indexer.weights_proj.weight",
    "router": "mlp.gate.weight",
    "router_bias": "mlp.gate.e_score_correction_bias",
}
GATE_UP = ("gate_proj", "up_proj")
MATRICES = {  # the tensors that are stacked, {} for the number of an expert
    "q_b": ("self_attn.q_b_proj",),
    "index_q": ("self_attn.indexer.wq_b",),
    "index_k": ("self_attn.indexer.wk",),
    "o": ("self_attn.o_proj",),
    "gate_up": tuple(f"mlp.{name}" for name in GATE_UP),
    "down": ("mlp.down_proj",),
    "shared_gate_up": tuple(f"mlp.shared_experts.{name}" for name in GATE_UP),
    "shared_down": ("mlp.shared_experts.down_proj",),
    "expert_gate_up": tuple("mlp.experts.{}." + name for name in GATE_UP),
    "expert_down": ("mlp.experts.{}.down_proj",),
}
# All experts of a layer in one tensor, which some checkpoints have: the gates lie before the ups.
EXPERT_STACKS = {
    "expert_gate_up": "mlp.experts.gate_up_proj",
    "expert_down": "mlp.experts.down_proj",
}
LAYER = re.compile(r"model\.layers\.(\d+)\.")
MTP = "eh_proj.weight"  # in layers that predict further tokens, which this example does not run
Q_PLAIN, Q_A = "self_attn.q_proj.weight", "self_attn.q_a_proj.weight"
KV_A = "self_attn.kv_a_proj_with_mqa.weight"
KV_B = "self_attn.kv_b_proj.weight"
INDEXER = "self_attn.indexer."


def input_projections(config: Config, at: str) -> tuple[str, str]:
    """Return the names of the query's first projection and the latent's."""
    return at + (Q_PLAIN if config.q_lora_rank is None else Q_A), at + KV_A


def matrices(config: Config, at: str, name: str) -> np.ndarray:
    """Return the names of the tensors that make up a parameter, in the shape of their stack."""
    names = [f"{at}{tensor}.weight" for tensor in MATRICES[name]]
    shape = (len(names),) if len(names) > 1 else ()
    if name.startswith("expert"):
        assert config.moe is not None
        shape = (config.moe.num_experts, *shape)
        names = [each.format(expert) for expert in range(shape[0]) for each in names]
    return np.array(names, object).reshape(shape)


def has_router_bias(config: Config) -> bool:
    """Whether the router has a bias; the one of a softmax has none."""
    return config.moe is not None and config.moe.scoring != "softmax"


def _names_of(config: Config, names: Set[str], at: str, name: str) -> list[str]:
    """Return the names of the tensors that the parameter `name` is read from."""
    if name in ("w_uk", "w_uv"):
        return [at + KV_B]
    if name == "qkv_a":
        return list(input_projections(config, at))
    if name == "router_bias" and not has_router_bias(config):
        return []
    if name in VECTORS:
        return [at + VECTORS[name]]
    if at + EXPERT_STACKS.get(name, "-") in names:
        return [at + EXPERT_STACKS[name]]
    return list(matrices(config, at, name).flat)


def refuse_more_layers(files: TensorFiles, num_layers: int) -> None:
    """Refuse files with further layers, except those that only predict further tokens."""
    layers = {int(found[1]) for name in files.names if (found := LAYER.match(name))}
    held = 1 + max((n for n in layers if f"model.layers.{n}.{MTP}" not in files.names), default=-1)
    if held > num_layers:
        raise ValueError(
            f"{files.directory}: config.json: num_hidden_layers: expected {held}, the number of "
            f"layers in the checkpoint's files, got {num_layers}"
        )


def check_names(files: TensorFiles, config: Config, tree: dict[str, Any]) -> None:
    """Refuse files without a tensor, or with one that is not read, unless it changes nothing.

    Args:
      files: of a checkpoint.
      config: sizes.
      tree: from `weights.parameters`.

    Raises:
      ValueError: names such a tensor.
    """
    read = {f"{TOP[name]}.weight" for name in tree if name != "layers"}
    for n, layer in enumerate(tree["layers"]):
        for name in layer:
            read.update(_names_of(config, files.names, f"model.layers.{n}.", name))
    for name in sorted(read - files.names):
        files.dtype(name)  # raises
    read |= {f"{name}_scale_inv" for name in read}
    for name in sorted(files.names - read):
        if not _changes_nothing(config, name):
            raise ValueError(
                f"{files.directory}: {config.tensor_prefix}{name}: expected no such tensor, "
                "because the model of config.json does not read it"
            )
    for name in sorted(files.other_names):
        part = name.split(".")[0]
        if not any(word in part for word in PICTURE_WORDS):
            raise ValueError(
                f"{files.directory}: {name}: expected {config.tensor_prefix}* or a tensor that is "
                f"about pictures (one of {PICTURE_WORDS} in its first word)"
            )


def _changes_nothing(config: Config, name: str) -> bool:
    layer = LAYER.match(name)
    if layer and int(layer[1]) >= config.num_layers:
        return True  # predicts further tokens, or `refuse_more_layers` would have refused it
    if name == f"{TOP['head']}.weight":
        return config.tied_head
    if layer and config.index is not None and name.startswith(layer[0] + INDEXER):
        # A layer that shares an indexer attends to what a layer below chose.
        return not config.index.own[int(layer[1])]
    return name.endswith("rotary_emb.inv_freq")  # computed from config.json
