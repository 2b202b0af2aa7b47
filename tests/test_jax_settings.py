"""Every op under JAX's settings: 64-bit types, strict promotion, checks for NaN and infinity."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mla

BATCH, TOKENS, HEADS, D_NOPE, D_CKV, D_KPE, D_V, PAGES, SIZE = 2, 8, 4, 16, 32, 8, 24, 16, 4
E4M3 = jnp.float8_e4m3fn
RNG = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


Q = {"q_nope": normal(TOKENS, HEADS, D_CKV), "q_pe": normal(TOKENS, HEADS, D_KPE)}
CODES = {name: x.astype(E4M3) for name, x in Q.items()}
ROWS = {"ckv": normal(TOKENS, D_CKV), "kpe": normal(TOKENS, D_KPE)}
W_UK, W_UV = normal(HEADS, D_NOPE, D_CKV), normal(HEADS, D_CKV, D_V)
PROMPTS = {"q_nope": normal(TOKENS, HEADS, D_NOPE), "q_pe": Q["q_pe"], "w_uk": W_UK, "w_uv": W_UV}
PLAIN: dict[str, Any] = {"kv_pages": normal(PAGES, SIZE, D_CKV + D_KPE)}
# Scales are Python floats and numpy's, which are 64 bits wide.
FP8 = {"kv_pages": PLAIN["kv_pages"].astype(E4M3), "kv_format": "fp8_e4m3", "kv_scale": 0.5}
TWO_SCALES = FP8 | {"kv_scale": (0.5, np.float64(0.25))}
TABLE = jnp.arange(8, dtype=jnp.int32).reshape(BATCH, 4)
# Sequence 0 has no token, and the last three tokens belong to no sequence.
PLACE: dict[str, Any] = {"page_table": TABLE, "seq_lens": jnp.asarray([0, 8], jnp.int32)}
STEP = PLACE | {"cu_q_lens": jnp.asarray([0, 0, 5], jnp.int32)}
TO_WRITE = {
    "page_table": TABLE,
    "positions": jnp.asarray([3, 4, 5, -1, 4, 5, 6, 7], jnp.int32),
    "cu_q_lens": jnp.asarray([0, 4, 8], jnp.int32),
}
RAW = {
    "norm_weight": normal(D_CKV),
    "norm_eps": np.float64(1e-6),
    "rope_table": jax_mla.rope_table(16, D_KPE),
    "rope_interleaved": True,
}
SINK = {"sink": normal(HEADS)}
# Query 0 has no key, query 1 none in the pool.
LISTS = {
    "indices": jnp.asarray(RNG.integers(0, PAGES * SIZE, (TOKENS, 5)), jnp.int32).at[1].set(-1),
    "topk_lens": jnp.arange(TOKENS, dtype=jnp.int32).clip(0, 5),
}
INDEX = {
    "q": normal(TOKENS, HEADS, 128), "weights": normal(TOKENS, HEADS), "k": 3,
    "return_scores": True,
}  # fmt: skip
INDEX_KEYS = {"index_pages": normal(PAGES, SIZE, 128)}
INDEX_CODES = {"index_pages": jnp.zeros((PAGES, SIZE, 132), jnp.uint8).at[..., ::7].set(49)}
INDEX_ROWS = {"k": normal(TOKENS, 128), **TO_WRITE}
INDEX_RAW = {
    "norm_weight": normal(128), "norm_bias": normal(128), "norm_eps": np.float64(1e-6),
    "rope_table": jax_mla.rope_table(16, 64), "rope_interleaved": False,
}  # fmt: skip
SCALE = {"sm_scale": np.float64(0.1), "return_lse": True}


def encode_and_decode() -> tuple[jax.Array, jax.Array]:
    scales: Any = (0.5, np.float64(0.25))
    rows = jax_mla.reference.encode_rows(ROWS["ckv"], ROWS["kpe"], "fp8_e4m3", scales, [E4M3])
    return jax_mla.reference.decode_rows(rows, D_CKV, D_KPE, "fp8_e4m3", scales)


def merge_over_axis(outs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    merge = functools.partial(jax_mla.merge, axis_name="parts")
    return jax.vmap(merge, axis_name="parts")(outs, lses)


def calls() -> dict[str, Callable[[], Any]]:
    def by_sequence(**arrays: jax.Array) -> dict[str, jax.Array]:
        return {name: x.reshape(BATCH, -1, *x.shape[1:]) for name, x in arrays.items()}

    part = functools.partial
    decode, append = jax_mla.decode, jax_mla.append
    ragged, prefill, mixed = (
        jax_mla.ragged_paged_attention,
        jax_mla.prefill,
        jax_mla.mixed_attention,
    )
    reference = jax_mla.reference
    queries, codes = by_sequence(**Q), by_sequence(**CODES)
    parts = {"outs": normal(3, 4, 8), "lses": normal(3, 4).at[1, 2].set(-jnp.inf)}
    found: dict[str, Callable[[], Any]] = {
        "decode q_scale": part(decode, **codes, **FP8, **PLACE, **SCALE, q_scale=0.5),
        "append raw": part(append, **ROWS, **TO_WRITE, **PLAIN, **RAW, q_pe=Q["q_pe"]),
        "ragged raw": part(ragged, **Q, **ROWS, **STEP, **PLAIN, **RAW, **SCALE),
        "ragged uniform": part(ragged, **Q, **ROWS, **PLACE, **PLAIN, **SCALE, num_seqs=2),
        "prefill alone": part(prefill, **PROMPTS, **ROWS, **SCALE),
        "decode sink": part(decode, **queries, **PLAIN, **PLACE, **SCALE, **SINK),
        "reference.sparse": part(
            reference.sparse_attention, **Q, **TWO_SCALES, **LISTS, **SCALE, **SINK
        ),
        "reference.index_topk": part(reference.index_topk, **INDEX, **INDEX_CODES, **STEP),
        "index_append raw": part(jax_mla.index_append, **INDEX_KEYS, **INDEX_ROWS, **INDEX_RAW),
        "index_append codes": part(jax_mla.index_append, **INDEX_CODES, **INDEX_ROWS),
        "merge": part(jax_mla.merge, **parts),
        "merge over an axis": part(merge_over_axis, **parts),
        "reference.decode": part(reference.decode, **queries, **FP8, **PLACE, **SCALE),
        "reference.append": part(
            reference.append, **by_sequence(**ROWS), **TWO_SCALES, page_table=TABLE,
            positions=TO_WRITE["positions"].reshape(BATCH, -1),
        ),
        "reference.ragged": part(
            reference.ragged_paged_attention, **Q, **ROWS, **STEP, **TWO_SCALES, **RAW, **SCALE
        ),
        "reference.rows": encode_and_decode,
        "rope_table": part(jax_mla.rope_table, 16, D_KPE, theta=np.float64(1e4)),
    }  # fmt: skip
    for backend in ("cpu", "reference"):
        found[f"index_topk {backend}"] = part(
            jax_mla.index_topk, **INDEX, **INDEX_KEYS, **STEP, num_seqs=2, backend=backend
        )
        found[f"index_append {backend}"] = part(
            jax_mla.index_append, **INDEX_KEYS, **INDEX_ROWS, backend=backend
        )
    for name, cache in {"plain": PLAIN, "fp8": FP8, "fp8, two scales": TWO_SCALES}.items():
        found |= {
            f"decode {name}": part(decode, **queries, **cache, **PLACE, **SCALE),
            f"sparse {name}": part(
                jax_mla.sparse_attention, **Q, **cache, **LISTS, **SCALE, **SINK
            ),
            f"append {name}": part(append, **ROWS, **TO_WRITE, **cache),
            f"ragged {name}": part(ragged, **Q, **ROWS, **STEP, **cache, **SCALE, page_begin=0),
        }
        for way in ("reference", "xla", None):
            options: dict[str, Any] = {**STEP, **cache, "implementation": way, "num_seqs": 2}
            found[f"prefill {way} {name}"] = part(prefill, **PROMPTS, **ROWS, **options, **SCALE)
            if way != "xla":
                found[f"mixed {way} {name}"] = part(
                    mixed, **PROMPTS, **ROWS, **options, sm_scale=np.float64(0.1)
                )
    return found


CALLS = calls()


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", CALLS)
def test_64_bit_types_and_strict_promotion(name: str) -> None:
    call = CALLS[name]
    want = call()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        results = call(), jax.jit(call)()
    for got in results:
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert one.dtype == other.dtype
            one, other = (np.asarray(x, np.float32) for x in (one, other))
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("check", [jax.debug_nans, jax.debug_infs], ids=["nans", "infs"])
@pytest.mark.parametrize("name", CALLS)
def test_eager_calls_pass_checks_for_nan_and_inf(name: str, check: Any) -> None:
    """A row without keys has an lse of -inf, by definition. What follows is checked again."""
    want = CALLS[name]()
    with check(True):
        got = CALLS[name]()
        with pytest.raises(FloatingPointError):
            jnp.log(-jnp.ones(2) if check is jax.debug_nans else jnp.zeros(2))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_an_empty_row_is_among_the_calls() -> None:
    for name in ("decode plain", "ragged plain", "prefill xla plain", "reference.decode"):
        assert any(jnp.isneginf(x).any() for x in CALLS[name]())
