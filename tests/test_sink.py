"""Sinks in every op that takes them, against the definition and its limits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from small import inputs

import jax_mla
from jax_mla.testing.run import cpu_mesh, device_of

H = 4
SINK = np.array([0.5, np.inf, -np.inf, -20.0], np.float32)


def with_sink(out, lse, sink):
    """Return what a sink leaves of out, by the definition, in float64."""
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        kept = np.exp(lse) / (np.exp(lse) + np.exp(sink.astype(np.float64)))
    kept = np.where(np.isneginf(sink), 1, np.where(np.isneginf(lse), 0, kept))
    return out * kept[..., None]


def decode_call(**kwargs):
    case = inputs(num_heads=H)
    return functools.partial(
        jax_mla.decode, *case.args(), **case.kwargs(), return_lse=True, **kwargs
    )


def ragged_call(**kwargs):
    case = inputs(num_heads=H)
    q_nope, q_pe, pool, table, lens = case.args()
    rows = [jnp.ones((6, n)) for n in (32, 8)]
    q_nope, q_pe = (x.reshape(6, H, -1) for x in (q_nope, q_pe))
    return functools.partial(
        jax_mla.ragged_paged_attention, q_nope, q_pe, *rows, pool, table, lens,
        jnp.array([0, 2, 4, 6], jnp.int32), **case.kwargs(), return_lse=True, **kwargs,
    )  # fmt: skip


def prefill_call(backend=None):
    rng = np.random.default_rng(0)
    shapes = (7, H, 16), (7, H, 8), (7, 32), (7, 8), (H, 16, 32), (H, 32, 16)
    args = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    implementation = "reference" if backend == "reference" else None
    return functools.partial(
        jax_mla.prefill, *args, sm_scale=0.2, return_lse=True, implementation=implementation
    )


CALLS = {"decode": decode_call, "ragged": ragged_call, "prefill": prefill_call}


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("is_jitted", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("on", ["cpu", "reference"])
def test_out_shrinks_and_lse_stays(op, is_jitted, on) -> None:
    with jax.default_device(device_of(on)):
        call = CALLS[op](backend=on)
        compiled = jax.jit if is_jitted else lambda fun: fun
        out, lse, *_ = compiled(call)()
        got, got_lse, *_ = compiled(lambda sink: call(sink=sink))(jnp.asarray(SINK))
    np.testing.assert_array_equal(got_lse, lse)
    np.testing.assert_allclose(got, with_sink(out, lse, SINK), atol=1e-5)
    np.testing.assert_array_equal(got[..., 2, :], out[..., 2, :])  # minus infinity is no sink
    np.testing.assert_array_equal(got[..., 1, :], 0)


@pytest.mark.parametrize("op", ["decode", "ragged"])
def test_definitions_have_sinks(op) -> None:
    call = CALLS[op]()
    definition = getattr(jax_mla.reference, call.func.__name__)
    want = definition(*call.args, **call.keywords, sink=SINK)
    for a, b in zip(call(sink=SINK)[:2], want[:2], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("op", CALLS)
def test_a_derivative_by_the_sink_is_refused(op) -> None:
    with pytest.raises(NotImplementedError, match=f"{CALLS[op]().func.__name__} .*no derivative"):
        jax.grad(lambda sink: CALLS[op]()(sink=sink)[0].sum())(jnp.asarray(SINK))


def test_the_definition_has_a_finite_derivative_by_the_sink() -> None:
    """Also of a sink of minus infinity and a row without keys."""
    call = decode_call()
    *operands, lens = call.args
    definition: Any = jax_mla.reference.decode

    def total(sink):
        out, _ = definition(*operands, jnp.zeros_like(lens), **call.keywords, sink=sink)
        return out.sum()

    assert np.isfinite(jax.grad(total)(jnp.asarray(SINK))).all()


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize(
    ("sink", "error", "message"),
    [
        (np.zeros(H + 1, np.float32), ValueError, r"sink: expected shape \(4\), one number for"),
        (np.zeros((1, H), np.float32), ValueError, r"sink: expected shape \(4\).*got \(1, 4\)"),
        (np.zeros(H, np.float16), TypeError, "sink: expected float32, got float16"),
        ([0.0] * H, TypeError, "sink: expected an array, got list"),
    ],
)
def test_bad_sinks(op, sink, error, message) -> None:
    with pytest.raises(error, match=message):
        CALLS[op]()(sink=sink)


@pytest.mark.parametrize("place", [P(), P("tp"), P("dp")], ids=str)
def test_a_sink_may_lie_anywhere_on_an_explicit_mesh(place) -> None:
    mesh = cpu_mesh((2, 4), ("dp", "tp"), (AxisType.Explicit,) * 2)
    rng = np.random.default_rng(0)
    q, pool = (jnp.asarray(rng.standard_normal(s, np.float32)) for s in ((4, 8, 32), (8, 4, 32)))
    table, lens = jnp.arange(8, dtype=jnp.int32).reshape(4, 2), jnp.full(4, 7, jnp.int32)
    sink = jnp.arange(8, dtype=jnp.float32)
    want = jax_mla.decode(q, None, pool, table, lens, sm_scale=0.2, sink=sink)
    with jax.set_mesh(mesh):
        specs = P("dp", "tp"), P(), P("dp"), P("dp"), place
        q, pool, table, lens, sink = (
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip((q, pool, table, lens, sink), specs, strict=True)
        )
        got = jax_mla.decode(q, None, pool, table, lens, sm_scale=0.2, sink=sink)
    np.testing.assert_allclose(got, want, atol=1e-5)
