"""Local pages: each group has its sequences and its part of the pool, and nothing communicates."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import (
    D_CKV,
    D_KPE,
    KINDS,
    OPTIONS,
    SIZE,
    H,
    L,
    Q,
    check,
    compile_and_check,
    context,
    decode,
    make_mesh,
    mesh_argument,
    put,
    specs,
    step,
)

import jax_mla
from jax_mla._mesh._sharding import axes_of
from jax_mla.testing.hlo import collectives, memory, num_copies, pointers
from jax_mla.testing.inputs import decode_inputs

pytestmark = pytest.mark.usefixtures("no_rank_promotion")

LENS = ((0, 5), (16, 11), (3, 14), (9, 1))  # of the two sequences of each group
CASES = [
    {"batch": "dp"},
    {"batch": "dp", "heads": "tp"},
    {"batch": "dp", "heads": ("tp", "cp")},
    {"batch": ("dp", "cp"), "heads": "tp"},
    {"batch": ("cp", "dp"), "heads": "tp"},
]


def groups_of(case) -> int:
    return 2 ** len(axes_of(case["batch"]))


def local_roles(mesh, *, batch, heads=None) -> jax_mla.MeshAxes:
    return mesh_argument(mesh, batch=batch, heads=heads, local_pages=batch)


@functools.cache
def group_args(group: int) -> tuple[Any, ...]:
    """Return one group's arguments of decode; one of its pages is an id of another group's part."""
    inputs = decode_inputs(
        seq_lens=LENS[group], q_len=Q, num_heads=H, d_ckv=D_CKV, d_kpe=D_KPE, page_size=SIZE,
        dtype="float32", num_layers=L, table_tokens=16, page_multiple=12, seed=group,
    )  # fmt: skip
    q_nope, q_pe, pool, table, lens = map(np.array, inputs.args())
    longest = int(np.argmax(lens))
    table[longest, 0] += pool.shape[1]
    return q_nope, q_pe, pool, table, lens


@functools.cache
def group_rows(group: int) -> tuple[Any, ...]:
    """Return the rest of one group's arguments of append: ckv, kpe, page_table, positions."""
    rng = np.random.default_rng(group)
    _, _, _, table, lens = group_args(group)
    ckv, kpe = (rng.standard_normal((2, Q, d)).astype(np.float32) for d in (D_CKV, D_KPE))
    positions = np.stack([lens - 2, lens - 1], axis=1).astype(np.int32)
    positions[0, 0] = 0  # for the longest sequence of some groups, on the page of another group
    return ckv, kpe, table, positions


@functools.cache
def decode_args(groups: int) -> tuple[Any, ...]:
    """Return all groups' arguments: the pools joined along their pages, the rest by sequence."""
    parts = zip(*map(group_args, range(groups)), strict=True)
    return tuple(np.concatenate(x, axis=1 if i == 2 else 0) for i, x in enumerate(parts))


@functools.cache
def append_args(groups: int) -> tuple[Any, ...]:
    rows = zip(*map(group_rows, range(groups)), strict=True)
    return zeroed(decode_args(groups)[2]), *map(np.concatenate, rows)


def zeroed(pool: np.ndarray) -> Any:
    return np.where(np.isnan(pool), 0, pool)


@functools.cache
def want_decode(groups: int) -> list[np.ndarray]:
    """Return what every group computes by definition, on its own part alone."""
    parts = [jax_mla.reference.decode(*group_args(g), **OPTIONS) for g in range(groups)]
    return [np.concatenate(x) for x in zip(*parts, strict=True)]


@functools.cache
def want_append(groups: int) -> np.ndarray:
    parts = [
        jax_mla.reference.append(zeroed(group_args(g)[2]), *group_rows(g), layer=1)
        for g in range(groups)
    ]
    return np.concatenate(parts, axis=1)


def rows_specs(batch) -> tuple[P, ...]:
    """Return the shardings of the arguments of append."""
    return P(None, batch), P(batch), P(batch), P(batch), P(batch)


