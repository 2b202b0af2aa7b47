"""Train the recall checkpoint that generate.py runs.

python examples/deepseek/train_recall.py --out DIR

takes 40 s on one H200, half of it to compile. The texts start with a few pairs of names and
numbers. Whenever the model answers well, the number of pairs grows, up to `--pairs`. All texts have
the same length, so the step compiles once. Training attends without a cache (`PlainAttention`).
"""

import argparse
import dataclasses
import functools
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the relative imports below need the package
    folder = Path(__file__).resolve().parent
    sys.path = [str(folder.parent), *(path for path in sys.path if path != str(folder))]
    sys.exit(importlib.import_module("deepseek.train_recall").main())

import jax
import jax.numpy as jnp

from . import recall, recall_tokenizer
from .checkpoint import save
from .config import Config, parse_config
from .model import logits, run_layers
from .moe import Experts
from .options import DTYPES, Parser, integer, number, positive
from .recall_model import init_params, mimetic, raw_config
from .rope import angles

Tree = Any
BALANCE_RATE = 1e-3  # per step, on the router bias
SKIP_DECAY = ("norm", "bias", "embed")


def to_compute_dtype(params: Tree, dtype: jnp.dtype) -> Tree:
    """Cast all parameters except the router, which is float32 in the published models."""

    def cast(path, x):
        return x if "router" in path[-1].key else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


@dataclasses.dataclass(frozen=True)
class PlainAttention:
    """Causal attention among the given tokens, differentiable, without a cache or absorption.

    Attributes:
      sm_scale: softmax scale.
    """

    sm_scale: float

    def __call__(self, weights, layer, q_nope, q_pe, ckv, kpe, cache, place):
        """Return the values of each head, [batch, tokens, heads, v_head_dim], and the cache."""
        del layer, place
        k_nope = jnp.einsum("btc,hnc->bthn", ckv, weights["w_uk"])
        values = jnp.einsum("btc,hcv->bthv", ckv, weights["w_uv"])
        scores = jnp.einsum("bqhn,bthn->bhqt", q_nope, k_nope)
        scores = scores + jnp.einsum("bqhp,btp->bhqt", q_pe, kpe)
        causal = jnp.tril(jnp.ones(scores.shape[-2:], jnp.bool_))
        scores = jnp.where(causal, scores.astype(jnp.float32) * self.sm_scale, -jnp.inf)
        probabilities = jax.nn.softmax(scores).astype(values.dtype)
        return jnp.einsum("bhqt,bthv->bqhv", probabilities, values), cache


