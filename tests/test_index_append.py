"""`index_append` against its definition and the bytes of the FP8 pages, on every backend."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import KINDS, context, gather, make_mesh, mesh_argument, put

import jax_mla
from jax_mla._runtime import _ffi
from jax_mla.testing.hlo import collectives, memory, num_copies, pointers
from jax_mla.testing.index import as_dtype, fp8_pages
from jax_mla.testing.inputs import WILD_IDS
from jax_mla.testing.run import device_of

pytestmark = pytest.mark.usefixtures("no_rank_promotion")
ref: Any = jax_mla.reference
append: Any = jax_mla.index_append  # without types, because options are made from dictionaries

L, PAGES, SIZE, B, Q, MAX, D, POSITIONS = 2, 8, 4, 4, 2, 2, 128, 7
TABLE = np.array([[0, 1], [2, 3], [WILD_IDS[0], 5], [6, 7]], np.int32)
# Tokens are skipped; some lie past the page table, on a wild page, or past the table of angles.
STEP = np.array([[2, 3], [4, 5], [-1, 1], [7, 8]], np.int32)
LIVE = [(0, 0), (0, 1), (1, 0), (1, 1), (3, 0)]


def keys(dtype: str = "bfloat16", d: int = D, seed: int = 0) -> np.ndarray:
    return as_dtype(np.random.default_rng(seed).standard_normal((B, Q, d)) * 3, dtype)


def empty(dtype: str, d: int = D, layers: tuple[int, ...] = (L,)) -> np.ndarray:
    width = 132 if dtype == "uint8" else d
    pool = np.random.default_rng(1).integers(0, 100, (*layers, PAGES, SIZE, width))
    return as_dtype(pool, dtype)


def row_of(b: int, i: int) -> tuple[int, int]:
    return int(TABLE[b, STEP[b, i] // SIZE]), int(STEP[b, i] % SIZE)


def unpacked(pool: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return codes [..., PAGES, SIZE, 128] and scales [..., PAGES, SIZE] of pages in FP8."""
    pages = np.asarray(pool).reshape(*pool.shape[:-2], SIZE * 132)
    codes = pages[..., : SIZE * 128].reshape(*pool.shape[:-1], 128)
    scales = np.ascontiguousarray(pages[..., SIZE * 128 :]).view(np.float32)
    return codes, scales


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_plain_keys(dtype, backend) -> None:
    """Every row by hand, and not another byte."""
    pool, k = empty(dtype), keys(dtype)
    want = pool.copy()
    for b, i in LIVE:
        want[(1, *row_of(b, i))] = k[b, i]
    with jax.default_device(device_of(backend)):
        got = append(pool, k, jnp.asarray(TABLE), jnp.asarray(STEP), layer=1, backend=backend)
    np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize("pow2", [True, False], ids=["ue8m0", "float"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_bytes_of_deepgemm(dtype, pow2, backend) -> None:
    """A page is its codes, then its scales; made from DeepGEMM's description."""
    pool, k = empty("uint8"), keys(dtype)
    k[0, 0, :5] = [np.nan, 1e-9, -0.0, 500, -3]
    k[1, 1] = as_dtype(np.full(128, 1e-7), dtype)  # below the smallest scale
    with jax.default_device(device_of(backend)):
        got = append(
            pool, k, jnp.asarray(TABLE), jnp.asarray(STEP), layer=1, power_of_two_scales=pow2,
            backend=backend,
        )  # fmt: skip
    codes, scales = (np.array(x) for x in unpacked(pool))
    for b, i in LIVE:
        values = np.nan_to_num(k[b, i].astype(np.float32))
        scale = max(np.abs(values).max(), np.float32(1e-4)) / np.float32(448)
        scale = float(np.exp2(np.ceil(np.log2(scale))) if pow2 else scale)
        codes[(1, *row_of(b, i))] = as_dtype(
            np.clip(values * (np.float32(1) / np.float32(scale)), -448, 448), "float8_e4m3fn"
        ).view(np.uint8)
        scales[(1, *row_of(b, i))] = scale
    want = fp8_pages(codes, scales)
    np.testing.assert_array_equal(np.asarray(got), want)


FORMS = {"first_halves": (False, False), "first_pairs": (False, True), "last_halves": (True, False)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_norm_and_rotation(dtype, fp8, form, backend) -> None:
    """The same as the steps one after the other, but for one unit in the last place."""
    last, interleaved = FORMS[form]
    rng = np.random.default_rng(2)
    weight, bias = (rng.standard_normal(D).astype(np.float32) for _ in range(2))
    table = jax_mla.rope_table(POSITIONS, 64)
    k = jnp.asarray(keys(dtype) + as_dtype(np.ones(1), dtype))
    pool = np.zeros_like(empty("uint8" if fp8 else dtype))
    args = jnp.asarray(TABLE), jnp.asarray(STEP)
    normed = ref.layer_norm(k, weight, bias, 1e-6)
    begin = 64 if last else 0
    turned = ref.rotate(normed[..., begin : begin + 64], table, args[1], interleaved=interleaved)
    ready = normed.at[..., begin : begin + 64].set(turned)
    want = ref.index_append(pool, ready, *args, layer=1)
    with jax.default_device(device_of(backend)):
        fun = functools.partial(
            append, layer=1, norm_weight=weight, norm_bias=bias, rope_table=table,
            rope_interleaved=interleaved, rope_last=last, backend=backend,
        )  # fmt: skip
        got = jax.jit(fun)(pool, k, *args)
    if fp8:
        (codes, scales), (want_codes, want_scales) = unpacked(got), unpacked(want)
        assert (scales == want_scales).all()
        assert (codes != want_codes).mean() < 0.01
        assert np.abs(codes.astype(int) - want_codes).max() <= 1
        return
    a, b = np.asarray(got, np.float32), np.asarray(want, np.float32)
    np.testing.assert_allclose(a, b, rtol=2**-7 if dtype == "bfloat16" else 1e-5, atol=1e-5)
    assert (a != b).mean() < 0.01 or dtype == "float32"


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_cuda_gives_the_bits_of_the_cpu(dtype, fp8, form) -> None:
    """Both add and round in the same order (csrc/index_append/arithmetic.h)."""
    last, interleaved = FORMS[form]
    rng = np.random.default_rng(3)
    weight, bias = (rng.standard_normal(D).astype(np.float32) for _ in range(2))
    args = empty("uint8" if fp8 else dtype), keys(dtype), TABLE, STEP
    fun = jax.jit(
        functools.partial(
            append, layer=1, norm_weight=weight, norm_bias=bias, power_of_two_scales=last,
            rope_table=np.asarray(jax_mla.rope_table(POSITIONS, 64)),
            rope_interleaved=interleaved, rope_last=last,
        )
    )  # fmt: skip
    got, want = (
        np.asarray(fun(*jax.device_put(args, jax.devices(platform)[0])))
        for platform in ("cuda", "cpu")
    )
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def test_layer_norm_by_hand() -> None:
    x = keys("float32")
    weight, bias = np.arange(D, dtype=np.float32), np.ones(D, np.float32)
    wide = x.astype(np.float64)
    want = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-6)
    got = ref.layer_norm(x, weight)
    np.testing.assert_allclose(got, want * weight, rtol=1e-5, atol=1e-4)
    got = ref.layer_norm(x, weight, bias)
    np.testing.assert_allclose(got, want * weight + bias, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "uint8"])
def test_ragged(dtype, backend) -> None:
    """The same tokens end to end, with padding behind them."""
    pool, k = empty(dtype), keys()
    with jax.default_device(device_of("cpu")):
        want = append(pool, k, jnp.asarray(TABLE), jnp.asarray(STEP), layer=1, backend="cpu")
    flat = np.concatenate([k.reshape(B * Q, D), k[0]])
    positions = np.concatenate([STEP.reshape(-1), [0, 1]]).astype(np.int32)
    bounds = jnp.arange(B + 1, dtype=jnp.int32) * Q
    with jax.default_device(device_of(backend)):
        fun = functools.partial(append, layer=1, cu_q_lens=bounds, backend=backend)
        got = jax.jit(fun)(pool, flat, TABLE, positions)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("layer", [-1, L, 2**31 - 1])
def test_a_layer_outside_the_pool_is_not_written(layer, backend) -> None:
    pool = empty("uint8")
    with jax.default_device(device_of(backend)):
        fun = jax.jit(functools.partial(append, backend=backend))
        got = fun(pool, keys(), TABLE, STEP, layer=jnp.int32(layer))
    np.testing.assert_array_equal(np.asarray(got), pool)


def test_in_place() -> None:
    pool = jnp.array(empty("uint8"))  # a copy: numpy's memory cannot be donated
    fun = jax.jit(functools.partial(append, layer=1), donate_argnums=0)
    compiled = fun.lower(pool, keys(), TABLE, STEP).compile()
    assert num_copies(compiled, pool.shape) == 0
    assert memory(compiled).alias_size_in_bytes == pool.nbytes
    before = pointers(pool)
    assert pointers(fun(pool, keys(), TABLE, STEP)) == before


def test_runs_the_kernel() -> None:
    before = _ffi.extension().call_counts()["index_append_cpu"]
    append(empty("uint8", layers=()), keys(), jnp.asarray(TABLE), jnp.asarray(STEP))
    assert _ffi.extension().call_counts()["index_append_cpu"] == before + 1


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_vmap(dtype) -> None:
    """Each mapped call returns a pool of its own."""
    pools = jnp.stack([jnp.asarray(empty(dtype, layers=())), jnp.asarray(empty(dtype, layers=()))])
    k = jnp.stack([jnp.asarray(keys("float32")), jnp.asarray(keys("float32", seed=4))])
    weight, table = jnp.ones(D), jax_mla.rope_table(POSITIONS, 64)
    args = jnp.asarray(TABLE), jnp.asarray(STEP)
    fun = functools.partial(
        append, norm_weight=weight, rope_table=table, rope_interleaved=False
    )  # fmt: skip
    got = jax.jit(jax.vmap(lambda pool, k: fun(pool, k, *args)))(pools, k)
    for i in range(2):
        want = fun(pools[i], k[i], *args, backend="reference")
        np.testing.assert_array_equal(got[i], want)


SPLITS = [(None, None), (None, "cp"), ("dp", None), ("dp", "cp"), (("tp", "dp"), "cp")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "pages"), SPLITS)
def test_every_split(batch, pages, kind) -> None:
    """In place on every device; a sharded batch costs one all-gather of the new keys and slots."""
    mesh = make_mesh(kind)
    pool, k = empty("uint8"), keys()
    table = jax_mla.rope_table(POSITIONS, 64)
    options = {"norm_weight": jnp.ones(D), "rope_table": table, "rope_interleaved": True}
    want = append(pool, k, jnp.asarray(TABLE), jnp.asarray(STEP), layer=1, **options)
    spec = P(None, pages), P(batch), P(batch), P(batch)
    fun = jax.jit(functools.partial(append, layer=1, **options), donate_argnums=0)
    with context(mesh, kind):
        placed = put((pool, k, TABLE, STEP), mesh, spec)
        compiled = fun.lower(*placed).compile()
        before, shard = pointers(placed[0]), placed[0].addressable_shards[0].data.shape
        got = fun(*placed)
    codes, want_codes = np.asarray(got), np.asarray(want)
    assert (codes != want_codes).mean() < 0.001  # XLA's norm rounds otherwise
    assert np.abs(codes.astype(int) - want_codes).max() <= 1
    assert pointers(got) == before and num_copies(compiled, shard) == 0
    assert collectives(compiled) == ([gather(B, Q, D + 4, itemsize=2)] if batch else [])
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec[0]), 4)


