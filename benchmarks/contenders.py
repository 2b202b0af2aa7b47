"""Calls as a JAX user makes them: one jitted function of many calls over rotating caches."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import timing
from workload import Pool

# decode(q_nope, q_pe, pools, page_table, seq_lens, layer) -> out, like q_nope
DecodeFn = Callable[[jax.Array, jax.Array, Pool, jax.Array, jax.Array, int], jax.Array]


class ChainedCalls:
    """A jitted function of `calls` calls, each over the next cache.

    What a call returns is the next call's first operand: `out` becomes `q_nope`, and an op that
    writes hands the pools on with it. So calls overlap no more than a model's layers, and no other
    kernel is added. The first operand is donated, and the last result takes its place. So every
    buffer keeps its address from dispatch to dispatch, as in a serving loop, and XLA can replay its
    command buffers unchanged.
    """

    def __init__(
        self,
        name: str,
        call: Callable[..., Any],
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
          call: call(*operands, layer) -> first operand of the next call; traced `calls` times.
          operands: The operands before the layer, the pools stacked.
          caches: Leading size of the pools.
          calls: Calls in one dispatch.
          out_sharding: Sharding of the first operand; only on a mesh.
          compiler_options: Passed to `jax.jit`.
        """
        self.name = name
        self.calls = calls
        self._rest = operands[1:]
        # A copy, because it is donated and several contenders start from the same operands.
        self._carry = jax.tree.map(jnp.copy, operands[0])
        self._step = chain(call, caches, calls, out_sharding, compiler_options)
        start = time.perf_counter()
        self.run(1)
        self.compile_seconds = time.perf_counter() - start
        # XLA records its command buffers in the first executions after the very first.
        self.run(2)

    def run(self, dispatches: int) -> float:
        """Enqueue that many dispatches, wait for the last; return the host's share in seconds."""
        carry = self._carry
        start = time.perf_counter()
        for _ in range(dispatches):
            carry = self._step(carry, *self._rest)
        host = time.perf_counter() - start
        self._carry = jax.block_until_ready(carry)
        return host


def chain(
    call: Callable[..., Any],
    caches: int,
    calls: int,
    out_sharding: Any,
    compiler_options: dict[str, Any] | None,
) -> Callable[..., Any]:
    """Return the jitted function of `calls` chained calls over rotating caches."""

    @functools.partial(
        jax.jit, donate_argnums=0, out_shardings=out_sharding, compiler_options=compiler_options
    )
    def step(carry, *rest):
        for i in range(calls):
            # The layer is static, so nothing of the stacked pool is sliced or copied.
            carry = call(carry, *rest, i % caches)
        return carry

    return step


def trace(contender: timing.Contender, device_index: int) -> dict[str, Any]:
    """Trace one dispatch; return the kernels' own times a call, or nothing without a trace."""
    times = timing.trace_kernels(lambda: contender.run(1), device_index=device_index)
    if times is None:
        return {}
    return {
        "kernels_us": times.busy_seconds / contender.calls * 1e6,
        "kernels": {
            name: {"per_call": count / contender.calls, "us": seconds / count * 1e6}
            for name, (count, seconds) in times.kernels.items()
        },
    }


def chosen_backend(operands: tuple[Any, ...]) -> str | None:
    """The backend that `backend=None` picks for a call."""
    import jax_mla

    statuses = jax_mla.backends(*operands[:4], layer=0)
    return next((status.name for status in statuses if status.chosen), None)


def jax_mla_decode(sm_scale: float, backend: str | None = None, **options: Any) -> DecodeFn:
    """`jax_mla.decode` with a chosen backend."""
    import jax_mla

    def decode(q_nope, q_pe, pools, page_table, seq_lens, layer, **more):
        return jax_mla.decode(
            q_nope,
            q_pe,
            pools,
            page_table,
            seq_lens,
            sm_scale=sm_scale,
            layer=layer,
            backend=backend,
            **options | more,
        )

    return decode


def chained_by_scale(decode: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A call for ChainedCalls whose queries are in e4m3, which `out` cannot replace.

    What is handed on is the pair of `q_nope` and its scale. A value of `out` is added to the scale,
    times 0. This costs a kernel of one element a call, which counts.
    """

    def call(carry, q_pe, pools, page_table, seq_lens, layer):
        q_nope, q_scale = carry
        out = decode(q_nope, q_pe, pools, page_table, seq_lens, layer, q_scale=q_scale)
        return q_nope, q_scale + 0 * out.ravel()[0].astype(jnp.float32)

    return call
