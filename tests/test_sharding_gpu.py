"""Sharded ops on 2 and 4 real GPUs, against one or the definition."""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mla
from jax_mla.testing.cases import Case
from jax_mla.testing.compare import assert_close, decode_exactly, decode_in_dtype
from jax_mla.testing.hlo import collectives, num_copies, pointers
from jax_mla.testing.index import IndexCase, check_lists, oracle
from jax_mla.testing.run import GPU_PLATFORM, expected, num_gpus
from jax_mla.testing.sparse import SparseCase

pytestmark = pytest.mark.gpu

CASE = Case(
    "sharded", seq_lens=(0, 1, 700, 64, 3000, 65, 1500, 128), q_len=2, num_heads=32, num_layers=2
)
B, Q, H = len(CASE.seq_lens), CASE.q_len, CASE.num_heads
D_CKV, D_KPE = CASE.d_ckv, CASE.d_kpe
# What the axis "x" splits, and the collectives of the program.
MODES = {
    "tensor": ({"heads": "x"}, []),
    "data": ({"batch": "x"}, []),
    "context": ({"pages": "x"}, ["all-reduce", "all-reduce"]),
    # XLA joins the gathers of q_nope and q_pe into one.
    "tensor, cache too": (
        {"heads": "x", "pages": "x"},
        ["all-gather", "all-reduce", "reduce-scatter"],
    ),
}


def make_mesh(num_devices: int, kind: AxisType) -> Mesh:
    if num_gpus() < num_devices:
        pytest.skip(f"needs {num_devices} GPUs, found {num_gpus()}")
    devices = np.array(jax.devices(GPU_PLATFORM)[:num_devices])
    return Mesh(devices, ("x",), axis_types=(kind,))


def put(arrays, mesh, specs):
    return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]


def with_pages_for(pool: np.ndarray, num_devices: int) -> np.ndarray:
    """Return the stacked pool with as many pages as the devices can share."""
    return np.pad(pool, ((0, 0), (0, -pool.shape[1] % num_devices), (0, 0), (0, 0)))


@functools.cache
def arguments():
    """Return the case's arrays on the host, with a multiple of 4 pages."""
    inputs = CASE.inputs()
    pool = with_pages_for(np.asarray(inputs.kv_pages), 4)
    return inputs.q_nope, inputs.q_pe, pool, inputs.page_table, inputs.seq_lens


def context(mesh: Mesh, kind: AxisType):
    return jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext()


def decode(*args):
    return jax_mla.decode(*args, **CASE.inputs().kwargs(), return_lse=True)


def axes_of_roles(mode: str):
    axes = MODES[mode][0]
    return [axes.get(role) for role in ("batch", "heads", "pages")]


def specs_of(mode: str):
    batch, heads, pages = axes_of_roles(mode)
    query = P(batch, None, heads)
    return query, query, P(None, pages), P(batch), P(batch)


def check_communication(compiled, mode: str, num_devices: int) -> None:
    found = collectives(compiled)
    assert [c.kind for c in found] == MODES[mode][1]
    layer_part = math.prod(arguments()[2].shape[1:]) // num_devices
    assert not any(math.prod(s) >= layer_part for c in found for s in c.shapes)
    rows = B * Q * H
    sizes = {
        "tensor": [],
        "data": [],
        "context": [4 * rows * num_devices, 4 * rows * D_CKV],
        "tensor, cache too": [
            2 * rows * (D_CKV + D_KPE),
            4 * rows * num_devices,
            4 * rows * D_CKV // num_devices,
        ],
    }  # fmt: skip
    assert [c.num_bytes for c in found] == sizes[mode]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_decode(mode: str, num_devices: int, kind: AxisType) -> None:
    mesh = make_mesh(num_devices, kind)
    with context(mesh, kind):
        args = put(arguments(), mesh, specs_of(mode))
        compiled = jax.jit(decode).lower(*args).compile()
        out, lse = compiled(*args)
    (want_out, want_lse), (yardstick, _) = expected(CASE)
    assert_close(
        np.asarray(out), np.asarray(lse), want_out, want_lse, dtype=CASE.dtype, yardstick=yardstick
    )
    check_communication(compiled, mode, num_devices)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_compiled_for_four_gpus_on_one(mode: str, kind: AxisType) -> None:
    """Compile for a description of four GPUs, and check the communication without them."""
    topology = topologies.get_topology_desc(platform=GPU_PLATFORM, topology="1x1x4")
    mesh = Mesh(np.array(topology.devices), ("x",), axis_types=(kind,))
    with context(mesh, kind):
        structs = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s))
            for x, s in zip(arguments(), specs_of(mode), strict=True)
        ]
        compiled = jax.jit(decode).lower(*structs).compile()
    check_communication(compiled, mode, 4)