def skip_if_kinds_mix(kind, case) -> None:
    if "mixed" in kind and any(isinstance(axes, tuple) for axes in case.values()):
        pytest.skip("JAX gathers the result if axes of two kinds split one of its dimensions")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode(kind, case) -> None:
    skip_if_kinds_mix(kind, case)
    mesh, groups = make_mesh(kind), groups_of(case)
    with context(mesh, kind):
        spec = specs(**case, pages=case["batch"])
        args = put(decode_args(groups), mesh, spec)
        fun = functools.partial(decode, mesh=local_roles(mesh, **case))
        (out, lse), found = compile_and_check(fun, args, want_decode(groups))
    assert found == []
    want = NamedSharding(mesh, spec[0])
    assert out.sharding.is_equivalent_to(want, 4) and lse.sharding.is_equivalent_to(want, 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_append(kind, case) -> None:
    """In place on every device, and no row goes to another."""
    skip_if_kinds_mix(kind, case)
    mesh, groups = make_mesh(kind), groups_of(case)
    spec = rows_specs(case["batch"])
    fun = functools.partial(jax_mla.append, layer=1, mesh=local_roles(mesh, **case))
    fun = jax.jit(fun, donate_argnums=0)
    with context(mesh, kind):
        pool, *rows = put(append_args(groups), mesh, spec)
        pool = jax.jit(lambda x: x + 0)(pool)  # not the host's memory
        compiled = fun.lower(pool, *rows).compile()
        before, shard = pointers(pool), pool.addressable_shards[0].data.shape
        got = fun(pool, *rows)
    np.testing.assert_array_equal(got, want_append(groups))
    assert collectives(compiled) == []
    assert pointers(got) == before and num_copies(compiled, shard) == 0
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec[0]), 4)


def test_global_page_ids_mean_something_else() -> None:
    """Otherwise the tests above would pass without local pages."""
    mesh = make_mesh()
    axes = mesh_argument(mesh, batch="dp", pages="dp")
    out, _ = jax.jit(functools.partial(decode, mesh=axes))(*decode_args(2))
    assert not np.allclose(out, want_decode(2)[0], atol=1e-3)
    pool = jax_mla.append(*map(jnp.array, append_args(2)), layer=1, mesh=axes)
    assert not np.allclose(pool, want_append(2), atol=1e-3)


@pytest.mark.parametrize("layers", ["stacked", "plain"])
@pytest.mark.parametrize("name", ["reference", None])
def test_split_pools_rank_3_and_backends(layers, name) -> None:
    mesh = make_mesh()
    axes = local_roles(mesh, batch="dp", heads="tp")
    pool_spec, index = (P(None, "dp"), 1) if layers == "stacked" else (P("dp"), None)

    def operands(args):
        q_nope, q_pe, pool, table, lens = args
        pool = pool if layers == "stacked" else pool[1]
        return q_nope[:, 0], q_pe[:, 0], pool[..., :D_CKV], pool[..., D_CKV:], table, lens

    def fun(q_nope, q_pe, ckv, kpe, table, lens, op=jax_mla.decode, **kwargs):
        return op(
            q_nope, q_pe, (ckv, kpe), table, lens,
            sm_scale=OPTIONS["sm_scale"], layer=index, return_lse=True, **kwargs,
        )  # fmt: skip

    spec = P("dp", "tp"), P("dp", "tp"), pool_spec, pool_spec, P("dp"), P("dp")
    args = put(operands(decode_args(2)), mesh, spec)
    reference = functools.partial(fun, op=jax_mla.reference.decode)
    parts = [reference(*map(jnp.array, operands(group_args(g)))) for g in range(2)]
    want = [np.concatenate(x) for x in zip(*parts, strict=True)]
    _, found = compile_and_check(functools.partial(fun, mesh=axes, backend=name), args, want)
    assert found == []

    pool, *rows = append_args(2)
    pool = pool if layers == "stacked" else pool[1]
    cache = tuple(put((pool[..., :D_CKV], pool[..., D_CKV:]), mesh, (pool_spec,) * 2))
    rows = put(rows, mesh, (P("dp"),) * 4)
    fun = jax.jit(functools.partial(jax_mla.append, layer=index, mesh=axes, backend=name))
    compiled = fun.lower(cache, *rows).compile()
    got = np.concatenate(compiled(cache, *rows), axis=-1)
    want_pool = want_append(2) if layers == "stacked" else want_append(2)[1]
    np.testing.assert_array_equal(got, want_pool)
    assert collectives(compiled) == []


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_scan_over_layers_in_place(kind) -> None:
    """A decode step of an engine: no collective and no copy of the pool."""
    parts = []
    for group in range(2):
        q_nope, q_pe, pool, *others = group_args(group)
        ckv, kpe, _, positions = group_rows(group)
        arrays = q_nope, q_pe, zeroed(pool), *others, ckv, kpe, positions
        parts.append(step(*map(jnp.asarray, arrays), ops=jax_mla.reference))
    (q_0, pool_0), (q_1, pool_1) = parts
    want = [np.concatenate([q_0, q_1]), np.concatenate([pool_0, pool_1], axis=1)]

    mesh = make_mesh(kind)
    q_nope, q_pe, _, table, lens = decode_args(2)
    pool, ckv, kpe, _, positions = append_args(2)
    arrays = q_nope, q_pe, pool, table, lens, ckv, kpe, positions
    spec = *specs("dp", "tp", "dp"), *(P("dp"),) * 3
    with context(mesh, kind):
        args = put(arrays, mesh, spec)
        args[2] = jax.jit(lambda x: x + 0)(args[2])  # not the host's memory
        axes = local_roles(mesh, batch="dp", heads="tp")
        jitted = jax.jit(functools.partial(step, mesh=axes), donate_argnums=2)
        compiled = jitted.lower(*args).compile()
        before, shard = pointers(args[2]), args[2].addressable_shards[0].data
        got = jitted(*args)
    check(got, want)
    assert collectives(compiled) == []
    assert pointers(got[1]) == before
    assert num_copies(compiled, shard.shape) == num_copies(compiled, shard.shape[1:]) == 0
    assert memory(compiled).alias_size_in_bytes == shard.nbytes


