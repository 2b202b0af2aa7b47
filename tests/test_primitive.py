"""JAX transformations of the ops: vmap, differentiation, lowering, scan, AOT, eager."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mla
from jax_mla import _backends, _ffi
from jax_mla.testing.hlo import text
from jax_mla.testing.inputs import decode_inputs
from jax_mla.testing.run import num_gpus

OPERANDS = ("q_nope", "q_pe", "kv_pages", "page_table", "seq_lens")
N = 3

pytestmark = pytest.mark.usefixtures("no_rank_promotion")


def inputs(**kwargs):
    defaults = {
        "seq_lens": (0, 5, 16),
        "q_len": 2,
        "num_heads": 4,
        "d_ckv": 32,
        "d_kpe": 8,
        "page_size": 4,
        "dtype": "float32",
    }
    return decode_inputs(**{**defaults, **kwargs})


def decode_fn(fun, **kwargs):
    return lambda *args: fun(*args, sm_scale=0.2, return_lse=True, **kwargs)


def assert_near(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b))
        finite = np.isfinite(b)
        np.testing.assert_array_equal(np.isfinite(a), finite)
        np.testing.assert_allclose(np.asarray(a)[finite], np.asarray(b)[finite], atol=2e-5)


def mapped(arrays, axes, seed=0):
    """N different versions of every mapped operand: permuted sequences, heads or pages."""
    rng = np.random.default_rng(seed)
    out = []
    for i, (x, axis) in enumerate(zip(arrays, axes, strict=True)):
        if axis is None:
            out.append(x)
        elif i == 2:  # other values, NaN where there was NaN
            versions = [jax.tree.map(lambda p, k=k: p * (1 + k), x) for k in range(N)]
            out.append(jax.tree.map(lambda *v, axis=axis: jnp.stack(v, axis), *versions))
        else:
            versions = [np.asarray(x)[rng.permutation(x.shape[0])] for _ in range(N)]
            out.append(jnp.stack(versions, axis))
    return out


SUBSETS = [s for n in range(1, 6) for s in itertools.combinations(range(5), n)]


@pytest.mark.parametrize("subset", SUBSETS, ids=lambda s: "+".join(OPERANDS[i] for i in s))
def test_vmap_of_decode(subset) -> None:
    """Every subset of operands, without a loop: one call of the handler."""
    axes = [(0 if i in (2, 4) else 1) if i in subset else None for i in range(5)]
    args = mapped(inputs().args(), axes)
    fun = jax.jit(jax.vmap(decode_fn(jax_mla.decode), in_axes=tuple(axes)))
    before = _ffi.extension().call_counts()["decode_cpu"]
    got = jax.block_until_ready(fun(*args))
    assert _ffi.extension().call_counts()["decode_cpu"] == before + 1
    assert "while(" not in text(fun.lower(*args).compile())
    want = jax.vmap(decode_fn(jax_mla.reference.decode), in_axes=tuple(axes))(*args)
    assert_near(got, want)


def test_vmap_does_not_reach_into_neighbouring_pools() -> None:
    """A wild id must not become a valid page of another mapped pool."""
    arrays = list(inputs().args())
    num_pages = arrays[2].shape[0]
    pools = jnp.where(jnp.isnan(jnp.stack([arrays[2]] * N)), 1.0, jnp.stack([arrays[2]] * N))
    for wild in (num_pages, num_pages + 3, -1, -num_pages, 2147480000, -2147483648):
        arrays[3] = arrays[3].at[1, 0].set(wild)
        args = (arrays[0], arrays[1], pools, arrays[3], arrays[4])
        in_axes = (None, None, 0, None, None)
        got = jax.vmap(decode_fn(jax_mla.decode), in_axes=in_axes)(*args)
        want = jax.vmap(decode_fn(jax_mla.reference.decode), in_axes=in_axes)(*args)
        assert_near(got, want)


@pytest.mark.parametrize("pools_mapped", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_vmap_over_layers(pools_mapped, split) -> None:
    data = inputs(num_layers=3, cache="split" if split else "packed")
    args = list(data.args())
    args[2] = jax.tree.map(lambda p: jnp.where(jnp.isnan(p), 0.5, p), args[2])
    if pools_mapped:
        args[2] = jax.tree.map(lambda p: jnp.stack([p, p * 2, p * 3, p * 4]), args[2])
    layers = jnp.asarray([2, 0, 1, 7], jnp.int32)  # the last owns nothing

    def fn(fun):
        return lambda pool, layer: fun(
            args[0], args[1], pool, args[3], args[4], sm_scale=0.2, layer=layer, return_lse=True
        )

    in_axes = (0 if pools_mapped else None, 0)
    got = jax.jit(jax.vmap(fn(jax_mla.decode), in_axes=in_axes))(args[2], layers)
    want = jax.vmap(fn(jax_mla.reference.decode), in_axes=in_axes)(args[2], layers)
    assert_near(got, want)
    assert (got[0][3] == 0).all()


def test_vmap_of_one_part_of_a_split_cache() -> None:
    args = list(inputs(cache="split").args())
    ckv = jnp.stack([args[2][0], args[2][0] * 2])

    def fn(fun):
        return lambda c: fun(args[0], args[1], (c, args[2][1]), args[3], args[4], sm_scale=0.2)

    got, want = (jax.vmap(fn(f))(ckv) for f in (jax_mla.decode, jax_mla.reference.decode))
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_vmap_over_page_begin() -> None:
    """Context parallelism under vmap: each shard owns its part of the ids."""
    args = list(inputs().args())
    num_pages = args[2].shape[0] // 2 * 2
    args[3] = jnp.where(args[3] < num_pages, args[3], -1)
    shards = args[2][:num_pages].reshape(2, num_pages // 2, *args[2].shape[1:])
    begins = jnp.asarray([0, num_pages // 2], jnp.int32)

    def fn(pool, begin):
        return jax_mla.decode(
            args[0], args[1], pool, *args[3:], sm_scale=0.2, return_lse=True, page_begin=begin
        )

    got = jax_mla.merge(*jax.vmap(fn)(shards, begins))
    want = decode_fn(jax_mla.reference.decode)(args[0], args[1], args[2][:num_pages], *args[3:])
    assert_near(got, want)


def test_nested_vmap() -> None:
    args = mapped(inputs().args(), [0, 0, 0, None, None])
    outer = [jnp.stack([x, x + 1]) for x in args[:2]]
    axes_in, axes_out = (0, 0, 0, None, None), (0, 0, None, None, None)

    def fn(fun):
        return jax.vmap(jax.vmap(decode_fn(fun), in_axes=axes_in), in_axes=axes_out)

    got, want = (
        jax.jit(fn(f))(*outer, *args[2:]) for f in (jax_mla.decode, jax_mla.reference.decode)
    )
    assert_near(got, want)


APPEND_SUBSETS = [s for n in (1, 2, 5) for s in itertools.combinations(range(5), n)]


@pytest.mark.parametrize("subset", APPEND_SUBSETS, ids=str)
@pytest.mark.parametrize("num_layers", [None, 2])
def test_vmap_of_append(subset, num_layers) -> None:
    """Each mapped call returns a cache of its own."""
    rng = np.random.default_rng(0)
    layers = () if num_layers is None else (num_layers,)
    pool = rng.standard_normal((*layers, 8, 4, 40)).astype(np.float32)
    ckv, kpe = (rng.standard_normal((2, 3, d)).astype(np.float32) for d in (32, 8))
    table = rng.permutation(8)[:6].reshape(2, 3).astype(np.int32)
    positions = np.array([[0, 1, 5], [-1, 3, 11]], np.int32)
    args, axes = [], []
    for i, x in enumerate((pool, ckv, kpe, table, positions)):
        if i in subset:
            versions = [np.roll(x, k, axis=0) for k in range(N)] if i else [x + k for k in range(N)]
            axis = 0 if i == 0 else 1
            x = np.stack(versions, axis)
        axes.append((0 if i == 0 else 1) if i in subset else None)
        args.append(jnp.asarray(x))
    layer = None if num_layers is None else jnp.int32(1)
    got, want = (
        jax.jit(jax.vmap(lambda *a, f=f: f(*a, layer=layer), in_axes=tuple(axes)))(*args)
        for f in (jax_mla.append, jax_mla.reference.append)
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd], ids=["grad", "jvp"])
def test_no_derivative(transform) -> None:
    q_nope, *rest = inputs().args()
    with pytest.raises(NotImplementedError, match="jax_mla.decode is for inference.*stop_gradient"):
        transform(lambda q: jax_mla.decode(q, *rest, sm_scale=0.2).sum())(q_nope)
    pool, table = rest[1], rest[2]
    ckv, kpe = jnp.ones((3, 1, 32)), jnp.ones((3, 1, 8))
    with pytest.raises(NotImplementedError, match="jax_mla.append is for inference"):
        transform(
            lambda c: jnp.sum(jax_mla.append(pool, c, kpe, table, jnp.zeros((3, 1), jnp.int32)))
        )(ckv)


def test_stop_gradient_works() -> None:
    q_nope, *rest = inputs().args()

    def loss(q):
        return (q * jax_mla.decode(jax.lax.stop_gradient(q), *rest, sm_scale=0.2)).sum()

    out = jax_mla.decode(q_nope, *rest, sm_scale=0.2)
    np.testing.assert_allclose(jax.grad(loss)(q_nope), out)


def lowered_text(platform: str, **kwargs) -> str:
    args = inputs().args()
    fun = jax.jit(decode_fn(jax_mla.decode, **kwargs))
    return fun.trace(*args).lower(lowering_platforms=(platform,)).as_text()


def test_lowering_by_platform() -> None:
    assert "jax_mla_decode" in lowered_text("cpu")
    assert "jax_mla_decode" not in lowered_text("cpu", backend="reference")
    assert "jax_mla_decode" not in lowered_text("tpu", backend="reference")
    with pytest.raises(
        ValueError, match="expected one that runs on tpu, got 'cpu', which runs on cpu"
    ):
        lowered_text("tpu", backend="cpu")


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
@pytest.mark.parametrize("mapped_pools", [False, True])
@pytest.mark.parametrize("op", ["decode", "append"])
def test_platform_without_kernels_is_refused(op, mapped_pools, platform) -> None:
    """The reference is slow, so it runs there only if the caller asks for it."""
    q_nope, q_pe, pool, table, lens = inputs().args()
    rows = jnp.ones((3, 1, 32)), jnp.ones((3, 1, 8)), table, lens[:, None] - 1

    def lower(backend):
        def fun(pool):
            if op == "append":
                return jax_mla.append(pool, *rows, backend=backend)
            return jax_mla.decode(q_nope, q_pe, pool, table, lens, sm_scale=0.2, backend=backend)

        mapped = jax.vmap(fun) if mapped_pools else fun
        pools = jnp.stack([pool] * N) if mapped_pools else pool
        return jax.jit(mapped).trace(pools).lower(lowering_platforms=(platform,)).as_text()

    message = (
        rf"^jax_mla.{op}: platform: expected one of cpu, cuda, got {platform}, for which there is "
        r'no kernel; backend="reference" runs everywhere'
    )
    with pytest.raises(ValueError, match=message):
        lower(None)
    assert "custom_call @jax_mla" not in lower("reference")


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_backends_choose_nothing_on_a_platform_without_kernels(platform) -> None:
    args = inputs().args()
    for statuses in (
        jax_mla.backends(platform=platform),
        jax_mla.backends(*args[:4], platform=platform),
    ):
        assert not any(s.chosen for s in statuses)
        assert str(statuses[-1]) == "reference (any): can run"


@pytest.mark.cuda_build
def test_lowering_for_cuda_without_a_gpu() -> None:
    """The handler with its scratch result, or every backend's reason."""
    args = inputs(d_ckv=512, d_kpe=64, page_size=64, dtype="bfloat16").args()
    fun = jax.jit(decode_fn(jax_mla.decode))
    lowered = fun.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert re.search(r"@jax_mla_decode\(.*tensor<\d+xui8>", lowered)
    with pytest.raises(ValueError, match="no backend takes this call on cuda") as error:
        lowered_text("cuda")  # float32, and dims that only the CPU serves
    statuses = [s for s in jax_mla.backends(*inputs().args()[:4], platform="cuda")]
    declined = [s for s in statuses if s.platform == "cuda"]
    assert declined and all(f"{s.name}: {s.reason}" in str(error.value) for s in declined)
    assert "jax_mla_decode" not in lowered_text("cuda", backend="reference")


