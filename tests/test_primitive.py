"""The primitives in JAX: differentiation, lowering for each platform, scan, AOT, outside jit."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import decode_fn, inputs

import jax_mla
from jax_mla._runtime import _backends, _ffi
from jax_mla.testing.hlo import text
from jax_mla.testing.run import num_gpus

pytestmark = pytest.mark.usefixtures("no_rank_promotion")


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
        pools = jnp.stack([pool] * 3) if mapped_pools else pool
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


@pytest.mark.cuda_build
@pytest.mark.parametrize(("padding", "multiple"), [(3, 2), (4, 8), (8, 16)])
def test_rows_of_odd_sizes_are_declined_on_cuda(padding, multiple) -> None:
    """The kernels copy 16 bytes at a time."""
    args = inputs(d_ckv=512, d_kpe=64, page_size=64, dtype="bfloat16", padding=padding).args()
    statuses = [s for s in jax_mla.backends(*args[:4], platform="cuda") if s.platform == "cuda"]
    statuses = [s for s in statuses if not s.by_name_only]  # tests/test_sm100.py
    why = f"are a multiple of 16 bytes, got a multiple of {multiple} at most"
    said = [why in s.reason for s in statuses]
    assert statuses and said == [multiple < 16] * len(statuses)


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
