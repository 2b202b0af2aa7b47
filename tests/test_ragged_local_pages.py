"""Ragged tokens with local pages: each group has its tokens, its sequences and its own pages."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import KINDS, check_step, context, laid_out, make_mesh, mesh_argument, put

import jax_mla
from jax_mla._mesh._sharding import axes_of
from jax_mla.testing.hlo import collectives, memory, num_copies, pointers
from jax_mla.testing.ragged import ragged_inputs

pytestmark = pytest.mark.usefixtures("no_rank_promotion")

# Without types, because a test unpacks whatever its options give.
attend: Any = jax_mla.ragged_paged_attention
reference: Any = jax_mla.reference.ragged_paged_attention

SEQS, TOKENS, PAGES, LAYERS, D_CKV, D_KPE = 4, 8, 16, 2, 32, 8
SHAPE: dict[str, Any] = {
    "num_heads": 8, "d_ckv": D_CKV, "d_kpe": D_KPE, "page_size": 4, "dtype": "float32",
    "num_layers": LAYERS, "table_tokens": 16,
}  # fmt: skip
# The sequences of each group that are present.
STEPS = {
    "ragged": (
        ((1, 5), (4, 16), (0, 7)),
        ((2, 9), (6, 6)),
        ((0, 3), (1, 1), (3, 12), (1, 2)),
        ((8, 14),),
    ),
    "uniform": (
        ((2, 5), (2, 16), (2, 1)),
        ((2, 9), (2, 6), (2, 2), (2, 3)),
        ((2, 13),),
        ((2, 8), (2, 15)),
    ),
}
CASES = [
    {"batch": "dp", "heads": "tp"},
    {"batch": "dp", "heads": ("tp", "cp")},
    {"batch": ("cp", "dp"), "heads": "tp"},
]
CACHE = 4  # the place of kv_pages among the arguments
steps = pytest.mark.parametrize("name", STEPS)
kinds = pytest.mark.parametrize("kind", ["auto", "explicit"])


@functools.cache
def group_args(name: str, group: int) -> tuple[Any, ...]:
    """Return one group's arguments without NaN; one page id is of another group's part."""
    seqs, is_uniform = STEPS[name][group], name == "uniform"
    padding = 0 if is_uniform else TOKENS - sum(q_len for q_len, _ in seqs)
    inputs = ragged_inputs(
        seqs=seqs, num_padding=padding, num_absent=SEQS - len(seqs), is_uniform=is_uniform,
        seed=group, **SHAPE,
    )  # fmt: skip
    *args, bounds, _ = inputs.args()
    args = [np.nan_to_num(x) for x in args]
    extra = PAGES - args[CACHE].shape[1]
    args[CACHE] = np.pad(args[CACHE], ((0, 0), (0, extra), (0, 0), (0, 0)))
    longest = max(range(len(seqs)), key=lambda b: seqs[b][1])
    table = args[CACHE + 1]
    table[longest, 0] += PAGES
    return *args, None if is_uniform else np.asarray(bounds), np.array([len(seqs)], np.int32)


@functools.cache
def step_args(name: str, groups: int) -> list[Any]:
    """Return all groups' arguments end to end: the pools joined along their pages."""
    parts = zip(*(group_args(name, g) for g in range(groups)), strict=True)
    return [
        None if x[0] is None else np.concatenate(x, axis=1 if i == CACHE else 0)
        for i, x in enumerate(parts)
    ]


def by_group(name: str, groups: int, fun) -> list[np.ndarray]:
    """Return out, lse and the pool that each group computes by definition, on its part alone."""
    parts = zip(*(fun(*group_args(name, g)) for g in range(groups)), strict=True)
    return [np.concatenate(x, axis=1 if i == 2 else 0) for i, x in enumerate(parts)]


@functools.cache
def want(name: str, groups: int, is_all: bool = False) -> list[np.ndarray]:
    def one(*args):
        num_seqs = None if is_all else args[-1][0]
        return reference(*args[:-1], num_seqs, sm_scale=0.2, layer=1, return_lse=True)

    return by_group(name, groups, one)


def specs(batch, heads) -> list[P]:
    rows, query = P(batch), P(batch, heads)
    return [query, query, rows, rows, P(None, batch), rows, rows, rows, rows]


def on_device(args) -> list[Any]:
    """Return the arguments that exist as arrays on one device."""
    return [x if x is None else jnp.array(x) for x in args]


