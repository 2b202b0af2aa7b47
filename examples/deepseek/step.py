"""The jitted step: the model on the tokens that the scheduler chose, and the next tokens."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .config import Config
from .model import PagedAttention, Params, Place, logits, paged_forward
from .moe import Experts
from .pages import UNUSED_PAGE
from .sampling import sample
from .sparse import SparseAttention

GPU_OPTIONS = {
    # A step has nothing to do while a collective runs. Without this option, XLA still moves its
    # collectives to another stream, which costs time (docs/sharding.md, "On GPUs").
    "xla_disable_hlo_passes": "async-collective-creator",
    # XLA merges products that share an operand: it would concatenate their weights in every step.
    "xla_gpu_dot_merger_threshold_mb": 0,
    # XLA's own list, and WHILE: the host takes no part in the loop over cached tokens that
    # `jax_mla.mixed_attention` has for long prompts.
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
    "DYNAMIC_SLICE_FUSION,WHILE",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The static part of a step; see `Engine`."""

    attend: PagedAttention | SparseAttention
    experts: Experts
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class Feed(NamedTuple):
    """`scheduler.Step` on the devices, with the page table and the number of the step."""

    tokens: jax.Array
    positions: jax.Array
    rows: jax.Array | None
    ends: jax.Array | None
    cu_q_lens: jax.Array | None
    page_table: jax.Array
    number: jax.Array


def step(
    config: Config,
    options: Options,
    params: Params,
    cache: Any,
    newest: jax.Array,
    feed: Feed,
) -> tuple[jax.Array, Any]:
    """Run the model on the tokens of a step, and sample.

    Args:
      config: sizes.
      options: how to run it.
      params: weights.
      cache: all pages; donated.
      newest: [slots] int32, the token that was sampled last for each slot.
      feed: the tokens.

    Returns:
      The new `newest`, and the cache.
    """
    own = newest if feed.rows is None else newest[feed.rows]
    tokens = jnp.where(feed.tokens < 0, own, feed.tokens)
    if feed.ends is None:
        seq_lens = feed.positions + 1
    else:
        seq_lens = jnp.where(feed.ends < 0, 0, feed.positions[feed.ends] + 1)
    # Not the host's array itself: a captured step finds this one at the same address every time.
    page_table = jnp.where(seq_lens[:, None] > 0, feed.page_table, UNUSED_PAGE)
    hidden, cache = paged_forward(
        config,
        params,
        cache,
        tokens,
        feed.positions,
        Place(page_table, seq_lens, feed.cu_q_lens),
        max_positions=options.max_tokens,
        attend=options.attend,
        experts=options.experts,
    )
    if feed.ends is not None:
        hidden = hidden[jnp.maximum(feed.ends, 0)]
    key = jax.random.fold_in(jax.random.key(options.seed), feed.number)
    scores = logits(config, params, hidden)
    return sample(scores, key, temperature=options.temperature, top_p=options.top_p), cache


@functools.lru_cache(maxsize=16)
def compiled_step(config: Config, options: Options, newest: Any, cache: Any) -> Any:
    """Return the jitted step; `newest` and `cache` are the shardings of its results."""
    on_gpu = newest.mesh.devices.flat[0].platform in ("gpu", "cuda")
    return jax.jit(
        functools.partial(step, config, options),
        donate_argnums=1,
        out_shardings=(newest, cache),
        compiler_options=GPU_OPTIONS if on_gpu else None,
    )
