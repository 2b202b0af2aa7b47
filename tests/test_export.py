"""jax.export and the persistent compilation cache, each checked in a new process."""

import functools
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mla
from jax_mla._runtime import _ffi
from jax_mla.testing.inputs import decode_inputs
from jax_mla.testing.run import cpu_mesh

pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")

PROGRAMS = pathlib.Path(__file__).parent / "programs"
CHECKS = [
    export.DisabledSafetyCheck.custom_call(name) for name in ("jax_mla_decode", "jax_mla_append")
]
CPU = {"platforms": ("cpu",), "disabled_checks": CHECKS}
INPUTS = decode_inputs(
    seq_lens=(0, 5, 16, 11), num_heads=4, d_ckv=256, d_kpe=32, page_size=4, dtype="bfloat16",
    page_multiple=8,
)  # fmt: skip
SPECS = (P("dp", None, "tp"), P("dp", None, "tp"), P("cp"), P("dp"), P("dp"))


def step(q_nope, q_pe, pool, table, lens, **kwargs):
    """Append one token to every sequence, then decode."""
    ckv, kpe = (
        (jnp.ones((1, 1, d)) * lens[:, None, None] / 8).astype(pool.dtype) for d in (256, 32)
    )
    pool = jax_mla.append(pool, ckv, kpe, table, (lens - 1)[:, None], **kwargs)
    out, lse = jax_mla.decode(
        q_nope, q_pe, pool, table, lens, sm_scale=0.1, return_lse=True, **kwargs
    )
    return out, lse, pool


def arguments(mesh=None):
    args = [jnp.array(x) for x in INPUTS.args()]
    if mesh is None:
        return args
    return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, SPECS, strict=True)]


def make_mesh(kind: AxisType):
    return cpu_mesh((2, 2, 2), ("dp", "tp", "cp"), (kind,) * 3)


def child(program: str, *args: str) -> str:
    """Run one of tests/programs in a new process with 8 CPU devices; return what it prints."""
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    # -P: the source tree may have no extension, so it must not come before the package.
    command = [sys.executable, "-P", str(PROGRAMS / program), *args]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def bits(x) -> np.ndarray:
    """Return bfloat16 as integers, so that NaNs are equal and numpy can save the array."""
    return np.asarray(x).view(np.uint16) if x.dtype == jnp.bfloat16 else np.asarray(x)


def reload_in_a_new_process(exported, args, results, tmp_path) -> str:
    arrays: dict[str, Any] = {f"arg{i}": bits(x) for i, x in enumerate(args)}
    arrays |= zip(("out", "lse", "pool"), map(bits, results), strict=True)
    np.savez(tmp_path / "data.npz", **arrays)
    (tmp_path / "program").write_bytes(exported.serialize())
    return child("run_exported.py", str(tmp_path / "program"), str(tmp_path / "data.npz"))


def cpu_device():
    return jax.default_device(jax.devices("cpu")[0])


def test_one_device(tmp_path) -> None:
    with cpu_device():
        args = arguments()
        exported = export.export(jax.jit(step), **CPU)(*args)
        printed = reload_in_a_new_process(exported, args, jax.jit(step)(*args), tmp_path)
    assert printed.split() == ["same", "1", "cpu"]


@pytest.mark.full
@pytest.mark.parametrize("kind", [AxisType.Explicit, "mesh="])
def test_sharded(kind, tmp_path) -> None:
    """Inside, both are a plain shard_map, which can be serialised."""
    mesh = make_mesh(AxisType.Auto if kind == "mesh=" else kind)
    fun = jax.jit(functools.partial(step, mesh=mesh) if kind == "mesh=" else step)
    args = arguments(mesh)
    if kind == "mesh=":
        exported, results = export.export(fun, **CPU)(*args), fun(*args)
    else:
        with jax.set_mesh(mesh):
            exported, results = export.export(fun, **CPU)(*args), fun(*args)
    assert exported.nr_devices == 8
    assert "CustomSPMDPartitioning" not in exported.mlir_module()
    printed = reload_in_a_new_process(exported, args, results, tmp_path)
    assert printed.split() == ["same", "8", "cpu"]


