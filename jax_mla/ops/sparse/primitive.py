"""The primitive behind `sparse_attention`: that of `decode`, in which every token is a page.

A slot names a row of the pool. Seen as pages of one token, a pool has a page for each slot, and a
query's list of slots, `indices`, is the page table of a sequence with one query, without a causal
mask; `topk_lens` are its lengths. So the backends, the batching rule, the sharding and the merge
are those of `decode`. Here is only what differs: what messages call the operands, and the view of
the pool, which moves no data. `page_begin` is the first page, not the first slot, that the pool
holds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax

from jax_mla import _primitive
from jax_mla.kv_cache import pool_sizes, tokens_as_pages
from jax_mla.ops.decode import primitive as decode
from jax_mla.ops.decode.primitive import Operands, Params

NAME = "jax_mla.sparse_attention"


def _tokens_as_pages(operands: Operands, params: Params) -> Operands:
    """Return the operands of `decode` on the same pools with pages of one token."""
    num_groups = len(params.pool_dims)
    page_size = pool_sizes(operands.kv_pages[0], params.has_layer, num_groups).page_size
    return operands._replace(
        page_begin=operands.page_begin * page_size,
        kv_pages=tuple(
            tokens_as_pages(pool, params.has_layer, num_groups) for pool in operands.kv_pages
        ),
    )


def local(
    bind: Callable[[Operands, Params], list[jax.Array]], operands: Operands, params: Params
) -> list[jax.Array]:
    """Fold the batch, head and group dimensions of one device's blocks, and call the handler."""
    return decode.local(NAME, bind, _tokens_as_pages(operands, params), params)


def keep_owned_slots(operands: Operands, params: Params) -> Operands:
    """Shorten every list to the slots that the pool holds, see `owned_pages.shorten`."""
    kept = decode.keep_owned_pages(_tokens_as_pages(operands, params), params)
    return operands._replace(page_table=kept.page_table, seq_lens=kept.seq_lens)


bind, _ = _primitive.define(
    dataclasses.replace(
        decode.OP,
        name=NAME,
        local=local,
        ffi=functools.partial(decode.ffi, NAME),
        keep_owned=keep_owned_slots,
        renamed=(("page_table", "indices"), ("seq_lens", "topk_lens")),
    )
)