def text_logits(config: Config, params: Tree, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute the logits at every token, and the share of the tokens that each expert gets."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cos_sin = angles(config.rope, config.qk_rope_head_dim, tokens.shape[1], positions)
    # A product with one-hot rows replaces the gather, whose gradient is a slow scatter on a GPU.
    hidden = jax.nn.one_hot(tokens, config.vocab_size, dtype=params["embed"].dtype)
    hidden = hidden @ params["embed"]
    attend = PlainAttention(config.sm_scale)
    hidden, _, chosen = run_layers(config, attend, Experts(), params, hidden, cos_sin)
    assert config.moe is not None
    one_hot = jax.nn.one_hot(jnp.stack(chosen), config.moe.num_experts)
    return logits(config, params, hidden), one_hot.sum(-2).mean((1, 2))


def answer_loss(config: Config, dtype: jnp.dtype, params: Tree, tokens: jax.Array, mask: jax.Array):
    """Compute the mean cross-entropy of the answers, with their accuracy and the experts' load."""
    scores, load = text_logits(config, to_compute_dtype(params, dtype), tokens[:, :-1])
    targets, mask = tokens[:, 1:], mask[:, 1:]
    nll = -(jax.nn.log_softmax(scores) * jax.nn.one_hot(targets, config.vocab_size)).sum(-1)
    is_right = (scores.argmax(-1) == targets) & mask
    count = mask.sum()
    return (nll * mask).sum() / count, (is_right.sum() / count, load)


def adam(params: Tree, grads: Tree, moments: Tree, step: jax.Array, lr: jax.Array) -> Tree:
    """Take one AdamW step, with the gradient clipped to global norm 1."""
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
    """Take one step on new texts.

    Args:
      config: model sizes.
      args: (batch, num_items, compute dtype).
      state: (params, moments, step, key).
      lr: learning rate.
      pair_range: [2] int32, the fewest and the most pairs of a text.

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
    # Load balancing as in DeepSeek-V3: it has no loss; the bias moves towards an even load.
    uneven = jnp.sign(load.mean(-1, keepdims=True) - load)
    for weights, step_up in zip(params["layers"][config.num_dense_layers :], uneven, strict=True):
        weights["router_bias"] += BALANCE_RATE * step_up
    return (params, moments, step + 1, key), value, accuracy


def json_object(text: str) -> dict[str, Any]:
    """A type for `add_argument`: a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def check_trainable(config: Config) -> None:
    """Refuse models that `mimetic` cannot start, or whose experts are not there to balance."""
    if config.q_lora_rank is None:
        raise ValueError("config.json: q_lora_rank: expected an integer of at least 1, got None")
    if config.moe is None:
        raise ValueError("config.json: n_routed_experts: expected a model with experts, got none")
    if config.num_dense_layers == config.num_layers:
        raise ValueError(
            "config.json: first_k_dense_replace: expected less than num_hidden_layers "
            f"({config.num_layers}), got {config.num_dense_layers}"
        )


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(description="Train the recall checkpoint.")
    option = parser.option
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new checkpoint")
    option("--tokens N", 49152, "tokens in a batch, about", type=integer(1))
    option("--items N", 192, "pairs and questions in a text", type=integer(2))
    option("--pairs N", 160, "pairs in a text at the end of the training", type=integer(1))
    option("--steps N", 10000, "most steps to take", type=integer(1))
    option("--seconds X", 1e9, "stop after this time", type=positive)
    option("--learning-rate X", 2e-3, "largest learning rate", type=number)
    option("--dtype", "bfloat16", "of the arithmetic; parameters are float32", choices=DTYPES)
    option("--seed N", 0, "seed of parameters and texts", type=integer(0))
    option("--config JSON", {}, "fields of config.json to change", type=json_object)
    option("--log-every N", 20, "steps between two lines of output", type=integer(1))
    option("--save-every N", 200, "steps between two saved checkpoints", type=integer(1))
    args = parser.parse_args()
    text_tokens, most = recall.ITEM_TOKENS * args.items, min(args.items - 1, len(recall.NAMES))
    if args.tokens < text_tokens:
        parser.error(
            f"argument --tokens: expected at least {text_tokens}, the tokens of a text of "
            f"{args.items} items, got {args.tokens}"
        )
    if args.pairs > most:
        parser.error(
            f"argument --pairs: expected at most {most}, less than --items and not more than the "
            f"names, got {args.pairs}"
        )
    try:
        check_trainable(parse_config(raw_config(**args.config)))
    except ValueError as error:
        parser.error(f"argument --config: {error}")
    return args


def write(directory: Path, raw: dict[str, Any], params: Tree) -> None:
    """Write the checkpoint, with a tokenizer for other programs as well."""
    save(directory, raw, params, recall.vocabulary())
    for name, text in recall_tokenizer.files().items():
        (directory / name).write_text(text)


def main() -> None:
    """Train, report, save."""
    args = parse_args()
    start = time.time()
    raw = raw_config(**args.config)
    config, dtype = parse_config(raw), jnp.dtype(args.dtype)
    key, init_key = jax.random.split(jax.random.key(args.seed))
    params = mimetic(config, init_params(config, init_key))
    print(f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters on {jax.devices()[0]}")
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    state = (params, (zeros(params), zeros(params)), jnp.int32(0), key)
    train_args = (args.tokens // (recall.ITEM_TOKENS * args.items), args.items, dtype)
    # The model learns the task on few pairs. The number of pairs grows as it succeeds.
    reach, num_perfect, log_start = min(8, args.pairs), 0, start
    for step in range(args.steps):
        progress = max(step / args.steps, (time.time() - start) / args.seconds)
        lr = args.learning_rate * min((step + 1) / 100, max((1 - progress) / 0.25, 0.01), 1.0)
        pair_range = jnp.array([min(4, reach), reach])
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
        is_perfect = accuracy > 0.9998 and reach == args.pairs
        num_perfect = num_perfect + 1 if is_perfect else 0
        if accuracy > 0.9:
            reach = min(args.pairs, reach * 3 // 2 + 1)
        if (step + 1) % args.save_every == 0:
            write(args.out, raw, state[0])
        if num_perfect == 8 or progress >= 1:
            break
        log_start = time.time()
    write(args.out, raw, state[0])


if __name__ == "__main__":
    main()
