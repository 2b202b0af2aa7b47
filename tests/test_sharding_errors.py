"""Shardings that cannot be served, and types that are not values or not on one mesh."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import (
    ARGS,
    D_CKV,
    KINDS,
    B,
    H,
    append_args,
    check,
    compile_and_check,
    context,
    decode,
    make_mesh,
    merge_of,
    put,
    specs,
)

import jax_mla

pytestmark = pytest.mark.usefixtures("no_rank_promotion")


@pytest.mark.parametrize(
    ("spec", "dimension"),
    [
        (P(None, None, None, "cp"), "last"),
        (P(None, None, "cp"), "page_size"),
        (P("cp"), "layers"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["decode", "append"])
def test_cache_sharded_elsewhere_is_an_error(kind, spec, dimension, op) -> None:
    """While tracing if the types show it, otherwise while compiling."""
    mesh = make_mesh(kind)
    message = (
        rf"jax_mla.{op}: kv_pages: expected only its num_pages dimension sharded, got its "
        rf"{dimension} dimension sharded over \['cp'\]; shard the cache over pages"
    )
    error = ValueError if "auto" not in kind and "dp" not in kind else jax.errors.JaxRuntimeError
    with context(mesh, kind):
        q_nope, q_pe, pool, table, lens = put(ARGS, mesh, specs())
        pool = jax.device_put(jnp.array(ARGS[2]), NamedSharding(mesh, spec))
        if op == "decode":
            lowered = lambda: jax.jit(decode).lower(q_nope, q_pe, pool, table, lens)  # noqa: E731
        else:
            rows = put(append_args()[1:], mesh, (P(),) * 4)
            lowered = lambda: jax.jit(  # noqa: E731
                functools.partial(jax_mla.append, layer=0)
            ).lower(pool, *rows)
        if error is ValueError:
            with pytest.raises(ValueError, match=message):
                lowered()
        else:
            with pytest.raises(error, match=message):
                lowered().compile()


@pytest.mark.parametrize(
    ("spec", "dimension"),
    [(P(None, None, None, "cp"), "last"), (P(None, None, "cp"), "page_size"), (P("cp"), "layers")],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["decode", "append"])
def test_cache_sharded_elsewhere_is_an_error_outside_jit(kind, spec, dimension, op) -> None:
    """The array says how it is sharded, so nothing is compiled and the message is short."""
    mesh = make_mesh(kind)
    with context(mesh, kind):
        q_nope, q_pe, _, table, lens = put(ARGS, mesh, specs())
        pool = jax.device_put(jnp.array(ARGS[2]), NamedSharding(mesh, spec))
        rows = put(append_args()[1:], mesh, (P(),) * 4)
        with pytest.raises(ValueError) as error:
            if op == "decode":
                decode(q_nope, q_pe, pool, table, lens)
            else:
                jax_mla.append(pool, *rows, layer=0)
    assert re.match(
        rf"jax_mla.{op}: kv_pages: expected only its num_pages dimension sharded, got its "
        rf"{dimension} dimension sharded over \['cp'\]; shard the cache over pages",
        str(error.value),
    )
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_second_pool_sharded_otherwise_is_an_error(kind) -> None:
    mesh = make_mesh(kind)
    q_nope, q_pe, pool, table, lens = ARGS
    with context(mesh, kind):
        q_nope, q_pe, table, lens = put((q_nope, q_pe, table, lens), mesh, (P(),) * 4)
        pools = put((pool[..., :D_CKV], pool[..., D_CKV:]), mesh, (P(None, "cp"), P(None, "tp")))
        message = (
            r"kv_pages\[1\]: expected its pages dimension sharded over \['cp'\] as in "
            r"kv_pages\[0\], got \['tp'\]"
        )
        with pytest.raises(ValueError, match=message):
            decode(q_nope, q_pe, tuple(pools), table, lens)
        error = ValueError if kind == "explicit" else jax.errors.JaxRuntimeError
        with pytest.raises(error, match=message):
            jax.jit(decode).lower(q_nope, q_pe, tuple(pools), table, lens).compile()


def test_explicit_operands_that_disagree_are_an_error() -> None:
    mesh = make_mesh("explicit")
    spec = list(specs("dp", None, None))
    spec[3] = P("tp")
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"page_table: expected its batch sharded over \['dp'\]"),
    ):
        jax.jit(decode).lower(*put(ARGS, mesh, spec))


@pytest.mark.parametrize("region", ["explicit", "manual"])
def test_unreduced_operand_is_an_error(region) -> None:
    """Attention to a sum is not the sum of the attentions to its terms."""
    mesh = make_mesh("explicit", ("tp",), (8,))
    q_nope, *rest = ARGS

    def explicit(x, w, *rest):
        out = P(None, None, None, None, unreduced=frozenset({"tp"}))
        return decode(jnp.einsum("bqhi,id->bqhd", x, w, out_sharding=out), *rest)

    def local(x, w, *rest):
        out = jax.lax.pcast(jnp.einsum("bqhi,id->bqhd", x, w), "tp", to="unreduced")
        return decode(out, *rest)

    in_specs = (P(None, None, None, "tp"), P("tp"), *specs()[1:])
    fun = (
        explicit if region == "explicit" else jax.shard_map(local, in_specs=in_specs, out_specs=P())
    )
    message = r"jax_mla.decode: q_nope: expected a value, got one that is unreduced over \['tp'\]"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        jax.jit(fun).lower(*put((q_nope, np.eye(D_CKV, dtype=np.float32), *rest), mesh, in_specs))


@pytest.mark.quick(1)
@pytest.mark.parametrize("mesh_argument", [False, True])
@pytest.mark.parametrize("operand", range(5))
def test_reduced_operand_is_a_replicated_one(operand, mesh_argument) -> None:
    mesh = make_mesh("explicit")
    spec = list(specs("dp", None, "cp"))
    axes = jax_mla.MeshAxes(batch="dp", pages="cp", replicated="tp")
    kwargs = {"mesh": axes} if mesh_argument else {}
    with jax.set_mesh(mesh):
        args = put(ARGS, mesh, spec)
        typed = P(*spec[operand], reduced=frozenset({"tp"}))
        args[operand] = jax.sharding.reshard(args[operand], typed)
        assert jax.typeof(args[operand]).sharding.spec.reduced
        (out, _), found = compile_and_check(functools.partial(decode, **kwargs), args)
        check(decode(*args, **kwargs))
        assert jax.typeof(out).sharding == NamedSharding(
            mesh.abstract_mesh, P("dp", None, None, None)
        )
    assert found == merge_of(B // 2, H)


def test_a_mesh_without_devices_is_an_error_for_arrays_without_a_mesh() -> None:
    mesh = make_mesh("auto")
    with pytest.raises(ValueError, match="^jax_mla.decode: mesh: expected a Mesh, or arrays that"):
        decode(*ARGS, mesh=mesh.abstract_mesh)
    check(decode(*put(ARGS, mesh, specs("dp", "tp")), mesh=mesh.abstract_mesh))


def test_operands_on_two_explicit_meshes_are_an_error() -> None:
    one, other = make_mesh("explicit"), make_mesh("explicit", ("x",), (8,))
    args = put(ARGS, one, specs("dp", "tp"))
    args[2] = jax.device_put(jnp.array(ARGS[2]), NamedSharding(other, P(None, "x")))
    message = r"kv_pages: expected an array on the mesh of q_nope, .*'dp': 2.*got one on .*'x': 8"
    with pytest.raises(ValueError, match=message):
        decode(*args)
