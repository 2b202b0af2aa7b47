"""Sharded calls under scan, vmap, ahead-of-time compilation, and outside jit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharded import (
    ARGS,
    KINDS,
    OPTIONS,
    B,
    H,
    append_args,
    check,
    compile_and_check,
    context,
    decode,
    make_mesh,
    merge_of,
    mesh_argument,
    put,
    reference,
    specs,
    step,
)

import jax_mla
from jax_mla.testing.hlo import collectives, memory, num_copies, pointers

pytestmark = pytest.mark.usefixtures("no_rank_promotion")


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", [*KINDS, "mesh"])
@pytest.mark.parametrize(
    ("batch", "heads", "pages"),
    [(None, "tp", "cp"), ("dp", "tp", "cp"), ("dp", "tp", None), (None, "tp", "tp")],
)
def test_scan_over_layers_in_place(kind, batch, heads, pages) -> None:
    pool, ckv, kpe, table, positions = append_args()
    arrays = (*ARGS[:2], pool, table, ARGS[4], ckv, kpe, positions)
    spec = (*specs(batch, heads, pages), P(batch), P(batch), P(batch))
    want = step(*map(jnp.asarray, arrays), ops=jax_mla.reference)
    mesh = make_mesh("auto" if kind == "mesh" else kind)
    axes = mesh_argument(mesh, batch=batch, heads=heads, pages=pages)
    fun = functools.partial(step, **({"mesh": axes} if kind == "mesh" else {}))
    with context(mesh, "auto" if kind == "mesh" else kind):
        args = put(arrays, mesh, spec)
        args[2] = jax.jit(lambda x: x + 0)(args[2])  # not the host's memory
        jitted = jax.jit(fun, donate_argnums=2)
        compiled = jitted.lower(*args).compile()
        before, shard = pointers(args[2]), args[2].addressable_shards[0].data
        q, pool = jitted(*args)
    check((q, pool), [np.asarray(x) for x in want])
    assert pointers(pool) == before
    assert num_copies(compiled, shard.shape) == num_copies(compiled, shard.shape[1:]) == 0
    assert memory(compiled).alias_size_in_bytes == shard.nbytes
    cache_shapes = {shard.shape[i:] for i in (0, 1)} | {pool.shape[i:] for i in (0, 1)}
    found = collectives(compiled)
    assert not any(cache_shapes & set(c.shapes) for c in found)
    reduces = 2 if pages else 0
    gathers = (1 if batch else 0) + (2 if pages == heads else 0)
    assert len(found) == reduces + gathers


VMAPS = [
    # in_axes, then the axes that split the mapped dimension, the batch and the pages
    ("query", (0, 0, None, None, None), "cp", "dp", None),
    ("query, merged", (0, 0, None, None, None), None, "dp", "cp"),
    ("sequences", (0, 0, None, 0, 0), None, "dp", None),
    ("sequences, mapped axis sharded", (0, 0, None, 0, 0), "dp", None, None),
    ("pools, mapped axis sharded", (0, 0, 0, 0, 0), "dp", None, None),
    ("pools, mapped axis sharded, merged", (0, 0, 0, 0, 0), "dp", None, "cp"),
    ("pools", (None, None, 0, None, None), None, "dp", None),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize(
    ("in_axes", "mapped", "batch", "pages"), [v[1:] for v in VMAPS], ids=[v[0] for v in VMAPS]
)
def test_vmap_adds_no_collective(kind, in_axes, mapped, batch, pages) -> None:
    mesh = make_mesh(kind)
    stacked = [
        x if d is None else jnp.stack([x, x * 1]) for x, d in zip(ARGS, in_axes, strict=True)
    ]
    spec = [
        s if d is None else P(mapped, *s)
        for s, d in zip(specs(batch, "tp", pages), in_axes, strict=True)
    ]
    want = jax.vmap(
        functools.partial(jax_mla.reference.decode, **OPTIONS), in_axes=in_axes
    )(*stacked)  # fmt: skip
    with context(mesh, kind):
        _, found = compile_and_check(
            jax.vmap(decode, in_axes=in_axes),
            put(stacked, mesh, spec),
            [np.asarray(x) for x in want],
        )
    assert [c.kind for c in found] == (["all-reduce"] * 2 if pages else [])


@pytest.mark.parametrize("in_axes", [(0, 0, None, None, None), (0, 0, None, 0, 0), (0, 0, 0, 0, 0)])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_vmap_over_a_sharded_axis_with_mesh_argument(kind, in_axes) -> None:
    """Explicit types name the axis of the mapped dimension, `spmd_axis_name=` does on Auto axes."""
    mesh = make_mesh(kind)
    roles = jax_mla.MeshAxes(mesh, heads="tp", pages="cp", replicated="dp")
    stacked = [
        x if d is None else jnp.stack([x, x * 1]) for x, d in zip(ARGS, in_axes, strict=True)
    ]
    spec = [
        s if d is None else P("dp", *s)
        for s, d in zip(specs(None, "tp", "cp"), in_axes, strict=True)
    ]
    over = "dp" if kind == "auto" else None
    fun = jax.vmap(functools.partial(decode, mesh=roles), in_axes, spmd_axis_name=over)
    want = [np.stack([x, x]) for x in reference()]
    with context(mesh, kind):
        _, found = compile_and_check(fun, put(stacked, mesh, spec), want)
    if kind == "auto" or jax.__version_info__ >= (0, 11):  # 0.10 gathers for any such shard_map
        assert [c.kind for c in found] == ["all-reduce"] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_eager_and_aot(kind) -> None:
    mesh = make_mesh(kind)
    with context(mesh, kind):
        args = put(ARGS, mesh, specs("dp", "tp", "cp"))
        check(decode(*args))
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in args]
        compiled = jax.jit(decode).lower(*structs).compile()
        check(compiled(*args))
        pool, *rows = append_args()
        pool, *rows = put((pool, *rows), mesh, (P(None, "cp"), *(P("dp"),) * 4))
        got = jax_mla.append(pool, *rows, layer=1)
        np.testing.assert_array_equal(got, jax_mla.reference.append(*append_args(), layer=1))
        assert not pool.is_deleted()
    assert collectives(compiled) == merge_of(B // 2, H // 2)
