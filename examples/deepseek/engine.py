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
from jax.sharding import NamedSharding, PartitionSpec

import jax_mla
from config import Config
from mesh import Placement
from model import Params, logits, paged_forward
from pages import PageAllocator
from sampling import sample


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
        self._steps: dict[str, jax.stages.Compiled] = {}

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
        for begin in range(0, total, self.chunk):
            columns = slice(begin, begin + self.chunk)
            self.cache = self._run("prefill", tokens[:, columns], positions[:, columns])
        start = time.perf_counter()
        self.cache.block_until_ready()
        self.seconds["prefill"] += time.perf_counter() - start

    def decode(self, prompts: Sequence[Sequence[int]], script: np.ndarray) -> Iterator[np.ndarray]:
        """Continue the prompts, one token of each a step.

        Each step is in flight while the tokens of the one before it are handed out.

        Args:
          prompts: as given to `prefill`.
          script: [len(prompts), steps] int32; a token that follows whatever the model says (the
            next question of a dialogue), or -1 where the model speaks.

        Yields:
          [len(prompts)] tokens of each step.
        """
        num_texts, steps = script.shape
        forced = np.full((self.batch, steps), -1, np.int32)
        forced[:num_texts] = script
        is_text = np.arange(self.batch) < num_texts
        seq_lens = np.array([len(p) for p in prompts] + [0] * (self.batch - num_texts))
        last = np.array([p[-1] for p in prompts] + [0] * (self.batch - num_texts), np.int32)
        tokens: np.ndarray | jax.Array = last
        pending: jax.Array | None = None
        for step in range(steps):
            self.pages.grow(seq_lens)
            positions = np.where(is_text, seq_lens - 1, -1)[:, None]
            extra = (forced[:, step], np.asarray(step, np.int32))
            sampled, self.cache = self._run("decode", tokens, positions, *extra)
            seq_lens = seq_lens + is_text
            if pending is not None:
                yield self._fetch(pending)[:num_texts]
            tokens = pending = sampled
        if pending is not None:
            yield self._fetch(pending)[:num_texts]

    def _fetch(self, tokens: jax.Array) -> np.ndarray:
        start = time.perf_counter()
        host = np.asarray(tokens)
        self.seconds["decode"] += time.perf_counter() - start
        return host

    def _run(
        self,
        phase: str,
        tokens: np.ndarray | jax.Array,
        positions: np.ndarray,
        *extra: np.ndarray,
    ) -> Any:
        """Place the operands, compile at the first call, run."""
        put = self.placement.put
        if isinstance(tokens, np.ndarray):
            tokens = put(tokens)
        operands = [
            put(self.pages.page_table.copy(), "dp"),
            tokens,
            put(positions.astype(np.int32), "dp"),
            *(put(x) for x in extra),
        ]
        if phase not in self._steps:
            start = time.perf_counter()
            function = self._prefill_step if phase == "prefill" else self._decode_step
            out = self.cache.sharding
            if phase == "decode":  # every process reads all tokens
                out = (NamedSharding(self.placement.mesh, PartitionSpec()), out)
            jitted = jax.jit(function, donate_argnums=1, out_shardings=out)
            self._steps[phase] = jitted.lower(self.params, self.cache, *operands).compile()
            self.seconds["compile"] += time.perf_counter() - start
        start = time.perf_counter()
        result = self._steps[phase](self.params, self.cache, *operands)
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

    def _decode_step(self, params: Params, cache, page_table, tokens, positions, forced, step):
        hidden, cache = self._model(params, cache, page_table, tokens[:, None], positions)
        key = jax.random.fold_in(jax.random.key(self._seed), step)
        sampled = sample(logits(self.config, params, hidden[:, -1]), key, **self._sampling)
        return jnp.where(forced >= 0, forced, sampled), cache
