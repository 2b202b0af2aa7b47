"""Train the recall checkpoint that generate.py runs: V3-shaped, small, checkable.

python examples/deepseek/train_recall.py --out DIR

takes about two minutes on one H200. The curriculum grows the number of pairs from a few to
`--pairs`, at one fixed text length, so that everything compiles once. Training attends without the
cache (`plain_attention`); generate.py and the tests measure the result with jax_mla.
"""

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import recall
from checkpoint import load, save
from config import Config, parse_config
from model import logits, plain_attention, run_layers
from rope import angles

Tree = Any
BALANCE_RATE = 1e-3  # per step, on the router bias
LOOK_BACK_GAIN = 16.0
QUERY_GAIN = 2.0
OUTPUT_GAIN = 0.5
HEAD_GAIN = 0.05
SKIP_DECAY = ("norm", "bias", "embed")


def raw_config(**overrides: object) -> dict[str, Any]:
    """config.json of the recall model; kv_lora_rank and rope as DeepSeek has them."""
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


def init_params(config: Config, key: jax.Array) -> Tree:
    """Random float32 parameters: unit fan-in, residual branches scaled by depth."""
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
        # What all tokens share gives the rotary part something constant to turn, so that heads
        # can learn "n tokens back" early.
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


def mimetic(config: Config, params: Tree) -> Tree:
    """Start attention near what trained attention looks like, which saves most of the training.

    As in "Mimetic Initialization of Self-Attention Layers" (arXiv:2305.09828), every head starts out
    copying what it attends to (value times output projection is positive) and attending to what
    resembles it (query times key projection is positive), and the output head starts out as the
    embedding. The heads of the first layer attend by
    position instead: half of them to the token before, half to the one before that. For that the
    rotary key is made of the constant part that `init_params` gives all embeddings, and the rotary
    query is the same, turned back. Training is free to keep or change all of it.
    """
    dim, rank, nope = config.qk_rope_head_dim, config.kv_lora_rank, config.qk_nope_head_dim
    for kind in ("dense", "moe"):
        w = dict(params[kind])
        latent = w["kv_a"][..., :rank]
        keys = jnp.einsum("ldc,lhnc->lhdn", latent, w["w_uk"])
        queries = jnp.einsum("ldr,lhdn->lrhn", w["q_a"], keys) * (config.hidden_size / rank**0.5)
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


def to_compute_dtype(params: Tree, dtype: jnp.dtype) -> Tree:
    """Cast all but the router, which stays float32 as in the published models."""

    def cast(path, x):
        return x if "router" in path[-1].key else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def text_logits(config: Config, params: Tree, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits at every token, and the routing weights."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cos_sin = angles(config.rope, config.qk_rope_head_dim, tokens.shape[1], positions)
    core = plain_attention(config.sm_scale)
    # A product with one-hot rows: the gradient of a gather is a slow scatter on a GPU.
    hidden = jax.nn.one_hot(tokens, config.vocab_size, dtype=params["embed"].dtype)
    hidden = hidden @ params["embed"]
    hidden, _, routed = run_layers(config, params, hidden, cos_sin, core, None)
    assert routed is not None
    return logits(config, params, hidden), routed


def answer_loss(config: Config, dtype: jnp.dtype, params: Tree, tokens: jax.Array, mask: jax.Array):
    """Mean cross-entropy of the answers; beside it accuracy and each expert's load."""
    scores, routed = text_logits(config, to_compute_dtype(params, dtype), tokens[:, :-1])
    targets, mask = tokens[:, 1:], mask[:, 1:]
    nll = -(jax.nn.log_softmax(scores) * jax.nn.one_hot(targets, config.vocab_size)).sum(-1)
    is_right = (scores.argmax(-1) == targets) & mask
    count = mask.sum()
    load = (routed > 0).mean(axis=(1, 2))  # [moe layers, experts]
    return (nll * mask).sum() / count, (is_right.sum() / count, load)


def adam(params: Tree, grads: Tree, moments: Tree, step: jax.Array, lr: jax.Array) -> Tree:
    """One AdamW step with the gradient clipped to global norm 1."""
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)
    t = step.astype(jnp.float32) + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
    second = jax.tree.map(lambda v, g: 0.98 * v + 0.02 * g * g, moments[1], grads)

    def update(path, p, m, v):
        decay = 0.0 if any(s in path[-1].key for s in SKIP_DECAY) else 0.05
        direction = (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.98**t)) + 1e-9)
        return p - lr * (direction + decay * p)

    return jax.tree_util.tree_map_with_path(update, params, first, second), (first, second)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2,))