def test_handler_runs_not_the_reference() -> None:
    args = inputs().args()
    counts = _ffi.extension().call_counts
    before = counts()["decode_cpu"]
    jax.block_until_ready(jax_mla.decode(*args, sm_scale=0.2))
    assert counts()["decode_cpu"] == before + 1
    jax.block_until_ready(jax_mla.decode(*args, sm_scale=0.2, backend="reference"))
    assert counts()["decode_cpu"] == before + 1


def test_eager_jit_and_aot_agree() -> None:
    args = inputs().args()
    fun = decode_fn(jax_mla.decode)
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    compiled = jax.jit(fun).lower(*structs).compile()
    for got in (jax.jit(fun)(*args), compiled(*args)):
        for a, b in zip(got, fun(*args), strict=True):
            np.testing.assert_array_equal(a, b)


def test_scan_over_layers_reads_the_stacked_pool() -> None:
    data = inputs(num_layers=3)
    q_nope, q_pe, pool, table, lens = data.args()
    pool = jnp.where(jnp.isnan(pool), 0.0, pool)

    def body(q, layer):
        return q + jax_mla.decode(q, q_pe, pool, table, lens, sm_scale=0.2, layer=layer), None

    got, _ = jax.jit(lambda q: jax.lax.scan(body, q, jnp.arange(3, dtype=jnp.int32)))(q_nope)
    want = q_nope
    for layer in range(3):
        want = want + jax_mla.reference.decode(
            want, q_pe, pool, table, lens, sm_scale=0.2, layer=layer
        )
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_named_scope_reaches_the_program() -> None:
    def fun(*args):
        with jax.named_scope("layer3"):
            return jax_mla.decode(*args, sm_scale=0.2)

    compiled = jax.jit(fun).lower(*inputs().args()).compile()
    assert "layer3/jax_mla.decode" in text(compiled)


