"""Prefill and decode over a paged cache, each one jitted step.

`Engine` owns the cache, the page allocator and the two compiled steps. Prefill feeds every prompt
but its last token, in chunks; decode starts from that last token and, within one jitted call,
appends to the cache, attends, runs the whole model and samples the next token.
"""

import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_mla

from .config import Config
from .mesh import Placement
from .model import Params, logits, paged_forward
from .pages import PageAllocator
from .sampling import sample

# A decode step waits for each of its collectives. XLA:GPU would run its own in another stream all
# the same (docs/sharding.md, "On GPUs").
DECODE_OPTIONS = {"xla_disable_hlo_passes": "async-collective-creator"}


class Engine:
    """Runs one batch of texts on a mesh.

    Attributes:
      config: model sizes.
      params: placed parameters.
      placement: the mesh.
      pages: page allocator; its page table is sent with every step.
      cache: stacked pool [layers, num_pages, page_size, d_ckv + d_kpe], donated to every step.
      batch: rows of every step, a multiple of dp; rows beyond the texts stay empty.
      seconds: time spent per phase: "compile", "prefill", "decode".
    """

    def __init__(
        self,
        config: Config,
        params: Params,
        placement: Placement,
        *,
        batch: int,
        max_tokens: int,
        page_size: int = 16,
        prefill_chunk: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        backend: str | None = None,
    ):
        """Allocate the cache; nothing is compiled yet.

        Args:
          config: model sizes.
          params: from `checkpoint.load`, placed on the mesh.
          placement: the mesh.
          batch: number of texts.
          max_tokens: longest text, prompt and continuation.
          page_size: tokens in a page.
          prefill_chunk: tokens of each text in one prefill step.
          temperature: see `sampling.sample`.
          top_p: see `sampling.sample`.
          seed: of sampling and of the order of pages.
          backend: passed to jax_mla.

        Raises:
          ValueError: the heads cannot be split over tp.
        """
        shape = placement.mesh.shape
        if config.num_heads % shape["tp"]:
            raise ValueError(
                f"--mesh: expected tp to divide {config.num_heads} heads, got {shape['tp']}"
            )
        self.config, self.params, self.placement = config, params, placement
        self.batch = -(-batch // shape["dp"]) * shape["dp"]
        self.chunk, self.max_tokens = prefill_chunk, max_tokens
        self.seconds = {"compile": 0.0, "prefill": 0.0, "decode": 0.0}
        self._backend, self._sampling = backend, {"temperature": temperature, "top_p": top_p}
        self._seed = seed
        pages_per_seq = -(-max_tokens // page_size)
        num_pages = -(-batch * pages_per_seq // shape["cp"]) * shape["cp"]
        self.pages = PageAllocator(num_pages, page_size, self.batch, pages_per_seq, seed)
        d_qk = config.kv_lora_rank + config.qk_rope_head_dim
        pool_shape = (config.num_layers, num_pages, page_size, d_qk)
        self.cache = placement.zeros(pool_shape, params["embed"].dtype, None, "cp")
        self._steps: dict[tuple, jax.stages.Compiled] = {}

    def backends(self, q_len: int = 1) -> list[jax_mla.BackendStatus]:
        """What each jax_mla backend says to a step of `q_len` tokens on one device."""
        config, shape = self.config, self.placement.mesh.shape
        q_shape = (self.batch // shape["dp"], q_len, config.num_heads // shape["tp"])
        struct: Any = functools.partial(jax.ShapeDtypeStruct, dtype=self.cache.dtype)
        return jax_mla.backends(
            struct((*q_shape, config.kv_lora_rank)),
            struct((*q_shape, config.qk_rope_head_dim)),
            self.cache,
            struct((q_shape[0], self.pages.page_table.shape[1]), dtype=jnp.int32),
        )

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Put all tokens of each prompt but the last into the cache.

        All prompts end in the last chunk: they are right-aligned, and what stands before a prompt
        is padding (position -1), which is neither appended nor seen by any token.

        Args:
          prompts: token ids, each at least one.
        """
        num_cached = np.array([len(p) - 1 for p in prompts] + [0] * (self.batch - len(prompts)))
        self.pages.grow(num_cached)
        total = -(-num_cached.max() // self.chunk) * self.chunk
        tokens = np.full((self.batch, total), -1, np.int32)
        for row, prompt in zip(tokens, prompts, strict=False):
            row[total - len(prompt) + 1 :] = prompt[:-1]
        positions = np.maximum(np.arange(total) - (total - num_cached)[:, None], -1)
        put, positions = self.placement.put, positions.astype(np.int32)
        page_table = put(self.pages.page_table.copy(), "dp")
        for begin in range(0, total, self.chunk):
            columns = slice(begin, begin + self.chunk)
            operands = (put(tokens[:, columns], "dp"), put(positions[:, columns], "dp"))
            self.cache = self._run("prefill", page_table, *operands)
        start = time.perf_counter()
        self.cache.block_until_ready()
        self.seconds["prefill"] += time.perf_counter() - start

    def decode(self, prompts: Sequence[Sequence[int]], script: np.ndarray) -> Iterator[np.ndarray]:
        """Continue the prompts, one token of each a step.

        Tokens and positions stay on the device from step to step; the host sends the page table
        when a sequence gets a page. Each step is in flight while the tokens of the one before it
        are handed out.

        Args:
          prompts: as given to `prefill`.
          script: [len(prompts), steps] int32; a token that follows whatever the model says (the
            next question of a dialogue), or -1 where the model speaks.

        Yields:
          [len(prompts)] tokens of each step.
        """
        put, (num_texts, steps) = self.placement.put, script.shape
        padding = [0] * (self.batch - num_texts)
        seq_lens = np.array([len(p) for p in prompts] + padding, np.int32)
        forced = np.full((self.batch, steps), -1, np.int32)
        forced[:num_texts] = script
        state = {
            "tokens": put(np.array([p[-1] for p in prompts] + padding, np.int32)),
            "positions": put(seq_lens - 1, "dp"),  # -1 in rows without a text
            "step": put(np.zeros((), np.int32)),
        }
        forced, is_text = put(forced), seq_lens > 0
        page_table = pending = None
        for _ in range(steps):
            if self.pages.grow(seq_lens) or page_table is None:
                page_table = put(self.pages.page_table.copy(), "dp")
            state, self.cache = self._run("decode", page_table, forced, state)
            seq_lens = seq_lens + is_text
            if pending is not None:
                yield self._fetch(pending)[:num_texts]
            pending = state["tokens"]
        if pending is not None:
            yield self._fetch(pending)[:num_texts]

    def _fetch(self, tokens: jax.Array) -> np.ndarray:
        start = time.perf_counter()
        host = np.asarray(tokens)
        self.seconds["decode"] += time.perf_counter() - start
        return host

    def _run(self, phase: str, *operands: Any) -> Any:
        """Run a step; compile it when these shapes come for the first time."""
        key = (phase, *(x.shape for x in jax.tree.leaves(operands)))
        if key not in self._steps:
            start = time.perf_counter()
            function, out, options = self._prefill_step, self.cache.sharding, None
            if phase == "decode":  # the state comes out as it went in
                function, options = self._decode_step, DECODE_OPTIONS
                out = (jax.tree.map(lambda x: x.sharding, operands[-1]), out)
            jitted = jax.jit(
                function, donate_argnums=1, out_shardings=out, compiler_options=options
            )
            self._steps[key] = jitted.lower(self.params, self.cache, *operands).compile()
            self.seconds["compile"] += time.perf_counter() - start
        start = time.perf_counter()
        result = self._steps[key](self.params, self.cache, *operands)
        self.seconds[phase] += time.perf_counter() - start
        return result

    def _model(self, params: Params, cache, page_table, tokens, positions):
        return paged_forward(
            self.config,
            params,
            cache,
            page_table,
            tokens,
            positions,
            max_positions=self.max_tokens,
            backend=self._backend,
        )

    def _prefill_step(self, params: Params, cache, page_table, tokens, positions):
        return self._model(params, cache, page_table, tokens, positions)[1]

    def _decode_step(self, params: Params, cache, page_table, forced, state):
        tokens, positions, step = state["tokens"], state["positions"], state["step"]
        hidden, cache = self._model(params, cache, page_table, tokens[:, None], positions[:, None])
        key = jax.random.fold_in(jax.random.key(self._seed), step)
        sampled = sample(logits(self.config, params, hidden[:, -1]), key, **self._sampling)
        scripted = forced[:, step]
        state = {
            "tokens": jnp.where(scripted >= 0, scripted, sampled),
            "positions": jnp.where(positions >= 0, positions + 1, -1),
            "step": step + 1,
        }
        return state, cache
