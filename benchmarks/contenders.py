"""Decode as a JAX user calls it: one jitted function of many calls over rotating caches."""

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from workload import Pool, Workload

# decode(q_nope, q_pe, pools, page_table, seq_lens, layer) -> out, like q_nope
DecodeFn = Callable[[jax.Array, jax.Array, Pool, jax.Array, jax.Array, int], jax.Array]


class ChainedDecode:
    """A jitted function of `calls` decode calls, each over the next cache.

    Each call's `out` is the next call's `q_nope`, so calls cannot overlap any more than a model's
    layers can, and no other kernel is added. The first query is donated and the last output takes
    its place: every buffer keeps its address from dispatch to dispatch, as in a serving loop,
    which is what lets XLA replay its command buffers unchanged.
    """

    def __init__(self, name: str, decode: DecodeFn, work: Workload, calls: int) -> None:
        """Compile for the workload's shapes and warm up.

        Args:
          name: For the report.
          decode: One call; traced `calls` times.
          work: Operands.
          calls: Calls in one dispatch.
        """
        self.name = name
        self.calls = calls
        self._work = work
        self._step = chain(decode, work, calls)
        self._q = jnp.copy(work.q_nope)
        start = time.perf_counter()
        self.run(1)
        self.compile_seconds = time.perf_counter() - start
        # XLA records its command buffers in the first executions after the very first.
        self.run(2)

    def run(self, dispatches: int) -> float:
        """Enqueue that many dispatches, wait for the last; return the host's share in seconds."""
        work, q = self._work, self._q
        start = time.perf_counter()
        for _ in range(dispatches):
            q = self._step(q, work.q_pe, work.pools, work.page_table, work.seq_lens)
        host = time.perf_counter() - start
        self._q = q.block_until_ready()
        return host


def chain(decode: DecodeFn, work: Workload, calls: int) -> Callable[..., jax.Array]:
    """Return the jitted function of `calls` chained decode calls over the workload's caches."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(q_nope, q_pe, pools, page_table, seq_lens):
        for i in range(calls):
            # A static layer of the stacked pool: nothing is sliced or copied.
            q_nope = decode(q_nope, q_pe, pools, page_table, seq_lens, i % work.num_caches)
        return q_nope

    return step


def jax_mla_decode(sm_scale: float, backend: str | None, **options) -> DecodeFn:
    """`jax_mla.decode` with a chosen backend."""
    import jax_mla

    def decode(q_nope, q_pe, pools, page_table, seq_lens, layer):
        return jax_mla.decode(
            q_nope,
            q_pe,
            pools,
            page_table,
            seq_lens,
            sm_scale=sm_scale,
            layer=layer,
            backend=backend,
            **options,
        )

    return decode
