"""The recall model: its sizes and its initial parameters."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from . import recall
from .config import Config
from .weights import Parameter, is_parameter, parameters

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
    tree = parameters(config, jnp.dtype(jnp.float32))
    paths, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_parameter)
    out_gain = (2 * config.num_layers) ** -0.5

    def draw(path: Any, parameter: Parameter, key: jax.Array) -> jax.Array:
        name, shape = path[-1].key, parameter.shape
        if name == "router_bias" or "norm" in name:
            return jnp.full(shape, float("norm" in name))
        if name == "embed":
            # All embeddings share a random part. RoPE rotates it by the position alone, so that
            # heads can learn early to look n tokens back.
            own, common = jax.random.split(key)
            return jax.random.normal(own, shape) + jax.random.normal(common, shape[1:])
        fan_in = shape[1] if name.startswith("expert") or name == "w_uv" else shape[-1]
        gain = {"head": 0.5}.get(name, out_gain if name == "o" or name.endswith("down") else 1.0)
        return jax.random.normal(key, shape) * (gain * fan_in**-0.5)

    keys = jax.random.split(key, len(paths))
    leaves = [draw(path, leaf, key) for (path, leaf), key in zip(paths, keys, strict=True)]
    return jax.tree.unflatten(structure, leaves)


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
    q_rank, heads = config.q_lora_rank, config.num_heads
    assert q_rank is not None
    layers = []
    for weights in params["layers"]:
        q_a, latent = weights["qkv_a"][:q_rank], weights["qkv_a"][q_rank : q_rank + rank]
        keys = jnp.einsum("cd,hnc->hnd", latent, weights["w_uk"])
        queries = jnp.einsum("rd,hnd->hnr", q_a, keys)
        queries = QUERY_GAIN * queries / queries.std() * nope**-0.5
        q_b = weights["q_b"].reshape(heads, -1, q_rank).at[:, :nope].set(queries)
        values = jnp.einsum("cd,hcv->dhv", latent, weights["w_uv"])
        o = 0.5 * weights["o"] + OUTPUT_GAIN * values.reshape(weights["o"].shape)
        layers.append(weights | {"q_b": q_b.reshape(-1, q_rank), "o": o})
    common = params["embed"].mean(0)
    head = HEAD_GAIN * (params["embed"] - common)
    common = common / jnp.sum(common**2)
    frequencies = config.rope.theta ** -(jnp.arange(0, dim, 2) / dim)
    back = 1 + 2 * jnp.arange(heads) // heads
    phase = back[:, None] * frequencies
    turned = jnp.stack([jnp.cos(phase), -jnp.sin(phase)], axis=-1).reshape(heads, dim)
    key = LOOK_BACK_GAIN * jnp.where(jnp.arange(dim) % 2 == 0, 1.0, 0.0)
    first = layers[0]
    qkv_a = first["qkv_a"].at[0].set(2 * common).at[q_rank + rank :].set(key[:, None] * common)
    q_b = jnp.zeros((heads, config.q_dim, q_rank)).at[:, nope:, 0].set(turned)
    layers[0] = first | {"qkv_a": qkv_a, "q_b": q_b.reshape(-1, q_rank)}
    return params | {"head": head, "layers": layers}