@pytest.mark.parametrize("layer", [2**32 + 1, np.int64(2**40)])
def test_layer_outside_32_bits_is_not_one_of_a_symbolic_number(layer) -> None:
    with cpu_device():
        q_nope, q_pe, pool, table, lens = arguments()
        args = [q_nope, q_pe, jnp.stack([pool, pool]), table, lens]
        fun = functools.partial(jax_mla.decode, sm_scale=0.1, layer=layer)
        exported = export.export(jax.jit(fun), **CPU)(*symbolic(args, "l", {2: 0}))
        assert not exported.call(*args).any()


@pytest.mark.parametrize("kind", ["mesh=", AxisType.Explicit])
def test_mesh_larger_than_this_machine(kind) -> None:
    """An AbstractMesh has no devices. Shardings that are known need none."""
    types = (AxisType.Auto if kind == "mesh=" else kind,) * 3
    mesh = AbstractMesh((4, 4, 4), ("dp", "tp", "cp"), axis_types=types)
    structs = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s))
        for x, s in zip(arguments(), SPECS, strict=True)
    ]
    fun = jax.jit(functools.partial(step, mesh=mesh) if kind == "mesh=" else step)
    with jax.sharding.use_abstract_mesh(mesh):
        exported = export.export(fun, **CPU)(*structs)
    assert exported.nr_devices == 64


def test_auto_mesh_is_refused_with_the_way_out() -> None:
    args = arguments(make_mesh(AxisType.Auto))
    with pytest.raises(ValueError, match=r"jax.export: expected shardings.*Explicit axes.*mesh="):
        export.export(jax.jit(step), **CPU)(*args)


def test_symbolic_batch() -> None:
    (batch,) = export.symbolic_shape("b")
    args = arguments()
    structs = [
        jax.ShapeDtypeStruct(x.shape if i == 2 else (batch, *x.shape[1:]), x.dtype)
        for i, x in enumerate(args)
    ]
    with cpu_device():
        exported = export.export(jax.jit(step), **CPU)(*structs)
        for n in (1, 3, 4):
            some = [x if i == 2 else x[:n] for i, x in enumerate(args)]
            for a, b in zip(exported.call(*some), jax.jit(step)(*some), strict=True):
                np.testing.assert_array_equal(bits(a), bits(b))