@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize(("batch", "pages"), [(None, "x"), ("x", None), ("x", "x")])
def test_append_in_place(batch, pages, num_devices: int) -> None:
    mesh = make_mesh(num_devices, AxisType.Auto)
    _, _, pool, table, lens = arguments()
    rng = np.random.default_rng(0)
    ckv, kpe = (
        np.asarray(rng.standard_normal((B, Q, d), dtype=np.float32), pool.dtype) for d in (512, 64)
    )
    positions = np.stack([lens - 2, lens - 1], axis=1).astype(np.int32)
    pool = np.where(np.isnan(pool), np.zeros_like(pool), pool)
    arrays = (pool, ckv, kpe, table, positions)
    want = jax_mla.reference.append(*map(jnp.asarray, arrays), layer=1)
    args = put(arrays, mesh, (P(None, pages), *(P(batch),) * 4))
    fun = jax.jit(functools.partial(jax_mla.append, layer=jnp.int32(1)), donate_argnums=0)
    compiled = fun.lower(*args).compile()
    before, shard = pointers(args[0]), args[0].addressable_shards[0].data.shape
    got = fun(*args)
    assert pointers(got) == before
    assert num_copies(compiled, shard) == 0
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert [c.kind for c in collectives(compiled)] == (["all-gather"] if batch else [])


def test_layer_scan_on_four_gpus() -> None:
    """As in a model: one axis splits the heads, the other the pages."""
    if num_gpus() < 4:
        pytest.skip(f"needs 4 GPUs, found {num_gpus()}")
    devices = np.array(jax.devices(GPU_PLATFORM)[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("tp", "cp"), axis_types=(AxisType.Explicit,) * 2)
    q_nope, q_pe, pool, table, lens = arguments()
    pool = np.where(np.isnan(pool), np.zeros_like(pool), pool)
    rows = [np.ones((B, Q, d), pool.dtype) for d in (512, 64)]
    positions = np.stack([lens - 2, lens - 1], axis=1).astype(np.int32)

    def step(q, pool, q_pe, table, lens, ckv, kpe, positions, ops=jax_mla):
        def layer(carry, index):
            q, pool = carry
            pool = ops.append(pool, ckv, kpe, table, positions, layer=index)
            out = ops.decode(q, q_pe, pool, table, lens, sm_scale=0.05, layer=index)
            return (q + out.astype(q.dtype), pool), None

        return jax.lax.scan(layer, (q, pool), jnp.arange(2, dtype=jnp.int32))[0]

    arrays = (q_nope, pool, q_pe, table, lens, *rows, positions)
    want_q, want_pool = jax.jit(functools.partial(step, ops=jax_mla.reference))(*arrays)
    query = P(None, None, "tp")
    with jax.set_mesh(mesh):
        args = put(arrays, mesh, (query, P(None, "cp"), query, *(P(),) * 5))
        fun = jax.jit(step, donate_argnums=1)
        compiled = fun.lower(*args).compile()
        before = pointers(args[1])
        got_q, got_pool = fun(*args)
    assert pointers(got_pool) == before
    np.testing.assert_array_equal(np.asarray(got_pool), np.asarray(want_pool))
    np.testing.assert_allclose(
        np.asarray(got_q, np.float32), np.asarray(want_q, np.float32), atol=0.06
    )
    assert [c.kind for c in collectives(compiled)] == ["all-reduce", "all-reduce"]


@pytest.mark.parametrize("num_devices", [2, 4])
def test_mixed_step(num_devices: int) -> None:
    """A prompt and sequences that decode; each GPU has some of the heads and the whole cache."""
    mesh = make_mesh(num_devices, AxisType.Auto)
    inputs = CASE.inputs()
    q_lens = np.array([0, 1, 700, 1, 300, 1, 20, 64], np.int32)
    bounds, rng = (
        np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32),
        np.random.default_rng(0),
    )
    tokens, heads = int(bounds[-1]), 64

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.standard_normal(shape, np.float32)).astype(inputs.q_nope.dtype)

    pool = np.asarray(inputs.kv_pages)
    pool = np.where(np.isnan(pool), np.zeros_like(pool), pool)
    arrays = (
        normal(tokens, heads, 128), normal(tokens, heads, D_KPE), normal(tokens, D_CKV),
        normal(tokens, D_KPE), normal(heads, 128, D_CKV, scale=D_CKV**-0.5),
        normal(heads, D_CKV, 128, scale=D_CKV**-0.5), pool, inputs.page_table, inputs.seq_lens,
        bounds,
    )  # fmt: skip
    fun = jax.jit(
        functools.partial(jax_mla.mixed_attention, sm_scale=192**-0.5, layer=jnp.int32(1)),
        donate_argnums=6,
    )
    want = fun(*map(jnp.array, arrays))
    queries, weights = P(None, "x"), P("x")
    specs = (queries, queries, P(), P(), weights, weights, *(P(),) * 4)
    args = put(arrays, mesh, specs)
    compiled = fun.lower(*args).compile()
    assert collectives(compiled) == [] and num_copies(compiled, pool.shape) == 0
    before = pointers(args[6])
    out, cache = fun(*args)
    assert pointers(cache) == before
    np.testing.assert_array_equal(np.asarray(cache), np.asarray(want[1]))
    exact, got = (np.asarray(x, np.float32) for x in (want[0], out))
    assert np.linalg.norm(got - exact) <= 1e-2 * np.linalg.norm(exact)