def place(args, mesh, spec) -> list[Any]:
    """Put the arguments that exist on the mesh, the pool in memory that can be donated."""
    placed: list[Any] = [
        None if x is None else put([x], mesh, [s])[0] for x, s in zip(args, spec, strict=True)
    ]
    placed[CACHE] = jnp.copy(placed[CACHE])
    return placed


def local_roles(mesh, *, batch="dp", heads: Any = "tp") -> jax_mla.MeshAxes:
    return mesh_argument(mesh, batch=batch, heads=heads, local_pages=batch)


def call(*args, **options) -> Any:
    return attend(*args, **{"sm_scale": 0.2, "layer": 1, "return_lse": True} | options)


def skip_if_kinds_mix(kind, case) -> None:
    if "mixed" in kind and any(isinstance(axes, tuple) for axes in case.values()):
        pytest.skip("JAX gathers the result if axes of two kinds split one of its dimensions")


@kinds
@steps
def test_raw_projections(name, kind) -> None:
    """The positions of a group's tokens follow from its own bounds and lengths."""
    raw = {
        "norm_weight": jnp.ones(D_CKV) / 2, "rope_table": jax_mla.rope_table(40, D_KPE),
        "rope_interleaved": True,
    }  # fmt: skip
    mesh, groups = make_mesh(kind), 2
    roles, args = local_roles(mesh), step_args(name, groups)

    def one(*args):
        options = {"sm_scale": 0.2, "layer": 1, "return_lse": True} | raw
        return reference(*args[:-1], args[-1][0], **options)

    with context(mesh, kind):
        fun = jax.jit(functools.partial(call, mesh=roles, **raw))
        got = fun(*place(args, mesh, specs("dp", "tp")))
    for a, b in zip(got, by_group(name, groups, one), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("is_all", [False, True], ids=["num_seqs", "all"])
@steps
def test_nothing_communicates(name, is_all, case, kind) -> None:
    """In place on every device. Without num_seqs the garbage of the absent sequences counts."""
    skip_if_kinds_mix(kind, case)
    mesh, groups = make_mesh(kind), 2 ** len(axes_of(case["batch"]))
    spec = specs(**case)
    fun = jax.jit(functools.partial(call, mesh=local_roles(mesh, **case)), donate_argnums=CACHE)
    with context(mesh, kind):
        args = place(step_args(name, groups), mesh, spec)
        args[-1] = None if is_all else args[-1]
        compiled = fun.lower(*args).compile()
        before, shard = pointers(args[CACHE]), args[CACHE].addressable_shards[0].data.shape
        got = fun(*args)
    check_step(got, want(name, groups, is_all))
    assert collectives(compiled) == []
    assert pointers(got[2]) == before and num_copies(compiled, shard) == 0
    for x, s in zip(got, (spec[0], spec[0], spec[CACHE]), strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, s), x.ndim)


@steps
def test_global_page_ids_mean_something_else(name) -> None:
    """Otherwise the tests here would pass without local pages."""
    mesh, args = make_mesh(), on_device(step_args(name, 2)[:-1])
    if name == "ragged":
        args[-1] = args[-1][: 2 * SEQS + 1]
    out, _, pool = call(*args, mesh=mesh_argument(mesh, batch="dp", pages="dp"))
    assert not np.allclose(out, want(name, 2, True)[0], atol=1e-3)
    assert not np.array_equal(pool, want(name, 2, True)[2])


@pytest.mark.parametrize("chosen", [None, "reference"])
@pytest.mark.parametrize("jit", [jax.jit, lambda fun: fun], ids=["jit", "eager"])
@kinds
@steps
def test_operands_may_be_anywhere(name, kind, jit, chosen) -> None:
    mesh, args = make_mesh(kind), step_args(name, 2)
    fun = jit(functools.partial(call, mesh=local_roles(mesh), backend=chosen))
    for placed in (
        place(args, mesh, specs("dp", "tp")),
        place(args, mesh, [P()] * len(args)),
        on_device(args),
    ):
        check_step(fun(*placed), want(name, 2))


@pytest.mark.parametrize("jit", [jax.jit, lambda fun: fun], ids=["jit", "eager"])
@kinds
@steps
def test_num_seqs_may_be_a_numpy_array(name, kind, jit) -> None:
    mesh, args = make_mesh(kind), step_args(name, 2)
    *placed, _ = place(args, mesh, specs("dp", "tp"))
    fun = jit(lambda *rest: call(*rest, args[-1], mesh=local_roles(mesh)))
    check_step(fun(*placed), want(name, 2))


