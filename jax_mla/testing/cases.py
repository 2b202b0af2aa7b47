"""Named cases of `decode` and of `ragged_paged_attention`, which tests run on every backend.

The fix of a bug adds a case here, with the issue in `why`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jax_mla.testing.inputs import DecodeInputs, decode_inputs
from jax_mla.testing.ragged import RaggedInputs, ragged_inputs

# No token, one token, lengths around page and tile borders, several tiles, several splits.
RAGGED = (0, 1, 63, 64, 65, 127, 200, 513)


@dataclasses.dataclass(frozen=True)
class Case:
    """One decode call.

    Attributes:
      name: name of the case, for test ids.
      seq_lens: tokens of each sequence.
      causal: argument of `jax_mla.decode`.
      num_splits: argument of `jax_mla.decode`.
      batch_invariant: argument of `jax_mla.decode`.
      sliding_window: argument of `jax_mla.decode`, and of `decode_inputs`.
      soft_cap: argument of `jax_mla.decode`.
      why: purpose of the case, if the name does not say it.

    The other attributes are arguments of `decode_inputs`.
    """

    name: str
    seq_lens: tuple[int, ...] = RAGGED
    q_len: int = 1
    num_heads: int = 16
    d_ckv: int = 512
    d_kpe: int = 64
    page_size: int = 64
    dtype: str = "bfloat16"
    cache: str = "packed"
    padding: int = 0
    pack: int | None = None
    num_layers: int | None = None
    table_tokens: int | None = None
    max_seq_len: int | None = None
    magnitude: float = 1.0
    kv_format: str | None = None
    has_codes: bool = False
    causal: bool = True
    num_splits: int | None = None
    batch_invariant: bool = False
    sliding_window: int | None = None
    soft_cap: float | None = None
    why: str = ""

    def inputs(self, seed: int = 0) -> DecodeInputs:
        """Return the arrays of the case. They are shared, so do not write to them."""
        return _inputs(self, seed)

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `jax_mla.decode` that are not among the inputs."""
        return {
            **self.mask(),
            "num_splits": self.num_splits,
            "batch_invariant": self.batch_invariant,
        }

    def mask(self) -> dict[str, Any]:
        """Return those of them that change what the result is by definition."""
        return {
            "causal": self.causal,
            "sliding_window": self.sliding_window,
            "soft_cap": self.soft_cap,
        }


@functools.lru_cache(maxsize=2)
def _inputs(case: Case, seed: int) -> DecodeInputs:
    names = {f.name for f in dataclasses.fields(case)}
    names -= {"name", "causal", "num_splits", "batch_invariant", "soft_cap", "why"}
    return decode_inputs(seed=seed, **{name: getattr(case, name) for name in names})


def stored_as(kv_format: str, cases: Iterable[Any]) -> Iterable[Any]:
    """Return the cases with a cache in this format, and with the dims that it has."""
    dims = {"d_ckv": 512, "d_kpe": 64} if kv_format == "fp8_ds_mla" else {}
    suffix = kv_format.removeprefix("fp8_")
    for case in cases:
        name = f"{case.name}_{suffix}"
        yield dataclasses.replace(case, name=name, kv_format=kv_format, **dims)


_SMALL = functools.partial(Case, d_ckv=256, d_kpe=32)

NO_ROPE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {}),
    ("_f32", {"dtype": "float32"}),
    ("_heads_64_q_len_2", {"num_heads": 64, "q_len": 2}),
    ("_stacked_packs", {"num_layers": 2, "pack": 4, "page_size": 16, "num_heads": 24}),
    ("_splits", {"num_splits": 3, "seq_lens": (0, 5, 700)}),
)