@pytest.mark.parametrize("in_axes", [(0, 0, None, None, None), (0, 0, None, 0, 0), (0, 0, 0, 0, 0)])
@pytest.mark.parametrize("over", [None, "cp"])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_vmap_of_decode(kind, over, in_axes) -> None:
    mesh = make_mesh(kind)
    axes = local_roles(mesh, batch="dp", heads="tp")
    spec = specs("dp", "tp", "dp")
    args = [
        x if d is None else np.stack([x, x])
        for x, d in zip(decode_args(2), in_axes, strict=True)
    ]  # fmt: skip
    spec = [s if d is None else P(over, *s) for s, d in zip(spec, in_axes, strict=True)]
    name = over if kind == "auto" else None  # Explicit types say it
    fun = jax.vmap(functools.partial(decode, mesh=axes), in_axes, spmd_axis_name=name)
    want = [np.stack([x, x]) for x in want_decode(2)]
    with context(mesh, kind):
        _, found = compile_and_check(fun, put(args, mesh, spec), want)
    if over is None or kind == "auto" or jax.__version_info__ >= (0, 11):
        assert found == []  # jax 0.10 gathers for any such shard_map on Explicit axes


@pytest.mark.parametrize("over", [None, "cp"])
def test_vmap_of_append(over) -> None:
    mesh = make_mesh()
    axes = local_roles(mesh, batch="dp")
    args = [np.stack([x, x]) for x in append_args(2)]
    args = put(args, mesh, [P(over, *s) for s in rows_specs("dp")])
    fun = functools.partial(jax_mla.append, layer=1, mesh=axes)
    compiled = jax.jit(jax.vmap(fun, spmd_axis_name=over)).lower(*args).compile()
    np.testing.assert_array_equal(compiled(*args), np.stack([want_append(2)] * 2))
    assert collectives(compiled) == []