def test_backends_say_who_runs() -> None:
    built = {s.name: s for s in jax_mla.backends(platform="cpu")}
    assert built["cpu"].chosen and not built["reference"].chosen
    args = inputs().args()
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args[:4]]
    for given in (args[:4], structs):
        status = {s.name: s for s in jax_mla.backends(*given, platform="cpu")}["cpu"]
        assert status.chosen and "runs" in str(status)


@pytest.mark.cuda_build
@pytest.mark.skipif(bool(num_gpus()), reason="the GPU here can be queried")
def test_a_gpu_that_jax_has_and_the_extension_cannot_query_is_said(monkeypatch) -> None:
    """As with a driver older than the CUDA runtime that the extension is built with."""
    monkeypatch.setattr(_backends, "_compute_capability", lambda: 90)
    statuses = [s for s in jax_mla.backends(platform="cuda") if s.platform == "cuda"]
    assert statuses
    for status in statuses:
        assert status.reason.startswith("the GPU cannot be queried: CUDA driver")


def test_declined_calls_list_every_reason(monkeypatch) -> None:
    answers = [("fast", "needs page_size 64, got 4"), ("slow", "needs bfloat16, got float32")]
    monkeypatch.setattr(_backends, "_answers", lambda platform, call: answers)
    args = inputs().args()
    with pytest.raises(ValueError, match='backend="reference" always does') as error:
        jax.jit(decode_fn(jax_mla.decode)).lower(*args)
    for name, reason in answers:
        assert f"{name}: {reason}" in str(error.value)
    statuses = jax_mla.backends(*args[:4], platform="cpu")
    assert [s.reason for s in statuses if s.name == "fast" and s.platform == "cpu"] == [
        answers[0][1]
    ]
    assert not any(s.chosen for s in statuses)