def train_step(
    config: Config, args: tuple, state: Tree, lr: jax.Array, pair_range: jax.Array
) -> tuple:
    """One step on fresh texts.

    Args:
      config: model sizes.
      args: (batch, num_items, compute dtype).
      state: (params, moments, step, key).
      lr: learning rate.
      pair_range: [2] int32; each text draws its number of pairs from this closed range.

    Returns:
      The state, loss and accuracy.
    """
    batch, num_items, dtype = args
    params, moments, step, key = state
    key, pair_key, text_key = jax.random.split(key, 3)
    num_pairs = jax.random.randint(pair_key, (batch,), pair_range[0], pair_range[1] + 1)
    tokens, mask = recall.sample_texts(text_key, batch, num_items, num_pairs)
    loss = functools.partial(answer_loss, config, dtype)
    (value, (accuracy, load)), grads = jax.value_and_grad(loss, has_aux=True)(params, tokens, mask)
    params, moments = adam(params, grads, moments, step, lr)
    # Load balancing as DeepSeek-V3 does it: no loss, the bias alone moves towards even load.
    uneven = jnp.sign(load.mean(-1, keepdims=True) - load)
    params["moe"]["router_bias"] += BALANCE_RATE * uneven
    return (params, moments, step + 1, key), value, accuracy


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1 << 16, help="tokens in a batch, about")
    parser.add_argument("--items", default="64,192", help="text lengths in items, used in turn")
    parser.add_argument("--pairs", type=int, default=160, help="pairs at the end of the curriculum")
    parser.add_argument("--questions", type=int, default=32, help="questions, at the least")
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--seconds", type=float, default=1e9, help="be done after this long")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start-pairs", type=int, default=8, help="pairs at first")
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    parser.add_argument("--config", type=json.loads, default={}, help="overrides of config.json")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=500)
    return parser.parse_args()


def main() -> None:
    """Train, report, save."""
    args = parse_args()
    start = time.time()
    raw = raw_config(**args.config)
    config, dtype = parse_config(raw), jnp.dtype(args.dtype)
    lengths = [int(items) for items in args.items.split(",")]
    key, init_key = jax.random.split(jax.random.key(args.seed))
    if args.resume:
        params = load(args.resume, config, jnp.float32)
    else:
        params = mimetic(config, init_params(config, init_key))
    print(f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters on {jax.devices()[0]}")
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    state = (params, (zeros(params), zeros(params)), jnp.int32(0), key)
    # The model learns what to do with few pairs; each time it has, the number of pairs grows.
    reach, num_perfect, log_start = min(args.start_pairs, args.pairs), 0, start
    for step in range(args.steps):
        num_items = min([n for n in lengths if n >= reach + args.questions], default=lengths[-1])
        batch = args.tokens // (recall.ITEM_TOKENS * num_items)
        progress = max(step / args.steps, (time.time() - start) / args.seconds)
        lr = args.learning_rate * min((step + 1) / 100, max((1 - progress) / 0.25, 0.01), 1.0)
        pair_range = jnp.array([min(4, reach), reach])
        train_args = (batch, num_items, dtype)
        state, loss, accuracy = train_step(config, train_args, state, jnp.float32(lr), pair_range)
        if (step + 1) % args.log_every:
            continue
        # No text is seen twice, so this is the accuracy on unseen texts.
        accuracy, step_ms = float(accuracy), 1e3 * (time.time() - log_start) / args.log_every
        print(
            f"step {step + 1:5d}  pairs <= {reach:3d}  loss {float(loss):.4f}  "
            f"accuracy {accuracy:.5f}  lr {lr:.5f}  {step_ms:.1f} ms/step  "
            f"{time.time() - start:.0f} s",
            flush=True,
        )
        if accuracy > 0.9:
            reach = min(args.pairs, reach * 3 // 2 + 1)
        if (step + 1) % args.save_every == 0:
            save(args.out, raw, state[0], recall.vocabulary())
        is_perfect = accuracy > 0.9998 and reach == args.pairs
        num_perfect = num_perfect + 1 if is_perfect else 0
        if num_perfect == 8 or progress >= 1:
            break
        log_start = time.time()
    save(args.out, raw, state[0], recall.vocabulary())


if __name__ == "__main__":
    main()