def symbolic(args, dim: str, at: dict[int, int]) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of the arguments, with `dim` as the dimension `at[i]` of argument i."""
    (size,) = export.symbolic_shape(dim)
    shapes = [list(x.shape) for x in args]
    for i, axis in at.items():
        shapes[i][axis] = size
    return [jax.ShapeDtypeStruct(s, x.dtype) for s, x in zip(shapes, args, strict=True)]


@pytest.mark.parametrize("case", ["mapped pools", "table width", "layers"])
def test_other_symbolic_dimensions(case) -> None:
    """A check that needs the size is left out."""
    with cpu_device():
        q_nope, q_pe, pool, table, lens = args = arguments()
        decode: Any = functools.partial(jax_mla.decode, sm_scale=0.1)
        if case == "mapped pools":
            fun = jax.vmap(decode)
            args = [jnp.stack([x, x, x]) for x in args]
            structs = symbolic(args, "n", dict.fromkeys(range(5), 0))
        elif case == "table width":
            fun = lambda q, r, p, t: decode(q, r, p, t, np.asarray(lens))  # noqa: E731
            args = [q_nope, q_pe, pool, table]
            structs = symbolic(args, "w", {3: 1})
        else:
            fun = functools.partial(decode, layer=1)
            args = [q_nope, q_pe, jnp.stack([pool * 0, pool]), table, lens]
            structs = symbolic(args, "l", {2: 0})
        exported = export.export(jax.jit(fun), **CPU)(*structs)
        np.testing.assert_array_equal(bits(exported.call(*args)), bits(fun(*args)))


@pytest.mark.parametrize("kind", ["mesh=", AxisType.Explicit])
def test_sharded_symbolic_dimension_is_an_error(kind) -> None:
    mesh = make_mesh(AxisType.Auto if kind == "mesh=" else kind)
    args = arguments(mesh)
    structs = [
        jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=x.sharding)
        for s, x in zip(symbolic(args, "8*b", dict.fromkeys((0, 1, 3, 4), 0)), args, strict=True)
    ]
    kwargs = {"mesh": mesh} if kind == "mesh=" else {}
    fun = jax.jit(functools.partial(jax_mla.decode, sm_scale=0.1, **kwargs))
    message = r"a symbolic dimension cannot be sharded: .* for batch over \['dp'\], got 8\*b"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        export.export(fun, **CPU)(*structs)


@pytest.mark.cuda_build
@pytest.mark.parametrize("symbolic", [False, True])
def test_cpu_and_cuda_in_one_program(symbolic, tmp_path) -> None:
    """Lower for both platforms on a machine with one of them, and reload the program here."""
    args = arguments()
    structs = args
    if symbolic:
        (batch,) = export.symbolic_shape("b")
        structs = [
            jax.ShapeDtypeStruct(x.shape if i == 2 else (batch, *x.shape[1:]), x.dtype)
            for i, x in enumerate(args)
        ]
    both = {**CPU, "platforms": ("cpu", "cuda")}
    with cpu_device():
        exported = export.export(jax.jit(step), **both)(*structs)
        assert exported.platforms == ("cpu", "cuda")
        printed = reload_in_a_new_process(exported, args, jax.jit(step)(*args), tmp_path)
    assert printed.split() == ["same", "1", "cpu", "cuda"]


@pytest.mark.cuda_build
def test_scratch_of_a_symbolic_batch_has_two_dimensions() -> None:
    """JAX computes sizes in 32 bits, and their product may need more."""
    args = arguments()
    fun = functools.partial(jax_mla.decode, sm_scale=0.1, batch_invariant=True)
    structs = symbolic(args, "b", dict.fromkeys((0, 1, 3, 4), 0))
    exported = export.export(jax.jit(fun), **{**CPU, "platforms": ("cuda",)})(*structs)
    assert re.search(r"@jax_mla_decode\(.*tensor<\?x\d+xui8>", exported.mlir_module())


@pytest.mark.cuda_build
def test_sharded_for_cpu_and_cuda() -> None:
    mesh = make_mesh(AxisType.Explicit)
    args = arguments(mesh)

    def decode(*args):
        return jax_mla.decode(*args, sm_scale=0.1)

    with jax.set_mesh(mesh):
        both = {**CPU, "platforms": ("cpu", "cuda")}
        exported = export.export(jax.jit(decode), **both)(*args)
    assert exported.platforms == ("cpu", "cuda") and exported.nr_devices == 8
    assert len(exported.serialize()) > 0


@pytest.mark.skipif(_ffi.extension().build_info()["cuda"], reason="this build has a CUDA part")
def test_export_for_cuda_needs_a_cuda_build() -> None:
    with (
        cpu_device(),
        pytest.raises(ValueError, match="expected a build with CUDA.*JAX_MLA_CUDA=ON"),
    ):
        export.export(jax.jit(step), platforms=("cpu", "cuda"), disabled_checks=CHECKS)(
            *arguments()
        )


@pytest.mark.full
def test_persistent_cache_hits_in_a_new_process(tmp_path) -> None:
    first, second = (json.loads(child("use_compilation_cache.py", str(tmp_path))) for _ in range(2))
    assert all(events == ["cache_misses"] for events in first.values()), first
    assert all(events == ["cache_hits"] for events in second.values()), second
