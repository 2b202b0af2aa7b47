"""Generate text for one batch: prefill and decode, each one jitted step.

`Engine` owns the paged cache, the page allocator and the two compiled steps. Prefill puts every
prompt but its last token into the cache, in chunks. Decode starts from that last token: each step
runs the whole model, which appends to the cache and attends, and samples the next token.
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
from .pages import PageAllocator, row_layout
from .sampling import sample

# A decode step has nothing to do while a collective runs. Without this option, XLA:GPU still moves
# its collectives to another stream, which costs time (docs/sharding.md, "On GPUs").
DECODE_OPTIONS = {"xla_disable_hlo_passes": "async-collective-creator"}


def require_backend(wanted: str | None, statuses: Sequence[jax_mla.BackendStatus]) -> None:
    """Check that jax_mla can run.

    Args:
      wanted: name of a backend, or None for jax_mla's own choice.
      statuses: what each backend says.

    Raises:
      ValueError: the backend declines, or none is chosen. The message has every backend's reason.
    """
    said = "; ".join(map(str, statuses))
    usable = [status.name for status in statuses if not status.reason]
    if wanted is None and not any(status.chosen for status in statuses):
        raise ValueError(f"--backend: jax_mla chooses none here, name one of {usable}: {said}")
    if wanted is not None and wanted.split(":")[0] not in usable:
        raise ValueError(f"--backend: expected one of {', '.join(usable)}, got {wanted!r}: {said}")


class Engine:
    """Generates texts for one batch of prompts on a mesh.

    Attributes:
      config: model sizes.
      params: parameters on the mesh.
      placement: the mesh.
      pages: page allocator. The devices get a new page table when a sequence gets a page.
      cache: [layers, num_pages, page_size, width], the pages of all layers, see
        `pages.row_layout`. Every step takes it as a donated argument and updates it in place.
      batch: rows of every step, a multiple of dp. Rows without a prompt stay empty.
      chunk: tokens of each prompt in one prefill step.
      max_tokens: longest sequence of this run.
      seconds: time in each phase: "compile", "prefill", "decode".
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
        kv_format: str | None = None,
        kv_scale: float = 1.0,
    ):
        """Allocate the cache. The steps are compiled at their first call.

        Args:
          config: model sizes.
          params: from `checkpoint.load`, placed on the mesh.
          placement: the mesh.
          batch: number of prompts.
          max_tokens: longest sequence, prompt and new tokens together.
          page_size: tokens in a page.
          prefill_chunk: tokens of each prompt in one prefill step.
          temperature: see `sampling.sample`.
          top_p: see `sampling.sample`.
          seed: seed of the sampling and of the order of pages.
          backend: passed to jax_mla.
          kv_format: how the cache is stored: "fp8_e4m3", "fp8_ds_mla", or None for the dtype of the
            parameters.
          kv_scale: scale of the cache in "fp8_e4m3".

        Raises:
          ValueError: tp does not divide the heads, or no jax_mla backend takes the steps.
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
        self._kv_format = kv_format
        self._kv_scale = kv_scale if kv_format == "fp8_e4m3" else None
        width, dtype = row_layout(config, kv_format, params["embed"].dtype)
        pool_shape = (config.num_layers, num_pages, page_size, width)
        self.cache = placement.zeros(pool_shape, dtype, None, "cp")
        self._steps: dict[tuple, jax.stages.Compiled] = {}
        for q_len in (prefill_chunk, 1):
            require_backend(backend, self.backends(q_len))

    def backend_of(self, phase: str) -> str:
        """Name the jax_mla backend that runs "prefill" or "decode"."""
        if self._backend is not None:
            return self._backend
        q_len = self.chunk if phase == "prefill" else 1
        return next(status.name for status in self.backends(q_len) if status.chosen)

    def backends(self, q_len: int = 1) -> list[jax_mla.BackendStatus]:
        """Ask each jax_mla backend whether it runs a step of `q_len` tokens on one device."""
        config, shape = self.config, self.placement.mesh.shape
        q_shape = (self.batch // shape["dp"], q_len, config.num_heads // shape["tp"])
        struct: Any = functools.partial(jax.ShapeDtypeStruct, dtype=self.params["embed"].dtype)
        return jax_mla.backends(
            struct((*q_shape, config.kv_lora_rank)),
            struct((*q_shape, config.qk_rope_head_dim)),
            self.cache,
            struct((q_shape[0], self.pages.page_table.shape[1]), dtype=jnp.int32),
            layer=0,
            kv_format=self._kv_format,
            platform=self.placement.mesh.devices.flat[0].platform,
        )

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Put every token of each prompt except the last into the cache.

        The prompts are right-aligned, so all of them end in the last chunk. The places before a
        prompt are padding with position -1. jax_mla does not append padding, and no token attends
        to it.

        Args:
          prompts: token ids of each prompt.

        Raises:
          ValueError: a prompt has no tokens.
        """
        for n, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompts: expected at least one token each, got none in {n}")
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
        """Continue the prompts. Each step adds one token to each sequence.

        Tokens and positions stay on the device between steps. The host only sends the page table
        when a sequence gets a page. While one step runs, the caller gets the tokens of the step
        before it.

        Args:
          prompts: the prompts that were given to `prefill`.
          script: [len(prompts), steps] int32. A token to use instead of the model's (a question of
            a dialogue), or -1 to use the model's.

        Yields:
          [len(prompts)] int32, the tokens of one step.
        """
        put, (num_prompts, steps) = self.placement.put, script.shape
        padding = [0] * (self.batch - num_prompts)
        seq_lens = np.array([len(p) for p in prompts] + padding, np.int32)
        forced = np.full((self.batch, steps), -1, np.int32)
        forced[:num_prompts] = script
        state = {
            "tokens": put(np.array([p[-1] for p in prompts] + padding, np.int32)),
            "positions": put(seq_lens - 1, "dp"),  # -1 in rows without a prompt
            "step": put(np.zeros((), np.int32)),
        }
        forced, has_prompt = put(forced), seq_lens > 0
        page_table = pending = None
        for _ in range(steps):
            if self.pages.grow(seq_lens) or page_table is None:
                page_table = put(self.pages.page_table.copy(), "dp")
            state, self.cache = self._run("decode", page_table, forced, state)
            seq_lens = seq_lens + has_prompt
            if pending is not None:
                yield self._fetch(pending)[:num_prompts]
            pending = state["tokens"]
        if pending is not None:
            yield self._fetch(pending)[:num_prompts]

    def _fetch(self, tokens: jax.Array) -> np.ndarray:
        start = time.perf_counter()
        host = np.asarray(tokens)
        self.seconds["decode"] += time.perf_counter() - start
        return host

    def _run(self, phase: str, *operands: Any) -> Any:
        """Run a step. Compile it first if these shapes are new."""
        key = (phase, *(x.shape for x in jax.tree.leaves(operands)))
        if key not in self._steps:
            start = time.perf_counter()
            function, out, options = self._prefill_step, self.cache.sharding, None
            if phase == "decode":  # the state keeps its sharding
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
            kv_format=self._kv_format,
            kv_scale=self._kv_scale,
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