@kinds
@steps
def test_page_begin_counts_in_every_part(name, kind) -> None:
    """Each device runs the local call with `page_begin` as it is."""
    mesh, args, begin = make_mesh(kind), list(step_args(name, 2)), 1000
    table = args[CACHE + 1]
    is_id = (table >= 0) & (table < 2 * PAGES)
    args[CACHE + 1] = np.where(is_id, table + begin, table)
    fun = jax.jit(functools.partial(call, mesh=local_roles(mesh), page_begin=begin))
    with context(mesh, kind):
        placed = place(args, mesh, specs("dp", "tp"))
        compiled = fun.lower(*placed).compile()
        check_step(fun(*placed), want(name, 2))
    assert collectives(compiled) == []


@kinds
@steps
def test_pools_of_packs_without_layers(name, kind) -> None:
    mesh, args = make_mesh(kind), step_args(name, 2)
    args = [laid_out(x[1], "packs") if i == CACHE else x for i, x in enumerate(args)]
    spec = [P("dp") if i == CACHE else s for i, s in enumerate(specs("dp", "tp"))]
    fun = jax.jit(functools.partial(call, layer=None, packs=True, mesh=local_roles(mesh)))
    with context(mesh, kind):
        placed = place(args, mesh, spec)
        compiled = fun.lower(*placed).compile()
        out, lse, pool = fun(*placed)
    *expected, expected_pool = want(name, 2)
    check_step((out, lse, pool), [*expected, laid_out(expected_pool[1], "packs")])
    assert collectives(compiled) == []


@kinds
@steps
def test_scan_over_layers_in_place(name, kind) -> None:
    def step(op, q_nope, q_pe, ckv, kpe, pool, *others, **options):
        def body(carry, layer):
            q_nope, pool = carry
            rows = q_nope, q_pe, ckv * (layer + 1), kpe
            out, pool = op(*rows, pool, *others, sm_scale=0.2, layer=layer, **options)
            return (q_nope + out, pool), None

        return jax.lax.scan(body, (q_nope, pool), jnp.arange(LAYERS, dtype=jnp.int32))[0]

    def one(*args):
        q, pool = step(reference, *map(jnp.asarray, args[:CACHE]), *args[CACHE:-1], args[-1][0])
        return q, q, pool

    expected = by_group(name, 2, one)[1:]
    mesh = make_mesh(kind)
    fun = jax.jit(functools.partial(step, attend, mesh=local_roles(mesh)), donate_argnums=CACHE)
    with context(mesh, kind):
        args = place(step_args(name, 2), mesh, specs("dp", "tp"))
        compiled = fun.lower(*args).compile()
        before, shard = pointers(args[CACHE]), args[CACHE].addressable_shards[0].data
        q, pool = fun(*args)
    np.testing.assert_allclose(q, expected[0], atol=1e-4)
    np.testing.assert_array_equal(pool, expected[1])
    assert collectives(compiled) == [] and pointers(pool) == before
    assert num_copies(compiled, shard.shape) == num_copies(compiled, shard.shape[1:]) == 0
    assert memory(compiled).alias_size_in_bytes == shard.nbytes


@steps
def test_manual_region_over_the_groups_is_the_local_call(name) -> None:
    mesh, spec = make_mesh(), specs("dp", "tp")
    args = [x for x in step_args(name, 2) if x is not None]
    if name == "uniform":
        spec.pop(-2)

    def local(*args):
        *args, num_seqs = args
        return call(*args, num_seqs=num_seqs)

    fun = jax.shard_map(
        local, mesh=mesh, in_specs=tuple(spec), out_specs=(spec[0], spec[0], spec[CACHE])
    )
    check_step(jax.jit(fun)(*args), want(name, 2))


@pytest.mark.parametrize("over", [None, "cp"])
@steps
def test_vmap_of_the_query(name, over) -> None:
    mesh = make_mesh()
    q_nope, q_pe, *rest = on_device(step_args(name, 2))
    fun = jax.vmap(
        functools.partial(call, mesh=local_roles(mesh)),
        in_axes=(0, None, *(None for _ in rest)), out_axes=(0, 0, None), spmd_axis_name=over,
    )  # fmt: skip
    args = jnp.stack([q_nope, q_nope]), q_pe, *rest
    out, lse, pool = jax.jit(fun)(*args)
    for i in range(2):
        check_step((out[i], lse[i], pool), want(name, 2))