@pytest.mark.parametrize("mesh_argument_inside", [False, True])
@pytest.mark.parametrize("op", ["decode", "append"])
def test_manual_regions(op, mesh_argument_inside) -> None:
    """Manual over the groups, it is simply the local call; over the heads only, mesh= says it."""
    mesh = make_mesh()
    if op == "decode":
        args, want = put(decode_args(2), mesh, specs("dp", "tp", "dp")), want_decode(2)
        fun, heads = decode, P(None, None, "tp")
        spec = specs("dp", "tp", "dp")
    else:
        args, want = put(append_args(2), mesh, rows_specs("dp")), [want_append(2)]
        fun, heads = functools.partial(jax_mla.append, layer=1), P()
        spec = rows_specs("dp")
    if mesh_argument_inside:
        axes = jax_mla.MeshAxes(batch="dp", local_pages="dp", replicated="cp")
        in_specs = tuple(heads if i < 2 else P() for i in range(5)) if op == "decode" else P()
        fun = jax.shard_map(
            functools.partial(fun, mesh=axes),
            mesh=mesh, axis_names={"tp"}, in_specs=in_specs, out_specs=heads,
        )  # fmt: skip
    else:
        fun = jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=spec[0])
    _, found = compile_and_check(lambda *args: jax.tree.leaves(fun(*args)), args, want)
    assert found == []


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_page_begin_counts_in_every_part(kind) -> None:
    """Each device runs the local call with `page_begin` as it is."""
    mesh = make_mesh(kind)
    axes = local_roles(mesh, batch="dp", heads="tp")
    begin = 1000
    q_nope, q_pe, pool, table, lens = decode_args(2)
    is_id = (table >= 0) & (table < pool.shape[1])
    table = np.where(is_id, table + begin, table)
    with context(mesh, kind):
        args = put((q_nope, q_pe, pool, table, lens), mesh, specs("dp", "tp", "dp"))
        fun = functools.partial(decode, mesh=axes, page_begin=begin)
        _, found = compile_and_check(fun, args, want_decode(2))
        assert found == []
        pool, ckv, kpe, _, positions = append_args(2)
        rows = put((pool, ckv, kpe, table, positions), mesh, rows_specs("dp"))
        got = jax_mla.append(*rows, layer=1, mesh=axes, page_begin=begin)
    np.testing.assert_array_equal(got, want_append(2))


@pytest.mark.parametrize("jit", [jax.jit, lambda fun: fun], ids=["jit", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_operands_may_be_anywhere(kind, jit) -> None:
    """The parts of the pool are parts of the array, however it is sharded when it comes."""
    mesh = make_mesh(kind)
    axes = local_roles(mesh, batch="dp", heads="tp")
    fun = jit(functools.partial(decode, mesh=axes))
    append = jit(functools.partial(jax_mla.append, layer=1, mesh=axes))
    for args, rows in (
        (put(decode_args(2), mesh, specs("dp", "tp", "dp")),
         put(append_args(2), mesh, rows_specs("dp"))),
        (put(decode_args(2), mesh, specs()), put(append_args(2), mesh, (P(),) * 5)),
        (map(jnp.array, decode_args(2)), map(jnp.array, append_args(2))),
    ):  # fmt: skip
        check(fun(*args), want_decode(2))
        np.testing.assert_array_equal(append(*rows), want_append(2))


def test_a_pool_that_the_compiler_finds_elsewhere_is_moved() -> None:
    """As with any `mesh=`: under jit on Auto axes only the compiler sees the sharding."""
    mesh = make_mesh()
    args = put(decode_args(2), mesh, specs("dp", "tp", "cp"))
    fun = functools.partial(decode, mesh=local_roles(mesh, batch="dp", heads="tp"))
    compile_and_check(fun, args, want_decode(2))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("pages", ["cp", ("dp", "cp")])
def test_a_pool_known_to_be_elsewhere_is_an_error(kind, pages) -> None:
    mesh = make_mesh(kind)
    axes = local_roles(mesh, batch="dp", heads="tp")
    message = "kv_pages: expected the sharding that mesh= says, .*'dp'.*, got .*'cp'.*never moves"
    with context(mesh, kind):
        args = put(decode_args(2), mesh, specs("dp", "tp", pages))
        with pytest.raises(ValueError, match="jax_mla.decode: " + message):
            decode(*args, mesh=axes)
        rows = put(append_args(2), mesh, (P(None, pages), *(P("dp"),) * 4))
        with pytest.raises(ValueError, match="jax_mla.append: " + message):
            jax_mla.append(*rows, layer=1, mesh=axes)


def test_axes_of_size_1() -> None:
    """One group: page ids are those of the whole pool."""
    mesh = make_mesh(sizes=(1, 2, 1))
    axes = jax_mla.MeshAxes(mesh, batch="dp", heads="tp", local_pages="dp")
    args = put(group_args(1), mesh, specs("dp", "tp", ("dp", "cp")))
    _, found = compile_and_check(functools.partial(decode, mesh=axes), args, want_one())
    assert found == []
    pool, *rows = zeroed(group_args(1)[2]), *group_rows(1)
    got = jax_mla.append(jnp.array(pool), *map(jnp.array, rows), layer=1, mesh=axes)
    np.testing.assert_array_equal(got, jax_mla.reference.append(pool, *rows, layer=1))


def want_one() -> list[np.ndarray]:
    return [np.asarray(x) for x in jax_mla.reference.decode(*group_args(1), **OPTIONS)]


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"local_pages": "dp"}, "local_pages: expected the axes of batch in the same order, [],"),
        (
            {"batch": "dp", "local_pages": "cp"},
            "local_pages: expected the axes of batch in the same order, ['dp'], because a group "
            "owns its sequences and its pages, got ['cp']",
        ),
        (
            {"batch": ("dp", "cp"), "local_pages": ("cp", "dp")},
            "local_pages: expected the axes of batch in the same order, ['dp', 'cp'],",
        ),
        (
            {"batch": ("dp", "cp"), "local_pages": "dp"},
            "local_pages: expected the axes of batch in the same order, ['dp', 'cp'],",
        ),
        (
            {"batch": "dp", "local_pages": "dp", "pages": "cp"},
            "pages: expected None, because the pages are split over local_pages, ['dp'], got 'cp'",
        ),
        (
            {"batch": "dp", "local_pages": "dp", "pages": "dp"},
            "pages: expected None, because the pages are split over local_pages, ['dp'], got 'dp'",
        ),
        (
            {"batch": "dp", "local_pages": "dp", "heads": ("tp", "dp")},
            "heads: expected axes that local_pages does not name, got ['dp']",
        ),
        (
            {"batch": "dp", "local_pages": "dp", "replicated": "dp"},
            "replicated: expected axes that split nothing, got ['dp']",
        ),
        (
            {"batch": "dp", "local_pages": ["dp"]},
            "local_pages: expected None, the name of an axis or a tuple of different ones, got",
        ),
    ],
    ids=str,
)
def test_roles_that_contradict_each_other(roles, message) -> None:
    with pytest.raises(ValueError, match="^jax_mla.MeshAxes: " + re.escape(message)):
        jax_mla.MeshAxes(**roles)


