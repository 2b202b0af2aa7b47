"""Decode as a JAX user calls it: one jitted function of many calls over rotating caches."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from workload import Pool

# decode(q_nope, q_pe, pools, page_table, seq_lens, layer) -> out, like q_nope
DecodeFn = Callable[[jax.Array, jax.Array, Pool, jax.Array, jax.Array, int], jax.Array]


class ChainedDecode:
    """A jitted function of `calls` decode calls, each over the next cache.

    Each call's `out` is the next call's `q_nope`. So calls overlap no more than a model's layers,
    and no other kernel is added. The first query is donated, and the last output takes its place.
    So every buffer keeps its address from dispatch to dispatch, as in a serving loop, and XLA can
    replay its command buffers unchanged.
    """

    def __init__(
        self,
        name: str,
        decode: DecodeFn,
        operands: tuple[Any, ...],
        *,
        caches: int,
        calls: int,
        out_sharding: Any = None,
        compiler_options: dict[str, Any] | None = None,
    ) -> None:
        """Compile and warm up.

        Args:
          name: For the report.
          decode: One call; traced `calls` times.
          operands: (q_nope, q_pe, pools, page_table, seq_lens), the pools stacked.
          caches: Leading size of the pools.
          calls: Calls in one dispatch.
          out_sharding: Sharding of the output and of q_nope; only on a mesh.
          compiler_options: Passed to `jax.jit`.
        """
        self.name = name
        self.calls = calls
        self._rest = operands[1:]
        # A copy, because it is donated and several contenders start from the same query.
        self._q = jnp.copy(operands[0])
        self._step = chain(decode, caches, calls, out_sharding, compiler_options)
        start = time.perf_counter()
        self.run(1)
        self.compile_seconds = time.perf_counter() - start
        # XLA records its command buffers in the first executions after the very first.
        self.run(2)

    def run(self, dispatches: int) -> float:
        """Enqueue that many dispatches, wait for the last; return the host's share in seconds."""
        q = self._q
        start = time.perf_counter()
        for _ in range(dispatches):
            q = self._step(q, *self._rest)
        host = time.perf_counter() - start
        self._q = q.block_until_ready()
        return host


def chain(
    decode: DecodeFn,
    caches: int,
    calls: int,
    out_sharding: Any,
    compiler_options: dict[str, Any] | None,
) -> Callable[..., jax.Array]:
    """Return the jitted function of `calls` chained decode calls over rotating caches."""

    @functools.partial(
        jax.jit, donate_argnums=0, out_shardings=out_sharding, compiler_options=compiler_options
    )
    def step(q_nope, q_pe, pools, page_table, seq_lens):
        for i in range(calls):
            # The layer is static, so nothing of the stacked pool is sliced or copied.
            q_nope = decode(q_nope, q_pe, pools, page_table, seq_lens, i % caches)
        return q_nope

    return step


def chosen_backend(operands: tuple[Any, ...]) -> str | None:
    """The backend that `backend=None` picks for a call."""
    import jax_mla

    statuses = jax_mla.backends(*operands[:4], layer=0)
    return next((status.name for status in statuses if status.chosen), None)


def jax_mla_decode(sm_scale: float, backend: str | None = None, **options: Any) -> DecodeFn:
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
