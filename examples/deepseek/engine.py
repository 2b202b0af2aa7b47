"""Generate text with continuous batching: a scheduler on the host, and a jitted step.

`Engine` owns the paged cache and the compiled steps. There is one for sequences that decode, and
one for each size of a step with prompts, whatever sequences the tokens are of.
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
from .model import Params, paged_attention
from .moe import Experts, best_product
from .pages import PagePool, row_layout
from .scheduler import Request, Scheduler, Step
from .sparse import SparseCache, index_pool, require_indexer
from .step import Feed, Options, compiled_step

# Products with fewer rows are matrix-vector products to XLA, which are slow on GPUs.
MIN_SLOTS = 8


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
    # A CUDA backend may be named with a variant: "sm90:wide".
    variants = {status.name for status in statuses if status.platform == "cuda"}
    name = None if wanted is None else wanted.split(":")[0]
    if name not in (None, *usable) or (wanted != name and name not in variants):
        raise ValueError(f"--backend: expected one of {', '.join(usable)}, got {wanted!r}: {said}")


class Engine:
    """Generates texts on a mesh.

    Attributes:
      config: model sizes.
      params: parameters on the mesh.
      placement: the mesh.
      scheduler: decides what each step has.
      cache: [layers, num_pages, page_size, width], the pages of all layers, see
        `pages.row_layout`; with an indexer a `SparseCache`. Every step takes it as a donated
        argument and updates it in place.
      page_size: tokens in a page.
      seconds: time in each kind of step, "prefill" and "decode", and in "compile".
      steps: number of steps of each kind.
    """

    def __init__(
        self,
        config: Config,
        params: Params,
        placement: Placement,
        *,
        slots: int,
        max_tokens: int,
        cache_tokens: int | None = None,
        page_size: int = 16,
        step_tokens: int = 512,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        backend: str | None = None,
        kv_format: str | None = None,
        kv_scale: float = 1.0,
        index_format: str | None = None,
        product: str | None = None,
    ):
        """Allocate the cache.

        Args:
          config: model sizes.
          params: from `checkpoint.load`, placed on the mesh.
          placement: the mesh.
          slots: the most sequences at a time, rounded up to a multiple of 8 for each group.
          max_tokens: longest sequence, prompt and new tokens together.
          cache_tokens: tokens that the cache holds, rounded up to pages. None: room for `slots`
            sequences of `max_tokens`.
          page_size: tokens in a page.
          step_tokens: tokens of a step with prompts. It is rounded up to be larger than `slots`,
            and is not more than `slots` sequences of `max_tokens`.
          temperature: see `sampling.sample`.
          top_p: see `sampling.sample`.
          seed: seed of the sampling and of the order of pages.
          backend: passed to jax_mla.
          kv_format: how the cache is stored: "fp8_e4m3", "fp8_ds_mla", or None for the dtype of the
            parameters.
          kv_scale: scale of the cache in "fp8_e4m3".
          index_format: how index keys are stored: "fp8", or None for the dtype of the parameters.
          product: how experts are computed, one of `moe.PRODUCTS`; None for the best.

        Raises:
          ValueError: the mesh cannot split the model, or no jax_mla backend takes the steps.
        """
        placement.check(config)
        require_indexer(config, index_format)
        self.config, self.params, self.placement = config, params, placement
        dp, cp = placement.mesh.shape["dp"], placement.mesh.shape["cp"]
        groups = placement.num_groups
        pages_per_seq = -(-max_tokens // page_size)
        if cache_tokens is None:
            cache_tokens = _multiple(slots, groups) * pages_per_seq * page_size
        pages = _multiple(-(-cache_tokens // page_size), groups * cp)
        slots = _multiple(slots, MIN_SLOTS * dp)
        # The cache first: if it does not fit, the host does not get to list all its pages.
        dtype = params["embed"].dtype
        width, cache_dtype = row_layout(config, kv_format, dtype)
        pool_shape = (config.num_layers, pages, page_size, width)
        self.cache: Any = placement.zeros(pool_shape, cache_dtype, None, placement.pages_axis)
        if config.index is not None:
            keys = index_pool(config.index, pages, page_size, dtype, index_format)
            keys = placement.zeros(keys.shape, keys.dtype, None, placement.pages_axis)
            self.cache = SparseCache(self.cache, keys)
        pools = [PagePool(pages // groups, page_size, seed + g) for g in range(groups)]
        # No step can have more tokens than all slots together.
        largest = _multiple(max(min(step_tokens, slots * max_tokens), 2 * slots), slots)
        self.page_size = page_size
        self._sizes = sorted({_multiple(largest // 4, slots), largest} - {slots})
        self.scheduler = Scheduler(pools, slots, pages_per_seq, self._sizes)
        self._put_table()
        self._newest, self._number = placement.put(np.zeros(slots, np.int32)), 0
        self._pending: tuple[Step, jax.Array] | None = None  # the step that runs, its newest tokens
        self._platform = placement.device.platform
        scale = kv_scale if kv_format == "fp8_e4m3" else None
        attend = paged_attention(
            config,
            backend,
            kv_format,
            scale,
            placement.mesh_axes,
            may_make_keys=placement.splits_heads_only,
        )
        product = product or best_product(self._platform, dtype)
        experts = Experts(product, placement.mesh, placement.experts)
        options = Options(attend, experts, max_tokens, temperature, top_p, seed)
        shardings = jax.tree.map(lambda pool: pool.sharding, self.cache)
        self._step = compiled_step(config, options, self._newest.sharding, shardings)
        self._backend, self._kv_format = backend, kv_format
        require_backend(backend, self.backends())
        self.seconds = {"compile": 0.0, "prefill": 0.0, "decode": 0.0}
        self.steps = {"prefill": 0, "decode": 0}

    @property
    def backend(self) -> str:
        """The jax_mla backend that runs the steps."""
        chosen = (status.name for status in self.backends() if status.chosen)
        return self._backend or next(chosen)

    def backends(self) -> list[jax_mla.BackendStatus]:
        """Ask each jax_mla backend whether it runs a decode step on one device."""
        config, shape = self.config, self.placement.mesh.shape
        slots, columns = self.scheduler.page_table.shape
        q_shape = (slots // shape["dp"], 1, config.num_heads // shape["tp"])
        struct: Any = functools.partial(jax.ShapeDtypeStruct, dtype=self.params["embed"].dtype)
        return jax_mla.backends(
            struct((*q_shape, config.kv_lora_rank)),
            struct((*q_shape, config.qk_rope_head_dim)),
            jax.tree.leaves(self.cache)[0],
            struct((q_shape[0], columns), dtype=jnp.int32),
            layer=0,
            kv_format=self._kv_format,
            platform=self._platform,
        )

    def add(self, request: Request) -> None:
        """Let a request wait for a slot. Requests may be added at any time."""
        self.scheduler.add(request)

    def warm_up(self, *, decode_only: bool = False) -> None:
        """Compile all steps, or the one of decode, by running each without a sequence."""
        start = time.perf_counter()
        for size in (0,) if decode_only else (0, *self._sizes):
            self.launch(self.scheduler.empty_step(size))
        self._newest.block_until_ready()
        self.seconds["compile"] += time.perf_counter() - start

    def run(self) -> Iterator[list[tuple[Request, int]]]:
        """Run steps until every request has ended.

        While a step runs, the host prepares the next one and the caller gets the tokens of the step
        before. So a text that ends by itself is computed for one step more, and that token dropped.
        A caller that leaves the loop may call again, and gets the tokens of the step that ran.

        Yields:
          The new tokens of a step, with their requests.
        """
        last = time.perf_counter()
        while True:
            plan = self.scheduler.next_step()
            if plan is None and self._pending is None:
                return
            launched = None if plan is None else (plan, self.launch(plan))
            pending, self._pending = self._pending, launched
            if pending is not None:
                done, tokens = pending
                values = np.asarray(tokens)
                kind, now = "decode" if done.ends is None else "prefill", time.perf_counter()
                self.seconds[kind] += now - last
                self.steps[kind] += 1
                last = now
                yield self._collect(done, values)

    def _collect(self, done: Step, values: np.ndarray) -> list[tuple[Request, int]]:
        """Give each request its token, and finish those that have ended."""
        news = []
        for request in done.requests:
            if request.has_ended:
                continue
            scripted = request.scripted(len(request.ids))
            token = int(values[request.slot]) if scripted < 0 else scripted
            request.ids.append(token)
            news.append((request, token))
            ends = token in self.config.eos_token_ids and scripted < 0
            if ends or len(request.ids) >= request.max_new_tokens:
                self.scheduler.finish(request)
        return news

    def compiled_text(self, size: int = 0) -> str:
        """Return the compiled program of the step of `size` tokens with prompts; 0 for decode."""
        feed = self._feed(self.scheduler.empty_step(size))
        lowered = self._step.lower(self.params, self.cache, self._newest, feed)
        return lowered.compile().as_text()

    def launch(self, plan: Step) -> jax.Array:
        """Start a step; return the newest token of each slot.

        Args:
          plan: from the scheduler.
        """
        feed = self._feed(plan)
        self._newest, self.cache = self._step(self.params, self.cache, self._newest, feed)
        return self._newest

    def _feed(self, plan: Step) -> Feed:
        put, scheduler = self.placement.put, self.scheduler
        if self._table_changes != scheduler.table_changes:
            self._put_table()
        self._number += 1
        # With pages split over cp, a step with prompts is the same on all devices along dp.
        axis = "dp" if self.placement.has_local_pages or plan.ends is None else None

        def put_if_any(array: np.ndarray | None, *spec: str | None) -> jax.Array | None:
            return None if array is None else put(array, *spec)

        return Feed(
            tokens=put(plan.tokens, axis),
            positions=put(plan.positions, axis),
            rows=put_if_any(plan.rows, axis),
            ends=put_if_any(plan.ends),
            cu_q_lens=put_if_any(plan.cu_q_lens, axis),
            page_table=self._page_table,
            number=put(np.asarray(self._number, np.int32)),
        )

    def _put_table(self) -> None:
        self._table_changes = self.scheduler.table_changes
        axis = "dp" if self.placement.has_local_pages else None
        self._page_table = self.placement.put(self.scheduler.page_table.copy(), axis)


def _multiple(n: int, of: int) -> int:
    """Round up to a multiple."""
    return -(-n // of) * of