# Small cases, one for each feature of the op; they run on a laptop.
CASES: tuple[Case, ...] = (
    Case("deepseek"),
    Case("deepseek_f16", dtype="float16"),
    Case("deepseek_f32", dtype="float32"),
    _SMALL("minicpm"),
    _SMALL("minicpm_f16", dtype="float16", cache="split"),
    Case("mistral", d_ckv=256, num_heads=32, why="Mistral Small 4"),
    Case("mistral_q_len_3", d_ckv=256, q_len=3, num_heads=32, page_size=16, cache="split"),
    *(
        Case(f"without_rope{suffix}", d_kpe=0, why="GLM-5.3-Flash", **options)
        for suffix, options in NO_ROPE
    ),
    Case("dims_128_32", d_ckv=128, d_kpe=32, num_heads=40),
    Case("dims_128_32_page_16", d_ckv=128, d_kpe=32, page_size=16, cache="split"),
    Case("dims_1024_64", d_ckv=1024),
    Case("dims_1024_64_heads_40", d_ckv=1024, num_heads=40, page_size=16),
    Case("dims_128_16", d_ckv=128, d_kpe=16, why="the CPU takes any dims"),
    Case("dims_64_8", d_ckv=64, d_kpe=8, dtype="float32"),
    Case("split", cache="split"),
    Case("stacked", num_layers=3),
    Case("stacked_split", num_layers=3, cache="split", dtype="float16"),
    Case("wide", padding=64, why="rows of 640 columns, as engines for TPU have them"),
    Case("wide_f32", padding=64, dtype="float32"),
    Case("wide_odd", padding=3, why="no multiple of 16 bytes, which only the CPU takes"),
    Case("wide_split", padding=64, cache="split", num_layers=2, dtype="float16"),
    Case("wide_heads_128", padding=64, num_heads=128, seq_lens=(0, 65, 130)),
    Case("packs", padding=64, pack=2),
    Case("packs_one_row_each", pack=1, seq_lens=(0, 70)),
    Case("packs_one_a_page", pack=64, seq_lens=(0, 70)),
    Case("packs_stacked", padding=64, pack=2, num_layers=3, num_heads=128, seq_lens=(0, 65, 130)),
    *(
        _SMALL(f"packs_page_{n}", page_size=n, padding=96, pack=2, seq_lens=(0, 1, n, n + 1, 99))
        for n in (2, 6, 16, 32)
    ),
    _SMALL("packs_split", page_size=8, cache="split", padding=32, pack=4, num_heads=40),
    Case("one_sequence", seq_lens=(300,)),
    Case("all_empty", seq_lens=(0, 0, 0)),
    Case("empty_first_and_last", seq_lens=(0, 70, 0)),
    Case("one_token", seq_lens=(1,)),
    Case("table_much_wider", seq_lens=(5, 130), table_tokens=4096),
    *(
        Case(f"bound_{n}", seq_lens=(0, 5, 64, 130, 700), table_tokens=16384, max_seq_len=n)
        for n in (1, 64, 130, 512)
    ),
    Case(
        "bound_heads_128",
        seq_lens=(5, 130, 700),
        num_heads=128,
        table_tokens=16384,
        max_seq_len=150,
    ),
    Case("bound_beyond_the_table", seq_lens=(5, 130), max_seq_len=2**40),
    _SMALL("bound_q_len_3", q_len=3, seq_lens=(2, 64, 200), table_tokens=999, max_seq_len=100),
    *(
        _SMALL(f"bound_page_{n}", page_size=n, seq_lens=(0, 99, 101, 250), max_seq_len=100)
        for n in (1, 48)
    ),
    _SMALL("bound_stacked_split", num_layers=2, cache="split", table_tokens=4096, max_seq_len=130),
    _SMALL("bound_three_splits", num_splits=3, table_tokens=4096, max_seq_len=130),
    _SMALL("bound_batch_invariant", batch_invariant=True, table_tokens=4096, max_seq_len=300),
    *(_SMALL(f"heads_{n}", num_heads=n, seq_lens=(0, 5, 130)) for n in (1, 3, 8, 20, 63, 126)),
    Case("heads_128", num_heads=128, seq_lens=(0, 65, 130)),
    *(
        _SMALL(f"page_{n}", page_size=n, seq_lens=(0, 1, n - 1, n, n + 1, 2 * n + 5))
        for n in (1, 2, 4, 16, 32, 128, 256)
    ),
    _SMALL("page_48", page_size=48, why="not a power of two", seq_lens=(0, 47, 48, 49, 100)),
    *(_SMALL(f"q_len_{n}", q_len=n, seq_lens=(0, 1, 3, 64, 200)) for n in (2, 3, 8)),
    _SMALL("q_len_4_not_causal", q_len=4, causal=False, seq_lens=(0, 1, 3, 64, 200)),
    Case("q_len_2_heads_128", q_len=2, num_heads=128, seq_lens=(0, 1, 130)),
    _SMALL("one_split", num_splits=1),
    _SMALL("three_splits", num_splits=3),
    _SMALL("more_splits_than_tokens", num_splits=64, seq_lens=(0, 1, 2, 70)),
    _SMALL("batch_invariant", batch_invariant=True),
    *(
        Case(f"window_{n}", sliding_window=n, seq_lens=(0, 1, 63, 64, 65, 127, 200, 513, 900))
        for n in (1, 64, 65, 300)
    ),
    Case("window_beyond_the_table", sliding_window=513),
    Case("window_f16", dtype="float16", sliding_window=100),
    Case("window_f32", dtype="float32", sliding_window=100),
    Case("window_heads_128", num_heads=128, sliding_window=100),
    _SMALL("window_130_q_len_3", sliding_window=130, q_len=3, seq_lens=(0, 1, 131, 132, 700)),
    _SMALL(
        "window_not_causal", sliding_window=70, q_len=4, causal=False, seq_lens=(0, 1, 3, 64, 400)
    ),
    *(
        _SMALL(f"window_page_{n}", page_size=n, sliding_window=50, seq_lens=(0, 49, 99, 101, 250))
        for n in (1, 48, 256)
    ),
    _SMALL(
        "window_bound",
        sliding_window=90,
        q_len=2,
        seq_lens=(0, 5, 300, 700),
        table_tokens=4096,
        max_seq_len=333,
    ),
    _SMALL("window_stacked_split", sliding_window=90, num_layers=2, cache="split"),
    _SMALL("window_three_splits", sliding_window=400, num_splits=3, seq_lens=(0, 5, 399, 900)),
    _SMALL("window_batch_invariant", sliding_window=400, batch_invariant=True),
    Case("soft_cap", soft_cap=0.5, why="most scores are near the cap"),
    Case("soft_cap_f16", soft_cap=2.0, dtype="float16"),
    Case("soft_cap_f32", soft_cap=2.0, dtype="float32"),
    Case("soft_cap_large", soft_cap=2.0**40, dtype="float32", why="changes next to nothing"),
    _SMALL("soft_cap_window", soft_cap=1.0, sliding_window=100, q_len=2, num_heads=40),
    Case("values_huge", magnitude=2.0**40, why="beyond float16's range"),
    Case("values_tiny", magnitude=2.0**-40, why="below float16's range"),
    *stored_as(
        "fp8_e4m3",
        (
            Case("deepseek"),
            Case("f16", dtype="float16"),
            Case("f32", dtype="float32"),
            Case("codes", has_codes=True),
            Case("codes_heads_40", num_heads=40, has_codes=True, batch_invariant=True),
            _SMALL("minicpm", cache="split"),
            Case("mistral", d_ckv=256, num_heads=32),
            Case("without_rope", d_kpe=0, num_heads=64),
            Case("without_rope_codes", d_kpe=0, has_codes=True),
            Case("without_rope_page_16", d_kpe=0, num_heads=40, page_size=16, num_layers=2),
            Case("dims_128_32", d_ckv=128, d_kpe=32, num_heads=40),
            Case("dims_1024_64", d_ckv=1024, num_heads=20),
            Case("mixed", cache="mixed"),
            Case("mixed_codes", cache="mixed", has_codes=True),
            _SMALL("mixed_f16", cache="mixed", dtype="float16", num_layers=2),
            Case("dims_24_9", d_ckv=24, d_kpe=9, page_size=4),
            Case("wide", padding=64),
            Case("wide_odd", padding=3),
            Case("wide_mixed", padding=64, cache="mixed"),
            Case("packs", padding=64, pack=4, num_layers=3),
            Case("heads_128", num_heads=128, seq_lens=(0, 65, 130)),
            *(_SMALL(f"page_{n}", page_size=n, seq_lens=(0, 1, n, n + 1, 99)) for n in (1, 48)),
            _SMALL("q_len_3", q_len=3, seq_lens=(0, 1, 3, 64, 200)),
            _SMALL("not_causal", q_len=4, causal=False, seq_lens=(0, 1, 3, 64, 200)),
            _SMALL("bound", seq_lens=(0, 99, 101, 250), table_tokens=4096, max_seq_len=100),
            _SMALL("three_splits", num_splits=3),
            _SMALL("window", sliding_window=100, q_len=2),
            Case("window_soft_cap", sliding_window=100, soft_cap=1.0, has_codes=True),
            _SMALL("batch_invariant", batch_invariant=True),
            Case("values_huge", magnitude=2.0**40),
            Case("values_tiny", magnitude=2.0**-40),
        ),
    ),
    *stored_as(
        "fp8_ds_mla",
        (
            Case("deepseek"),
            Case("f16", dtype="float16"),
            Case("f32", dtype="float32"),
            Case("codes", has_codes=True),
            Case("stacked", num_layers=3),
            Case("wide", padding=48),
            Case("packs", padding=16, pack=4, num_layers=3),
            Case("heads_128", num_heads=128, seq_lens=(0, 65, 130)),
            *(Case(f"page_{n}", page_size=n, seq_lens=(0, 1, n, n + 1, 99)) for n in (1, 48)),
            Case("q_len_3", q_len=3, num_heads=5, seq_lens=(0, 1, 3, 64, 200)),
            Case("bound", seq_lens=(0, 99, 101, 250), table_tokens=4096, max_seq_len=100),
            Case("three_splits", num_splits=3),
            Case("window_soft_cap", sliding_window=100, soft_cap=1.0, q_len=2),
            Case("values_huge", magnitude=2.0**40),
            Case("values_tiny", magnitude=2.0**-40),
        ),
    ),
)

