"""Rows without rotary part, and pools without pages, in every op."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mla
from jax_mla.testing.cases import Case, RaggedCase
from jax_mla.testing.run import GPU_PLATFORM, cpu_mesh, device_of, why_not

D_CKV, PAGE_SIZE = 512, 16
NO_ROPE = Case("no_rope", seq_lens=(0, 1, 40, 70), d_kpe=0, page_size=PAGE_SIZE, num_heads=8)
STEP = RaggedCase(
    "step", ((1, 40), (5, 9), (0, 5), (20, 70)), d_ckv=D_CKV, d_kpe=0, num_heads=8, num_padding=3
)
FORMATS = (None, "fp8_e4m3")


def bits(x: Any) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint8)


def rows_and_place(num_pages: int = 6) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return ckv [4, 2, d_ckv], a page table and positions."""
    rng = np.random.default_rng(0)
    ckv = jnp.asarray(rng.standard_normal((4, 2, D_CKV), dtype=np.float32), jnp.bfloat16)
    table = jnp.asarray(np.arange(4).reshape(4, 1) % max(num_pages, 1), jnp.int32)
    return ckv, table, jnp.asarray([[0, 1], [15, -1], [3, 4], [7, 99]], jnp.int32)


def pool_of(kv_format: str | None, num_pages: int = 6) -> jax.Array:
    return jnp.ones((num_pages, PAGE_SIZE, D_CKV), jnp.float8_e4m3fn if kv_format else jnp.bfloat16)


def skip_if_declined(
    backend: str, query: Any, q_pe: Any, pool: Any, table: Any, *, layer: Any, fmt: str | None
) -> None:
    platform = "cpu" if backend in ("cpu", "reference") else GPU_PLATFORM
    call = {"layer": layer, "kv_format": fmt, "platform": platform}
    for status in jax_mla.backends(query, q_pe, pool, table, **call):
        if status.name == backend and backend != "reference" and status.reason:
            pytest.skip(f"{backend}: {status.reason}")


def scale_of(kv_format: str | None) -> dict[str, Any]:
    return {"kv_format": kv_format, "kv_scale": 0.02} if kv_format else {}


