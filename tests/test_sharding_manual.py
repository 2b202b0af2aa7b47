"""Calls inside `shard_map`: fully manual, and manual over some of the axes."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import (
    ARGS,
    B,
    H,
    append_args,
    compile_and_check,
    context,
    decode,
    make_mesh,
    merge_of,
    put,
    reference,
    specs,
)

import jax_mla

pytestmark = pytest.mark.usefixtures("no_rank_promotion")


def manual(*args):
    begin = jax.lax.axis_index("cp") * args[2].shape[1]
    return jax_mla.merge(*decode(*args, page_begin=begin), axis_name="cp")


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_manual_region(kind, check_vma) -> None:
    mesh = make_mesh(kind)
    in_specs = specs("dp", "tp", "cp")
    fun = jax.shard_map(
        manual, mesh=mesh, in_specs=in_specs, out_specs=(in_specs[0],) * 2, check_vma=check_vma
    )
    with context(mesh, kind):
        _, found = compile_and_check(fun, put(ARGS, mesh, in_specs))
    assert found == merge_of(B // 2, H // 2)


@pytest.mark.parametrize("names", [("x",), ("dp", "cp")])
@pytest.mark.parametrize("op", ["decode", "append"])
def test_manual_region_on_one_device_beside_another_mesh(op, names) -> None:
    """The call must not fix the program's mesh, as it would if it asked for the device list."""
    here, there = make_mesh(names=names, sizes=(1,) * len(names)), make_mesh(sizes=(1, 1, 1))
    if op == "decode":
        fun, args, want = decode, ARGS, reference()
    else:
        fun = functools.partial(jax_mla.append, layer=1)
        args, want = append_args(), [fun(*map(jnp.array, append_args()))]
    local = jax.shard_map(fun, mesh=here, in_specs=P(), out_specs=P())

    def both(*args):
        there_spec = NamedSharding(there, P(None, "dp"))
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, there_spec), local(*args))

    _, found = compile_and_check(
        lambda *args: jax.tree.leaves(both(*args)), [jnp.array(x) for x in args], want
    )
    assert found == []


def test_manual_region_checks_that_parts_are_merged() -> None:
    """Partial results are not replicated, and the types know it."""
    mesh = make_mesh()
    in_specs = specs("dp", "tp", "cp")
    fun = jax.shard_map(decode, mesh=mesh, in_specs=in_specs, out_specs=(in_specs[0],) * 2)
    with pytest.raises(ValueError, match="replicated across mesh axis 'cp'"):
        jax.jit(fun)(*put(ARGS, mesh, in_specs))


def test_mesh_argument_over_manual_axes_is_an_error() -> None:
    """In a `shard_map` over all axes the operands are one device's blocks already."""
    mesh = make_mesh()
    fun = jax.shard_map(
        functools.partial(decode, mesh=mesh), mesh=mesh, in_specs=P(), out_specs=P()
    )
    message = r"mesh: expected batch over axes that are not manual, \[\], got 'dp': a shard_map has"
    with pytest.raises(ValueError, match=message):
        fun(*ARGS)


PARTLY = {"axis_names": {"cp"}, "in_specs": (P(), P(), P(None, "cp"), P(), P()), "out_specs": P()}


@pytest.mark.parametrize("set_mesh", [False, True])
def test_partly_manual_is_refused_with_the_way_out(set_mesh) -> None:
    mesh = make_mesh()
    args = put(ARGS, mesh, specs("dp", "tp", "cp"))
    with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        fun = jax.jit(jax.shard_map(manual, mesh=mesh, **PARTLY))
        message = r"manual axes \{cp\} and auto axes \{dp, tp\}.*mesh=jax_mla.MeshAxes"
        with pytest.raises(ValueError, match=message):
            fun.lower(*args)


def test_partly_manual_over_an_axis_of_size_1_is_refused() -> None:
    """The compiler could not tell how the operands are sharded over dp."""
    mesh = make_mesh(names=("cp", "dp"), sizes=(1, 2))
    fun = jax.shard_map(decode, mesh=mesh, axis_names={"cp"}, in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match=r"manual axes \{cp\} and auto axes \{dp\}"):
        jax.jit(fun).lower(*put(ARGS, mesh, specs("dp")))
    axes = jax_mla.MeshAxes(batch="dp")
    fun = jax.shard_map(
        functools.partial(decode, mesh=axes),
        mesh=mesh, axis_names={"cp"}, in_specs=P(), out_specs=P(),
    )  # fmt: skip
    _, found = compile_and_check(fun, put(ARGS, mesh, specs("dp")))
    assert found == []


@pytest.mark.parametrize("check_vma", [True, False])
def test_partly_manual_with_mesh_argument(check_vma) -> None:
    mesh = make_mesh()

    def fun(*args):
        begin = jax.lax.axis_index("cp") * args[2].shape[1]
        axes = jax_mla.MeshAxes(batch="dp", heads="tp")
        return jax_mla.merge(*decode(*args, page_begin=begin, mesh=axes), axis_name="cp")

    partly = jax.shard_map(fun, mesh=mesh, check_vma=check_vma, **PARTLY)
    _, found = compile_and_check(partly, put(ARGS, mesh, specs("dp", "tp", "cp")))
    assert found == merge_of(B // 2, H // 2)


def test_partly_manual_with_the_rest_explicit() -> None:
    mesh = make_mesh("explicit")
    with jax.set_mesh(mesh):
        args = put(ARGS, mesh, specs("dp", "tp", "cp"))
        _, found = compile_and_check(jax.shard_map(manual, **PARTLY), args)
    reduces = [c for c in found if c.kind == "all-reduce"]
    assert reduces == merge_of(B // 2, H // 2)
    if jax.__version_info__ >= (0, 11):  # 0.10 gathers at the border of any such region
        assert found == reduces