@pytest.mark.parametrize("op", ["decode", "append"])
@pytest.mark.parametrize("what", ["pages", "sequences"])
def test_sizes_that_the_groups_do_not_divide(op, what) -> None:
    mesh = make_mesh(names=("dp", "tp"), sizes=(4, 2))
    axes = jax_mla.MeshAxes(mesh, batch="dp", heads="tp", local_pages="dp")
    q_nope, q_pe, pool, table, lens = map(jnp.array, decode_args(4))
    _, ckv, kpe, _, positions = map(jnp.array, append_args(4))
    if what == "pages":
        pool = pool[:, :-1]
        factor, size = "pages", pool.shape[1]
    else:
        q_nope, q_pe, table, lens, ckv, kpe, positions = (
            x[:-1] for x in (q_nope, q_pe, table, lens, ckv, kpe, positions)
        )
        factor, size = "batch" if op == "decode" else "rows", len(lens)
    message = (
        f"^jax_mla.{op}: mesh: expected {factor} to be a multiple of 4, the number of devices "
        rf"along \['dp'\], got {size}; local_pages gives every group as many"
    )
    with pytest.raises(ValueError, match=message):
        if op == "decode":
            decode(q_nope, q_pe, pool, table, lens, mesh=axes)
        else:
            jax_mla.append(pool, ckv, kpe, table, positions, layer=1, mesh=axes)


def test_axes_that_are_manual_or_missing() -> None:
    mesh = make_mesh()
    axes = jax_mla.MeshAxes(batch="dp", local_pages="dp")
    fun = jax.shard_map(
        functools.partial(decode, mesh=axes), mesh=mesh, in_specs=P(), out_specs=P()
    )
    with pytest.raises(ValueError, match="decode: mesh: expected batch over axes that are not man"):
        fun(*decode_args(2))
    axes = jax_mla.MeshAxes(mesh, batch="x", local_pages="x")
    with pytest.raises(ValueError, match="decode: mesh: expected batch over axes of the mesh.*'x'"):
        decode(*decode_args(2), mesh=axes)