def test_axes_of_size_1() -> None:
    """One group: num_seqs may be a number, and page ids are those of the whole pool."""
    mesh = make_mesh(sizes=(1, 2, 1))
    axes = jax_mla.MeshAxes(mesh, batch="dp", heads="tp", local_pages="dp")
    for name in STEPS:
        *args, num_seqs = on_device(group_args(name, 0))
        for number in (num_seqs, num_seqs[0], int(num_seqs[0])):
            check_step(call(*args, number, mesh=axes), want(name, 1))


# ---- append with cu_q_lens ---------------------------------------------------------------------


def append_args(name: str, groups: int) -> list[Any]:
    """Return all groups' arguments of append; some positions skip their token."""
    _, _, ckv, kpe, pool, table, _, bounds, _ = step_args(name, groups)
    return [pool, ckv, kpe, table, np.arange(TOKENS * groups, dtype=np.int32) % 20 - 1, bounds]


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_append(case, kind) -> None:
    skip_if_kinds_mix(kind, case)
    mesh, groups = make_mesh(kind), 2 ** len(axes_of(case["batch"]))
    whole = append_args("ragged", groups)
    parts = zip(
        np.split(whole[0], groups, axis=1), *(np.split(x, groups) for x in whole[1:]), strict=True
    )
    expected = np.concatenate(
        [jax_mla.reference.append(*part, cu_q_lens=b, layer=1) for *part, b in parts], axis=1
    )
    axes = local_roles(mesh, **case)
    fun = jax.jit(
        lambda *args: jax_mla.append(*args[:-1], cu_q_lens=args[-1], layer=1, mesh=axes),
        donate_argnums=0,
    )
    batch = case["batch"]
    with context(mesh, kind):
        pool, *rows = put(whole, mesh, [P(None, batch), *[P(batch)] * 5])
        pool = jnp.copy(pool)
        compiled = fun.lower(pool, *rows).compile()
        before, shard = pointers(pool), pool.addressable_shards[0].data.shape
        got = fun(pool, *rows)
    np.testing.assert_array_equal(got, expected)
    assert collectives(compiled) == []
    assert pointers(got) == before and num_copies(compiled, shard) == 0


# ---- Bad input ---------------------------------------------------------------------------------


def without_last(*places: int):
    return lambda args: [x[:-1] if i in places else x for i, x in enumerate(args)]


def with_bounds(*values: int):
    return lambda args: [*args[:7], np.array(values, np.int32), None]


TOKENS_OF = (0, 1, 2, 3)
EACH = "in each of 2 groups with local pages"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_last(7), f"cu_q_lens: expected shape (10) = sequences in page_table + 1, {EACH}"),
        (without_last(8), "num_seqs: expected shape (2), one number for each group with local"),
        (lambda args: [*args[:8], jnp.int32(3)], "num_seqs: expected shape (2), one number for"),
        (without_last(*TOKENS_OF), "mesh: expected a multiple of 2, the number of groups with lo"),
        (without_last(5, 6), "mesh: expected a multiple of 2, the number of groups with local pa"),
        (
            with_bounds(0, 1, 2, 3, 4, 0, 2, 1, 3, 4),
            "cu_q_lens: expected values that never fall, got 2 followed by 1 at index 7",
        ),
        (
            with_bounds(0, 1, 2, 3, 4, 8, 9, 9, 9, 9),
            "cu_q_lens: expected places among the tokens in [0, 9), got 9",
        ),
    ],
    ids=range(7),
)
def test_refuses(change, message) -> None:
    args = change([jnp.array(x) for x in step_args("ragged", 2)])
    with pytest.raises(ValueError, match="^jax_mla.ragged_paged_attention: " + re.escape(message)):
        call(*args, mesh=local_roles(make_mesh()))


def test_a_number_for_all_groups_is_refused() -> None:
    args = [jnp.array(x) for x in step_args("ragged", 2)[:-1]]
    with pytest.raises(TypeError, match="num_seqs: expected an int32 array of shape .* got int"):
        call(*args, 3, mesh=local_roles(make_mesh()))


def test_append_refuses_bounds_of_one_group() -> None:
    *args, bounds = map(jnp.array, append_args("ragged", 2))
    with pytest.raises(ValueError, match=re.escape("append: cu_q_lens: expected shape (10) = s")):
        jax_mla.append(*args, cu_q_lens=bounds[:9], layer=1, mesh=local_roles(make_mesh()))
