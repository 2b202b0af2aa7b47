"""Sharded `sparse_attention`: right answers, and the cache stays where it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import KINDS, check, context, make_mesh, mesh_argument, put, size_of

import jax_mla
from jax_mla.testing.hlo import Collective, collectives
from jax_mla.testing.sparse import SparseCase

pytestmark = pytest.mark.usefixtures("no_rank_promotion")

H, D = 8, 32
CASE = SparseCase(
    "sharded", (0, 3, 7, 12, 12, 1, 5, 9), k=12, num_tokens=120, num_heads=H, d_ckv=D, d_kpe=8,
    page_size=4, dtype="float32", num_layers=2, num_wild=1, has_sink=True,
)  # fmt: skip
SPLITS = [
    {"batch": "dp"},
    {"heads": "tp"},
    {"pages": "cp"},
    {"batch": "dp", "heads": "tp", "pages": "cp"},
    {"batch": ("dp", "cp"), "heads": "tp"},
    {"batch": "dp", "pages": ("cp", "tp")},
]


@functools.cache
def arguments():
    """Return the arguments as numpy arrays: q_nope, q_pe, pool, indices, topk_lens, sink."""
    inputs = CASE.inputs()
    q_nope, q_pe, pool, indices = inputs.args()
    args = q_nope, q_pe, pool, indices, inputs.topk_lens, inputs.sink
    return tuple(np.asarray(x) for x in args)


@functools.cache
def by_sequence():
    """Return the same with four sequences of two queries."""
    q_nope, q_pe, pool, indices, lens, sink = arguments()
    split = (x.reshape(4, 2, *x.shape[1:]) for x in (q_nope, q_pe))
    return (*split, pool, indices.reshape(4, 2, -1), lens.reshape(4, 2), sink)


def attend(q_nope, q_pe, pool, indices, lens, sink, *, fun=jax_mla.sparse_attention, **kwargs):
    return fun(
        q_nope, q_pe, pool, indices, topk_lens=lens, sink=sink, sm_scale=0.3, layer=1,
        return_lse=True, **kwargs,
    )  # fmt: skip


@functools.cache
def reference():
    return attend(*arguments(), fun=jax_mla.reference.sparse_attention)


def check_result(got) -> None:
    """In either form."""
    want = reference()
    check([np.asarray(a).reshape(b.shape) for a, b in zip(got, want, strict=True)], want)


def specs(form, batch=None, heads=None, pages=None) -> list[P]:
    query = P(batch, heads) if form == "tokens" else P(batch, None, heads)
    return [query, query, P(None, pages), P(batch), P(batch), P(heads)]


def merges(form, split) -> list[Collective]:
    if "pages" not in split:
        return []
    batch, heads = size_of(split.get("batch")), size_of(split.get("heads"))
    rows = (8 // batch,) if form == "tokens" else (4 // batch, 2)
    lse, out = (size_of(split["pages"]), *rows, 1, H // heads), (*rows, 1, H // heads, D)
    return [Collective("all-reduce", 4 * int(np.prod(s)), (s,)) for s in (lse, out)]


@pytest.mark.parametrize("form", ["tokens", "by_sequence"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_every_split(split, kind, form) -> None:
    """Queries and heads need no communication, pages need one max and one sum."""
    if "mixed" in kind and isinstance(split.get("batch"), tuple):
        pytest.skip("JAX gathers the result if axes of two kinds split one of its dimensions")
    mesh = make_mesh(kind)
    args = arguments() if form == "tokens" else by_sequence()
    with context(mesh, kind):
        placed = put(args, mesh, specs(form, **split))
        compiled = jax.jit(attend).lower(*placed).compile()
        got = compiled(*placed)
    check_result(got)
    assert collectives(compiled) == sorted(merges(form, split))
    want = NamedSharding(mesh, specs(form, **split)[0])
    assert got[0].sharding.is_equivalent_to(want, got[0].ndim)


@pytest.mark.parametrize("form", ["tokens", "by_sequence"])
def test_mesh_argument(form) -> None:
    mesh = make_mesh()
    args = arguments() if form == "tokens" else by_sequence()
    placed = put(args, mesh, specs(form, "dp", "tp", "cp"))
    compiled = jax.jit(functools.partial(attend, mesh=mesh)).lower(*placed).compile()
    check_result(compiled(*placed))
    split = {"batch": "dp", "heads": "tp", "pages": "cp"}
    assert collectives(compiled) == sorted(merges(form, split))


def test_manual_region() -> None:
    mesh, spec = make_mesh(), specs("tokens", "dp", "tp", "cp")

    def part(q_nope, q_pe, pool, indices, lens):
        begin = jax.lax.axis_index("cp") * pool.shape[1]
        out, lse = attend(q_nope, q_pe, pool, indices, lens, None, page_begin=begin)
        return jax_mla.merge(out, lse, axis_name="cp")

    args = arguments()
    fun = jax.shard_map(
        part, mesh=mesh, in_specs=tuple(spec[:5]), out_specs=(spec[0], P("dp", "tp"))
    )
    out, lse = jax.jit(fun)(*put(args[:5], mesh, spec[:5]))
    want = jax_mla.reference.sparse_attention(
        *map(jnp.asarray, args[:4]),
        topk_lens=jnp.asarray(args[4]),
        sm_scale=0.3,
        layer=1,
        return_lse=True,
    )
    check((out, lse), want)


def test_a_partly_manual_region_where_an_axis_of_size_1_splits_the_pages() -> None:
    mesh = jax.make_mesh((2, 4, 1), ("dp", "tp", "cp"), axis_types=(AxisType.Explicit,) * 3)

    def part(*args):
        return [x[None] for x in attend(*(jax.lax.pcast(x, "tp", to="varying") for x in args))]

    with jax.set_mesh(mesh):
        args = put(arguments(), mesh, specs("tokens", "dp", None, "cp"))
        fun = jax.shard_map(part, in_specs=P(), out_specs=P("tp"), axis_names={"tp"})
        for found in zip(*jax.jit(fun)(*args), strict=True):
            check_result(found)


def test_local_pages() -> None:
    """A group's slots name rows of its own part of the pool, and nothing communicates."""
    mesh = make_mesh()
    roles = mesh_argument(mesh, batch="dp", heads="tp", local_pages="dp")
    q_nope, q_pe, pool, indices, lens, sink = arguments()
    slots = pool.shape[1] * pool.shape[2] // 2
    local = np.where(indices < slots, indices, -1)  # of the first half, which each group reads
    pool = np.concatenate([pool[:, : pool.shape[1] // 2]] * 2, axis=1)
    args = q_nope, q_pe, pool, local, lens, sink
    placed = put(args, mesh, specs("tokens", "dp", "tp", "dp"))
    compiled = jax.jit(functools.partial(attend, mesh=roles)).lower(*placed).compile()
    got, want = compiled(*placed), attend(*args, fun=jax_mla.reference.sparse_attention)
    check(got, want)
    assert collectives(compiled) == []


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_lists_split_over_their_entries_are_gathered(kind) -> None:
    """Indices are small; the pool stays."""
    mesh = make_mesh(kind)
    spec = specs("tokens", "dp", None, None)
    spec[3] = P("dp", "tp")
    with context(mesh, kind):
        placed = put(arguments(), mesh, spec)
        compiled = jax.jit(attend).lower(*placed).compile()
        check_result(compiled(*placed))
    assert [c.shapes for c in collectives(compiled)] == [((4, 12),)]


def test_a_pool_split_over_its_rows_is_refused() -> None:
    mesh = make_mesh()
    spec = specs("tokens")
    spec[2] = P(None, None, "cp")
    placed = put(arguments(), mesh, spec)
    with pytest.raises(ValueError, match="jax_mla.sparse_attention: kv_pages: "):
        attend(*placed)