SPARSE = SparseCase(
    "sharded", (0, 1, 700, 64, 2048, 65, 1500, 128), k=2048, num_tokens=5000, num_heads=32,
    num_layers=2, num_wild=1,
)  # fmt: skip
INDEX = IndexCase(
    "sharded", (4000, 3, 0, 900), q_lens=2, k=64, num_heads=32, d=128, page_size=64, num_layers=2,
    num_wild=1,
)  # fmt: skip


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_sparse_attention(mode: str, num_devices: int, kind: AxisType) -> None:
    mesh = make_mesh(num_devices, kind)
    inputs = SPARSE.inputs()
    q_nope, q_pe, pool, indices = map(np.asarray, inputs.args())
    arrays = q_nope, q_pe, with_pages_for(pool, num_devices), indices, inputs.topk_lens
    batch, heads, pages = axes_of_roles(mode)
    specs = P(batch, heads), P(batch, heads), P(None, pages), P(batch), P(batch)

    def attend(*args):
        kwargs = inputs.kwargs() | {"topk_lens": args[-1]}
        return jax_mla.sparse_attention(*args[:-1], **kwargs, return_lse=True)

    with context(mesh, kind):
        args = put(arrays, mesh, specs)
        compiled = jax.jit(attend).lower(*args).compile()
        out, lse = (np.asarray(x) for x in compiled(*args))
    dense = inputs.by_token()
    want, want_lse = (x[:, 0] for x in decode_exactly(dense, causal=False))
    yardstick = decode_in_dtype(dense, causal=False)[0][:, 0]
    assert_close(out, lse, want, want_lse, dtype=SPARSE.dtype, yardstick=yardstick)
    layer_part = math.prod(arrays[2].shape[1:]) // num_devices
    assert not any(math.prod(s) >= layer_part for c in collectives(compiled) for s in c.shapes)


@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize(("batch", "pages"), [("x", None), (None, "x"), ("x", "x")])
def test_index_topk(batch, pages, num_devices: int) -> None:
    mesh = make_mesh(num_devices, AxisType.Auto)
    inputs = INDEX.inputs()
    arrays = [np.asarray(x) for x in inputs.args()]
    arrays[2] = with_pages_for(arrays[2], num_devices)
    args = put(arrays, mesh, (P(batch), P(batch), P(None, pages), P(batch), P(batch)))
    fun = jax.jit(functools.partial(jax_mla.index_topk, **inputs.kwargs()))
    check_lists(fun(*args), oracle(inputs), INDEX.k)
