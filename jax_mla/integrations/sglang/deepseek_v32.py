"""DeepSeek V3.2 for the engine, which has none: the layers of its V3, with the steps of its GLM-5.

GLM-5's modules hand the indexers' choices from layer to layer, and the pools of index keys back to
the engine. V3's have the sizes, the rotary embeddings and the names of the weights.
"""

# pyright: reportMissingImports=false
# Type checkers need not have the engine.

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from sgl_jax.srt.hf_transformers_utils import AutoConfig
from sgl_jax.srt.layers.embeddings import get_rope
from sgl_jax.srt.models import glm5_moe
from sgl_jax.srt.models.deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3DecoderLayer,
    DeepseekV3ForCausalLM,
    DeepseekV3Model,
)
from sgl_jax.srt.models.registry import ModelRegistry
from sgl_jax.srt.utils.weight_utils import WeightMapping
from transformers import PretrainedConfig

from jax_mla.integrations.sglang import fp8, indexer


class DeepseekV32Config(PretrainedConfig):
    """config.json as it is; the engine's transformers does not know the model."""

    model_type = "deepseek_v32"


class Indexer(glm5_moe.GlmDsaIndexer):
    """GLM-5's indexer with a rotary embedding of its own: pairs are halves of the 64 values."""

    def __init__(self, config: Any, mesh: Any, dtype: Any) -> None:
        """Make it from config.json."""
        super().__init__(
            hidden_size=config.hidden_size,
            q_lora_rank=config.q_lora_rank,
            index_head_dim=config.index_head_dim,
            index_n_heads=config.index_n_heads,
            mesh=mesh,
            dtype=dtype,
        )
        self.rotary_emb = get_rope(
            head_size=indexer.ROPE_DIM,
            rotary_dim=indexer.ROPE_DIM,
            max_position=config.max_position_embeddings,
            base=int(config.rope_theta),
            is_neox_style=True,
            rope_scaling=config.rope_scaling,
            dtype=dtype,
        )

    def project(
        self, hidden_states: jax.Array, qr: jax.Array, positions: jax.Array, rotary_emb: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `indexer.project`; the embedding of the attention is another."""
        del rotary_emb
        return indexer.project(self, hidden_states, qr, positions, self.rotary_emb)


class DeepseekV32Attention(DeepseekV3Attention):
    """V3's attention with an indexer."""

    use_dsa_sparse = True
    indexer_type = "full"
    __call__ = glm5_moe.Glm5Attention.__call__
    _forward_mqa = glm5_moe.Glm5Attention._forward_mqa

    def __init__(self, config: Any, mesh: Any, layer_id: int, dtype: Any) -> None:
        """Make it from config.json."""
        super().__init__(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            mesh=mesh,
            layer_id=layer_id,
            rope_theta=config.rope_theta,
            rope_scaling=config.rope_scaling,
            max_position_embeddings=config.max_position_embeddings,
            dtype=dtype,
        )
        self.indexer = Indexer(config, mesh, dtype)

    @property
    def kv_a_proj_with_mqa(self) -> Any:
        """GLM-5's name of the projection."""
        return self.kv_a_proj


class DeepseekV32DecoderLayer(DeepseekV3DecoderLayer):
    """V3's layer with sparse attention."""

    __call__ = glm5_moe.Glm5DecoderLayer.__call__

    def __init__(self, config: Any, mesh: Any, layer_id: int, dtype: Any) -> None:
        """Make it from config.json."""
        super().__init__(config, mesh, layer_id, dtype)
        scaling = self.self_attn.attn_mqa.scaling  # with YaRN's factor
        self.self_attn = DeepseekV32Attention(config, mesh, layer_id, dtype)
        self.self_attn.attn_mqa.scaling = scaling


class DeepseekV32Model(DeepseekV3Model):
    """V3's embedding and norm, and V3.2's layers."""

    __call__ = glm5_moe.Glm5Model.__call__

    def __init__(self, config: Any, mesh: Any, dtype: Any) -> None:
        """Make it from config.json."""
        super().__init__(config, mesh, dtype)
        layers = range(config.num_hidden_layers)
        self.layers = nnx.data(
            [DeepseekV32DecoderLayer(config, mesh, layer_id, dtype) for layer_id in layers]
        )


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek V3.2. The engine finds it by its name, which is that in config.json."""

    __call__ = glm5_moe.Glm5ForCausalLM.__call__

    def __init__(self, config: Any, mesh: Any, dtype: Any) -> None:
        """Make it from config.json."""
        super().__init__(config, mesh, dtype)
        self.model = DeepseekV32Model(config, mesh, dtype)

    @classmethod
    def patch_model_config(cls, mc: Any) -> None:
        """Put what newer configs have in `rope_parameters` where V3's modules look for it."""
        super().patch_model_config(mc)
        config = mc.hf_config
        rope = getattr(config, "rope_parameters", None) or {}
        theta = getattr(config, "rope_theta", None)
        config.rope_theta = theta or rope.get("rope_theta", 10000.0)
        scaling = getattr(config, "rope_scaling", None)
        if scaling is None and rope.get("rope_type", "default") != "default":
            scaling = rope
        config.rope_scaling = scaling
        quantization = mc.quantization_config
        if quantization is not None:
            quantization.ignored_layers = [*(quantization.ignored_layers or ()), fp8.PLAIN_IN_INDEX]

    def _create_layer_mappings(self, layer_idx: int, *args: Any) -> dict[str, Any]:
        """Add the indexer's weights to V3's."""
        mappings = super()._create_layer_mappings(layer_idx, *args)
        *_, is_static_quant = args
        name = f"model.layers.{layer_idx}.self_attn.indexer"

        def add(source: str, target: str, transpose: bool) -> None:
            mappings[f"{name}.{source}"] = WeightMapping(
                target_path=f"{name}.{target}", sharding=(None, None), transpose=transpose
            )

        add("weights_proj.weight", "weights_proj.weight", transpose=True)
        for matrix in ("wq_b", "wk"):
            if is_static_quant:
                add(f"{matrix}.weight", f"{matrix}.weight_q", transpose=False)
                add(f"{matrix}.weight_scale_inv", f"{matrix}.weight_scale", transpose=False)
            else:
                add(f"{matrix}.weight", f"{matrix}.weight", transpose=True)
        for vector in ("weight", "bias"):
            mappings[f"{name}.k_norm.{vector}"] = WeightMapping(
                target_path=f"{name}.k_norm.{vector}", sharding=(None,)
            )
        return mappings


def register() -> None:
    """Make the model and its config known to the engine of this process."""
    AutoConfig.register(DeepseekV32Config.model_type, DeepseekV32Config, exist_ok=True)
    ModelRegistry.models[DeepseekV32ForCausalLM.__name__] = DeepseekV32ForCausalLM