def test_mesh_argument() -> None:
    mesh = make_mesh()
    roles = mesh_argument(mesh, batch="dp", pages="cp")
    pool, k = empty("bfloat16"), keys()
    placed = put((pool, k, TABLE, STEP), mesh, (P(None, "cp"), P("dp"), P("dp"), P("dp")))
    got = jax.jit(functools.partial(append, layer=1, mesh=roles))(*placed)
    want = append(pool, k, jnp.asarray(TABLE), jnp.asarray(STEP), layer=1)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_append_then_choose(backend) -> None:
    """Keys that were appended token by token are those that index_topk scores."""
    rng = np.random.default_rng(7)
    k = as_dtype(rng.integers(-3, 4, (1, 8, D)), "bfloat16")
    q = as_dtype(rng.integers(-2, 3, (1, 4, D)), "bfloat16")
    table = jnp.array([[3, 1]], jnp.int32)
    with jax.default_device(device_of(backend)):
        pool = jnp.zeros((PAGES, SIZE, 132), jnp.uint8)
        for t in range(8):
            position = jnp.array([t], jnp.int32)
            pool = append(pool, jnp.asarray(k[:, t]), table, position, backend=backend)
        weights, lens = jnp.ones((1, 4)), jnp.array([8], jnp.int32)
        found = jax_mla.index_topk(
            jnp.asarray(q), weights, pool, table, lens, k=3, return_positions=True, backend=backend
        )
    scores = np.maximum(k[0].astype(np.float32) @ q[0].astype(np.float32).T, 0).sum(-1)
    want = np.sort(np.lexsort((np.arange(8), -scores))[:3])
    np.testing.assert_array_equal(found[0][0], want)
