"""The recall model: its sizes and its initial parameters."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from . import recall
from .config import Config

Tree = Any
# Strengths of `mimetic`. With all four, the model recalls 8 pairs within 100 steps. With the first
# alone it did not within 680 (a smaller model, 3072 tokens a step).
LOOK_BACK_GAIN = 16.0
QUERY_GAIN = 2.0
OUTPUT_GAIN = 0.5
HEAD_GAIN = 0.05


def raw_config(**overrides: object) -> dict[str, Any]:
    """Make the config.json of the recall model. Its latent has the sizes of DeepSeek's.

    Args:
      **overrides: fields to change.

    Returns:
      The fields.
    """
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": len(recall.vocabulary()),
        "hidden_size": 128,
        "intermediate_size": 192,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 96,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": recall.BOS,
        "eos_token_id": recall.EOS,
        "torch_dtype": "bfloat16",
    } | overrides


@functools.partial(jax.jit, static_argnums=0)
def init_params(config: Config, key: jax.Array) -> Tree:
    """Draw float32 parameters, scaled by fan-in and, in residual branches, by depth."""
    keys = iter(jax.random.split(key, 64))
    hidden, heads = config.hidden_size, config.num_heads
    q_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    out_gain = (2 * config.num_layers) ** -0.5

    def normal(*shape: int, fan_in: int, gain: float = 1.0) -> jax.Array:
        return jax.random.normal(next(keys), shape) * (gain * fan_in**-0.5)

    def mlp(prefix: str, *shape: int, width: int) -> Tree:
        return {
            f"{prefix}gate": normal(*shape, hidden, width, fan_in=hidden),
            f"{prefix}up": normal(*shape, hidden, width, fan_in=hidden),
            f"{prefix}down": normal(*shape, width, hidden, fan_in=width, gain=out_gain),
        }

    def layers(n: int) -> Tree:
        rank_q, rank_kv, v_dim = config.q_lora_rank, config.kv_lora_rank, config.v_head_dim
        assert rank_q is not None
        return {
            "input_norm": jnp.ones((n, hidden)),
            "post_norm": jnp.ones((n, hidden)),
            "q_a": normal(n, hidden, rank_q, fan_in=hidden),
            "q_a_norm": jnp.ones((n, rank_q)),
            "q_b": normal(n, rank_q, heads, q_dim, fan_in=rank_q),
            "kv_a": normal(n, hidden, rank_kv + config.qk_rope_head_dim, fan_in=hidden),
            "kv_a_norm": jnp.ones((n, rank_kv)),
            "w_uk": normal(n, heads, config.qk_nope_head_dim, rank_kv, fan_in=rank_kv),
            "w_uv": normal(n, heads, rank_kv, v_dim, fan_in=rank_kv),
            "o": normal(n, heads, v_dim, hidden, fan_in=heads * v_dim, gain=out_gain),
        }

    moe, num_dense = config.moe, config.num_dense_layers
    assert moe is not None
    num_moe, experts = config.num_layers - num_dense, moe.num_experts
    shared_width = moe.intermediate_size * moe.num_shared_experts
    return {
        # All embeddings share a random part. RoPE rotates it by the position alone, so that heads
        # can learn early to look n tokens back.
        "embed": normal(config.vocab_size, hidden, fan_in=1) + normal(hidden, fan_in=1),
        "head": normal(config.vocab_size, hidden, fan_in=hidden, gain=0.5),
        "final_norm": jnp.ones((hidden,)),
        "dense": layers(num_dense) | mlp("", num_dense, width=config.intermediate_size),
        "moe": layers(num_moe)
        | mlp("expert_", num_moe, experts, width=moe.intermediate_size)
        | mlp("shared_", num_moe, width=shared_width)
        | {
            "router": normal(num_moe, hidden, experts, fan_in=hidden),
            "router_bias": jnp.zeros((num_moe, experts)),
        },
    }


@functools.partial(jax.jit, static_argnums=0)
def mimetic(config: Config, params: Tree) -> Tree:
    """Start attention close to a trained pattern, which saves most of the training.

    Every head starts by attending to what resembles its query (query times key projection is
    positive), and copies it (value times output projection is positive). The output head starts as
    the embedding. Both follow "Mimetic Initialization of Self-Attention Layers" (arXiv:2305.09828).

    The heads of the first layer attend by position instead. One half attends to the token before,
    the other half to the one before that. Their rotary key is made from the part that all
    embeddings share (`init_params`), and their rotary query is this key, rotated back.

    Args:
      config: model sizes.
      params: from `init_params`.

    Returns:
      The changed parameters.
    """
    dim, rank, nope = config.qk_rope_head_dim, config.kv_lora_rank, config.qk_nope_head_dim
    for kind in ("dense", "moe"):
        w = dict(params[kind])
        latent = w["kv_a"][..., :rank]
        keys = jnp.einsum("ldc,lhnc->lhdn", latent, w["w_uk"])
        queries = jnp.einsum("ldr,lhdn->lrhn", w["q_a"], keys)
        w["q_b"] = w["q_b"].at[..., :nope].set(QUERY_GAIN * queries / queries.std() * nope**-0.5)
        values = jnp.einsum("ldc,lhcv->lhvd", latent, w["w_uv"])
        w["o"] = 0.5 * w["o"] + OUTPUT_GAIN * values
        params = params | {kind: w}
    common = params["embed"].mean(0)
    params = params | {"head": HEAD_GAIN * (params["embed"] - common)}
    common = common / jnp.sum(common**2)
    frequencies = config.rope.theta ** -(jnp.arange(0, dim, 2) / dim)
    back = 1 + 2 * jnp.arange(config.num_heads) // config.num_heads
    phase = back[:, None] * frequencies
    turned = jnp.concatenate([jnp.cos(phase), -jnp.sin(phase)], axis=-1)
    dense = dict(params["dense"])
    key = LOOK_BACK_GAIN * jnp.where(jnp.arange(dim) < dim // 2, 1.0, 0.0)
    dense["kv_a"] = dense["kv_a"].at[0, :, rank:].set(common[:, None] * key)
    dense["q_a"] = dense["q_a"].at[0, :, 0].set(2 * common)
    dense["q_b"] = dense["q_b"].at[0].set(0).at[0, 0, :, nope:].set(turned)
    return params | {"dense": dense}