_PAGES_OF_128: dict[str, dict[str, Any]] = {
    "ragged": {"seq_lens": (0, 1, 127, 128, 129, 256, 700)},
    "all_empty": {"seq_lens": (0, 0, 0)},
    "heads_128": {"num_heads": 128, "seq_lens": (0, 65, 130, 1500)},
    "heads_200": {"num_heads": 200, "seq_lens": (0, 65, 130)},
    "heads_256": {"num_heads": 256, "seq_lens": (0, 65, 130)},
    "stacked": {"num_layers": 3},
    "wide": {"padding": 64, "pack": 2},
    "bound": {"table_tokens": 16384, "max_seq_len": 130},
    "many": {"seq_lens": (300,) * 150},
    "three_splits": {"num_splits": 3, "seq_lens": (0, 5, 700, 1500)},
    "batch_invariant": {"batch_invariant": True, "seq_lens": (0, 5, 700, 1500)},
}

# Large cases, for GPUs.
BIG_CASES: tuple[Case, ...] = (
    *(Case(f"big_heads_{n}", num_heads=n) for n in (1, 3, 8, 20, 40, 63, 64, 96, 126)),
    *(
        Case(f"big_q_len_{n}", q_len=n, num_heads=h, seq_lens=(0, 1, 4, 63, 64, 65, 1000))
        for n, h in ((2, 16), (3, 20), (4, 128), (5, 8), (6, 64), (7, 3), (8, 128))
    ),
    *(
        Case(f"big_page_{n}", page_size=n, num_heads=h, seq_lens=(0, 1, n, n + 1, 1500))
        for n, h in ((1, 16), (2, 128), (8, 128), (16, 64), (32, 128), (128, 16), (256, 128))
    ),
    *(
        Case(f"big_page_128_{name}", page_size=128, why="sm100 takes no smaller pages", **options)
        for name, options in _PAGES_OF_128.items()
    ),
    Case("big_page_256_heads_16", page_size=256, seq_lens=(0, 1, 255, 256, 257, 1500)),
    Case("big_long", seq_lens=(131072, 0, 1, 70000), num_heads=16, table_tokens=131072),
    Case("big_long_wide", seq_lens=(131072,), num_heads=128),
    *(
        Case(
            f"big_bound_{batch}x_heads_{heads}",
            seq_lens=(5000, 0, 700, 9000, 4096, 1, 4097, 8192)[:batch] * (batch // 8 or 1),
            num_heads=heads,
            q_len=q_len,
            table_tokens=163840,
            max_seq_len=4096,
            why="as an engine has it: the width of the table says nothing about the lengths",
        )
        for batch, heads, q_len in ((1, 16, 1), (1, 128, 1), (4, 64, 1), (8, 24, 2), (16, 128, 1))
    ),
    *(
        Case(
            f"big_one_long_among_short_heads_{n}",
            seq_lens=(20000,) + (64,) * 47,
            num_heads=n,
            why="there are more parts than a merging CTA has warps, so the warps share them",
        )
        for n in (64, 24)
    ),
    *(
        dataclasses.replace(
            shape,
            name=f"big_lengths_differ_{shape.name}",
            seq_lens=(0, 1) + tuple(900 + i * 389 % 1100 for i in range(100)) + (0, 64, 0),
            why="a worker starts one sequence, continues another and keeps the end of that one",
        )
        for shape in (
            Case("heads_64", num_heads=64),
            Case("heads_128_f16", num_heads=128, dtype="float16"),
            Case("heads_50_page_1", num_heads=50, page_size=1),
            Case("heads_24", num_heads=24),
            _SMALL("minicpm", num_heads=28, q_len=2, cache="split"),
        )
    ),
    *(
        dataclasses.replace(
            shape,
            name=f"big_values_{name}_{shape.name}",
            magnitude=magnitude,
            why="partial results in float16 have to be scaled, wherever they are merged",
        )
        for name, magnitude in (("huge", 2.0**40), ("tiny", 2.0**-40))
        for shape in (
            Case("combine_heads_16", seq_lens=(5000, 0, 700)),
            Case("combine_heads_128", seq_lens=(5000, 0, 700), num_heads=128),
            Case("cluster", seq_lens=(600,) * 64, num_heads=64),
            Case(
                "kept",
                seq_lens=(0, 1) + tuple(900 + i * 389 % 1100 for i in range(100)),
                num_heads=64,
            ),
            Case("shares", seq_lens=(1500,) * 32, num_heads=48, q_len=1),
        )
    ),
    _SMALL("big_minicpm_long", seq_lens=(40000, 3, 8191), num_heads=40),
    Case("big_batch_1", seq_lens=(5000,), num_heads=128),
    Case("big_batch_128", seq_lens=tuple((i * 37) % 700 for i in range(128)), num_heads=128),
    Case("big_batch_1024", seq_lens=tuple((i * 13) % 90 for i in range(1024)), num_heads=16),
    Case("big_batch_77_f16", seq_lens=tuple((i * 61) % 900 for i in range(77)), dtype="float16"),
)


@dataclasses.dataclass(frozen=True)
class RaggedCase:
    """One call of `ragged_paged_attention`.

    Attributes:
      name: name of the case, for test ids.
      cu_q_lens: wild values in place of those that belong to `seqs`. In a case with wild values the
        cache has no NaN, because such a call may read all of it.
      seq_lens: the same for the lengths.
      page_ids: wild values in place of the first pages of the first sequences.
      num_splits: argument of the op.
      batch_invariant: argument of the op.
      sliding_window: argument of the op, and of `ragged_inputs`.
      soft_cap: argument of the op.
      why: purpose of the case, if the name does not say it.

    The other attributes are arguments of `ragged_inputs`.
    """

    name: str
    seqs: tuple[tuple[int, int], ...]
    num_padding: int = 0
    num_absent: int = 0
    num_shared_pages: int = 0
    is_uniform: bool = False
    num_heads: int = 16
    d_ckv: int = 256
    d_kpe: int = 32
    page_size: int = 16
    dtype: str = "bfloat16"
    cache: str = "packed"
    padding: int = 0
    pack: int | None = None
    num_layers: int | None = None
    table_tokens: int | None = None
    max_seq_len: int | None = None
    cu_q_lens: tuple[int, ...] = ()
    seq_lens: tuple[int, ...] = ()
    page_ids: tuple[int, ...] = ()
    kv_format: str | None = None
    has_codes: bool = False
    num_splits: int | None = None
    batch_invariant: bool = False
    sliding_window: int | None = None
    soft_cap: float | None = None
    why: str = ""

    @property
    def is_wild(self) -> bool:
        """Whether the case has values that no engine should pass."""
        return bool(self.cu_q_lens or self.seq_lens or self.page_ids)

    def inputs(self, seed: int = 0) -> RaggedInputs:
        """Return the arrays of the case. They are shared, so do not write to them."""
        return _ragged_inputs(self, seed)

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of the op that are not among the inputs."""
        return {
            **self.mask(),
            "num_splits": self.num_splits,
            "batch_invariant": self.batch_invariant,
        }

    def mask(self) -> dict[str, Any]:
        """Return those of them that change what the result is by definition."""
        return {"sliding_window": self.sliding_window, "soft_cap": self.soft_cap}


@functools.lru_cache(maxsize=2)
def _ragged_inputs(case: RaggedCase, seed: int) -> RaggedInputs:
    names = {f.name for f in dataclasses.fields(case)}
    names -= {"name", "cu_q_lens", "seq_lens", "page_ids", "num_splits", "batch_invariant"}
    names -= {"soft_cap", "why"} | ({"sliding_window"} if case.is_wild else set())
    inputs = ragged_inputs(seed=seed, **{name: getattr(case, name) for name in names})
    if not case.is_wild:
        return inputs
    table = inputs.page_table.copy()
    table[: len(case.page_ids), 0] = case.page_ids
    rows = ("q_nope", "q_pe", "ckv", "kpe", "kv_pages")
    without_nan = functools.partial(np.nan_to_num, nan=0.5)
    changes = {name: jax.tree.map(without_nan, getattr(inputs, name)) for name in rows}
    for name in ("cu_q_lens", "seq_lens"):
        if values := getattr(case, name):
            changes[name] = np.array(values, np.int32)
    return dataclasses.replace(inputs, page_table=table, **changes)


_MIXED = ((1, 70), (33, 33), (1, 1), (0, 40), (17, 100), (5, 5), (1, 130))
_RAGGED = functools.partial(RaggedCase, seqs=_MIXED, num_padding=6, num_absent=2)
_WILD = functools.partial(
    RaggedCase, seqs=((3, 40), (4, 9), (5, 30)), num_padding=4, num_heads=3, dtype="float32"
)
_MAX, _MIN = 2**31 - 1, -(2**31)

RAGGED_CASES: tuple[RaggedCase, ...] = (
    _RAGGED("mixed", d_ckv=512, d_kpe=64, page_size=64),
    _RAGGED("mixed_mistral", d_kpe=64, page_size=64),
    _RAGGED("mixed_without_rope", d_ckv=512, d_kpe=0),
    RaggedCase("uniform_without_rope", ((3, 50), (3, 3)), d_kpe=0, d_ckv=512, is_uniform=True),
    _RAGGED("mixed_dims_128_32", d_ckv=128, d_kpe=32),
    _RAGGED("mixed_dims_1024_64", d_ckv=1024, d_kpe=64),
    _RAGGED("mixed_f16", dtype="float16", cache="split"),
    _RAGGED("mixed_f32", dtype="float32"),
    _RAGGED("stacked", num_layers=3),
    _RAGGED("stacked_split", num_layers=3, cache="split", dtype="float16"),
    _RAGGED("wide", padding=64, d_ckv=512, d_kpe=64, page_size=64),
    _RAGGED("wide_odd", padding=3, why="no multiple of 16 bytes, which only the CPU takes"),
    _RAGGED("wide_split", padding=32, cache="split", num_layers=2, dtype="float16"),
    _RAGGED("packs", padding=96, pack=2),
    _RAGGED("packs_one_a_page", pack=16, dtype="float32"),
    _RAGGED("packs_stacked", padding=96, pack=4, num_layers=3),
    _RAGGED("packs_split", padding=32, pack=1, cache="split"),
    RaggedCase("packs_uniform", ((3, 50), (3, 3), (3, 2)), padding=96, pack=2, is_uniform=True),
    *(_RAGGED(f"heads_{n}", num_heads=n) for n in (1, 5, 128)),
    *(_RAGGED(f"page_{n}", page_size=n, num_heads=5) for n in (1, 3, 64, 128)),
    _RAGGED("three_splits", num_splits=3),
    _RAGGED("batch_invariant", batch_invariant=True),
    RaggedCase("decode_step", ((1, 5), (1, 64), (1, 1), (1, 200))),
    RaggedCase(
        "heads_76",
        ((1, 333), (1, 1500), (1, 1)),
        num_heads=76,
        why="two row tiles that are not full, of sequences that are split",
    ),
    RaggedCase("one_chunk", ((130, 300),), why="more tokens than any tile has rows"),
    RaggedCase("prompts", ((40, 40), (64, 64), (3, 3)), why="there is nothing in the cache"),
    RaggedCase("empty_chunks", ((0, 0), (2, 20), (0, 33), (0, 1), (1, 50), (0, 9))),
    RaggedCase("nothing_but_padding", ((0, 4), (0, 20)), num_padding=5),
    RaggedCase("more_tokens_than_the_length", ((5, 3), (4, 0), (1, 9), (70, 20))),
    RaggedCase("shared_prefix", ((1, 70), (9, 90), (1, 64), (30, 80)), num_shared_pages=3),
    RaggedCase("long_beside_chunk", ((1, 3000), (64, 500)), num_heads=8, why="one is split"),
    RaggedCase("table_much_wider", ((1, 5), (7, 30)), table_tokens=4096),
    *(
        _RAGGED(f"bound_{n}", table_tokens=4096, max_seq_len=n, why="some sequences are longer")
        for n in (1, 33, 100)
    ),
    _RAGGED("bound_beyond_the_table", max_seq_len=131),
    _RAGGED("bound_stacked_split", num_layers=2, cache="split", table_tokens=999, max_seq_len=70),
    _RAGGED("bound_batch_invariant", batch_invariant=True, table_tokens=4096, max_seq_len=100),
    RaggedCase("bound_one_chunk", ((130, 300), (130, 150)), table_tokens=4096, max_seq_len=150),
    RaggedCase(
        "bound_decode_step", ((1, 5), (1, 64), (1, 65), (1, 200)), table_tokens=4096, max_seq_len=64
    ),
    RaggedCase("bound_uniform_1", ((1, 5), (1, 64), (1, 65)), is_uniform=True, max_seq_len=64),
    RaggedCase("bound_uniform_3", ((3, 50), (3, 3), (3, 2)), is_uniform=True, max_seq_len=40),
    RaggedCase(
        "bound_uniform_units",
        ((520, 600), (520, 540)),
        num_heads=2,
        is_uniform=True,
        table_tokens=4096,
        max_seq_len=540,
        why="as many tokens a sequence as make units of them",
    ),
    RaggedCase("uniform_1", ((1, 5), (1, 64), (1, 1)), is_uniform=True),
    RaggedCase("uniform_3", ((3, 50), (3, 3), (3, 2)), is_uniform=True),
    RaggedCase("uniform_absent", ((2, 50), (2, 7)), num_absent=3, is_uniform=True),
    *(_RAGGED(f"window_{n}", sliding_window=n) for n in (1, 20, 64)),
    _RAGGED("window_page_3", sliding_window=30, page_size=3, num_heads=5),
    _RAGGED("window_heads_128", sliding_window=30, num_heads=128, d_ckv=512, d_kpe=64),
    _RAGGED("window_batch_invariant", sliding_window=30, batch_invariant=True),
    _RAGGED("window_three_splits", sliding_window=90, num_splits=3),
    _RAGGED("window_bound", sliding_window=30, table_tokens=4096, max_seq_len=60),
    _RAGGED("soft_cap", soft_cap=1.0),
    _RAGGED("soft_cap_window", soft_cap=1.0, sliding_window=25, num_layers=2, cache="split"),
    RaggedCase("window_one_chunk", ((130, 300),), sliding_window=40, num_heads=8),
    RaggedCase("window_prompts", ((90, 90), (64, 64), (3, 3)), sliding_window=20),
    RaggedCase("window_decode_step", ((1, 5), (1, 64), (1, 1), (1, 900)), sliding_window=100),
    RaggedCase("window_few_tokens", ((5, 3), (4, 0), (1, 9), (70, 20)), sliding_window=8),
    RaggedCase("window_uniform_1", ((1, 5), (1, 64), (1, 400)), is_uniform=True, sliding_window=50),
    RaggedCase(
        "window_uniform_3",
        ((3, 50), (3, 3), (3, 200)),
        is_uniform=True,
        sliding_window=40,
        max_seq_len=150,
    ),
    RaggedCase(
        "window_uniform_units",
        ((520, 600), (520, 540)),
        num_heads=2,
        is_uniform=True,
        sliding_window=100,
    ),
    _WILD("bounds_fall", cu_q_lens=(2, 9, 5, 12)),
    _WILD("bounds_negative", cu_q_lens=(-4, _MIN, 3, 9)),
    _WILD("bounds_past_the_tokens", cu_q_lens=(1, 6, _MAX, 8)),
    _WILD("bounds_all_past_the_tokens", cu_q_lens=(_MAX, _MAX, 3, 4)),
    _WILD("lengths", seq_lens=(_MAX, -1, 49)),
    _WILD("lengths_at_the_ends", seq_lens=(48, 0, _MIN), num_layers=2),
    _WILD("lengths_and_a_bound", seq_lens=(_MAX, -1, 41), max_seq_len=40, table_tokens=999),
    _WILD("page_ids", page_ids=(_MAX, -1, _MIN)),
    _WILD("window_lengths", seq_lens=(_MAX, -1, 49), sliding_window=5),
    _WILD("window_bounds", cu_q_lens=(2, 9, 5, 12), sliding_window=5),
    _WILD("window_page_ids", page_ids=(_MAX, -1, _MIN), sliding_window=10),
    _WILD("page_ids_just_outside", page_ids=(10, 11), cache="split"),
    _WILD("page_ids_packs", page_ids=(_MAX, -1, _MIN), padding=8, pack=4, num_layers=2),
    *stored_as(
        "fp8_e4m3",
        (
            _RAGGED("mixed_step", d_ckv=512, d_kpe=64, page_size=64),
            _RAGGED("mistral", d_kpe=64),
            _RAGGED("without_rope", d_ckv=512, d_kpe=0),
            _RAGGED("without_rope_codes", d_ckv=512, d_kpe=0, has_codes=True),
            _RAGGED("f16", dtype="float16", cache="split"),
            _RAGGED("f32", dtype="float32"),
            _RAGGED("codes", has_codes=True),
            _RAGGED("window", sliding_window=30),
            _RAGGED("mixed", cache="mixed", num_layers=2),
            _RAGGED("mixed_f32", cache="mixed", dtype="float32"),
            _RAGGED("mixed_codes", cache="mixed", has_codes=True),
            _RAGGED("packs_stacked", padding=96, pack=4, num_layers=3),
            _RAGGED("wide_odd", padding=3, num_heads=5, page_size=3),
            RaggedCase("uniform", ((3, 50), (3, 3), (3, 2)), is_uniform=True),
            RaggedCase("decode_step", ((1, 5), (1, 64), (1, 1), (1, 200)), has_codes=True),
            RaggedCase("shared_prefix", ((1, 70), (9, 90), (1, 64)), num_shared_pages=3),
            RaggedCase("long_beside_chunk", ((1, 3000), (20, 500)), num_heads=64, page_size=64),
            _RAGGED("mixed_step_codes", d_ckv=512, d_kpe=64, page_size=64, has_codes=True),
            RaggedCase(
                "long_beside_chunk_codes",
                ((1, 3000), (20, 500)),
                num_heads=64,
                page_size=64,
                has_codes=True,
            ),
        ),
    ),
    *stored_as(
        "fp8_ds_mla",
        (
            _RAGGED("mixed_step", page_size=64),
            _RAGGED("f16", dtype="float16"),
            _RAGGED("f32", dtype="float32"),
            _RAGGED("codes", has_codes=True),
            _RAGGED("packs_stacked", padding=48, pack=4, num_layers=3),
            RaggedCase("uniform", ((3, 50), (3, 3), (3, 2)), is_uniform=True),
            RaggedCase("long_beside_chunk", ((1, 3000), (20, 500)), num_heads=64, page_size=64),
        ),
    ),
)
