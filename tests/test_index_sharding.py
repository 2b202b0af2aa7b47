"""Sharded `index_topk` and `index_append`: right answers, and the pool stays where it is."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharded import KINDS, context, make_mesh, mesh_argument, put, size_of

import jax_mla
from jax_mla.testing.hlo import Collective, collectives
from jax_mla.testing.index import IndexCase, check_lists, check_scores, oracle

pytestmark = pytest.mark.usefixtures("no_rank_promotion")

K = 5
UNIFORM = IndexCase(
    "uniform", (20, 3, 0, 29), q_lens=2, k=K, d=16, dtype="float32", num_layers=2, num_wild=1
)
RAGGED = IndexCase(
    "ragged", (20, 3, 0, 29), q_lens=(1, 3, 0, 11), k=K, d=16, dtype="float32", num_layers=2,
    num_padding=1,
)  # fmt: skip
CASES = {"uniform": UNIFORM, "ragged": RAGGED}
SPLITS = [
    {"batch": "dp"},
    {"pages": "cp"},
    {"batch": "dp", "pages": "cp"},
    {"batch": ("dp", "tp")},
    {"batch": "dp", "pages": ("cp", "tp")},
    {"batch": "dp", "pages": "dp"},
]


@functools.cache
def arguments(form: str) -> list[Any]:
    """Return the arguments, with as many pages as eight devices can share, and NaN in the rest."""
    inputs = CASES[form].inputs()
    args = [np.asarray(x) for x in inputs.args()]
    missing = -args[2].shape[1] % 8
    args[2] = np.pad(args[2], ((0, 0), (0, missing), (0, 0), (0, 0)), constant_values=np.nan)
    return args


def specs(form: str, batch=None, pages=None) -> list[P]:
    """Tokens are split in either form, sequences only in a uniform call."""
    seqs = P(batch) if form == "uniform" else P()
    spec = [P(batch), P(batch), P(None, pages), seqs, seqs]
    return spec if form == "uniform" else [*spec, P()]


def choose(*args, **kwargs):
    return jax_mla.index_topk(*args, k=K, layer=1, **kwargs)


def check(got, form: str) -> None:
    want = oracle(CASES[form].inputs())
    check_lists(got, want, K)
    if len(got) == 3:
        check_scores(got[2], want, K)


def merges(form: str, split) -> list[Collective]:
    """One all-gather of positions and scores, if pages are split."""
    if "pages" not in split:
        return []
    tokens, parts = len(arguments(form)[0]), size_of(split["pages"])
    local = tokens if split["batch_is_lost"] else tokens // size_of(split.get("batch"))
    shape = (2, local, parts * K)
    return [Collective("all-gather", 4 * int(np.prod(shape)), (shape,))]


@pytest.mark.parametrize("form", CASES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_every_split(split, kind, form) -> None:
    if "mixed" in kind and isinstance(split.get("batch"), tuple):
        pytest.skip("JAX gathers the result if axes of two kinds split one of its dimensions")
    mesh = make_mesh(kind)
    with context(mesh, kind):
        placed = put(arguments(form), mesh, specs(form, **split))
        compiled = jax.jit(choose).lower(*placed).compile()
        got = compiled(*placed)
    check(got, form)
    lost = "pages" in split and split["pages"] == split.get("batch")
    found = collectives(compiled)
    merge = merges(form, {**split, "batch_is_lost": lost})
    if lost:  # the axis stays with the pages, so queries are gathered, which are small
        assert set(merge) <= set(found)
        assert max(c.num_bytes for c in found) <= arguments(form)[0].nbytes
    else:
        assert found == merge


@pytest.mark.parametrize("form", CASES)
def test_mesh_argument(form) -> None:
    mesh = make_mesh()
    roles = mesh_argument(mesh, batch="dp", pages="cp")
    placed = put(arguments(form), mesh, specs(form, "dp", "cp"))
    fun = functools.partial(choose, mesh=roles, return_scores=True)
    compiled = jax.jit(fun).lower(*placed).compile()
    check(compiled(*placed), form)
    split = {"batch": "dp", "pages": "cp", "batch_is_lost": False}
    assert collectives(compiled) == merges(form, split)


def test_manual_region() -> None:
    """The call is local: it chooses among the pages at hand, and its slots are global."""
    mesh, spec = make_mesh(), specs("uniform", "dp", "cp")

    def part(*args):
        begin = jax.lax.axis_index("cp") * args[2].shape[1]
        slots, lens = choose(*args, page_begin=begin)
        return slots[None], lens[None]

    out = P("cp", "dp")
    fun = jax.shard_map(part, mesh=mesh, in_specs=tuple(spec), out_specs=(out, out))
    args = arguments("uniform")
    slots, lens = jax.jit(fun)(*put(args, mesh, spec))
    half = args[2].shape[1] // 2
    for i in range(2):
        want = choose(
            *args[:2], args[2][:, i * half : (i + 1) * half], *args[3:], page_begin=i * half
        )
        np.testing.assert_array_equal(slots[i], want[0])
        np.testing.assert_array_equal(lens[i], want[1])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axes", ["cp", ("cp", "tp")], ids=str)
@pytest.mark.parametrize("form", CASES)
def test_best_of_all_parts_in_a_manual_region(form, axes, check_vma) -> None:
    """With axis_name the result is that of the whole pool, on all devices, by one all-gather."""
    mesh = make_mesh()
    batch = "dp" if form == "uniform" else None  # in a manual region sequences stay whole
    spec = specs(form, batch, axes)

    def part(*args):
        begin = jax.lax.axis_index(axes) * args[2].shape[1]
        return choose(*args, page_begin=begin, axis_name=axes, return_scores=True)

    out = P(batch)
    fun = jax.shard_map(
        part, mesh=mesh, in_specs=tuple(spec), out_specs=(out,) * 3, check_vma=check_vma
    )
    placed = put(arguments(form), mesh, spec)
    compiled = jax.jit(fun).lower(*placed).compile()
    check(compiled(*placed), form)
    split = {"batch": batch, "pages": axes, "batch_is_lost": False}
    assert collectives(compiled) == merges(form, split)


def test_manual_axes_need_the_first_page_and_no_mesh() -> None:
    args = arguments("uniform")
    with pytest.raises(ValueError, match="page_begin: expected an index with axis_name"):
        choose(*args, axis_name="cp")
    with pytest.raises(ValueError, match="axis_name: expected None with mesh, got 'cp'"):
        choose(*args, axis_name="cp", page_begin=0, mesh=make_mesh())
    with pytest.raises(TypeError, match="axis_name: expected names of mesh axes, got 3"):
        choose(*args, axis_name=3, page_begin=0)
    with pytest.raises(ValueError, match="axis_name: expected axes of a shard_map or vmap .*'cp'"):
        choose(*args, axis_name="cp", page_begin=0)
    # XLA ends the process if a name comes twice.
    with pytest.raises(ValueError, match=r"axis_name: expected different axes, got \('cp', 'cp'\)"):
        choose(*args, axis_name=("cp", "cp"), page_begin=0)


@pytest.mark.parametrize("typed", ["explicit", "auto"])
@pytest.mark.parametrize("form", CASES)
def test_a_partly_manual_region(form, typed) -> None:
    """The rest of the axes splits the pages: by Explicit types, or by `mesh=` on Auto axes."""
    mesh = make_mesh(typed)
    kwargs = {"mesh": jax_mla.MeshAxes(batch="dp", pages="cp")} if typed == "auto" else {}

    def part(*args):
        found = choose(*(jax.lax.pcast(x, "tp", to="varying") for x in args), **kwargs)
        return [x[None] for x in found]

    with jax.set_mesh(mesh):
        args = put(arguments(form), mesh, specs(form, "dp", "cp"))
        fun = jax.shard_map(part, in_specs=P(), out_specs=P("tp"), axis_names={"tp"})
        for found in zip(*jax.jit(fun)(*args), strict=True):
            check(found, form)


def test_pages_by_hand_beside_an_explicit_axis() -> None:
    mesh = make_mesh("explicit")

    def part(*args):
        begin = jax.lax.axis_index("cp") * args[2].shape[1]
        return choose(*args, page_begin=begin, axis_name="cp")

    with jax.set_mesh(mesh):
        args = put(arguments("uniform"), mesh, specs("uniform", "dp", "cp"))
        in_specs = P(), P(), P(None, "cp"), P(), P()
        fun = jax.shard_map(part, in_specs=in_specs, out_specs=P(), axis_names={"cp"})
        check(jax.jit(fun)(*args), "uniform")


def test_explicit_axes_that_would_cut_a_sequence_are_refused() -> None:
    mesh = make_mesh("explicit")
    with jax.set_mesh(mesh):
        args = put(arguments("uniform"), mesh, [P(("dp", "cp", "tp"))] * 2 + [P()] * 3)
        with pytest.raises(ValueError, match=r"index_topk: q: .*that divides the 4 sequences"):
            choose(*args)


@pytest.mark.parametrize("form", CASES)
def test_local_pages(form) -> None:
    """A group's slots name rows of its own part of the pool, and nothing communicates."""
    mesh = make_mesh()
    roles = mesh_argument(mesh, batch="dp", local_pages="dp")
    args = arguments(form)
    parts = [args, args]
    joined = [np.concatenate([a, b], axis=0) for a, b in zip(*parts, strict=True)]
    joined[2] = np.concatenate([args[2]] * 2, axis=1)
    spec = [P("dp"), P("dp"), P(None, "dp"), P("dp"), P("dp"), P("dp")][: len(joined)]
    placed = put(joined, mesh, spec)
    compiled = jax.jit(functools.partial(choose, mesh=roles)).lower(*placed).compile()
    got = compiled(*placed)
    assert collectives(compiled) == []
    tokens = len(args[0])
    for i in range(2):
        check([x[i * tokens : (i + 1) * tokens] for x in got], form)


