"""What the tests of sharded calls share: inputs, meshes, shardings, checks."""

import contextlib
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mla
from jax_mla._mesh._sharding import axes_of
from jax_mla.testing.hlo import Collective, collectives
from jax_mla.testing.inputs import decode_inputs
from jax_mla.testing.run import cpu_mesh

L, B, Q, H, D_CKV, D_KPE, SIZE = 2, 4, 2, 8, 32, 8, 4
INPUTS = decode_inputs(
    seq_lens=(0, 5, 16, 11), q_len=Q, num_heads=H, d_ckv=D_CKV, d_kpe=D_KPE, page_size=SIZE,
    dtype="float32", num_layers=L, page_multiple=8,
)  # fmt: skip
ARGS = INPUTS.args()
PADDING = 8  # columns that `laid_out` adds
OPTIONS = {**INPUTS.kwargs(), "return_lse": True}
NUM_PAGES, MAX = ARGS[2].shape[1], ARGS[3].shape[1]
KINDS = {
    "auto": (AxisType.Auto,) * 3,
    "explicit": (AxisType.Explicit,) * 3,
    "mixed_dp": (AxisType.Explicit, AxisType.Auto, AxisType.Auto),
    "mixed_tp_cp": (AxisType.Auto, AxisType.Explicit, AxisType.Explicit),
}


def make_mesh(kind: str = "auto", names=("dp", "tp", "cp"), sizes=(2, 2, 2)) -> jax.sharding.Mesh:
    return cpu_mesh(sizes, names, KINDS[kind][: len(names)])


def specs(batch=None, heads=None, pages=None) -> tuple[P, ...]:
    """Return the shardings of q_nope, q_pe, kv_pages, page_table and seq_lens."""
    query = P(batch, None, heads)
    return query, query, P(None, pages), P(batch), P(batch)


def mesh_argument(mesh, **roles) -> jax_mla.MeshAxes:
    """Return the argument `mesh=` with these roles; the other axes of the mesh are replicated."""
    named = {axis for axes in roles.values() for axis in axes_of(axes)}
    others = tuple(axis for axis in mesh.axis_names if axis not in named)
    return jax_mla.MeshAxes(mesh, **roles, replicated=others)


def put(arrays, mesh, specs_):
    return [
        jax.device_put(jnp.array(x), NamedSharding(mesh, s))
        for x, s in zip(arrays, specs_, strict=True)
    ]


def context(mesh, kind: str):
    return contextlib.nullcontext() if kind == "auto" else jax.set_mesh(mesh)


@functools.cache
def reference():
    out, lse = jax_mla.reference.decode(*ARGS, **OPTIONS)
    return np.asarray(out), np.asarray(lse)


def decode(*args, **kwargs):
    return jax_mla.decode(*args, **OPTIONS, **kwargs)


def check(got, want=None) -> None:
    for a, b in zip(got, want or reference(), strict=True):
        a = np.asarray(a)
        np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b))
        finite = np.isfinite(b)
        np.testing.assert_allclose(a[finite], b[finite], atol=1e-5)


def check_step(got, want) -> None:
    """Check out, lse and the pool of `ragged_paged_attention`: the pool bit for bit."""
    for a, b in zip(got[:2], want[:2], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    np.testing.assert_array_equal(got[2], want[2])
    for shard in got[2].addressable_shards:  # replicas must not differ either
        np.testing.assert_array_equal(shard.data, np.asarray(want[2])[shard.index])


def laid_out(pool, form: str) -> jax.Array:
    """Return a pool with NaN as padding: "wide", or "packs" of two rows."""
    widths = [(0, 0)] * (pool.ndim - 1) + [(0, PADDING)]
    pool = jnp.pad(jnp.asarray(pool), widths, constant_values=jnp.nan)
    return pool if form == "wide" else pool.reshape(*pool.shape[:-2], -1, 2, pool.shape[-1])


def compile_and_check(fun, args, want=None):
    compiled = jax.jit(fun).lower(*args).compile()
    got = compiled(*args)
    check(got, want)
    return got, collectives(compiled)


def gather(*shape: int, itemsize: int = 4) -> Collective:
    return Collective("all-gather", itemsize * math.prod(shape), (shape,))


def merge_of(b: int, h: int, shards: int = 2) -> list[Collective]:
    """Return one max of lse with a slot for each shard, and one sum of out."""
    lse, out = (shards, b, Q, h), (b, Q, h, D_CKV)
    return [
        Collective("all-reduce", 4 * math.prod(lse), (lse,)),
        Collective("all-reduce", 4 * math.prod(out), (out,)),
    ]


CASES = [
    {"batch": b, "heads": h, "pages": p}
    for b, h, p in itertools.product((None, "dp"), (None, "tp"), (None, "cp"))
] + [
    {"batch": ("dp", "cp"), "heads": "tp"},
    {"batch": ("cp", "dp"), "heads": "tp"},
    {"heads": ("tp", "cp"), "batch": "dp"},
    {"pages": ("cp", "dp"), "heads": "tp"},
    {"pages": ("dp", "tp", "cp")},
]


def case_id(case) -> str:
    return ",".join(f"{k}@{v if isinstance(v, str) else '+'.join(v)}" for k, v in case.items() if v)


def size_of(axes) -> int:
    return 2 ** (0 if axes is None else 1 if isinstance(axes, str) else len(axes))


@functools.cache
def append_args() -> tuple[Any, ...]:
    rng = np.random.default_rng(1)
    ckv = rng.standard_normal((B, Q, D_CKV)).astype(np.float32)
    kpe = rng.standard_normal((B, Q, D_KPE)).astype(np.float32)
    lens = INPUTS.seq_lens
    positions = np.stack([lens - 2, lens - 1], axis=1).astype(np.int32)
    positions[3, 0] = MAX * SIZE  # past the table
    pool = np.where(np.isnan(INPUTS.kv_pages), 0, INPUTS.kv_pages)
    return pool, ckv, kpe, INPUTS.page_table, positions


def step(q, q_pe, pool, table, lens, ckv, kpe, positions, *, ops=jax_mla, **kwargs):
    """Run all layers of a toy decode step, which appends and attends in each."""

    def layer(carry, index):
        q, pool = carry
        pool = ops.append(pool, ckv, kpe, table, positions, layer=index, **kwargs)
        out = ops.decode(q, q_pe, pool, table, lens, sm_scale=0.3, layer=index, **kwargs)
        return (q + out, pool), None

    return jax.lax.scan(layer, (q, pool), jnp.arange(L, dtype=jnp.int32))[0]