@pytest.mark.parametrize("has_norm", [False, True], ids=["as_they_are", "norm"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_append_without_rope(kv_format, has_norm, backend, on_device) -> None:
    ckv, table, positions = rows_and_place()
    norm = jnp.linspace(0.5, 2, D_CKV) if has_norm else None
    normed = ckv if norm is None else jax_mla.reference.rms_norm(ckv, norm, 1e-6)
    fun = functools.partial(jax_mla.append, norm_weight=norm, backend=backend)
    got = jax.jit(functools.partial(fun, **scale_of(kv_format)))(
        pool_of(kv_format), ckv, None, table, positions
    )
    want = jax_mla.reference.append(
        pool_of(kv_format), normed, None, table, positions, **scale_of(kv_format)
    )
    off = np.abs(np.asarray(got, np.float32) - np.asarray(want, np.float32))
    assert off.max() <= (0.02 * 2**4 if has_norm else 0)
    assert (off > 0).mean() < 1e-3  # a norm rounds now and then to the next value


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_step_is_append_then_decode(kv_format, backend, on_device) -> None:
    case = RaggedCase(
        "decode", ((1, 40), (1, 1), (1, 70)), d_ckv=D_CKV, d_kpe=0, num_heads=8,
        kv_format=kv_format,
    )  # fmt: skip
    if reason := why_not(case, backend):
        pytest.skip(f"{backend}: {reason}")
    inputs = case.inputs()
    q_nope, _, ckv, _, pool, table, lens, *_ = inputs.args()
    options: dict[str, Any] = {**inputs.kwargs(), "backend": backend}
    out, new = jax_mla.ragged_paged_attention(q_nope, None, ckv, None, pool, table, lens, **options)
    sm_scale = options.pop("sm_scale")
    expected = jax_mla.append(pool, ckv, None, table, lens - 1, **options)
    want = jax_mla.decode(q_nope, None, expected, table, lens, sm_scale=sm_scale, **options)
    np.testing.assert_array_equal(bits(new), bits(expected))
    atol = 4e-3 if backend == "reference" else 0  # XLA sums in another order
    np.testing.assert_allclose(
        np.asarray(out, np.float32), np.asarray(want, np.float32), rtol=0, atol=atol
    )


def test_codes_of_new_rows_have_the_values_of_the_reference() -> None:
    ckv, *_ = rows_and_place()
    (rows,) = jax_mla.reference.encode_rows(ckv, None, "fp8_e4m3", 0.02, [jnp.float8_e4m3fn])
    values, kpe = jax_mla.reference.decode_rows([rows], D_CKV, 0, "fp8_e4m3", 0.02)
    assert kpe.shape == (4, 2, 0)
    np.testing.assert_allclose(values, ckv.astype(jnp.float32), rtol=0.07, atol=0.02 * 2**-9)


@pytest.mark.parametrize("cache", [("bf16", 2), ("fp8_ds_mla", 1)], ids=lambda cache: cache[0])
def test_encode_rows_refuses_a_cache_with_rotary_part(cache) -> None:
    kv_format, num_pools = cache
    with pytest.raises(ValueError, match=r"^jax_mla.reference.encode_rows: kpe: expected an array"):
        jax_mla.reference.encode_rows(
            jnp.ones((2, D_CKV)), None, kv_format, None, [jnp.bfloat16] * num_pools
        )


def test_vmap() -> None:
    inputs = NO_ROPE.inputs()
    q_nope, q_pe, pool, table, lens = inputs.args()
    assert q_pe is None
    fun = functools.partial(jax_mla.decode, **inputs.kwargs())
    want = fun(q_nope, None, pool, table, lens)
    by_query = jax.vmap(lambda q: fun(q, None, pool, table, lens))(jnp.stack([q_nope, -q_nope]))
    np.testing.assert_array_equal(by_query[0], want)
    both = jax.vmap(lambda q, x: fun(q, None, x, table, lens))(
        jnp.stack([q_nope] * 2), jnp.stack([pool] * 2)
    )
    np.testing.assert_array_equal(both[1], want)


@pytest.mark.parametrize("pages", [None, "data"], ids=["whole_pool", "split_pool"])
def test_mesh(pages) -> None:
    """Sequences and heads are split, and pages too: then new rows are exchanged."""
    mesh = cpu_mesh((2, 2), ("data", "tensor"))
    ckv, table, positions = rows_and_place()
    pool, q = pool_of(None), jnp.stack([jnp.tile(ckv[:, :1], (1, 8, 1))], axis=1)

    def put(x: jax.Array, *spec: Any) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    def step(pool, ckv, q, table, positions):
        pool = jax_mla.append(pool, ckv, None, table, positions)
        lens = jnp.full(4, 9, jnp.int32)
        return pool, jax_mla.decode(q, None, pool, table, lens, sm_scale=0.05)

    want = jax.jit(step)(pool, ckv, q, table, positions)
    got = jax.jit(step)(
        put(pool, pages), put(ckv, "data"), put(q, "data", None, "tensor"), put(table, "data"),
        put(positions, "data"),
    )  # fmt: skip
    np.testing.assert_array_equal(bits(got[0]), bits(want[0]))
    np.testing.assert_allclose(
        np.asarray(got[1], np.float32), np.asarray(want[1], np.float32), atol=2e-2
    )


@pytest.mark.parametrize("op", ["prefill", "mixed_attention"])
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_prompts(op, implementation) -> None:
    """Unabsorbed attention is the absorbed one between the projections."""
    inputs = STEP.inputs()
    _, _, ckv, _, pool, table, lens, bounds, num_seqs = inputs.args()
    rng = np.random.default_rng(1)
    pool, ckv = (jnp.nan_to_num(x, nan=0.5).astype(jnp.float32) for x in (pool, ckv))
    tokens, heads, d_nope, d_v = ckv.shape[0], 8, 32, 24
    q, w_uk, w_uv = (
        jnp.asarray(rng.standard_normal(shape, dtype=np.float32))
        for shape in ((tokens, heads, d_nope), (heads, d_nope, D_CKV), (heads, D_CKV, d_v))
    )
    w_uk, w_uv = w_uk / 20, w_uv / 20
    options: dict[str, Any] = {"sm_scale": 0.1}
    want, new = jax_mla.ragged_paged_attention(
        jnp.einsum("thn,hnc->thc", q, w_uk), None, ckv, None, pool, table, lens, bounds, num_seqs,
        backend="reference", **options,
    )  # fmt: skip
    want = jnp.einsum("thc,hcv->thv", want, w_uv)
    if op == "prefill":
        got = jax_mla.prefill(
            q, None, ckv, None, w_uk, w_uv, new, table, lens, bounds, num_seqs,
            implementation=implementation, **options,
        )  # fmt: skip
    else:
        got, _ = jax_mla.mixed_attention(
            q, None, ckv, None, w_uk, w_uv, pool, table, lens, bounds, num_seqs,
            implementation=implementation, **options,
        )  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["packed", "split", "stacked", "no_rope"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_pool_without_pages(kv_format, layout, backend) -> None:
    dtype = jnp.float8_e4m3fn if kv_format else jnp.bfloat16
    layers, d_kpe = (3,) if layout == "stacked" else (), 0 if layout == "no_rope" else 64
    pool: Any = jnp.zeros((*layers, 0, 64, D_CKV + d_kpe), dtype)
    if layout == "split":
        pool = tuple(jnp.zeros((0, 64, d), dtype) for d in (D_CKV, d_kpe))
    options: dict[str, Any] = {
        "backend": backend,
        **scale_of(kv_format),
        **({"layer": 1} if layers else {}),
    }
    attend: dict[str, Any] = {"sm_scale": 0.1, "return_lse": True, **options}
    query = jnp.ones((3, 16, D_CKV), jnp.bfloat16)
    q_pe = jnp.ones((3, 16, d_kpe), jnp.bfloat16) if d_kpe else None
    ckv, kpe = query[:, 0], None if q_pe is None else q_pe[:, 0]
    table: Any = np.full((3, 2), 2147480000, np.int32)
    lens: Any = np.zeros(3, np.int32)
    skipped: Any = np.full(3, -1, np.int32)
    skip_if_declined(backend, query, q_pe, pool, table, layer=options.get("layer"), fmt=kv_format)
    with jax.default_device(device_of(backend)):
        new = jax_mla.append(pool, ckv, kpe, table, skipped, **options)
        results = [
            jax_mla.decode(query, q_pe, pool, table, lens, **attend),
            jax_mla.sparse_attention(query, q_pe, pool, table, topk_lens=lens, **attend),
            # Lengths on the device may be anything: no page is present.
            jax_mla.decode(query, q_pe, pool, table, jnp.full(3, 70), **attend),
            jax_mla.ragged_paged_attention(
                query, q_pe, ckv, kpe, pool, table, jnp.full(3, 70), **attend
            )[:2],
        ]
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, pool)
    for out, lse in results:
        np.testing.assert_array_equal(np.asarray(out, np.float32), np.zeros((3, 16, D_CKV)))
        np.testing.assert_array_equal(lse, np.full((3, 16), -np.inf, np.float32))


def test_a_length_in_a_pool_without_pages_is_refused_on_the_host() -> None:
    query, pool = jnp.ones((1, 4, 32)), jnp.zeros((0, 4, 40))
    table: Any = np.zeros((1, 2), np.int32)
    lens: Any = np.ones(1, np.int32)
    with pytest.raises(ValueError, match=r"page_table: expected ids of the pool's pages in \[0, 0"):
        jax_mla.decode(query, jnp.ones((1, 4, 8)), pool, table, lens, sm_scale=1.0)
