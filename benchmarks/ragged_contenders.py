"""Our ways to take a step: the ragged op, and append and decode by themselves."""

from typing import Any

import bars
import contenders
import jax.numpy as jnp
import ragged_work
import workload

import jax_mla

# A way to take a step: a call for `contenders.ChainedCalls` and its operands.
Way = tuple[Any, tuple[Any, ...]]


def ways(
    work: ragged_work.RaggedWorkload,
    written: workload.Workload,
    backend: str | None,
    table_tokens: int | None = None,
) -> dict[str, Way]:
    """Return the ways to take a step, by name.

    Args:
      work: The step before it is taken.
      written: The same with the rows written.
      backend: Backend of all ops; None for what they choose.
      table_tokens: Width of the wide page table; None for none.

    Returns:
      "jax_mla", as an engine calls it, also in a wide page table, without max_seq_len and with it.
      If all sequences have the same number of new tokens: the
      same without cu_q_lens, and `decode`, behind `append` if it is more than one token.
    """
    options = {"sm_scale": work.sm_scale, "backend": backend}
    found: dict[str, Way] = {"jax_mla": (_ragged(options, with_bounds=True), work.step_operands)}
    if table_tokens:
        wide = work.in_wide_table(table_tokens).step_operands
        bounded = {**options, "max_seq_len": int(work.case.seq_lens.max())}
        found["jax_mla" + bars.WIDE_TABLE] = _ragged(options, with_bounds=True), wide
        found["jax_mla" + bars.BOUND] = _ragged(bounded, with_bounds=True), wide
    if not work.case.is_uniform:
        return found
    found["uniform"] = (_ragged(options, with_bounds=False), work.step_operands)
    if work.case.q_len == 1:
        found["decode"] = (contenders.jax_mla_decode(**options), written.operands)
    else:
        found["append, decode"] = (_append_then_decode(options), work.step_operands)
    return found


def _ragged(options: dict[str, Any], *, with_bounds: bool) -> Any:
    def call(carry, q_pe, ckv, kpe, page_table, seq_lens, cu_q_lens, layer):
        q_nope, pools = carry
        return jax_mla.ragged_paged_attention(
            q_nope, q_pe, ckv, kpe, pools, page_table, seq_lens,
            cu_q_lens if with_bounds else None, layer=layer, **options,
        )  # fmt: skip

    return call


def _append_then_decode(options: dict[str, Any]) -> Any:
    def call(carry, q_pe, ckv, kpe, page_table, seq_lens, cu_q_lens, layer):
        del cu_q_lens

        def split(x):
            return x.reshape(len(seq_lens), -1, *x.shape[1:])

        q_nope, pools = carry
        # XLA computes them once a dispatch, as an engine does for all layers.
        q_len = len(q_nope) // len(seq_lens)
        positions = (seq_lens - q_len)[:, None] + jnp.arange(q_len, dtype=seq_lens.dtype)
        pools = jax_mla.append(
            pools, split(ckv), split(kpe), page_table, positions, layer=layer,
            backend=options["backend"],
        )  # fmt: skip
        out = jax_mla.decode(
            split(q_nope), split(q_pe), pools, page_table, seq_lens, layer=layer, **options
        )
        return out.reshape(q_nope.shape), pools

    return call