def test_a_pool_split_over_its_rows_is_refused() -> None:
    mesh = make_mesh()
    spec = specs("uniform")
    spec[2] = P(None, None, "cp")
    with pytest.raises(ValueError, match="jax_mla.index_topk: index_pages: "):
        choose(*put(arguments("uniform"), mesh, spec))


def test_ties_over_parts_go_to_the_lower_position() -> None:
    """Equal scores on all devices: the lists are those of one device."""
    case = IndexCase("equal", (60, 7), k=K, d=16, dtype="float32", num_layers=2, span=1, sign=-1)
    args = [np.asarray(x) for x in case.inputs().args()]
    args[2] = np.pad(args[2], ((0, 0), (0, -args[2].shape[1] % 8), (0, 0), (0, 0)))
    mesh = make_mesh()
    placed = put(args, mesh, [P("dp"), P("dp"), P(None, ("cp", "tp")), P("dp"), P("dp")])
    check_lists([*jax.jit(choose)(*placed)], oracle(case.inputs()), K)
    assert jnp.all(jnp.diff(choose(*args, return_positions=True)[0][0]) == 1)


def layer_of_v32(pool, index_pool, ckv, kpe, key, q_nope, q_pe, q, weights, table, positions):
    """Write the rows of the latent cache and of the indexer, choose, attend."""
    place, lens = (table, positions), positions[:, -1] + 1
    pool = jax_mla.append(pool, ckv, kpe, *place, layer=1)
    index_pool = jax_mla.index_append(index_pool, key, *place, layer=1)
    slots, counts = jax_mla.index_topk(q, weights, index_pool, table, lens, k=4, layer=1)
    return jax_mla.sparse_attention(
        q_nope, q_pe, pool, slots, topk_lens=counts, sm_scale=0.3, layer=1
    )


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_layer_on_a_mesh(kind) -> None:
    """Sequences on dp, heads on tp, pages on cp; neither pool moves."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    batch, q_len, heads, pages, size = 4, 2, 4, 16, 4
    tokens = (batch, q_len)
    args = [
        normal(2, pages, size, 40),
        np.zeros((2, pages, size, 132), np.uint8),
        normal(*tokens, 32),
        normal(*tokens, 8),
        normal(*tokens, 128),
        normal(*tokens, heads, 32),
        normal(*tokens, heads, 8),
        normal(*tokens, 3, 128),
        normal(*tokens, 3),
        rng.permutation(pages).reshape(batch, 4).astype(np.int32),
        np.array([[4, 5], [-1, 0], [14, 15], [7, 8]], np.int32),
    ]
    # Keys of earlier tokens, so that there is a choice.
    before = jnp.asarray(np.tile(np.arange(16, dtype=np.int32), (batch, 1)))
    filled, old = jnp.asarray(args[1]), jnp.asarray(normal(batch, 16, 128))
    args[1] = np.asarray(jax_mla.index_append(filled, old, jnp.asarray(args[9]), before, layer=1))
    want = jax.jit(layer_of_v32)(*args)
    mesh, cache, head = make_mesh(kind), P(None, "cp"), P("dp", None, "tp")
    spec = [cache, cache, P("dp"), P("dp"), P("dp"), head, head, *[P("dp")] * 4]
    with context(mesh, kind):
        placed = put(args, mesh, spec)
        compiled = jax.jit(layer_of_v32).lower(*placed).compile()
        got = compiled(*placed)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert max(c.num_bytes for c in collectives(compiled)) < args[1].nbytes // 4
