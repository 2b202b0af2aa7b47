# ruff: noqa: E501
"""append of raw projections: the norm of ckv, the rotation of kpe and q_pe, then the cache."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import KINDS, context, make_mesh, put

import jax_mla
from examples.deepseek import rope
from examples.deepseek.config import Rope
from jax_mla.testing.hlo import collectives, num_copies, pointers

append: Any = jax_mla.append  # without types, because options are made from dictionaries
pytestmark = pytest.mark.usefixtures("no_rank_promotion")

B, Q, H, PAGES, SIZE, MAX, POSITIONS = 4, 2, 4, 8, 16, 2, 30
EPS = 1e-6
FORMATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "e4m3": {"kv_format": "fp8_e4m3", "kv_scale": (0.02, 0.03)},
    "ds_mla": {"kv_format": "fp8_ds_mla"},
}
interleaving = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])


def tables() -> tuple[jax.Array, jax.Array]:
    """page_table and positions; tokens are skipped, and some lie past the page table."""
    positions = jnp.array([[3, 4], [16, 17], [-1, 0], [29, 32]], jnp.int32)
    return jnp.arange(PAGES, dtype=jnp.int32).reshape(B, MAX), positions


def rows(dtype: str, d_ckv: int = 512, d_kpe: int = 64) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)

    def make(*shape: int) -> jax.Array:
        values = rng.standard_normal(shape, np.float32) * 3
        return jnp.asarray(values.astype(getattr(ml_dtypes, dtype, dtype)))

    return {
        "ckv": make(B, Q, d_ckv), "kpe": make(B, Q, d_kpe), "q_pe": make(B, Q, H, d_kpe),
        "norm_weight": make(d_ckv), "rope_table": jax_mla.rope_table(POSITIONS, d_kpe),
    }  # fmt: skip


def empty(form: str, dtype: str, d: int = 576) -> jax.Array:
    width, kind = {"plain": (d, dtype), "e4m3": (d, "float8_e4m3fn"), "ds_mla": (656, "uint8")}[
        form
    ]
    return jnp.zeros((PAGES, SIZE, width), kind)


def separate(given: dict[str, jax.Array], pool: Any, *, interleaved: bool, **options: Any) -> Any:
    """The steps one after the other, by their definitions."""
    table, positions = tables()
    turn = functools.partial(
        jax_mla.reference.rotate, rope_table=given["rope_table"], positions=positions,
        interleaved=interleaved,
    )  # fmt: skip
    ckv = jax_mla.reference.rms_norm(given["ckv"], given["norm_weight"], EPS)
    new = jax_mla.reference.append(pool, ckv, turn(given["kpe"]), table, positions, **options)
    return turn(given["q_pe"]), new


def fused(given: dict[str, jax.Array], pool: Any, *, interleaved: bool, **options: Any) -> Any:
    others = {name: x for name, x in given.items() if name not in ("ckv", "kpe")}
    return append(
        pool, given["ckv"], given["kpe"], *tables(), **others, norm_eps=EPS,
        rope_interleaved=interleaved, **options,
    )  # fmt: skip


def as_bytes(x: Any) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


def assert_nearly_same(got: Any, want: Any) -> None:
    """Equal but for one in a hundred values, which differ by one unit in the last place.

    A float32 may differ anywhere, by a little. (The steps of the smallest codes are absolute.)
    """
    if got.dtype == jnp.uint8:  # a row of fp8_ds_mla: the values that its codes stand for
        got, want = (
            jnp.concatenate(
                jax_mla.reference.decode_rows([x], 512, 64, "fp8_ds_mla", None), -1
            ).astype(jnp.bfloat16)
            for x in (got, want)
        )
        rtol, atol = 2**-3, 2**-11
    else:
        rtol, atol = {1: (2**-3, 2**-8), 2: (2**-7, 1e-5), 4: (2**-20, 2e-6)}[got.dtype.itemsize]
    got, want = np.asarray(got), np.asarray(want)
    differs = (as_bytes(got) != as_bytes(want)).reshape(*got.shape, -1).any(axis=-1)
    assert differs.mean() < 0.01 or got.dtype == np.float32
    np.testing.assert_allclose(np.float64(got), np.float64(want), rtol=rtol, atol=atol)


@interleaving
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_same_as_the_separate_steps(dtype, form, interleaved, backend, on_device) -> None:
    given, pool = rows(dtype), empty(form, dtype)
    want = separate(given, pool, interleaved=interleaved, **FORMATS[form])
    fun = jax.jit(functools.partial(fused, interleaved=interleaved, backend=backend,
                                    **FORMATS[form]))  # fmt: skip
    for a, b in zip(fun(given, pool), want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert_nearly_same(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("widths", "interleaved"),
    [((512, 64), False), ((512, 64), True), ((200, 24), True), ((600, 70), False)],
)
def test_cuda_gives_the_bits_of_the_cpu(widths, dtype, form, interleaved) -> None:
    """Both add and round in the same order (csrc/core/transform.h)."""
    if form == "ds_mla" and widths != (512, 64):
        pytest.skip("a row of fp8_ds_mla has 512 + 64 values")
    given, pool = rows(dtype, *widths), empty(form, dtype, sum(widths))
    fun = jax.jit(functools.partial(fused, interleaved=interleaved, **FORMATS[form]))
    got, want = (
        [as_bytes(x) for x in fun(*jax.device_put((given, pool), jax.devices(platform)[0]))]
        for platform in ("cuda", "cpu")
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("d_ckv", [512, 600])
def test_cuda_gives_the_bits_of_the_cpu_for_many_tokens(d_ckv, dtype, form) -> None:
    """More than kFewTokens of csrc/append/encode.cu: another kernel runs."""
    if form == "ds_mla" and d_ckv != 512:
        pytest.skip("a row of fp8_ds_mla has 512 + 64 values")
    tokens, pages = 3001, 188
    rng = np.random.default_rng(1)
    ckv, kpe, q_pe = (
        jnp.asarray(rng.standard_normal((tokens, *shape), np.float32), dtype)
        for shape in ((d_ckv,), (64,), (2, 64))
    )
    positions = np.arange(tokens, dtype=np.int32)
    positions[[0, 70, 3000]] = -1
    positions[500] = pages * SIZE  # past the table
    table = rng.permutation(pages).astype(np.int32)[None]
    pool = jnp.zeros(
        (pages, SIZE, 656 if form == "ds_mla" else d_ckv + 64), empty(form, dtype).dtype
    )
    arguments = {
        "ckv": ckv, "kpe": kpe, "q_pe": q_pe, "page_table": jnp.asarray(table),
        "positions": jnp.asarray(positions), "cu_q_lens": jnp.array([0, tokens], jnp.int32),
        "norm_weight": jnp.asarray(rng.standard_normal(d_ckv), dtype),
        "rope_table": jax_mla.rope_table(2000, 64),
    }  # fmt: skip
    fun = jax.jit(functools.partial(append, rope_interleaved=True, **FORMATS[form]))
    results = []
    for platform in ("cuda", "cpu"):
        device = jax.devices(platform)[0]
        results.append(fun(jax.device_put(pool, device), **jax.device_put(arguments, device)))
    (got_q, got), (want_q, want) = results
    is_written = positions >= 0  # q_pe of the others is arbitrary
    np.testing.assert_array_equal(as_bytes(got_q)[is_written], as_bytes(want_q)[is_written])
    np.testing.assert_array_equal(as_bytes(got), as_bytes(want))


@pytest.mark.parametrize("parts", [("norm_weight",), ("rope_table",), ("rope_table", "q_pe")])
def test_any_part_can_be_off(parts, backend, on_device) -> None:
    given = rows("bfloat16")
    table, positions = tables()
    pool = (
        jnp.zeros((3, PAGES, SIZE, 512), "bfloat16"),
        jnp.zeros((3, PAGES, SIZE, 70), "bfloat16"),
    )
    layer = jnp.int32(1)
    options: dict[str, Any] = {n: given[n] for n in parts}
    if "rope_table" in parts:
        options["rope_interleaved"] = False
    got = append(
        pool, given["ckv"], given["kpe"], table, positions, layer=layer, backend=backend, **options
    )
    ckv, kpe = given["ckv"], given["kpe"]
    if "norm_weight" in parts:
        ckv = jax_mla.reference.rms_norm(ckv, given["norm_weight"], EPS)
    if "rope_table" in parts:
        kpe = jax_mla.reference.rotate(kpe, given["rope_table"], positions, interleaved=False)
    if "q_pe" in parts:
        q_pe, got = got
        want = jax_mla.reference.rotate(
            given["q_pe"], given["rope_table"], positions, interleaved=False
        )
        assert_nearly_same(q_pe, want)
    want = jax_mla.reference.append(pool, ckv, kpe, table, positions, layer=layer)
    for a, b in zip(got, want, strict=True):
        assert_nearly_same(a, b)


def test_rows_of_one_token_and_ragged_rows(backend, on_device) -> None:
    """[batch, ...] and [tokens, ...] give what [batch, q_len, ...] gives."""
    given, pool = rows("bfloat16"), empty("plain", "bfloat16")
    table, positions = tables()
    options = {"rope_table": given["rope_table"], "norm_weight": given["norm_weight"],
               "rope_interleaved": False, "backend": backend}  # fmt: skip
    one = [given[n][:, 0] for n in ("ckv", "kpe")]
    got = append(pool, *one, table, positions[:, 0], q_pe=given["q_pe"][:, 0], **options)
    only_first = positions.at[:, 1].set(-1)
    all_ = [given[n] for n in ("ckv", "kpe")]
    want = append(pool, *all_, table, only_first, q_pe=given["q_pe"], **options)
    np.testing.assert_array_equal(as_bytes(got[0]), as_bytes(want[0][:, 0]))
    np.testing.assert_array_equal(as_bytes(got[1]), as_bytes(want[1]))

    flat = {n: given[n].reshape(B * Q, *given[n].shape[2:]) for n in ("ckv", "kpe", "q_pe")}
    bounds = jnp.arange(B + 1, dtype=jnp.int32) * Q
    got = append(
        pool, flat["ckv"], flat["kpe"], table, positions.reshape(-1), cu_q_lens=bounds,
        q_pe=flat["q_pe"], **options,
    )  # fmt: skip
    want = append(pool, *all_, table, positions, q_pe=given["q_pe"], **options)
    np.testing.assert_array_equal(as_bytes(got[0]), as_bytes(want[0].reshape(got[0].shape)))
    np.testing.assert_array_equal(as_bytes(got[1]), as_bytes(want[1]))


# ---- Definitions -------------------------------------------------------------------------------


def test_norm_by_hand() -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((5, 64)) * [[1e-3], [1], [50], [0], [7]]).astype(np.float32)
    weight = rng.standard_normal(64).astype(np.float32)
    want = x / np.sqrt((np.float64(x) ** 2).mean(-1, keepdims=True) + EPS) * weight
    got = jax_mla.reference.rms_norm(jnp.asarray(x), jnp.asarray(weight), EPS)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_norm_keeps_its_roundings_where_float32_follows() -> None:
    """XLA leaves casts out of a program (on the CPU: of large arrays), and never step by step."""
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((8192, 512), np.float32) * 3, jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal(512), jnp.float32)

    def fun(x: jax.Array) -> jax.Array:
        return jax_mla.reference.rms_norm(x, weight, EPS).astype(jnp.float32) * 3

    # A sum that is fused with a product may round the other way.
    assert (np.asarray(jax.jit(fun)(x)) != np.asarray(fun(x))).mean() < 1e-3


@interleaving
def test_rotation_by_complex_numbers(interleaved) -> None:
    rng = np.random.default_rng(2)
    d, positions = 16, np.array([0, 1, 7, 29], np.int32)
    x = rng.standard_normal((4, 3, d)).astype(np.float32)
    pairs = x.reshape(4, 3, d // 2, 2) if interleaved else np.stack([x[..., :8], x[..., 8:]], -1)
    angle = positions[:, None] * 10000.0 ** -(np.arange(0, d, 2) / d)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)[:, None]
    parts = turned.real, turned.imag
    want = np.stack(parts, -1).reshape(x.shape) if interleaved else np.concatenate(parts, -1)
    got = jax_mla.reference.rotate(
        jnp.asarray(x), jax_mla.rope_table(30, d), jnp.asarray(positions), interleaved=interleaved
    )
    np.testing.assert_allclose(got, want, atol=1e-6)


YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
        "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"mscale": 0.707, "mscale_all_dim": 1.2}, {"mscale": 0},
        {"attention_factor": 1.0, "mscale": 0},
        {"attention_factor": 2, "mscale": 0.707}, {"attention_factor": None, "truncate": True},
    ],
)  # fmt: skip
def test_yarn_is_the_model_examples(changes) -> None:
    """Against the other implementation here, which the tests compare with transformers."""
    scaling = YARN | changes
    known = Rope(
        kind="yarn", theta=10000.0, factor=40, original_max_positions=4096, beta_fast=32,
        beta_slow=1, mscale=scaling["mscale"], mscale_all_dim=scaling["mscale_all_dim"],
        amplitude=scaling.get("attention_factor"),
    )  # fmt: skip
    frequencies, factor = rope.inverse_frequencies(known, 64, 4096)
    phase = np.arange(500)[:, None] * np.float64(frequencies)
    want = np.concatenate([np.cos(phase), np.sin(phase)], axis=1) * factor
    got = jax_mla.rope_table(500, 64, rope_scaling=scaling)
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_the_theta_of_a_scaling_is_used() -> None:
    """`rope_parameters` of a config of transformers 5."""
    want = jax_mla.rope_table(50, 64, theta=5e4, rope_scaling=YARN)
    np.testing.assert_array_equal(
        jax_mla.rope_table(50, 64, rope_scaling=YARN | {"rope_theta": 5e4}), want
    )
    want = jax_mla.rope_table(50, 64, theta=5e4)
    for kind in ({"rope_type": "default"}, {}):
        plain = jax_mla.rope_table(50, 64, rope_scaling=kind | {"rope_theta": 5e4})
        np.testing.assert_array_equal(plain, want)


@pytest.mark.parametrize("name", ["beta_fast", "beta_slow", "mscale", "mscale_all_dim"])
def test_null_in_yarn_is_absent(name) -> None:
    absent = {field: x for field, x in YARN.items() if field != name}
    got, want = (
        jax_mla.rope_table(500, 64, rope_scaling=scaling)
        for scaling in (YARN | {name: None, "rope_type": None}, absent)
    )
    np.testing.assert_array_equal(got, want)


# ---- Values on the device, transforms of JAX ---------------------------------------------------


def test_positions_past_the_table_take_its_last_row(backend, on_device) -> None:
    given, pool = rows("bfloat16"), empty("plain", "bfloat16")
    short = given | {"rope_table": given["rope_table"][:5]}
    q_pe, new = fused(short, pool, interleaved=False, backend=backend)
    want = separate(short, pool, interleaved=False)
    assert_nearly_same(q_pe, want[0])
    assert_nearly_same(new, want[1])
    assert np.isfinite(np.float32(q_pe)).all()


@pytest.mark.parametrize("is_weight_mapped", [False, True], ids=["shared", "mapped"])
def test_vmap(is_weight_mapped, backend, on_device) -> None:
    given, pool = rows("float32"), empty("e4m3", "float32")
    weight = given.pop("norm_weight")
    weights = jnp.stack([weight, 2 * weight]) if is_weight_mapped else weight
    ckvs = jnp.stack([given.pop("ckv"), jnp.flip(rows("float32")["ckv"], 0)])

    def one(ckv, weight):
        both = {"ckv": ckv, "norm_weight": weight}
        return fused(given | both, pool, interleaved=False, backend=backend,
                     **FORMATS["e4m3"])  # fmt: skip

    got = jax.vmap(one, in_axes=(0, 0 if is_weight_mapped else None))(ckvs, weights)
    for i in range(2):
        both = {"ckv": ckvs[i], "norm_weight": weights[i] if is_weight_mapped else weight}
        want = separate(given | both, pool, interleaved=False, **FORMATS["e4m3"])
        for a, b in zip(got, want, strict=True):
            assert_nearly_same(a[i], b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("batch", "heads", "pages"), [("dp", "tp", None), ("dp", "tp", "cp"), (None, "tp", "cp")]
)
def test_sharded(kind, batch, heads, pages) -> None:
    """Each device transforms its own rows, and then they move as they did."""
    mesh = make_mesh(kind)
    given = rows("float32", 32, 8)
    table, positions = tables()
    pool = empty("plain", "float32", 40)
    want = separate(given, pool, interleaved=False)
    spec = {"ckv": P(batch), "kpe": P(batch), "q_pe": P(batch, None, heads), "norm_weight": P(),
            "rope_table": P()}  # fmt: skip

    @functools.partial(jax.jit, donate_argnums=0)
    def fun(pool, given, table, positions):
        others = {name: x for name, x in given.items() if name not in ("ckv", "kpe")}
        return append(pool, given["ckv"], given["kpe"], table, positions, **others,
                      norm_eps=EPS, rope_interleaved=False)  # fmt: skip

    with context(mesh, kind):
        placed = dict(zip(given, put(given.values(), mesh, [spec[n] for n in given]), strict=True))
        pool, table, positions = put([pool, table, positions], mesh, [P(pages), P(batch), P(batch)])
        pool = jnp.copy(pool)  # device_put lets CPU devices share memory, which cannot be donated
        compiled = fun.lower(pool, placed, table, positions).compile()
        before = pointers(pool)
        q_pe, got = fun(pool, placed, table, positions)
    np.testing.assert_allclose(q_pe, want[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got, want[1], rtol=1e-5, atol=1e-6)
    assert pointers(got) == before
    assert [c.kind for c in collectives(compiled)] == (["all-gather"] if batch else [])
    assert q_pe.sharding.is_equivalent_to(NamedSharding(mesh, spec["q_pe"]), 4)


@pytest.mark.parametrize("form", FORMATS)
def test_donated_pool_stays_in_place(form) -> None:
    given, pool = rows("bfloat16"), empty(form, "bfloat16")
    fun = jax.jit(
        functools.partial(fused, given, interleaved=True, **FORMATS[form]), donate_argnums=0
    )
    compiled = fun.lower(pool).compile()
    assert num_copies(compiled, pool.shape) == 0
    before = pointers(pool)
    assert pointers(fun(pool)[1]) == before


# ---- Bad input ---------------------------------------------------------------------------------

E4M3 = jnp.float8_e4m3fn
BAD = [
    ({"norm_weight": jnp.ones(64)}, ValueError, "norm_weight: expected shape (512), the width of ckv, got (64,)"),
    ({"norm_weight": jnp.ones(512, jnp.int32)}, TypeError, "norm_weight: expected bfloat16 or float16 or float32, got int32"),
    ({"norm_weight": [1.0]}, TypeError, "norm_weight: expected an array, got list"),
    ({"norm_eps": -1.0}, ValueError, "norm_eps: expected a number in [0, 3.4e+38], got -1.0"),
    ({"norm_eps": 1e300}, ValueError, "norm_eps: expected a number in [0, 3.4e+38], got 1e+300"),
    ({"norm_eps": "x", "norm_weight": None}, TypeError, "norm_eps: expected a Python number, got str"),
    ({"norm_eps": jnp.float32(1)}, TypeError, "norm_eps: expected a Python number, got a jax.Array"),
    ({"rope_table": jnp.ones((9, 32))}, ValueError, "rope_table: expected shape (*, 64), the width of kpe, got (9, 32)"),
    ({"rope_table": jnp.ones((0, 64))}, ValueError, "rope_table: expected at least one position and an even width"),
    ({"rope_table": jnp.ones((9, 64), jnp.bfloat16)}, TypeError, "rope_table: expected float32, got bfloat16"),
    ({"rope_table": None}, ValueError, "q_pe: expected None without rope_table, got an array"),
    ({"rope_table": None, "q_pe": None, "rope_interleaved": True}, ValueError, "rope_interleaved: expected None without rope_table, got True"),
    ({"rope_interleaved": None}, ValueError, "rope_interleaved: expected True or False with rope_table, got None; True for the published weights of DeepSeek, Kimi and GLM-5"),
    ({"rope_interleaved": 1}, TypeError, "rope_interleaved: expected a bool, got int"),
    ({"q_pe": jnp.ones((B, Q, 64))}, ValueError, "q_pe: expected shape (4, 2, *, 64), the tokens of ckv and the width of kpe, got (4, 2, 64)"),
    ({"q_pe": jnp.ones((B, Q, H, 64), jnp.float16)}, TypeError, "q_pe: expected float32 as in ckv, got float16"),
    ({"positions": np.full((B, Q), POSITIONS, np.int32)}, ValueError, "positions: expected positions that rope_table (jax_mla.rope_table) has in"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=range(len(BAD)))
def test_bad_input(changes, error, message) -> None:
    table, positions = tables()
    given: dict[str, Any] = rows("float32") | {"rope_interleaved": False}
    if "rope_table" in changes and changes["rope_table"] is None:
        given["rope_interleaved"] = None
    given |= {"page_table": table, "positions": positions} | changes
    with pytest.raises(error) as caught:
        append(empty("plain", "float32"), **given)
    assert str(caught.value).startswith(f"jax_mla.append: {message}")


# x, rope_table, positions
ROTATED = jnp.ones((6, 4, 64)), jnp.ones((9, 64)), jnp.arange(6)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (ROTATED[::-1], "positions: expected integers, the third argument, got float32"),
        ((ROTATED[0], ROTATED[2], ROTATED[1]), "positions: expected integers, the third argument, got float32"),
        ((ROTATED[1], ROTATED[0], ROTATED[2]), "rope_table: expected shape (*, 64), the second argument and the width of x, got (6, 4, 64)"),
        ((ROTATED[1], ROTATED[0][:, 0], ROTATED[2]), "x: expected [*tokens, d] or [*tokens, heads, d] for positions of shape (6,), got shape (9, 64)"),
        ((ROTATED[1], jnp.ones((9, 64), jnp.bfloat16), jnp.arange(9)), "rope_table: expected float32, the second argument, got bfloat16"),
        ((ROTATED[0].swapaxes(0, 1), *ROTATED[1:]), "x: expected [*tokens, d] or [*tokens, heads, d] for positions of shape (6,), got shape (4, 6, 64)"),
        ((jnp.ones((6, 64), int), *ROTATED[1:]), "x: expected floats, the first argument, got int32"),
        ((ROTATED[0][..., :7], ROTATED[1][:, :7], ROTATED[2]), "x: expected an even width, got shape (6, 4, 7)"),
        (([1.0], *ROTATED[1:]), "x: expected an array, got list"),
    ],
    ids=range(9),
)  # fmt: skip
def test_rotate_names_what_does_not_fit(args, message) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        jax_mla.reference.rotate(*args, interleaved=True)
    assert str(caught.value) == f"jax_mla.reference.rotate: {message}"


def test_rms_norm_names_what_does_not_fit() -> None:
    message = (
        r"reference.rms_norm: weight: expected shape \(8\), the second argument .*got \(3, 8\)"
    )
    with pytest.raises(ValueError, match=message):
        jax_mla.reference.rms_norm(jnp.ones(8), jnp.ones((3, 8)), EPS)


def test_codes_cannot_be_transformed() -> None:
    given = rows("float32")
    codes = {name: given[name].astype(E4M3) for name in ("ckv", "kpe")}
    with pytest.raises(TypeError, match="ckv: expected .* or float32 with norm_weight, got float8"):
        append(
            empty("e4m3", "float32"), **codes, page_table=tables()[0], positions=tables()[1],
            norm_weight=given["norm_weight"], **FORMATS["e4m3"],
        )  # fmt: skip


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"num_positions": 0}, ValueError, "num_positions: expected at least 1, got 0"),
        ({"num_positions": 2.5}, TypeError, "num_positions: expected an int, got float"),
        ({"num_positions": "x"}, TypeError, "num_positions: expected an int, got str"),
        ({"num_positions": True}, TypeError, "num_positions: expected an int, got bool"),
        ({"d_kpe": 7}, ValueError, "d_kpe: expected an even number of at least 2, got 7"),
        ({"d_kpe": 64.0}, TypeError, "d_kpe: expected an int, got float"),
        ({"theta": 0}, ValueError, "theta: expected a positive finite number, got 0.0"),
        ({"theta": -1e4}, ValueError, "theta: expected a positive finite number, got -10000.0"),
        ({"theta": math.nan}, ValueError, "theta: expected a positive finite number, got nan"),
        ({"theta": "1e4"}, TypeError, "theta: expected a Python number, got str"),
        ({"theta": 1, "rope_scaling": YARN}, ValueError, "theta: expected a number above 1 with YaRN, got 1.0"),
        ({"rope_scaling": "yarn"}, TypeError, "rope_scaling: expected None or a mapping, got str"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, ValueError, "rope_scaling: expected None or type 'yarn' or 'default', got 'linear'"),
        ({"rope_scaling": {"rope_theta": 5e4, "factor": 2}}, ValueError, "rope_scaling: expected None or type 'yarn' or 'default', got no type in {'rope_theta': 50000.0, 'factor': 2}"),
        ({"theta": 5e4, "rope_scaling": {"rope_type": "default", "rope_theta": 1e4}}, ValueError, "theta: expected None or 10000.0, as in rope_scaling, got 50000.0"),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 0}}, ValueError, "rope_scaling['rope_theta']: expected a positive finite number, got 0.0"),
        ({"rope_scaling": {"type": "yarn"}}, ValueError, "rope_scaling: expected ['factor', 'original_max_position_embeddings']"),
        ({"rope_scaling": YARN | {"rope_type": "default"}}, ValueError, "rope_scaling: expected the same rope_type and type, got 'default' and 'yarn'"),
        ({"rope_scaling": {"type": "default", "factor": 4}}, ValueError, "rope_scaling: expected type 'yarn' with factor, got 'default'"),
        ({"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 4}}, ValueError, "rope_scaling['beta_fast']: expected at least beta_slow (4.0), got 1.0"),
        ({"rope_scaling": YARN | {"mscale": 1e300, "mscale_all_dim": 1e-300}}, ValueError, "rope_scaling: expected a factor on cos and sin that float32 holds, got"),
        ({"rope_scaling": YARN | {"truncate": False}}, ValueError, "rope_scaling['truncate']: expected True, got False"),
        ({"rope_scaling": YARN | {"truncate": None}}, ValueError, "rope_scaling['truncate']: expected True, got None"),
        ({"rope_scaling": YARN | {"apply_yarn_scaling": False}}, ValueError, "rope_scaling['apply_yarn_scaling']: expected True, got False"),
        ({"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, ValueError, "rope_scaling['partial_rotary_factor']: expected 1.0, got 0.5"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ValueError, "rope_scaling['partial_rotary_factor']: expected 1.0, got 0.5"),
        ({"rope_scaling": YARN | {"llama_4_scaling_beta": 0.1}}, ValueError, "rope_scaling['llama_4_scaling_beta']: expected no field but apply_yarn_scaling, "),
        ({"rope_scaling": YARN | {"factor": None}}, TypeError, "rope_scaling['factor']: expected a Python number, got NoneType"),
        ({"rope_scaling": YARN | {"factor": 0}}, ValueError, "rope_scaling['factor']: expected a positive finite number, got 0.0"),
        ({"rope_scaling": YARN | {"factor": -4}}, ValueError, "rope_scaling['factor']: expected a positive finite number, got -4.0"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 0}}, ValueError, "rope_scaling['original_max_position_embeddings']: expected a positive"),
        ({"rope_scaling": YARN | {"beta_fast": -1}}, ValueError, "rope_scaling['beta_fast']: expected a positive"),
        ({"rope_scaling": YARN | {"mscale": "1"}}, TypeError, "rope_scaling['mscale']: expected a Python number, got str"),
        ({"rope_scaling": YARN | {"attention_factor": 0}}, ValueError, "rope_scaling['attention_factor']: expected a positive"),
    ],
)  # fmt: skip
def test_bad_tables(kwargs, error, message) -> None:
    with pytest.raises(error) as caught:
        jax_mla.rope_table(**{"num_positions": 10, "d_kpe": 64} | kwargs)
    assert str(caught.value).startswith(f"jax_mla.rope_table: {message}")


@pytest.mark.cuda_build
@pytest.mark.parametrize("form", FORMATS)
def test_lowers_for_cuda(form) -> None:
    given, pool = rows("bfloat16"), empty(form, "bfloat16")
    fun = jax.jit(functools.partial(fused, interleaved=False, **FORMATS[form]))
    lowered = fun.trace(given, pool).lower(lowering_platforms=("cuda",))
    assert "@jax_mla_append" in lowered.as_text()
