# ruff: noqa: E501
"""check_values finds each bad value, outside jit and under checkify."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import KINDS, context, make_mesh

import jax_mla

LAYERS, PAGES, SIZE, WIDTH = 3, 10, 4, 24
POOL = jnp.zeros((LAYERS, PAGES, SIZE, WIDTH))
# Two sequences of up to 12 tokens; the last place of each is not in use.
TABLE = jnp.asarray([[7, 2, -5], [0, 9, 1 << 30]], jnp.int32)
LENS = jnp.asarray([8, 6], jnp.int32)
POSITIONS = jnp.asarray([[7, -1], [4, 5]], jnp.int32)
LAYER = jnp.int32(2)
# A step of seven tokens: a chunk of three, one token, a sequence that is absent, and padding.
STEP_TABLE = jnp.asarray([[7, 2, -5], [0, 9, 1 << 30], [-1, 0, 0]], jnp.int32)
STEP: dict[str, Any] = {
    "page_table": STEP_TABLE,
    "seq_lens": jnp.asarray([8, 1, -9], jnp.int32),
    "num_tokens": 7,
    "cu_q_lens": jnp.asarray([0, 3, 4, 99], jnp.int32),
    "num_seqs": jnp.int32(2),
    "positions": None,
}
LENS_OF_STEP, BOUNDS = STEP["seq_lens"], STEP["cu_q_lens"]
UNIFORM = STEP | {"num_tokens": 6, "cu_q_lens": None, "seq_lens": jnp.asarray([8, 2, -9])}
# A call of append with the same tokens.
ROWS: dict[str, Any] = {
    "page_table": STEP_TABLE,
    "seq_lens": None,
    "cu_q_lens": jnp.asarray([0, 3, 4, 4], jnp.int32),
    "positions": jnp.asarray([5, 6, 7, 0, 99, 99, 5], jnp.int32),
}

GOOD: list[dict[str, Any]] = [
    {},
    {"seq_lens": LENS.at[1].set(8)},
    {"positions": POSITIONS[:, 0]},
    {"positions": jnp.full((2, 2), -1, jnp.int32)},  # all skipped: no two at one row
    {"kv_pages": POOL[0], "layer": None},
    {"kv_pages": (POOL[..., :16], POOL[..., 16:])},
    {"kv_pages": POOL.reshape(LAYERS, PAGES, SIZE // 2, 2, WIDTH), "packs": True},
    {"kv_pages": POOL[0].reshape(PAGES, SIZE // 2, 2, WIDTH), "layer": None, "packs": True},
    {"page_table": TABLE.at[1].set(jnp.asarray([9, 0, 7])), "positions": POSITIONS},
    STEP,
    STEP | {"num_seqs": None, "cu_q_lens": BOUNDS.at[3].set(4), "seq_lens": jnp.asarray([8, 1, 0])},
    STEP | {"num_seqs": jnp.int32(0)},
    STEP | {"num_seqs": jnp.int32(0), "cu_q_lens": BOUNDS.at[0].set(2)},
    STEP | {"page_table": STEP_TABLE.at[1, 0].set(7), "seq_lens": LENS_OF_STEP.at[1].set(5)},
    UNIFORM,
    ROWS,
    # A window: what lies in front of it may be gone.
    {"sliding_window": 4, "page_table": TABLE.at[0, 0].set(-7)},
    {"sliding_window": 3, "page_table": TABLE.at[0, 0].set(-7), "q_nope": jnp.zeros((2, 2, 2, 16))},
    STEP | {"sliding_window": 2, "page_table": STEP_TABLE.at[0, 0].set(-7)},
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"seq_lens": LENS.at[1].set(13)}, r"seq_lens: expected lengths .*\[0, 12\], got 13 for sequence 1"),
    ({"seq_lens": LENS.at[0].set(-1)}, "seq_lens: expected .*got -1 for sequence 0"),
    ({"seq_lens": LENS.at[0].set(9)}, r"page_table: expected page ids in \[0, 10\) within the lengths, got -5 at place 2 of sequence 0"),
    ({"seq_lens": LENS.at[1].set(12)}, "page_table: .*got 1073741824 at place 2 of sequence 1"),
    ({"positions": POSITIONS.at[1, 0].set(12)}, "positions: expected places that page_table has, below 12, got 12 for sequence 1"),
    ({"positions": POSITIONS.at[0, 1].set(8)}, "page_table: expected page ids .*where tokens are written, got -5 at place 2 of sequence 0"),
    ({"positions": POSITIONS.at[1, 1].set(4)}, "positions: expected every token at a row of its own, got row 0 of page 9 for two tokens, of sequences 1 and 1"),
    ({"page_table": TABLE.at[1, 1].set(2), "positions": jnp.asarray([4, 4], jnp.int32)}, "positions: .*got row 0 of page 2 for two tokens, of sequences 0 and 1"),
    ({"kv_pages": POOL[0].reshape(PAGES, SIZE // 2, 2, WIDTH), "layer": None, "packs": True, "seq_lens": LENS.at[1].set(13)}, r"seq_lens: expected lengths .*\[0, 12\], got 13"),
    ({"seq_lens": LENS.at[0].set(7)}, "seq_lens: expected lengths that include the new tokens, got 7 for sequence 0 with a token at position 7"),
    ({"layer": jnp.int32(3)}, r"layer: expected an index in \[0, 3\), got 3"),
    ({"layer": jnp.int32(-1)}, "layer: expected an index .*got -1"),
    ({"sliding_window": 5, "page_table": TABLE.at[0, 0].set(-7)}, "page_table: .*got -7 at place 0 of sequence 0"),
    ({"sliding_window": 4, "page_table": TABLE.at[0, 0].set(-7), "q_nope": jnp.zeros((2, 2, 2, 16))}, "page_table: .*got -7 at place 0 of sequence 0"),
    (STEP | {"sliding_window": 3, "page_table": STEP_TABLE.at[0, 0].set(-7)}, "page_table: .*got -7 at place 0 of sequence 0"),
    (STEP | {"num_seqs": jnp.int32(4)}, r"num_seqs: expected a number of sequences in \[0, 4\), got 4"),
    (STEP | {"num_seqs": jnp.int32(-1)}, r"num_seqs: expected a number of sequences in \[0, 4\), got -1"),
    (STEP | {"num_seqs": None}, r"cu_q_lens: expected places among the tokens in \[0, 7\], got 99 at index 3"),
    (STEP | {"cu_q_lens": BOUNDS.at[0].set(-1)}, r"cu_q_lens: expected places .*got -1 at index 0"),
    (STEP | {"cu_q_lens": BOUNDS.at[0].set(2)}, "cu_q_lens: expected sums of lengths, of which the first is 0, got 2; pass np.concatenate"),
    (STEP | {"cu_q_lens": jnp.ones(4, jnp.int32)}, "cu_q_lens: expected sums of lengths, .*got 1"),
    (ROWS | {"cu_q_lens": jnp.ones(4, jnp.int32)}, "cu_q_lens: expected sums of lengths, .*got 1"),
    (STEP | {"cu_q_lens": BOUNDS.at[1].set(5)}, "cu_q_lens: expected values that never fall, got 5 followed by 4 at index 2"),
    (STEP | {"seq_lens": LENS_OF_STEP.at[1].set(13)}, r"seq_lens: expected lengths that fit .*\[0, 12\], got 13 for sequence 1"),
    (STEP | {"seq_lens": LENS_OF_STEP.at[0].set(-(2**31))}, "seq_lens: expected lengths that fit .*got -2147483648 for sequence 0"),
    (STEP | {"seq_lens": LENS_OF_STEP.at[0].set(2)}, "seq_lens: expected lengths that include the new tokens, got 2 for sequence 0 with 3 new ones"),
    (STEP | {"seq_lens": LENS_OF_STEP.at[0].set(9)}, "page_table: expected page ids .*within the lengths, got -5 at place 2 of sequence 0"),
    (STEP | {"page_table": STEP_TABLE.at[1, 0].set(2), "seq_lens": LENS_OF_STEP.at[1].set(2)}, "page_table: expected every token at a row of its own, got row 1 of page 2 for two tokens, of sequences 0 and 1"),
    (STEP | {"layer": jnp.int32(3)}, "layer: expected an index .*got 3"),
    (UNIFORM | {"seq_lens": jnp.asarray([8, 1, 0])}, "seq_lens: expected lengths that include .*got 1 for sequence 1 with 2 new ones"),
    (UNIFORM | {"num_seqs": None}, "seq_lens: expected lengths that fit .*got -9 for sequence 2"),
    (ROWS | {"cu_q_lens": jnp.asarray([0, 3, 2, 4])}, "cu_q_lens: expected values that never fall, got 3 followed by 2 at index 2"),
    (ROWS | {"cu_q_lens": jnp.asarray([0, 3, 4, 8])}, r"cu_q_lens: expected places .*\[0, 7\], got 8 at index 3"),
    (ROWS | {"positions": ROWS["positions"].at[3].set(12)}, "positions: expected places .*below 12, got 12 for sequence 1"),
    (ROWS | {"positions": ROWS["positions"].at[2].set(8)}, "page_table: expected page ids .*where tokens are written, got -5 at place 2 of sequence 0"),
    (ROWS | {"positions": ROWS["positions"].at[2].set(5)}, "positions: expected every token .*got row 1 of page 2 for two tokens, of sequences 0 and 0"),
]  # fmt: skip


def arguments(changes: dict[str, Any]) -> dict[str, Any]:
    given = {
        "kv_pages": POOL, "page_table": TABLE, "seq_lens": LENS, "positions": POSITIONS,
        "layer": LAYER,
    }  # fmt: skip
    return given | changes


STATIC = ("num_tokens", "packs", "sliding_window")


@functools.partial(jax.jit, static_argnums=1)  # one program for all calls of the same form
def checked(given: dict[str, Any], static: tuple[tuple[str, Any], ...]) -> Any:
    return checkify.checkify(functools.partial(jax_mla.check_values, **dict(static)))(**given)


def under_checkify(given: dict[str, Any]) -> checkify.Error:
    static = {name: given.pop(name) for name in STATIC if name in given}
    return checked(given, tuple(static.items()))[0]


@pytest.mark.quick(3)
@pytest.mark.parametrize("changes", GOOD, ids=lambda changes: "+".join(changes) or "all")
def test_good_values_pass(changes: dict[str, Any]) -> None:
    jax_mla.check_values(**arguments(changes))
    assert under_checkify(arguments(changes)).get() is None


@pytest.mark.quick(1)
@pytest.mark.parametrize("changes", [STEP, UNIFORM], ids=["ragged", "uniform"])
def test_with_64_bit_types_and_strict_promotion(changes: dict[str, Any]) -> None:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        jax_mla.check_values(**arguments(changes))


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_values_are_found(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^jax_mla.check_values: {message}"):
        jax_mla.check_values(**arguments(changes))
    with pytest.raises(ValueError, match=f"^jax_mla.check_values: {message}"):
        under_checkify(arguments(changes)).throw()


# Two sequences, so that their arrays can be sharded over an axis of two.
UNIFORM_STEP = {"positions": None, "num_tokens": 4, "seq_lens": jnp.asarray([8, 2], jnp.int32)}
TOKENS = {
    "seq_lens": None,
    "cu_q_lens": jnp.asarray([0, 3, 4], jnp.int32),
    "positions": jnp.asarray([5, 6, 7, 0], jnp.int32),
}
SHARDED: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"positions": POSITIONS[:, 0]}, None),
    ({"seq_lens": LENS.at[0].set(9)}, "page_table: .*got -5 at place 2 of sequence 0"),
    ({"positions": POSITIONS.at[1, 1].set(4)}, "positions: .*got row 0 of page 9 for two tokens"),
    (UNIFORM_STEP, None),
    (UNIFORM_STEP | {"num_seqs": jnp.int32(1)}, None),
    (UNIFORM_STEP | {"seq_lens": jnp.asarray([8, 1])}, "seq_lens: .*got 1 for sequence 1 with 2"),
    (TOKENS, None),
    (TOKENS | {"positions": TOKENS["positions"].at[3].set(12)}, "positions: .*12 for sequence 1"),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("changes", "message"), SHARDED, ids=range(len(SHARDED)))
def test_sharded_values(changes: dict[str, Any], message: str | None, kind: str) -> None:
    """Sequences and tokens over dp, pages over cp."""
    mesh = make_mesh(kind)

    def put(name: str, x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        specs = {"kv_pages": P(None, "cp"), "cu_q_lens": P(), "layer": P(), "num_seqs": P()}
        return jax.device_put(x, NamedSharding(mesh, specs.get(name, P("dp"))))

    with context(mesh, kind):
        given = {name: put(name, x) for name, x in arguments(changes).items()}
        if message is None:
            jax_mla.check_values(**given)
            under_checkify(given).throw()
            return
        with pytest.raises(ValueError, match=f"^jax_mla.check_values: {message}"):
            jax_mla.check_values(**given)
        with pytest.raises(ValueError, match=f"^jax_mla.check_values: {message}"):
            under_checkify(given).throw()


# A step in which each of the three sequences has a new token. The lengths end behind it.
ALL_DECODE: dict[str, Any] = STEP | {
    "page_table": STEP_TABLE.at[2, 0].set(5),
    "seq_lens": jnp.asarray([8, 1, 3], jnp.int32),
    "num_tokens": 3,
    "num_seqs": None,
}


def test_lengths_behind_a_0_in_place_of_their_sums_are_warned_of() -> None:
    given = arguments(ALL_DECODE | {"cu_q_lens": jnp.asarray([0, 1, 1, 1], jnp.int32)})
    with pytest.warns(UserWarning, match="check_values: cu_q_lens: got sequences without") as found:
        jax_mla.check_values(**given)
    assert found[0].filename == __file__
    rightly: list[dict[str, Any]] = [
        {"cu_q_lens": jnp.asarray([0, 1, 2, 3], jnp.int32)},
        {"cu_q_lens": jnp.asarray([0, 1, 1, 2], jnp.int32)},
        {"seq_lens": jnp.asarray([8, 0, 0], jnp.int32)},
    ]
    for changes in rightly:
        jax_mla.check_values(**(given | changes))
    under_checkify(dict(given)).throw()  # there is nothing to see yet


def test_lengths_in_place_of_their_sums_are_warned_of_in_append() -> None:
    rows = {"page_table": STEP_TABLE.at[2, 0].set(5), "positions": jnp.asarray([5, 0, 0])}
    given = arguments(ROWS | rows | {"cu_q_lens": jnp.asarray([0, 1, 1, 1], jnp.int32)})
    with pytest.warns(UserWarning, match="check_values: cu_q_lens: got sequences without") as found:
        jax_mla.check_values(**given)
    assert found[0].filename == __file__
    for rightly in ([0, 1, 2, 3], [0, 1, 1, 2]):
        given["cu_q_lens"] = jnp.asarray(rightly, jnp.int32)
        jax_mla.check_values(**given)


def test_a_query_whose_heads_stand_in_front_of_its_tokens_is_warned_of() -> None:
    query = jnp.zeros((2, 3, 1, 16))  # [batch, heads, q_len, d]
    message = r"check_values: q_nope: got shape \(2, 3, 1, 16\), .* 3 tokens of one head"
    with pytest.warns(UserWarning, match=message) as found:
        jax_mla.check_values(**arguments({"q_nope": query}))
    assert found[0].filename == __file__
    for right in (query.swapaxes(1, 2), query[:, :, 0], query[:, :1]):
        jax_mla.check_values(**arguments({"q_nope": right}))
    jax_mla.check_values(**arguments(STEP | {"q_nope": jnp.zeros((7, 3, 16))}))


def test_numpy_values_and_an_int_layer() -> None:
    given = arguments({"seq_lens": np.array([8, 13], np.int32), "layer": 1})
    with pytest.raises(ValueError, match="seq_lens: .*got 13"):
        jax_mla.check_values(**given)
    with pytest.raises(ValueError, match="layer: .*got 3"):
        jax_mla.check_values(**arguments({"layer": 3}))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"seq_lens": None, "positions": None}, ValueError, "seq_lens, positions: expected at least one"),
        ({"seq_lens": LENS[:1]}, ValueError, r"seq_lens: expected shape \(2\) with page_table's batch"),
        ({"positions": POSITIONS[:1]}, ValueError, r"positions: expected shape \(2, 2\)"),
        ({"positions": POSITIONS[None]}, ValueError, r"positions: expected \[batch, q_len\] or \[batch\]"),
        ({"page_table": TABLE.astype(jnp.float32)}, TypeError, "page_table: expected int32"),
        ({"kv_pages": POOL[:, :, None], "layer": None}, ValueError, "kv_pages: expected layer= and packs=True"),
        ({"layer": None}, ValueError, "kv_pages: expected layer= for a stacked pool of rank 4"),
        ({"kv_pages": POOL[0, 0], "layer": None}, ValueError, "kv_pages: expected"),
        ({"kv_pages": POOL[:, :, :0]}, ValueError, r"kv_pages: expected no dimension of size 0, got \(3, 10, 0, 24\)"),
        ({"kv_pages": POOL[:, :0]}, ValueError, r"page_table: expected page ids in \[0, 0\) within the lengths"),
        ({"page_table": TABLE[:0], "seq_lens": LENS[:0], "positions": POSITIONS[:0]}, ValueError, r"page_table: expected no dimension of size 0, got \(0, 3\)"),
        ({"page_table": TABLE[:, :0]}, ValueError, r"page_table: expected no dimension of size 0, got \(2, 0\)"),
        ({"positions": POSITIONS[:, :0]}, ValueError, r"positions: expected no dimension of size 0, got \(2, 0\)"),
        (STEP | {"page_table": STEP_TABLE[:0], "seq_lens": LENS[:0], "cu_q_lens": None}, ValueError, "page_table: expected no dimension of size 0"),
        ({"sliding_window": 0}, ValueError, "sliding_window: expected None or an int of at least 1, got 0"),
        ({"num_tokens": 2}, ValueError, "num_tokens: expected seq_lens beside it, and no positions"),
        (STEP | {"num_tokens": None}, ValueError, "num_seqs: expected num_tokens beside it"),
        (STEP | {"num_tokens": None, "num_seqs": None}, ValueError, "cu_q_lens: expected num_tokens beside it"),
        (STEP | {"num_tokens": 7.0}, TypeError, "num_tokens: expected an int, got float"),
        (STEP | {"num_tokens": 0}, ValueError, "num_tokens: expected at least 1, got 0"),
        (STEP | {"num_tokens": 2**31}, ValueError, "num_tokens: expected less than 2"),
        (STEP | {"cu_q_lens": None}, ValueError, "num_tokens: expected a multiple of the 3 sequences"),
        (STEP | {"cu_q_lens": BOUNDS[:-1]}, ValueError, r"cu_q_lens: expected shape \(4\)"),
        (STEP | {"num_seqs": 4}, ValueError, r"num_seqs: expected a number of sequences in \[0, 4\), got 4"),
        ({"q_nope": jnp.zeros((3, 2, 16))}, ValueError, r"q_nope: expected shape \(2, \*, \*\) with page_table's batch, got \(3, 2, 16\)"),
        ({"q_nope": jnp.zeros((2, 16))}, ValueError, r"q_nope: expected \[batch, q_len, num_heads, d_ckv\]"),
        (STEP | {"q_nope": jnp.zeros((3, 7, 16))}, ValueError, r"q_nope: expected shape \(7, \*, \*\) with num_tokens, got \(3, 7, 16\)"),
        (ROWS | {"positions": POSITIONS}, ValueError, r"positions: expected \[tokens\] with cu_q_lens"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(changes, error, message) -> None:
    with pytest.raises(error, match=f"^jax_mla.check_values: {message}"):
        jax_mla.check_values(**arguments(changes))


def test_in_a_step_whose_other_part_runs() -> None:
    """As an engine uses it: the ops run in the same checkified function."""
    rows = (jnp.ones((2, 16)), jnp.ones((2, 8)))

    @jax.jit
    @checkify.checkify
    def step(pool, positions):
        jax_mla.check_values(pool, TABLE, positions=positions, layer=1)
        pool = jax_mla.append(pool, *rows, TABLE, positions, layer=1)
        query = (jnp.ones((2, 3, 16)), jnp.ones((2, 3, 8)))
        jax_mla.check_values(pool, TABLE, seq_lens=positions + 1, layer=1)
        return jax_mla.decode(*query, pool, TABLE, positions + 1, sm_scale=0.2, layer=1)

    error, out = step(POOL, jnp.asarray([3, 6], jnp.int32))
    error.throw()
    assert out.shape == (2, 3, 16)
    error, _ = step(POOL, jnp.asarray([3, 12], jnp.int32))
    with pytest.raises(ValueError, match="positions: .*got 12 for sequence 1"):
        error.throw()


def test_in_a_ragged_step() -> None:
    """The check stands beside the op, with the same arrays."""
    ragged = {name: STEP[name] for name in ("seq_lens", "cu_q_lens", "num_seqs")}
    query = (jnp.ones((7, 3, 16)), jnp.ones((7, 3, 8)))
    rows = (jnp.ones((7, 16)), jnp.ones((7, 8)))

    @jax.jit
    @checkify.checkify
    def step(pool, ragged):
        jax_mla.check_values(pool, STEP_TABLE, num_tokens=7, layer=1, **ragged)
        return jax_mla.ragged_paged_attention(
            *query, *rows, pool, STEP_TABLE, **ragged, sm_scale=0.2, layer=1
        )

    error, (out, _) = step(POOL, ragged)
    error.throw()
    assert out.shape == (7, 3, 16)
    error, _ = step(POOL, ragged | {"seq_lens": jnp.asarray([2, 1, -9], jnp.int32)})
    with pytest.raises(ValueError, match="seq_lens: .*got 2 for sequence 0 with 3 new ones"):
        error.throw()


def test_under_jit_alone_the_check_is_not_dropped_silently() -> None:
    with pytest.raises(ValueError, match="not functionalized"):
        jax.jit(lambda lens: jax_mla.check_values(POOL[0], TABLE, seq_lens=lens))(LENS)
