# ruff: noqa: E501
"""Bad input fails while tracing or lowering; the message names the argument, expected and got."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_mla
from jax_mla._runtime import _backends
from jax_mla.testing.run import cpu_mesh

B, Q, H, D_CKV, D_KPE, PAGES, SIZE, MAX = 2, 3, 4, 32, 8, 10, 4, 5
F32, I32 = jnp.float32, jnp.int32


def zeros(*shape: int, dtype=F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


DECODE = {
    "q_nope": zeros(B, Q, H, D_CKV),
    "q_pe": zeros(B, Q, H, D_KPE),
    "kv_pages": zeros(PAGES, SIZE, D_CKV + D_KPE),
    "page_table": zeros(B, MAX, dtype=I32),
    "seq_lens": zeros(B, dtype=I32),
}
APPEND = {
    "kv_pages": zeros(PAGES, SIZE, D_CKV + D_KPE),
    "ckv": zeros(B, Q, D_CKV),
    "kpe": zeros(B, Q, D_KPE),
    "page_table": zeros(B, MAX, dtype=I32),
    "positions": zeros(B, Q, dtype=I32),
}
RAGGED = {
    "q_nope": zeros(B * Q, H, D_CKV),
    "q_pe": zeros(B * Q, H, D_KPE),
    "ckv": zeros(B * Q, D_CKV),
    "kpe": zeros(B * Q, D_KPE),
    "kv_pages": zeros(PAGES, SIZE, D_CKV + D_KPE),
    "page_table": zeros(B, MAX, dtype=I32),
    "seq_lens": zeros(B, dtype=I32),
    "cu_q_lens": zeros(B + 1, dtype=I32),
}
SPARSE = {
    "q_nope": zeros(6, H, D_CKV),
    "q_pe": zeros(6, H, D_KPE),
    "kv_pages": zeros(PAGES, SIZE, D_CKV + D_KPE),
    "indices": zeros(6, 7, dtype=I32),
}
INDEX_TOPK = {
    "q": zeros(6, H, 128),
    "weights": zeros(6, H),
    "index_pages": zeros(PAGES, SIZE, 128),
    "page_table": zeros(B, MAX, dtype=I32),
    "seq_lens": zeros(B, dtype=I32),
    "k": 4,
}
INDEX_APPEND = {
    "index_pages": zeros(PAGES, SIZE, 128),
    "k": zeros(B, Q, 128),
    "page_table": zeros(B, MAX, dtype=I32),
    "positions": zeros(B, Q, dtype=I32),
}
PREFILL = RAGGED | {
    "q_nope": zeros(B * Q, H, 16),
    "w_uk": zeros(H, 16, D_CKV),
    "w_uv": zeros(H, D_CKV, 24),
}
SPLIT = (zeros(PAGES, SIZE, D_CKV), zeros(PAGES, SIZE, D_KPE))
STACKED = zeros(2, PAGES, SIZE, D_CKV + D_KPE)
E4M3 = jnp.float8_e4m3fn
FP8 = {
    "kv_pages": zeros(PAGES, SIZE, D_CKV + D_KPE, dtype=E4M3),
    "kv_format": "fp8_e4m3",
    "kv_scale": 0.5,
}


def call(op, arrays, **changes):
    """Trace `op` with structs as tracers, and with everything else as it is."""
    has_scale = op not in (jax_mla.append, jax_mla.index_append, jax_mla.index_topk)
    given = {**({"sm_scale": 1.0} if has_scale else {}), **arrays, **changes}
    traced = {
        k: v
        for k, v in given.items()
        if all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(v) or [0])
    }
    static = {k: v for k, v in given.items() if k not in traced}
    return jax.eval_shape(lambda kw: op(**kw, **static), traced)


def decode(**changes):
    return call(jax_mla.decode, DECODE, **changes)


def append(**changes):
    return call(jax_mla.append, APPEND, **changes)


def ragged(**changes):
    return call(jax_mla.ragged_paged_attention, RAGGED, **changes)


def sparse(**changes):
    return call(jax_mla.sparse_attention, SPARSE, **changes)


def test_good_input_is_accepted() -> None:
    assert [x.shape for x in call(jax_mla.index_topk, INDEX_TOPK)] == [(6, 4), (6,)]
    assert call(jax_mla.index_append, INDEX_APPEND).shape == (PAGES, SIZE, 128)
    assert decode().shape == (B, Q, H, D_CKV)
    assert decode(kv_pages=SPLIT).dtype == F32
    assert decode(kv_pages=STACKED, layer=1, kv_format="f32").shape == (B, Q, H, D_CKV)
    for scale in (1, 0.5, np.float32(2), (0.5, 2), jnp.ones((1,)), np.int64(1), np.float16(1)):
        assert decode(**{**FP8, "kv_scale": scale}).shape == (B, Q, H, D_CKV)
        assert append(**{**FP8, "kv_scale": scale}).dtype == E4M3
    assert append().shape == (PAGES, SIZE, D_CKV + D_KPE)
    assert decode(num_splits=4, seq_lens=np.array([0, 20], np.int32)) is not None
    assert decode(max_seq_len=np.int64(9), seq_lens=np.array([0, 9], np.int32)) is not None
    assert decode(max_seq_len=2**40, seq_lens=np.array([0, 20], np.int32)) is not None
    assert append(positions=np.array([[0, -1, 19]] * 2, np.int32)) is not None
    without_rope = {"kv_pages": zeros(PAGES, SIZE, D_CKV)}
    assert decode(q_pe=None, **without_rope).shape == (B, Q, H, D_CKV)
    assert append(kpe=None, **without_rope).shape == (PAGES, SIZE, D_CKV)
    assert sparse(q_pe=None, **without_rope).shape == (6, H, D_CKV)
    assert ragged(q_pe=None, kpe=None, **without_rope)[0].shape == (B * Q, H, D_CKV)
    out = call(jax_mla.prefill, PREFILL, q_pe=None, kpe=None, **without_rope)
    assert out.shape == (B * Q, H, 24)
    no_tokens = np.zeros(B, np.int32)
    empty = zeros(0, SIZE, D_CKV + D_KPE)
    assert (
        decode(kv_pages=empty, page_table=np.zeros((B, MAX), np.int32), seq_lens=no_tokens)
        is not None
    )


# What decode, ragged_paged_attention and backends say about max_seq_len.
BAD_BOUND = [
    ({"max_seq_len": 0}, ValueError, "max_seq_len: expected None or an int of at least 1, got 0"),
    ({"max_seq_len": np.int32(-1)}, ValueError, "max_seq_len: expected None or an int of at least 1, got -1"),
    ({"max_seq_len": True}, TypeError, "max_seq_len: expected None or an int, got bool"),
    ({"max_seq_len": 8.0}, TypeError, "max_seq_len: expected None or an int, got float"),
    ({"max_seq_len": "8"}, TypeError, "max_seq_len: expected None or an int, got str"),
    ({"max_seq_len": zeros(dtype=I32)}, TypeError, "max_seq_len: expected None or an int, got a traced value; .*static_argnames"),
    ({"max_seq_len": jnp.int32(8)}, TypeError, "max_seq_len: expected None or an int, got a jax.Array; the argument is static"),
]  # fmt: skip
# The same about sliding_window and soft_cap.
BAD_MASK = [
    ({"sliding_window": 0}, ValueError, "sliding_window: expected None or an int of at least 1, got 0"),
    ({"sliding_window": np.int32(-1)}, ValueError, "sliding_window: expected None or an int of at least 1, got -1"),
    ({"sliding_window": True}, TypeError, "sliding_window: expected None or an int, got bool"),
    ({"sliding_window": 8.0}, TypeError, "sliding_window: expected None or an int, got float"),
    ({"sliding_window": jnp.int32(8)}, TypeError, "sliding_window: expected None or an int, got a jax.Array; the argument is static"),
    ({"sliding_window": zeros(dtype=I32)}, TypeError, "sliding_window: expected None or an int, got a traced value"),
    ({"soft_cap": 0.0}, ValueError, r"soft_cap: expected None or a number from 2\^-60 to 2\^60, got 0.0"),
    ({"soft_cap": -30}, ValueError, "soft_cap: expected None or a number from .*, got -30.0"),
    ({"soft_cap": float("inf")}, ValueError, "soft_cap: expected None or a number from .*, got inf"),
    ({"soft_cap": float("nan")}, ValueError, "soft_cap: expected None or a number from .*, got nan"),
    ({"soft_cap": True}, TypeError, "soft_cap: expected a Python number, got bool"),
    ({"soft_cap": jnp.float32(30)}, TypeError, "soft_cap: expected a Python number, got a jax.Array"),
    ({"soft_cap": zeros()}, TypeError, "soft_cap: expected a Python number, got a traced value"),
]  # fmt: skip
BAD_LENGTH = [
    ({"max_seq_len": 9, "seq_lens": np.array([9, 10], np.int32)}, ValueError, r"seq_lens: expected lengths that fit max_seq_len in \[0, 10\), got 10"),
    ({"max_seq_len": 21, "seq_lens": np.array([21, 0], np.int32)}, ValueError, r"seq_lens: expected lengths that fit page_table in \[0, 21\), got 21"),
]  # fmt: skip
# Changed arguments, type of the error, and a regular expression for its message after the op's name.
BAD_DECODE = [
    ({"q_nope": zeros(B, D_CKV)}, ValueError, r"q_nope: expected \[batch, q_len, num_heads, d_ckv\]"),
    ({"q_nope": zeros(B, Q, H, D_CKV, dtype=I32)}, TypeError, "q_nope: expected bfloat16 or float16"),
    ({"q_nope": [1.0]}, TypeError, "q_nope: expected an array, got list"),
    ({"q_nope": np.zeros((B, Q, H, D_CKV))}, TypeError, "q_nope: expected bfloat16 or float16 or float32, got float64"),
    ({"q_nope": zeros(0, Q, H, D_CKV), "q_pe": zeros(0, Q, H, D_KPE), "seq_lens": zeros(0, dtype=I32),
      "page_table": zeros(0, MAX, dtype=I32)}, ValueError, "expected no dimension of size 0"),
    ({"q_pe": zeros(B, Q, H + 1, D_KPE)}, ValueError, r"q_pe: expected shape \(2, 3, 4, \*\) as in q_nope, got \(2, 3, 5, 8\)"),
    ({"q_pe": zeros(B, Q, H, 0)}, ValueError, r"q_pe: expected no dimension of size 0, or None for rows without rotary part, got shape \(2, 3, 4, 0\)"),
    ({"q_pe": None}, ValueError, r"kv_pages: expected a last dimension of 32 = d_ckv, of rows without rotary part, or 128, got shape \(10, 4, 40\)"),
    ({"q_pe": zeros(B, H, D_KPE)}, ValueError, r"q_pe: expected shape .*got \(2, 4, 8\)"),
    ({"q_pe": zeros(B, Q, H, D_KPE, dtype=jnp.bfloat16)}, TypeError, "q_pe: expected float32 as in q_nope, got bfloat16"),
    ({"page_table": zeros(B + 1, MAX, dtype=I32)}, ValueError, r"page_table: expected shape \(2, \*\) with q_nope's batch, got \(3, 5\)"),
    ({"page_table": zeros(B, dtype=I32)}, ValueError, "page_table: expected shape"),
    ({"page_table": zeros(B, MAX)}, TypeError, "page_table: expected int32, got float32"),
    ({"page_table": zeros(B, 0, dtype=I32)}, ValueError, "page_table: expected no dimension of size 0"),
    ({"page_table": np.zeros((B, MAX), np.int64)}, TypeError, r"page_table: expected int32, got int64; pass page_table.astype\(np.int32\)"),
    ({"seq_lens": zeros(B + 1, dtype=I32)}, ValueError, r"seq_lens: expected shape \(2\)"),
    ({"seq_lens": zeros(B, dtype=jnp.uint32)}, TypeError, "seq_lens: expected int32, got uint32"),
    ({"seq_lens": np.array([1, 21], np.int32)}, ValueError, r"seq_lens: expected lengths that fit page_table in \[0, 21\), got 21"),
    ({"seq_lens": np.array([1, -1], np.int32)}, ValueError, "seq_lens: expected lengths.*got -1"),
    ({"seq_lens": np.array(["a", "b"])}, TypeError, "seq_lens: expected an array of numbers, got ndarray of <U1"),
    ({"seq_lens": np.ones(B, np.int32), "kv_pages": zeros(SIZE)}, ValueError, r"kv_pages: expected \[num_pages, page_size, d\]"),
    ({"page_table": zeros(B, 2**28 + 1, dtype=I32)}, ValueError, r"page_table: expected places for at most 2\^30 tokens a sequence, got 1073741828"),
    ({"sm_scale": float("nan")}, ValueError, r"sm_scale: expected a number between -2.36e\+38 and 2.36e\+38, got nan"),
    ({"sm_scale": 1e300}, ValueError, r"sm_scale: expected a number between .*, got 1e\+300"),
    ({"sm_scale": -3e38}, ValueError, r"sm_scale: expected a number between .*, got -3e\+38"),
    ({"sm_scale": -(10**400)}, ValueError, "sm_scale: expected a number between .*, got inf"),
    ({"sm_scale": zeros()}, TypeError, r"sm_scale: expected a Python number, got a traced value; the argument is static: .*static_argnames"),
    ({"sm_scale": jnp.ones(())}, TypeError, r"sm_scale: expected a Python number, got a jax.Array; .*static.*x\.item\(\)"),
    ({"causal": zeros(dtype=jnp.bool_)}, TypeError, "causal: expected a bool, got a traced value; .*static_argnames"),
    ({"num_splits": zeros(dtype=I32)}, TypeError, "num_splits: expected an int, got a traced value; .*static_argnames"),
    ({"sm_scale": "1"}, TypeError, "sm_scale: expected a Python number, got str"),
    ({"sm_scale": True}, TypeError, "sm_scale: expected a Python number, got bool"),
    ({"causal": 1}, TypeError, "causal: expected a bool, got int"),
    ({"batch_invariant": "yes"}, TypeError, "batch_invariant: expected a bool, got str"),
    ({"num_splits": 0}, ValueError, r"num_splits: expected None or an int in \[1, 2\^31\), got 0"),
    ({"num_splits": 2**31}, ValueError, r"num_splits: expected None or an int in \[1, 2\^31\), got 2147483648"),
    ({"return_lse": "no"}, TypeError, "return_lse: expected a bool, got str"),
    ({"q_nope": jax.random.split(jax.random.key(0), (B, Q, H, D_CKV))}, TypeError, "q_nope: expected bfloat16 or .*got key<fry>"),
    ({"q_pe": jax.new_ref(jnp.zeros((B, Q, H, D_KPE)))}, TypeError, r"q_pe: expected an array, got a Ref; pass the value it holds, q_pe\[...\], and assign the result back"),
    ({"q_nope": zeros(B, Q, H, D_KPE), "q_pe": zeros(B, Q, H, D_CKV)}, ValueError, "q_nope, q_pe: expected d_ckv >= d_kpe, got d_ckv 8 and d_kpe 32; .*swapped"),
    ({"q_nope": zeros(B, Q, H, D_CKV, dtype=jnp.bfloat16), "q_pe": zeros(B, Q, H, D_KPE, dtype=jnp.bfloat16)}, TypeError, "kv_pages: expected bfloat16 as in q_nope, got float32"),
    ({"num_splits": 2.0}, TypeError, "num_splits: expected an int, got float"),
    ({"page_begin": -1}, ValueError, "page_begin: expected an index in"),
]  # fmt: skip
BAD_INDEX_TOPK: list[Any] = [
    ({"q": zeros(6, H)}, ValueError, "q: expected [tokens, index_heads, d] or [batch, q_len"),
    ({"q": zeros(5, H, 128), "weights": zeros(5, H)}, ValueError, "q: expected a multiple of the 2"),
    ({"q": zeros(6, H, 128, dtype=I32)}, TypeError, "q: expected bfloat16 or float16"),
    ({"weights": zeros(6, 3)}, ValueError, "weights: expected shape (6, 4), the tokens and heads"),
    ({"weights": zeros(6, H, dtype=jnp.bfloat16)}, TypeError, "rounded weights choose other tokens"),
    ({"index_pages": zeros(PAGES, SIZE, 64)}, ValueError, "index_pages: expected shape (10, 4, 128)"),
    ({"index_pages": zeros(2, PAGES, SIZE, 128)}, ValueError, "index_pages: expected layer= for"),
    ({"layer": 0}, ValueError, "index_pages: expected [num_pages, page_size, d]"),
    ({"index_pages": zeros(PAGES, SIZE, 128, dtype=jnp.bfloat16)}, TypeError, "expected float32 as in q"),
    ({"index_pages": zeros(PAGES, SIZE, 128, dtype=jnp.uint8)}, ValueError, "expected shape (10, 4, 132)"),
    ({"index_pages": zeros(0, SIZE, 128)}, ValueError, "index_pages: expected num_pages and page_size"),
    ({"index_pages": zeros(0, PAGES, SIZE, 128), "layer": 0}, ValueError, "index_pages: expected num_layers, num_pages and page_size"),
    ({"index_pages": zeros(2**20, 2**11, 128)}, ValueError, "fewer than 2^31 tokens in a layer"),
    ({"page_table": zeros(B, MAX)}, TypeError, "page_table: expected int32"),
    ({"seq_lens": zeros(3, dtype=I32)}, ValueError, "seq_lens: expected shape (2) with page_table's"),
    ({"seq_lens": np.array([3, 21], np.int32)}, ValueError, "seq_lens: expected lengths that fit"),
    ({"page_table": np.full((B, MAX), 10, np.int32), "seq_lens": np.array([3, 3], np.int32)},
     ValueError, "page_table: expected ids of the pool's pages in [0, 10), got 10"),
    ({"cu_q_lens": zeros(4, dtype=I32)}, ValueError, "cu_q_lens: expected shape (3)"),
    ({"q": zeros(2, 3, H, 128), "weights": zeros(2, 3, H), "cu_q_lens": zeros(3, dtype=I32)},
     ValueError, "q: expected [tokens, index_heads, d] with cu_q_lens"),
    ({"num_seqs": 3}, ValueError, "num_seqs: expected a number of sequences in [0, 3), got 3"),
    ({"k": 0}, ValueError, "k: expected an int in [1, 1048576], got 0"),
    ({"k": 2.0}, TypeError, "k: expected an int, got float"),
    ({"return_scores": 1}, TypeError, "return_scores: expected a bool"),
    ({"max_seq_len": 0}, ValueError, "max_seq_len: expected None or an int of at least 1"),
    ({"backend": "fastest"}, ValueError, "backend: expected None or one of"),
]  # fmt: skip
BAD_INDEX_APPEND: list[Any] = [
    ({"k": zeros(B)}, ValueError, "k: expected [batch, q_len, d] or [batch, d]"),
    ({"k": zeros(B, Q, 128, dtype=E4M3)}, TypeError, "k: expected bfloat16 or float16 or float32"),
    ({"k": zeros(B, Q, 64)}, ValueError, "index_pages: expected shape (10, 4, 64), the width of k"),
    ({"k": zeros(B, Q, 64), "index_pages": zeros(PAGES, SIZE, 132, dtype=jnp.uint8)}, ValueError,
     "k: expected 128 values a key for index_pages of uint8, got 64"),
    ({"positions": zeros(B, dtype=I32)}, ValueError, "positions: expected shape (2, 3) as in k"),
    ({"page_table": zeros(3, MAX, dtype=I32)}, ValueError, "page_table: expected shape (2, *)"),
    ({"positions": np.full((B, Q), 20, np.int32)}, ValueError, "positions: expected places that"),
    ({"norm_bias": zeros(128)}, ValueError, "norm_bias: expected None without norm_weight"),
    ({"norm_weight": zeros(64)}, ValueError, "norm_weight: expected shape (128), the width of k"),
    ({"norm_weight": zeros(128), "norm_eps": -1.0}, ValueError, "norm_eps: expected a number in"),
    ({"rope_table": zeros(9, 64)}, ValueError, "rope_interleaved: expected True or False"),
    ({"rope_table": zeros(9, 130), "rope_interleaved": True}, ValueError, "an even width of at most"),
    ({"rope_last": True}, ValueError, "rope_last: expected False without rope_table"),
    ({"rope_interleaved": True}, ValueError, "rope_interleaved: expected None without rope_table"),
    ({"power_of_two_scales": 1}, TypeError, "power_of_two_scales: expected a bool"),
    ({"layer": 0}, ValueError, "index_pages: expected [num_pages, page_size, d]"),
]  # fmt: skip
BAD_SPARSE = [
    ({"q_nope": zeros(H, D_CKV)}, ValueError, r"q_nope: expected \[tokens, num_heads, d_ckv\] or \[batch, q_len, num_heads, d_ckv\], got shape \(4, 32\)"),
    ({"q_pe": zeros(5, H, D_KPE)}, ValueError, r"q_pe: expected shape \(6, 4, \*\) as in q_nope"),
    ({"indices": zeros(5, 7, dtype=I32)}, ValueError, r"indices: expected shape \(6, \*\), a list for each query of q_nope, got \(5, 7\)"),
    ({"indices": zeros(6, H, 7, dtype=I32)}, ValueError, r"indices: expected shape \(6, \*\), a list"),
    ({"indices": zeros(6, 7)}, TypeError, "indices: expected int32, got float32"),
    ({"indices": np.zeros((6, 7), np.int64)}, TypeError, r"indices: expected int32, got int64; pass indices.astype\(np.int32\)"),
    ({"indices": zeros(6, 0, dtype=I32)}, ValueError, "q_nope, indices: expected no dimension of size 0"),
    ({"indices": zeros(6, 2**30 + 1, dtype=I32)}, ValueError, r"indices: expected places for at most 2\^30 tokens a sequence"),
    ({"topk_lens": zeros(5, dtype=I32)}, ValueError, r"topk_lens: expected shape \(6\), a number for each query of q_nope, got \(5,\)"),
    ({"topk_lens": zeros(6)}, TypeError, "topk_lens: expected int32, got float32"),
    ({"topk_lens": np.full(6, 8, np.int32)}, ValueError, r"topk_lens: expected lengths of at most 7 in \[0, 8\), got 8"),
    ({"topk_lens": np.full(6, -1, np.int32)}, ValueError, r"topk_lens: expected lengths of at most 7 in \[0, 8\), got -1"),
    ({"topk_lens": 7}, TypeError, "topk_lens: expected an array, got int"),
    ({"sink": zeros(5)}, ValueError, r"sink: expected shape \(4\), one number for each head, got \(5,\)"),
    ({"sink": zeros(H, dtype=jnp.bfloat16)}, TypeError, "sink: expected float32, got bfloat16"),
    ({"kv_pages": zeros(2**20, 2048, D_CKV + D_KPE)}, ValueError, r"kv_pages: expected fewer than 2\^31 tokens in a layer, which slots can name, got 2147483648"),
    ({"kv_pages": STACKED}, ValueError, "kv_pages: expected layer= for a stacked pool"),
    ({"layer": 0}, ValueError, "layer: expected None for a pool of rank 3"),
    ({"page_begin": -1}, ValueError, "page_begin: expected an index in"),
    ({"backend": "fast"}, ValueError, "backend: expected"),
    ({"return_lse": 1}, TypeError, "return_lse: expected a bool, got int"),
    ({"batch_invariant": 1}, TypeError, "batch_invariant: expected a bool, got int"),
    ({"sm_scale": zeros()}, TypeError, "sm_scale: expected a Python number, got a traced value"),
]  # fmt: skip
BAD_APPEND = [
    ({"page_table": zeros(B, 2**21, dtype=I32), "kv_pages": zeros(1, 1024, D_CKV + D_KPE)}, ValueError, r"page_table: expected places for at most 2\^30 tokens a sequence"),
    ({"kpe": zeros(B, Q, 0)}, ValueError, r"kpe: expected no dimension of size 0, or None for rows without rotary part, got shape \(2, 3, 0\)"),
    ({"kpe": None}, ValueError, r"kv_pages: expected a last dimension of 32 = d_ckv, of rows without rotary part, or 128, got shape \(10, 4, 40\)"),
    ({"kpe": None, "kv_pages": zeros(PAGES, SIZE, D_CKV), "rope_table": jnp.ones((20, D_KPE)), "rope_interleaved": True}, ValueError, "rope_table: expected None for rows without rotary part"),
    ({"ckv": zeros(D_CKV)}, ValueError, r"ckv: expected \[batch, q_len, d_ckv\] or \[batch, d_ckv\], got shape \(32,\)"),
    ({"ckv": zeros(B, D_CKV)}, ValueError, r"kpe: expected shape \(2, \*\) as in ckv, got \(2, 3, 8\)"),
    ({"ckv": zeros(B, D_CKV), "kpe": zeros(B, D_KPE)}, ValueError, r"positions: expected shape \(2\) as in ckv, got \(2, 3\)"),
    ({"ckv": zeros(B, Q, D_KPE), "kpe": zeros(B, Q, D_CKV)}, ValueError, "ckv, kpe: expected d_ckv >= d_kpe, got d_ckv 8 and d_kpe 32; .*swapped"),
    ({"kv_pages": SPLIT[::-1], "ckv": zeros(B, Q, D_KPE), "kpe": zeros(B, Q, D_CKV)}, ValueError, "ckv, kpe: expected d_ckv >= d_kpe.*swapped"),
    ({"ckv": zeros(B, Q, D_CKV, dtype=jnp.bfloat16), "kpe": zeros(B, Q, D_KPE, dtype=jnp.bfloat16)}, TypeError, "kv_pages: expected bfloat16 as in ckv, got float32"),
    ({"ckv": zeros(B, Q, D_CKV, dtype=I32)}, TypeError, "ckv: expected bfloat16"),
    ({"kpe": zeros(B, Q + 1, D_KPE)}, ValueError, "kpe: expected shape .* as in ckv"),
    ({"kpe": zeros(B, Q, D_KPE, dtype=jnp.float16)}, TypeError, "kpe: expected float32 as in ckv, got float16"),
    ({"kv_pages": zeros(B, Q, D_CKV), "ckv": zeros(B, Q, D_KPE), "kpe": zeros(PAGES, SIZE, D_CKV + D_KPE)}, ValueError, r"kpe: expected shape \(2, 3, \*\) as in ckv, behind the cache, which is the first argument, got \(10, 4, 40\)"),
    ({"page_table": zeros(B + 1, MAX, dtype=I32)}, ValueError, "page_table: expected shape .* with ckv's batch"),
    ({"positions": zeros(B, dtype=I32)}, ValueError, r"positions: expected shape \(2, 3\) as in ckv, got \(2,\)"),
    ({"positions": zeros(B, Q)}, TypeError, "positions: expected int32, got float32"),
    ({"positions": np.full((B, Q), 20, np.int32)}, ValueError, r"positions: expected places that page_table has in .*20\), got 20"),
    ({"positions": np.array([["a"] * Q] * B)}, TypeError, "positions: expected an array of numbers, got ndarray of <U1"),
    ({"page_table": zeros(dtype=I32)}, ValueError, "page_table: expected shape"),
]  # fmt: skip
TOKENS = {"ckv": zeros(6, D_CKV), "kpe": zeros(6, D_KPE), "positions": zeros(6, dtype=I32)}
# What append and ragged_paged_attention say about cu_q_lens.
BAD_BOUNDS = [
    ({"cu_q_lens": zeros(B, dtype=I32)}, ValueError, r"cu_q_lens: expected shape \(3\) = sequences in page_table \+ 1, got \(2,\)"),
    ({"cu_q_lens": zeros(B + 1)}, TypeError, "cu_q_lens: expected int32, got float32"),
    ({"cu_q_lens": np.zeros(B + 1, np.int64)}, TypeError, "cu_q_lens: expected int32, got int64"),
    ({"cu_q_lens": [0, 1, 2]}, TypeError, "cu_q_lens: expected an array, got list"),
    ({"cu_q_lens": np.array([0, 3, 7], np.int32)}, ValueError, r"cu_q_lens: expected places among the tokens in \[0, 7\), got 7"),
    ({"cu_q_lens": np.array([0, 3, 2], np.int32)}, ValueError, "cu_q_lens: expected values that never fall, got 3 followed by 2 at index 2"),
]  # fmt: skip
BAD_RAGGED_APPEND = [
    ({"ckv": zeros(B, Q, D_CKV)}, ValueError, r"ckv: expected \[tokens, d_ckv\] with cu_q_lens, got shape \(2, 3, 32\)"),
    ({"positions": zeros(5, dtype=I32)}, ValueError, r"positions: expected shape \(6\) as in ckv, got \(5,\)"),
    ({"page_table": zeros(B, dtype=I32)}, ValueError, r"page_table: expected \[batch, max_pages_per_seq\], got shape \(2,\)"),
]  # fmt: skip
BAD_RAGGED = [
    ({"q_pe": None}, ValueError, "q_pe: expected an array, or None for kpe too, for rows without rotary part, got None"),
    ({"kpe": None}, ValueError, "kpe: expected an array, or None for q_pe too"),
    ({"q_pe": None, "kpe": None, "kv_pages": SPLIT}, ValueError, "kv_pages: expected one pool for rows without rotary part, got two"),
    ({"q_pe": None, "kpe": None, "kv_pages": zeros(PAGES, SIZE, D_CKV, dtype=E4M3), "kv_format": "fp8_e4m3", "kv_scale": (0.5, 1.0)}, ValueError, "kv_scale: expected one scale for rows without rotary part, got 2"),
    ({"q_pe": None, "kpe": None, "kv_pages": zeros(PAGES, SIZE, 656, dtype=jnp.uint8), "kv_format": "fp8_ds_mla"}, ValueError, "kv_format: expected d_ckv, d_kpe = 512, 64 for 'fp8_ds_mla', got 32, 0"),
    ({"q_nope": zeros(B, Q, H, D_CKV)}, ValueError, r"q_nope: expected \[tokens, num_heads, d_ckv\], got shape"),
    ({"q_nope": zeros(6, H, D_CKV, dtype=I32)}, TypeError, "q_nope: expected bfloat16 or float16 or float32, got int32"),
    ({"q_pe": zeros(5, H, D_KPE)}, ValueError, r"q_pe: expected shape \(6, 4, \*\) as in q_nope"),
    ({"ckv": zeros(5, D_CKV)}, ValueError, r"ckv: expected shape \(6, 32\) as in q_nope, got \(5, 32\)"),
    ({"kpe": zeros(6, D_CKV)}, ValueError, r"kpe: expected shape \(6, 8\) as in q_pe, got \(6, 32\)"),
    ({"ckv": zeros(6, D_CKV, dtype=jnp.bfloat16)}, TypeError, "ckv: expected float32 as in q_nope, got bfloat16"),
    ({"page_table": zeros(B, dtype=I32)}, ValueError, r"page_table: expected \[seqs, max_pages_per_seq\], got shape \(2,\)"),
    ({"page_table": zeros(B, 2**28 + 1, dtype=I32)}, ValueError, r"page_table: expected places for at most 2\^30 tokens"),
    ({"page_table": zeros(0, MAX, dtype=I32), "seq_lens": zeros(0, dtype=I32)}, ValueError, "expected no dimension of size 0"),
    ({"seq_lens": zeros(3, dtype=I32)}, ValueError, r"seq_lens: expected shape \(2\) with page_table's sequences, got \(3,\)"),
    ({"seq_lens": np.array([21, 0], np.int32)}, ValueError, r"seq_lens: expected lengths that fit page_table in \[0, 21\), got 21"),
    ({"cu_q_lens": None, "page_table": zeros(4, MAX, dtype=I32), "seq_lens": zeros(4, dtype=I32)}, ValueError, "q_nope: expected a multiple of the 4 sequences in page_table .*, or cu_q_lens, got 6 tokens"),
    ({"num_seqs": 3}, ValueError, r"num_seqs: expected a number of sequences in \[0, 3\), got 3"),
    ({"num_seqs": -1}, ValueError, "num_seqs: expected a number of sequences in .*, got -1"),
    ({"num_seqs": 1.0}, TypeError, "num_seqs: expected an int or an int32 scalar, got float"),
    ({"num_seqs": zeros(2, dtype=I32)}, TypeError, r"num_seqs: expected an int32 scalar, got int32 of shape \(2,\)"),
    ({"num_seqs": 2, "cu_q_lens": np.array([0, 3, 2], np.int32)}, ValueError, "cu_q_lens: expected values that never fall"),
    ({"seq_lens": np.array([3, 2], np.int32), "cu_q_lens": np.array([0, 3, 6], np.int32)}, ValueError, "seq_lens: expected lengths that include the new tokens, got 2 for sequence 1 with 3 new ones"),
    ({"rope_interleaved": True}, ValueError, "rope_interleaved: expected None without rope_table, got True"),
    ({"sm_scale": jnp.float32(1)}, TypeError, "sm_scale: expected a Python number, got a jax.Array"),
    ({"num_splits": 0}, ValueError, "num_splits: expected None or an int"),
    ({"return_lse": 1}, TypeError, "return_lse: expected a bool, got int"),
]  # fmt: skip
# All ops check the cache in the same way.
BAD_CACHE = [
    ({"kv_pages": zeros(PAGES, SIZE, D_CKV)}, ValueError, r"kv_pages: expected a last dimension of at least 40 = d_ckv \+ d_kpe and at most 256, got shape \(10, 4, 32\)"),
    ({"kv_pages": zeros(PAGES, SIZE, D_CKV + D_KPE - 1)}, ValueError, r"kv_pages: expected a last dimension of at least 40 = .*, got shape \(10, 4, 39\)"),
    ({"kv_pages": zeros(PAGES, SIZE, 257)}, ValueError, r"kv_pages: expected a last dimension of at least 40 .* and at most 256, got shape \(10, 4, 257\); .* W_UK"),
    ({"kv_pages": zeros(0, PAGES, SIZE, D_CKV + D_KPE), "layer": 0}, ValueError, r"kv_pages: expected at least one layer, got \(0, 10, 4, 40\)"),
    ({"kv_pages": zeros(PAGES, SIZE // 2, 2, D_CKV), "packs": True}, ValueError, r"kv_pages: expected a last dimension of at least 40 .*, got shape \(10, 2, 2, 32\)"),
    ({"kv_pages": (SPLIT[0], zeros(PAGES, SIZE, D_KPE - 1))}, ValueError, r"kv_pages\[1\] \(kpe\): expected a last dimension of at least 8 = d_kpe and .*, got shape \(10, 4, 7\)"),
    ({"kv_pages": (zeros(PAGES, 2, 2, D_CKV), SPLIT[1]), "packs": True}, ValueError, r"packs: expected False for a pool of rank 3"),
    ({"kv_pages": zeros(PAGES, SIZE, 0, D_CKV + D_KPE), "packs": True}, ValueError, "kv_pages: expected a page_size of at least 1"),
    ({"kv_pages": zeros(PAGES, 0, 2, D_CKV + D_KPE), "packs": True}, ValueError, "kv_pages: expected a page_size of at least 1"),
    ({"kv_pages": zeros(SIZE)}, ValueError, r"kv_pages: expected \[num_pages, page_size, d\]"),
    ({"kv_pages": zeros(SIZE, D_CKV + D_KPE)}, ValueError, r"kv_pages: expected \[num_pages, page_size, d\]"),
    ({"kv_pages": zeros(1, 1, 1, PAGES, SIZE, D_CKV + D_KPE)}, ValueError, r"kv_pages: expected \[num_pages, page_size, d\], or \[num_pages, page_size / pack, pack, d\] with packs=True, both with num_layers in front if layer is given, got"),
    ({"kv_pages": zeros(PAGES, SIZE, D_CKV + D_KPE, dtype=jnp.bfloat16)}, TypeError, r"kv_pages: expected float32 as in (q_nope|ckv), got bfloat16; cast \1 to the dtype of the cache"),
    ({"kv_pages": zeros(PAGES, SIZE, D_CKV + D_KPE, dtype=jnp.float8_e4m3fn)}, TypeError, "kv_pages: expected float32 as in .*, got float8_e4m3fn; pass kv_format='fp8_e4m3' if the cache has this format"),
    ({"kv_pages": zeros(PAGES, SIZE, 656, dtype=jnp.uint8)}, TypeError, "kv_pages: expected float32 as in .*, got uint8; pass kv_format='fp8_ds_mla' if the cache has this format"),
    ({"kv_pages": jax.new_ref(jnp.zeros((PAGES, SIZE, D_CKV + D_KPE)))}, TypeError, r"kv_pages: expected an array, got a Ref; pass the value it holds, kv_pages\[...\]"),
    ({"kv_pages": zeros(PAGES, 0, D_CKV + D_KPE)}, ValueError, "kv_pages: expected a page_size of at least 1"),
    ({"kv_pages": SPLIT[::-1]}, ValueError, r"kv_pages\[0\] \(ckv\): expected a last dimension of at least 32 = d_ckv"),
    ({"kv_pages": None}, TypeError, r"kv_pages: expected an array or a tuple \(ckv, kpe\), got NoneType"),
    ({"kv_pages": list(SPLIT)}, TypeError, r"kv_pages: expected an array or a tuple \(ckv, kpe\), got list"),
    ({"kv_pages": ()}, ValueError, r"kv_pages: expected an array or a tuple \(ckv, kpe\), got a tuple of 0"),
    ({"kv_pages": (zeros(PAGES, SIZE, D_CKV + D_KPE),)}, ValueError, r"kv_pages: expected an array or a tuple \(ckv, kpe\), got a tuple of 1"),
    ({"kv_pages": (*SPLIT, SPLIT[0])}, ValueError, r"kv_pages: expected an array or a tuple \(ckv, kpe\), got a tuple of 3"),
    ({"kv_pages": (SPLIT[0], zeros(PAGES + 1, SIZE, D_KPE))}, ValueError, r"kv_pages\[1\] \(kpe\): expected shape .* as in kv_pages\[0\]"),
    ({"kv_pages": zeros(2, PAGES, SIZE // 2, 2, D_CKV + D_KPE)}, ValueError, "kv_pages: expected layer= and packs=True for a pool of rank 5"),
    ({"kv_pages": zeros(2, PAGES, SIZE // 2, 2, D_CKV + D_KPE), "layer": 0}, ValueError, "kv_pages: expected packs=True for a pool of rank 5"),
    ({"kv_pages": zeros(2, PAGES, SIZE // 2, 2, D_CKV + D_KPE), "packs": True}, ValueError, "kv_pages: expected layer= for a pool of rank 5"),
    ({"kv_pages": STACKED}, ValueError, r"kv_pages: expected layer= for a stacked pool of rank 4, \[num_layers, num_pages, page_size, d\], or packs=True for .*; got rank 4 with layer=None and packs=False"),
    ({"kv_pages": STACKED, "layer": 0, "packs": True}, ValueError, "packs: expected False for a pool of rank 4 with layer="),
    ({"packs": True}, ValueError, "packs: expected False for a pool of rank 3"),
    ({"packs": 2}, TypeError, "packs: expected a bool, got int"),
    ({"layer": 0}, ValueError, "layer: expected None for a pool of rank 3"),
    ({"kv_pages": STACKED, "layer": 2}, ValueError, r"layer: expected an index in \[0, 2\), got 2"),
    ({"kv_pages": STACKED, "layer": 1.0}, TypeError, "layer: expected an int or an int32 scalar, got float"),
    ({"kv_pages": STACKED, "layer": jax.random.key(0)}, TypeError, "layer: expected an int32 scalar, got key<fry>"),
    ({"kv_pages": STACKED, "layer": np.array("a")}, TypeError, "layer: expected an int32 scalar, got <U1"),
    ({"kv_pages": STACKED, "layer": zeros(2, dtype=I32)}, TypeError, r"layer: expected an int32 scalar, got int32 of shape \(2,\)"),
    ({"kv_format": []}, TypeError, r"kv_format: expected one of bf16, f16, .*, got \[\]"),
    ({"kv_format": "fp7"}, ValueError, "kv_format: expected one of bf16, f16, .*, got 'fp7'"),
    ({"kv_format": "fp8_e5m2"}, ValueError, "kv_format: expected one of bf16, f16, f32, fp8_e4m3, fp8_ds_mla, got 'fp8_e5m2'"),
    ({"kv_format": "bf16"}, TypeError, "kv_pages: expected bfloat16 for format 'bf16', got float32"),
    ({"kv_format": "bf16", "kv_pages": zeros(PAGES, SIZE, D_CKV + D_KPE, dtype=jnp.bfloat16)}, TypeError, "kv_pages: expected float32 as in (q_nope|ckv), got bfloat16"),
    ({"kv_format": "fp8_e4m3", "kv_scale": 1.0}, TypeError, "kv_pages: expected float8_e4m3fn for format 'fp8_e4m3', got float32"),
    ({"kv_format": "fp8_ds_mla"}, ValueError, "kv_format: expected d_ckv, d_kpe = 512, 64 for 'fp8_ds_mla', got 32, 8"),
    ({**FP8, "kv_scale": None}, ValueError, "kv_scale: expected a scale for format 'fp8_e4m3', got None"),
    ({**FP8, "kv_scale": 0}, ValueError, r"kv_scale: expected a positive finite number \(from 2\^-60 to 2\^60\), got 0.0"),
    ({**FP8, "kv_scale": 2.0**-61}, ValueError, "kv_scale: expected a positive finite number .*, got 4.3"),
    ({**FP8, "kv_scale": np.float64(2.0**61)}, ValueError, "kv_scale: expected a positive finite number .*, got 2.3"),
    ({**FP8, "kv_scale": -1.0}, ValueError, "kv_scale: expected a positive finite number .*, got -1.0"),
    ({**FP8, "kv_scale": 10**400}, ValueError, "kv_scale: expected a positive finite number .*, got inf"),
    ({**FP8, "kv_scale": np.float32("nan")}, ValueError, "kv_scale: expected a positive finite number .*, got nan"),
    ({**FP8, "kv_scale": (1.0, np.array(np.inf, np.float32))}, ValueError, r"kv_scale\[1\]: expected a positive finite number .*, got inf"),
    ({**FP8, "kv_scale": (2.0**50, 2.0**-41)}, ValueError, "kv_scale: expected a scale of ckv of at most 2\\^90 times that of kpe, got 1125899906842624.0 and 4.5"),
    ({**FP8, "kv_scale": (1.0, 1.0, 1.0)}, ValueError, r"kv_scale: expected one scale or \(ckv, kpe\), got 3"),
    ({**FP8, "kv_scale": [1.0, 1.0]}, TypeError, "kv_scale: expected a number or an array, got list"),
    ({**FP8, "kv_scale": True}, TypeError, "kv_scale: expected a number or an array, got bool"),
    ({**FP8, "kv_scale": jnp.bfloat16(1)}, TypeError, "kv_scale: expected float32, got bfloat16"),
    ({**FP8, "kv_scale": np.ones((), np.float64)}, TypeError, "kv_scale: expected float32, got float64"),
    ({**FP8, "kv_scale": jnp.ones(2)}, ValueError, r"kv_scale: expected a scalar or shape \(1,\), got shape \(2,\)"),
    ({**FP8, "kv_pages": (zeros(PAGES, SIZE, D_CKV, dtype=E4M3), zeros(PAGES, SIZE, D_KPE, dtype=jnp.float16))}, TypeError, r"kv_pages\[1\] \(kpe\): expected float8_e4m3fn or bfloat16 for format 'fp8_e4m3', got float16"),
    ({**FP8, "kv_pages": (zeros(PAGES, SIZE, D_CKV, dtype=E4M3), zeros(PAGES, SIZE, D_KPE, dtype=jnp.bfloat16)), "kv_scale": (1.0, 1.0)}, ValueError, "kv_scale: expected one scale, that of ckv, since kpe is bfloat16, got two"),
    ({**FP8, "kv_pages": zeros(PAGES, SIZE, D_CKV, dtype=E4M3)}, ValueError, r"kv_pages: expected a last dimension of at least 40 = d_ckv \+ d_kpe"),
    ({"kv_format": "f32", "kv_scale": zeros()}, ValueError, "kv_scale: expected None for format 'f32', got a scale"),
    ({"kv_scale": zeros()}, ValueError, "kv_scale: expected None for a cache in its own dtype"),
    ({"backend": "sm42"}, ValueError, "backend: expected None or one of .*reference.*, got 'sm42'"),
    ({"backend": "cpu:avx2"}, ValueError, "backend: expected None or one of .*, got 'cpu:avx2'"),
    ({"backend": "reference:f64"}, ValueError, "backend: expected None or one of .*, got 'reference:f64'"),
    ({"mesh": "dp"}, TypeError, "mesh: expected a mesh or a MeshAxes, got str"),
    ({"mesh": 3}, TypeError, "mesh: expected a mesh or a MeshAxes, got int"),
    ({"mesh": jax_mla.MeshAxes(batch="dp")}, ValueError, r"mesh: expected MeshAxes\(mesh=...\) outside jax.set_mesh"),
]  # fmt: skip


def name(value) -> str | None:
    return "+".join(value) if isinstance(value, dict) else "" if isinstance(value, type) else None


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    BAD_DECODE + BAD_BOUND + BAD_MASK + BAD_LENGTH + BAD_CACHE,
    ids=name,
)
def test_decode_refuses(changes, error, message) -> None:
    with pytest.raises(error, match=f"^jax_mla.decode: .*{message}"):
        decode(**changes)


@pytest.mark.parametrize(("changes", "error", "message"), BAD_APPEND + BAD_CACHE, ids=name)
def test_append_refuses(changes, error, message) -> None:
    with pytest.raises(error, match=f"^jax_mla.append: .*{message}"):
        append(**changes)


@pytest.mark.parametrize(("changes", "error", "message"), BAD_BOUNDS + BAD_RAGGED_APPEND, ids=name)
def test_append_of_ragged_tokens_refuses(changes, error, message) -> None:
    with pytest.raises(error, match=f"^jax_mla.append: .*{message}"):
        append(**{**TOKENS, "cu_q_lens": RAGGED["cu_q_lens"], **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    BAD_BOUNDS + BAD_RAGGED + BAD_BOUND + BAD_MASK + BAD_LENGTH + BAD_CACHE,
    ids=name,
)
def test_ragged_paged_attention_refuses(changes, error, message) -> None:
    with pytest.raises(error, match=f"^jax_mla.ragged_paged_attention: .*{message}"):
        ragged(**changes)


@pytest.mark.parametrize(("changes", "error", "message"), BAD_INDEX_TOPK, ids=name)
def test_index_topk_refuses(changes, error, message) -> None:
    with pytest.raises(error, match=f"^jax_mla.index_topk: .*{re.escape(message)}"):
        call(jax_mla.index_topk, INDEX_TOPK, **changes)


@pytest.mark.parametrize(("changes", "error", "message"), BAD_INDEX_APPEND, ids=name)
def test_index_append_refuses(changes, error, message) -> None:
    with pytest.raises(error, match=f"^jax_mla.index_append: .*{re.escape(message)}"):
        call(jax_mla.index_append, INDEX_APPEND, **changes)


# q_nope before W_UK, and q_pe, for the row of a packed pool: DeepSeek, GLM, MiniCPM3.
@pytest.mark.parametrize(("changes", "error", "message"), BAD_SPARSE + BAD_CACHE, ids=name)
def test_sparse_attention_refuses(changes, error, message) -> None:
    with pytest.raises(error, match=f"^jax_mla.sparse_attention: {message}"):
        sparse(**changes)


@pytest.mark.parametrize(
    ("d_nope", "d_kpe", "width"), [(128, 64, 576), (192, 64, 576), (64, 32, 288)]
)
@pytest.mark.parametrize("is_split", [False, True])
def test_queries_that_were_not_multiplied_are_refused(d_nope, d_kpe, width, is_split) -> None:
    pool = zeros(PAGES, SIZE, width)
    if is_split:
        pool = zeros(PAGES, SIZE, width - d_kpe), zeros(PAGES, SIZE, d_kpe)
    changes = {"q_nope": zeros(B, Q, H, d_nope), "q_pe": zeros(B, Q, H, d_kpe), "kv_pages": pool}
    with pytest.raises(ValueError, match="was the query multiplied by W_UK"):
        decode(**changes)
    rows = {"ckv": zeros(6, width - d_kpe), "kpe": zeros(6, d_kpe), "kv_pages": pool}
    queries = {"q_nope": zeros(6, H, d_nope), "q_pe": zeros(6, H, d_kpe)}
    with pytest.raises(
        ValueError, match=f"q_nope: expected the width of ckv, {width - d_kpe}, .*W_UK"
    ):
        ragged(**rows, **queries)


def test_values_of_absent_sequences_are_not_checked() -> None:
    wild = np.array([5, 2**31 - 1], np.int32), np.array([0, 3, -7], np.int32)
    for num_seqs in (1, zeros(dtype=I32)):
        ragged(num_seqs=num_seqs, seq_lens=wild[0], cu_q_lens=wild[1])
        ragged(num_seqs=num_seqs, seq_lens=wild[0], cu_q_lens=None)


def test_positions_of_padding_are_not_checked() -> None:
    wild = np.array([0, 1, 2, 10**6, 10**6, 10**6], np.int32)
    append(**{**TOKENS, "cu_q_lens": np.array([0, 1, 3], np.int32), "positions": wild})
    append(**{**TOKENS, "cu_q_lens": RAGGED["cu_q_lens"], "positions": wild})
    with pytest.raises(ValueError, match="positions: expected places that page_table has"):
        append(**{**TOKENS, "cu_q_lens": np.array([0, 1, 4], np.int32), "positions": wild})


def prefill(**changes):
    return call(jax_mla.prefill, PREFILL, **changes)


def mixed(**changes):
    return call(jax_mla.mixed_attention, PREFILL, **changes)


# What is used of the page tables below: 9 tokens of sequence 0, 4 of sequence 1. Of each sequence
# the last three are new ones, whose pages prefill does not read.
PLACES_USED = {
    decode: {"seq_lens": np.array([9, 4], np.int32)},
    append: {"positions": np.array([[-1, 7, 8], [1, 2, 3]], np.int32)},
    ragged: {"seq_lens": np.array([9, 4], np.int32)},
    mixed: {"seq_lens": np.array([9, 4], np.int32), "cu_q_lens": np.array([0, 3, 6], np.int32)},
    prefill: {"seq_lens": np.array([12, 7], np.int32), "cu_q_lens": np.array([0, 3, 6], np.int32)},
}
WILD = -(2**31)
TABLE = np.array([[7, 2, 9, WILD, PAGES], [0, WILD, PAGES, -1, -1]], np.int32)


@pytest.mark.parametrize("op", PLACES_USED)
def test_wrong_page_ids_in_numpy_arrays_are_refused(op) -> None:
    used: dict[str, Any] = PLACES_USED[op]
    op(page_table=TABLE, **used)
    for place, page in (((0, 2), -1), ((1, 0), PAGES)):
        table = TABLE.copy()
        table[place] = page
        message = f"page_table: expected ids of the pool's pages in [0, 10), got {page} at index "
        with pytest.raises(ValueError, match=re.escape(f"{message}{place}")):
            op(page_table=table, **used)
        op(page_table=table, page_begin=0, **used)  # a part of the pages
        op(page_table=zeros(B, MAX, dtype=I32), **used)
        on_device = {name: zeros(*x.shape, dtype=I32) for name, x in used.items()}
        op(page_table=table, **on_device)


def test_page_ids_of_absent_sequences_and_of_padding_are_not_checked() -> None:
    table = TABLE.copy()
    table[1, 0] = WILD
    ragged(page_table=table, num_seqs=1, **PLACES_USED[ragged])
    prefill(page_table=table, num_seqs=1, **PLACES_USED[prefill])
    mixed(page_table=table, num_seqs=1, **PLACES_USED[mixed])
    rows = {**TOKENS, "page_table": table, "positions": np.array([6, 7, 8, 0, 1, 2], np.int32)}
    append(**rows, cu_q_lens=np.array([0, 3, 3], np.int32))
    append(**rows, cu_q_lens=RAGGED["cu_q_lens"])
    with pytest.raises(ValueError, match=r"page_table: expected ids .*at index \(1, 0\)"):
        append(**rows, cu_q_lens=np.array([0, 3, 6], np.int32))


def test_page_ids_of_groups_are_not_checked() -> None:
    axes = jax_mla.MeshAxes(cpu_mesh((2,), ("dp",)), batch="dp", local_pages="dp")
    for op in (decode, append):
        op(page_table=TABLE - 1, mesh=axes, **PLACES_USED[op])
    bounds = np.array([0, 3, 0, 3], np.int32)
    ragged(page_table=TABLE - 1, mesh=axes, cu_q_lens=bounds, seq_lens=np.array([9, 4], np.int32))


def test_the_reference_asks_for_a_layer_too() -> None:
    arrays = {k: jnp.zeros(v.shape, v.dtype) for k, v in (DECODE | APPEND).items()}
    pool = jnp.zeros((2, PAGES, SIZE, D_CKV + D_KPE))
    got = "kv_pages: expected layer= for a stacked pool of rank 4, .* or packs=True for"
    for op, given in ((jax_mla.decode, DECODE), (jax_mla.append, APPEND)):
        reference = getattr(jax_mla.reference, op.__name__)
        scale = {"sm_scale": 1.0} if given is DECODE else {}
        args: dict[str, Any] = {k: arrays[k] for k in given} | {"kv_pages": pool} | scale
        for fun in (op, reference):
            with pytest.raises(ValueError, match=got):
                fun(**args)


def test_definitions_of_the_indexer_check_ranks() -> None:
    q, weights, table = jnp.ones((3, 2, 16)), jnp.ones((3, 2)), jnp.zeros((1, 2), jnp.int32)
    pool, lens = jnp.ones((2, 8, 16, 16)), jnp.full(1, 9, jnp.int32)
    with pytest.raises(ValueError, match="reference.index_topk: index_pages: expected"):
        jax_mla.reference.index_topk(q, weights, pool, table, lens, k=2)
    with pytest.raises(ValueError, match="reference.index_append: index_pages: expected"):
        jax_mla.reference.index_append(pool, q[:1, 0], table, lens)
    with pytest.raises(ValueError, match="reference.index_topk: q: expected"):
        jax_mla.reference.index_topk(q[None], weights, pool[0], table, lens, k=2)


@pytest.mark.parametrize("op", ["decode", "sparse_attention", "index_topk"])
def test_pools_of_a_vmap_that_are_too_large_are_refused_by_name(op) -> None:
    pools = zeros(2**15, 2**16, 1, 128 if op == "index_topk" else D_CKV)
    lens, table = zeros(1, dtype=I32), zeros(1, 2, dtype=I32)

    def call(pool, *arrays):
        if op == "index_topk":
            return jax_mla.index_topk(arrays[0], arrays[1], pool, *arrays[2:], k=2)
        q = arrays[0][..., :D_CKV]
        if op == "decode":
            return jax_mla.decode(q, None, pool, *arrays[2:], sm_scale=1.0)
        return jax_mla.sparse_attention(q, None, pool, arrays[2], sm_scale=1.0)

    mapped = jax.jit(jax.vmap(call, in_axes=(0, None, None, None, None)))
    name = "index_pages" if op == "index_topk" else "kv_pages"
    with pytest.raises(ValueError, match=f"jax_mla.{op}: {name}: expected fewer than 2\\^31 pages"):
        mapped.lower(pools, zeros(1, 2, 128), zeros(1, 2), table, lens)


def test_bounds_of_a_window_are_checked_before_they_are_used() -> None:
    arrays: dict[str, Any] = {k: jnp.zeros(v.shape, v.dtype) for k, v in RAGGED.items()}
    arrays |= {"page_table": np.zeros((B, MAX), np.int32), "seq_lens": np.full(B, 3, np.int32)}
    arrays |= {"cu_q_lens": np.array([0, 1, 2, 3], np.int32)}
    with pytest.raises(ValueError, match=r"cu_q_lens: expected shape \(3\) = sequences in"):
        jax_mla.ragged_paged_attention(**arrays, sliding_window=3, sm_scale=1.0)


def test_a_number_of_sequences_may_have_any_integer_dtype() -> None:
    arrays: dict[str, Any] = {k: jnp.ones(v.shape, v.dtype) for k, v in RAGGED.items()}
    step = arrays | {"seq_lens": jnp.full(B, Q, I32), "cu_q_lens": jnp.arange(B + 1) * Q}
    step |= {"page_table": jnp.arange(B * MAX, dtype=I32).reshape(B, MAX)}
    q = jnp.ones((B * Q, H, 16))
    prompt: dict[str, Any] = step | {
        "q_nope": q,
        "w_uk": jnp.ones((H, 16, D_CKV)),
        "w_uv": jnp.ones((H, D_CKV, 8)),
    }
    one = jnp.int8(1)
    with jax.numpy_dtype_promotion("strict"):
        for op in (jax_mla.prefill, jax_mla.mixed_attention):
            op(**prompt, num_seqs=one, sm_scale=1.0)
        names = ("kv_pages", "page_table", "seq_lens", "cu_q_lens")
        question: dict[str, Any] = {name: step[name] for name in names}
        jax_mla.check_values(**question, num_tokens=B * Q, num_seqs=one)


def test_merge_refuses_axes_that_are_no_names() -> None:
    outs, lses = jnp.zeros((3, 8)), jnp.zeros(3)
    with pytest.raises(TypeError, match="^jax_mla.merge: axis_name: expected names of mesh axes"):
        jax_mla.merge(outs, lses, axis_name=0)  # type: ignore[arg-type]


def test_a_list_of_pools_is_refused_by_every_function() -> None:
    arrays = {k: jnp.zeros(v.shape, v.dtype) for k, v in APPEND.items() if k != "kv_pages"}
    pools = [jnp.zeros(s.shape, s.dtype) for s in SPLIT]
    got = r"kv_pages: expected an array or a tuple \(ckv, kpe\), got list"
    with pytest.raises(TypeError, match=f"^jax_mla.reference.append: {got}"):
        jax_mla.reference.append(pools, **arrays)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=f"^jax_mla.backends: {got}"):
        jax_mla.backends(DECODE["q_nope"], DECODE["q_pe"], list(SPLIT), DECODE["page_table"])  # type: ignore[arg-type]


def test_only_decode_on_cuda_has_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backends, "_known", lambda: {"sm80": "cuda", "cpu": "cpu"})
    assert _backends.check_name("jax_mla.decode", "sm80:99kb") == "sm80:99kb"
    for op in (decode, append):
        with pytest.raises(ValueError, match="backend: expected .*, got 'cpu:99kb'"):
            op(backend="cpu:99kb")
    message = "^jax_mla.append: backend: expected a name without a variant, .*got 'sm80:99kb'"
    with pytest.raises(ValueError, match=message):
        append(backend="sm80:99kb")
    assert append(backend="sm80").shape == APPEND["kv_pages"].shape


@pytest.mark.parametrize(
    ("outs", "lses", "error", "message"),
    [
        (zeros(2, 3, 8), zeros(2, 4), ValueError, r"lses: expected shape \(2, 3\) as in outs, got \(2, 4\)"),
        (zeros(2, 3, 8), zeros(2, 3, dtype=jnp.bfloat16), TypeError, "lses: expected float32, got bfloat16"),
        (zeros(2, 3, 8, dtype=I32), zeros(2, 3), TypeError, "outs: expected bfloat16 or float16"),
        (zeros(8), zeros(), ValueError, r"outs: expected \[parts, ..., d_ckv\], got shape \(8,\)"),
    ],
)  # fmt: skip
def test_merge_refuses(outs, lses, error, message) -> None:
    with pytest.raises(error, match=f"^jax_mla.merge: {message}"):
        jax.eval_shape(jax_mla.merge, outs, lses)


def test_merge_over_an_axis_refuses_scalars() -> None:
    merge = jax.vmap(functools.partial(jax_mla.merge, axis_name="i"), axis_name="i")
    with pytest.raises(
        ValueError, match=r"^jax_mla.merge: outs: expected \[..., d_ckv\], got shape"
    ):
        merge(jnp.zeros(3), jnp.zeros(3))


def test_a_platform_is_a_str() -> None:
    with pytest.raises(TypeError, match="^jax_mla.backends: platform: expected a str, got list"):
        jax_mla.backends(platform=["cpu"])  # type: ignore[arg-type]


@pytest.mark.parametrize("role", ["batch", "heads", "pages"])
@pytest.mark.parametrize("axes", [{"dp"}, ["dp"], 3, ("dp", 3), ("dp", "dp"), P("dp")], ids=str)
def test_mesh_axes_refuses_what_are_no_names(role, axes) -> None:
    message = f"^jax_mla.MeshAxes: {role}: expected None, the name of an axis or a tuple"
    with pytest.raises(ValueError, match=message):
        jax_mla.MeshAxes(**{role: axes})


def test_mesh_axes_refuses_what_is_no_mesh() -> None:
    message = "^jax_mla.MeshAxes: mesh: expected a mesh or None, got str"
    with pytest.raises(TypeError, match=message):
        jax_mla.MeshAxes("dp")  # type: ignore[arg-type]


BAD_QUESTION = [
    ({"q_nope": zeros(B, D_CKV)}, ValueError, r"q_nope: expected \[batch, q_len, num_heads, d_ckv\]"),
    ({"q_nope": zeros(B, Q, H, D_CKV, dtype=jnp.int8)}, TypeError, "q_nope: expected bfloat16 or float16 or float32, got int8"),
    ({"q_nope": [1.0]}, TypeError, "q_nope: expected an array, got list"),
    ({"q_pe": zeros(B, Q, H, D_KPE, dtype=jnp.float8_e4m3fn)}, TypeError, "q_pe: expected float32 as in q_nope, got float8_e4m3fn"),
    ({"kv_pages": zeros(SIZE)}, ValueError, r"kv_pages: expected \[num_pages, page_size, d\]"),
    ({"page_table": zeros(B, dtype=I32)}, ValueError, r"page_table: expected shape \(2, \*\) with q_nope's batch, got \(2,\)"),
    ({"page_table": zeros(B, 2**28 + 1, dtype=I32)}, ValueError, r"page_table: expected places for at most 2\^30 tokens"),
    ({"kv_pages": zeros(PAGES, SIZE, D_CKV)}, ValueError, "kv_pages: expected a last dimension of at least 40"),
    ({"kv_pages": zeros(PAGES, 0, D_CKV + D_KPE)}, ValueError, "kv_pages: expected a page_size of at least 1"),
    ({"kv_pages": zeros(PAGES, SIZE, D_CKV + D_KPE, dtype=jnp.float8_e4m3fn)}, TypeError, "kv_pages: expected float32 as in q_nope, got float8_e4m3fn; pass kv_format='fp8_e4m3' if the cache has this format"),
    ({"q_nope": zeros(B, Q, H, D_KPE), "q_pe": zeros(B, Q, H, D_CKV)}, ValueError, "q_nope, q_pe: expected d_ckv >= d_kpe.*swapped"),
    ({"kv_pages": SPLIT[::-1]}, ValueError, r"kv_pages\[0\] \(ckv\): expected a last dimension of at least 32 = d_ckv"),
    ({"q_pe": None, "page_table": None}, ValueError, r"page_table: expected all of .* or none, got None"),
    ({"batch_invariant": 1}, TypeError, "batch_invariant: expected a bool, got int"),
    ({"platform": "sm90"}, ValueError, "platform: expected one of .*'cuda'.*, got 'sm90'"),
]  # fmt: skip


BAD_HOST_BOUND = BAD_BOUND[:-2]  # no case with an array: nothing is traced here


@pytest.mark.parametrize(("changes", "error", "message"), BAD_QUESTION + BAD_HOST_BOUND, ids=name)
def test_backends_refuses(changes, error, message) -> None:
    given = {k: v for k, v in DECODE.items() if k != "seq_lens"} | changes
    with pytest.raises(error, match=f"^jax_mla.backends: {message}"):
        jax_mla.backends(**given)


def test_mesh_names_and_sizes_are_checked() -> None:
    mesh = cpu_mesh((4, 1), ("dp", "tp"))
    with pytest.raises(ValueError, match=r"mesh: expected batch to be a multiple of 4, .*, got 2"):
        decode(mesh=mesh)
    axes = jax_mla.MeshAxes(mesh, batch="dp", heads="x")
    with pytest.raises(
        ValueError, match=r"mesh: expected heads over axes .*\['dp', 'tp'\], got 'x'"
    ):
        decode(mesh=axes)


def test_handler_errors_name_tensor_expected_and_got() -> None:
    """A handler reports an error at run time as one exception, and the process goes on."""
    out = (zeros(B, Q, H, D_CKV), zeros(B, Q, H))
    fun = jax.ffi.ffi_call("jax_mla_decode", out)
    arrays = [jnp.zeros(s.shape, s.dtype) for s in DECODE.values()]
    q_nope, q_pe, pool, table, lens = arrays
    one = jnp.zeros((1,), I32)
    attrs = {
        "sm_scale": np.float32(1), "causal": np.bool_(True), "num_splits": np.int64(0),
        "batch_invariant": np.bool_(False), "backend": "", "has_layer": np.bool_(False),
        "max_seq_len": np.int64(0), "kv_format": "", "norm_eps": np.float32(0),
        "sliding_window": np.int64(0), "soft_cap": np.float32(0),
        "rope_interleaved": np.bool_(False),
        "operands": "q_nope,q_pe,page_table,seq_lens,layer,page_begin,kv_pages",
    }  # fmt: skip
    with (
        jax.default_device(jax.devices("cpu")[0]),
        pytest.raises(jax.errors.JaxRuntimeError) as error,
    ):
        jax.block_until_ready(fun(q_nope, q_pe, table, lens[:1], one, one, pool, **attrs))
    assert re.search(
        r"INVALID_ARGUMENT: jax_mla_decode: seq_lens: expected .*2.*got .*1", str(error.value)
    )
    assert jax_mla.decode(q_nope, q_pe, pool, table, lens, sm_scale=1.0).shape == q_nope.shape
