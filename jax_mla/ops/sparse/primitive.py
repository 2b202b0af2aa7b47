"""The primitive behind `sparse_attention`: that of `decode`, in which every token is a page.

A slot names a row of the pool. Seen as pages of one token, a pool has a page for each slot, and a
query's list of slots is the page table of a sequence with one query, without a causal mask. So the
backends, the batching rule, the sharding and the merge are those of `decode`. Here is only what
differs: the names of the operands, and the view of the pool, which moves no data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jax_mla import _primitive, _sharding
from jax_mla._op import Factors, FfiCall, Op
from jax_mla.kv_cache import pool_sizes, tokens_as_pages
from jax_mla.ops.decode import primitive as decode

NAME = "jax_mla.sparse_attention"


class Operands(NamedTuple):
    """The operands of a call, or one item for each of them; in the order of `decode.Operands`.

    Attributes:
      q_nope: [*batch, 1, *heads, d_ckv].
      q_pe: [*batch, 1, *heads, d_kpe].
      indices: [*batch, k] int32, slots.
      topk_lens: [*batch] int32.
      layer: int32, as many dimensions as batch; each has size 1 or the batch's.
      page_begin: like `layer`; the first page, not the first slot, that the pool holds.
      kv_scale: float32, `layer`'s dimensions and 2: of ckv and kpe; None if the format has none.
      q_scale: float32, `layer`'s dimensions and 1; None if the queries have none.
      kv_pages: one pool or two, [*groups, (num_layers,) num_pages, *rows, width], see
        `kv_cache.pool_sizes`.
    """

    q_nope: Any
    q_pe: Any
    indices: Any
    topk_lens: Any
    layer: Any
    page_begin: Any
    kv_scale: Any
    q_scale: Any
    kv_pages: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Params(decode.Params):
    """The static parameters of a call.

    Attributes:
      has_queries: whether the last batch dimension counts the queries of a sequence. No role of a
        mesh splits it.
    """

    has_queries: bool = False


def factors(types: Operands, params: Params) -> tuple[Operands, Factors]:
    """Name the dimensions that are split alike; see `_sharding.py`."""
    operands, results = decode.factors(decode.Operands(*types), params)
    if not params.has_queries:
        return Operands(*operands), results
    last = f"batch{types.topk_lens.ndim - 1}"

    def rename(dims: list[str]) -> list[str]:
        return [f"{_sharding.WHOLE}queries" if dim == last else dim for dim in dims]

    operands = jax.tree.map(rename, operands, is_leaf=lambda x: isinstance(x, list))
    return Operands(*operands), [rename(dims) for dims in results]


def _tokens_as_pages(operands: Operands, params: Params) -> decode.Operands:
    """Return the operands of `decode` on the same pools with pages of one token."""
    num_groups = len(params.pool_dims)
    page_size = pool_sizes(operands.kv_pages[0], params.has_layer, num_groups).page_size
    return decode.Operands(*operands)._replace(
        page_begin=operands.page_begin * page_size,
        kv_pages=tuple(
            tokens_as_pages(pool, params.has_layer, num_groups) for pool in operands.kv_pages
        ),
    )


def local(
    bind: Callable[[Operands, Params], list[jax.Array]], operands: Operands, params: Params
) -> list[jax.Array]:
    """Fold the batch, head and group dimensions of one device's blocks, and call the handler."""

    def bind_folded(folded: decode.Operands, params: Any) -> list[jax.Array]:
        return bind(Operands(*folded), params)

    return decode.local(bind_folded, _tokens_as_pages(operands, params), params)


def keep_owned_slots(operands: Operands, params: Params) -> Operands:
    """Shorten every list to the slots that the pool holds, see `decode.shorten`."""
    kept = decode.keep_owned_pages(_tokens_as_pages(operands, params), params)
    return operands._replace(indices=kept.page_table, topk_lens=kept.seq_lens)


def ffi(platform: str, types: Operands, params: Params) -> FfiCall | None:
    """Choose the custom call for a platform; None means the reference."""
    return decode.ffi(platform, decode.Operands(*types), params, op=NAME)


def batch(
    operands: Operands, dims: Operands, size: int, params: Params
) -> tuple[Operands, list[int], Params]:
    """Add one mapped axis; the top of `decode/primitive.py` says where."""
    given, given_dims = decode.Operands(*operands), decode.Operands(*dims)
    mapped, results, params = decode.batch(given, given_dims, size, params)
    return Operands(*mapped), results, params


bind, _ = _primitive.define(
    Op(
        name=NAME,
        results=lambda types, params: decode.results(decode.Operands(*types), params),
        local=local,
        reference=lambda operands, params: decode.run_reference(decode.Operands(*operands), params),
        ffi=ffi,
        batch=batch,
        factors=factors,
        merges=True,
        keep_owned=keep_owned_slots,
    )
)
