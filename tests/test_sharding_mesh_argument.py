"""The argument `mesh=`: the same communication, and an error where the cache could move."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import (
    ARGS,
    CASES,
    D_CKV,
    D_KPE,
    KINDS,
    B,
    H,
    Q,
    append_args,
    case_id,
    check,
    compile_and_check,
    context,
    decode,
    gather,
    make_mesh,
    merge_of,
    mesh_argument,
    put,
    size_of,
    specs,
)

import jax_mla
from jax_mla.testing.hlo import collectives

pytestmark = pytest.mark.usefixtures("no_rank_promotion")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES[-6:], ids=case_id)
def test_mesh_argument(kind, case) -> None:
    if "mixed" in kind and any(isinstance(axes, tuple) for axes in case.values()):
        pytest.skip("JAX gathers the result if axes of two kinds split one of its dimensions")
    mesh = make_mesh(kind)
    axes = mesh_argument(mesh, **case)
    with context(mesh, kind):
        args = put(ARGS, mesh, specs(**case))
        _, found = compile_and_check(functools.partial(decode, mesh=axes), args)
    b, h = B // size_of(case.get("batch")), H // size_of(case.get("heads"))
    assert found == (merge_of(b, h, size_of(case["pages"])) if case.get("pages") else [])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("axes", "result"),
    [
        ({"batch": "dp", "heads": "dp", "pages": "dp"}, P("dp")),
        ({"batch": ("dp", "tp"), "heads": "tp", "pages": "tp"}, P(("dp", "tp"))),
        (
            {"batch": "dp", "heads": ("tp", "cp"), "pages": ("cp", "dp")},
            P("dp", None, ("tp", "cp")),
        ),
        ({"batch": "dp", "heads": "dp"}, P("dp")),
    ],
    ids=str,
)
def test_mesh_argument_with_an_axis_on_several_dimensions(kind, axes, result) -> None:
    mesh = make_mesh(kind)
    roles = mesh_argument(mesh, **axes)
    with context(mesh, kind):
        out, lse = jax.jit(functools.partial(decode, mesh=roles))(*ARGS)
    check((out, lse))
    if "mixed" not in kind:  # JAX gathers where axes of two kinds split one dimension
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, result), 4)


def test_plain_mesh_argument_uses_the_usual_names() -> None:
    mesh = make_mesh()
    _, found = compile_and_check(
        functools.partial(decode, mesh=mesh), put(ARGS, mesh, specs("dp", "tp", "cp"))
    )
    assert found == merge_of(B // 2, H // 2)
    check(decode(*ARGS, mesh=mesh))  # eager, from one device


@pytest.mark.parametrize("jit", [jax.jit, lambda fun: fun], ids=["jit", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_mesh_argument_outside_set_mesh(kind, jit) -> None:
    """Operands may be sharded as `mesh=` says, be replicated, or have no mesh in their types."""
    mesh = make_mesh(kind)
    roles = jax_mla.MeshAxes(mesh, batch="dp", heads="tp", pages="cp")
    fun = jit(functools.partial(decode, mesh=roles))
    for args in (put(ARGS, mesh, specs("dp", "tp", "cp")), put(ARGS, mesh, specs()), ARGS):
        check(fun(*args))
    fun = jit(functools.partial(jax_mla.append, layer=1, mesh=mesh))
    want = jax_mla.reference.append(*append_args(), layer=1)
    spec = (P(None, "cp"), *(P("dp"),) * 4)
    for args in (put(append_args(), mesh, spec), map(jnp.array, append_args())):
        np.testing.assert_array_equal(fun(*args), want)


@pytest.mark.parametrize("op", ["decode", "append"])
def test_mesh_argument_compiles_once_outside_jit(op) -> None:
    mesh, compiled = make_mesh(), []
    rows = [jnp.array(x) for x in append_args()]

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if "backend_compile" in event:
            compiled.append(duration_secs)

    def call() -> None:
        if op == "decode":
            jax.block_until_ready(decode(*ARGS, mesh=mesh))
        else:
            jax.block_until_ready(jax_mla.append(*rows, layer=1, mesh=mesh))

    call()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x * 2.5)(1.0)
        assert compiled  # the name of the event is still right
        compiled.clear()
        call()
        assert not compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_mesh_argument_never_moves_the_cache() -> None:
    mesh = make_mesh("explicit")
    with jax.set_mesh(mesh):
        args = put(ARGS, mesh, specs("dp", "tp", "tp"))
        with pytest.raises(
            ValueError, match="kv_pages: expected the sharding .*cp.*never moves the cache"
        ):
            decode(*args, mesh=mesh)


@pytest.mark.parametrize("spec", [P(None, "tp"), P(None, None, "cp"), P(None, ("cp", "tp"))])
def test_mesh_argument_outside_jit_never_moves_the_cache(spec) -> None:
    """On Auto axes the types do not say how the cache is sharded, but the array does."""
    mesh = make_mesh()
    args = put(ARGS, mesh, specs("dp", "tp"))
    args[2] = jax.device_put(args[2], NamedSharding(mesh, spec))
    rows = (args[2], *map(jnp.array, append_args()[1:]))
    message = r"kv_pages: expected the sharding .*cp.*never moves the cache"
    with pytest.raises(ValueError, match="jax_mla.decode: " + message):
        decode(*args, mesh=mesh)
    with pytest.raises(ValueError, match="jax_mla.append: " + message):
        jax_mla.append(*rows, layer=1, mesh=mesh)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_mesh_argument_ignores_axes_of_size_1_of_the_cache(kind) -> None:
    mesh = make_mesh(kind, sizes=(2, 1, 2))
    roles = jax_mla.MeshAxes(batch="dp", heads="tp", pages="cp")
    with jax.set_mesh(mesh):
        args = put(ARGS, mesh, specs("dp", "tp", ("tp", "cp")))
        check(decode(*args, mesh=roles))


def test_plain_mesh_argument_without_the_usual_names_is_an_error() -> None:
    """Nothing would be sharded, and the cache would be gathered."""
    mesh = make_mesh(names=("data", "model"), sizes=(2, 4))
    with pytest.raises(ValueError, match=r"mesh: expected an axis named dp, tp or cp.*MeshAxes"):
        decode(*ARGS, mesh=mesh)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_mesh_argument_has_to_be_the_current_mesh(kind) -> None:
    """With other sizes every device would take pages for its own that it does not have."""
    current, other = (make_mesh(kind, ("dp", "cp"), sizes) for sizes in ((2, 4), (4, 2)))
    permuted = make_mesh(kind, ("cp", "dp"), (4, 2))
    message = r"mesh: expected the axes of the current mesh.*'cp': 4.*got a mesh of .*'cp': 2"
    with jax.set_mesh(current):
        args = put(ARGS, current, specs("dp", None, "cp"))
        with pytest.raises(ValueError, match=message):
            decode(*args, mesh=other)
        check(decode(*args, mesh=permuted))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("op", ["decode", "append"])
def test_mesh_argument_has_to_name_every_axis(op, plain) -> None:
    """JAX would gather a cache that is split over an axis without a name, and nobody would know."""
    mesh = make_mesh(names=("dp", "x"), sizes=(2, 4))
    axes = mesh if plain else jax_mla.MeshAxes(mesh, batch="dp")
    message = (
        rf"^jax_mla.{op}: mesh: expected every axis of the mesh named, .* got {{'x': 4}} unnamed; "
        r"say jax_mla.MeshAxes\(batch=..., heads=..., pages=..., replicated=...\)"
    )
    query, _, pool, rows, _ = specs("dp", None, "x")
    if op == "decode":
        fun, args = decode, put(ARGS, mesh, (query, query, pool, rows, rows))
    else:
        fun = functools.partial(jax_mla.append, layer=1)
        args = put(append_args(), mesh, (pool, *(rows,) * 4))
    with pytest.raises(ValueError, match=message):
        jax.jit(functools.partial(fun, mesh=axes)).lower(*args)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("pages", [None, "cp"])
def test_replicated_axes_communicate_nothing(kind, pages) -> None:
    mesh = make_mesh(kind, ("dp", "x", "cp"))
    roles = jax_mla.MeshAxes(mesh, batch="dp", pages="cp", replicated="x")
    spec = specs("dp", None, pages and "cp")
    with context(mesh, kind):
        if pages is None:
            roles = jax_mla.MeshAxes(mesh, batch="dp", replicated=("x", "cp"))
        _, found = compile_and_check(functools.partial(decode, mesh=roles), put(ARGS, mesh, spec))
        assert found == (merge_of(B // 2, H) if pages else [])
        pool, *rows = put(append_args(), mesh, (spec[2], *(P("dp"),) * 4))
        fun = jax.jit(functools.partial(jax_mla.append, layer=1, mesh=roles))
        compiled = fun.lower(pool, *rows).compile()
        assert [c.kind for c in collectives(compiled)] == ["all-gather"]  # of the new rows
        assert collectives(compiled) == [gather(B, Q, D_CKV + D_KPE + 2)]
        want = jax_mla.reference.append(*append_args(), layer=1)
        np.testing.assert_array_equal(compiled(pool, *rows), want)


def test_axes_of_size_1_need_no_name() -> None:
    mesh = make_mesh(names=("dp", "x", "cp"), sizes=(2, 1, 2))
    roles = jax_mla.MeshAxes(mesh, batch="dp", pages="cp")
    args = put(ARGS, mesh, specs("dp", None, ("x", "cp")))
    _, found = compile_and_check(functools.partial(decode, mesh=roles), args)
    assert found == merge_of(B // 2, H)


def test_an_axis_is_either_replicated_or_split() -> None:
    message = r"MeshAxes: replicated: expected axes that split nothing, got \['dp'\], which batch"
    with pytest.raises(ValueError, match=message):
        jax_mla.MeshAxes(batch=("dp", "tp"), replicated="dp")
    message = "MeshAxes: replicated: expected None, the name of an axis"
    with pytest.raises(ValueError, match=message):
        jax_mla.MeshAxes(replicated=["dp"])  # type: ignore[arg-type]
    message = r"mesh: expected replicated over axes of the mesh, .*, got 'x'"
    with pytest.raises(ValueError, match=message):
        decode(*ARGS, mesh=jax_mla.MeshAxes(make_mesh(), batch="dp", replicated="x"))
