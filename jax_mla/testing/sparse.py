"""Cases and random inputs of `sparse_attention`. What it must not read holds NaN or wild slots."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla.kv_cache import pool_sizes, tokens_as_pages
from jax_mla.testing.cases import stored_as
from jax_mla.testing.inputs import WILD_IDS, DecodeInputs, decode_inputs, keyword_arguments

WILD_SLOTS = (*WILD_IDS, 2**31 - 1, -(2**31))


@dataclasses.dataclass(frozen=True)
class SparseInputs:
    """Arguments of one call, as numpy arrays.

    Attributes:
      cache: a decode call of one sequence, whose queries are those of the call: [1, tokens, ...].
      indices: [tokens, k] int32.
      topk_lens: [tokens] int32.
      sink: [num_heads] float32, or None.
      q_len: queries of a sequence in the form [batch, q_len]; None for the form [tokens].
    """

    cache: DecodeInputs
    indices: np.ndarray
    topk_lens: np.ndarray
    sink: np.ndarray | None
    q_len: int | None

    def shaped(self, x: np.ndarray) -> jax.Array:
        """Return an array [tokens, ...] in the form of the call."""
        if self.q_len is None:
            return jnp.asarray(x)
        return jnp.asarray(x.reshape(len(x) // self.q_len, self.q_len, *x.shape[1:]))

    def args(self) -> tuple[Any, ...]:
        """Return the positional arguments of the op, as JAX arrays."""
        pools = jax.tree.map(jnp.asarray, self.cache.kv_pages)
        q_nope, q_pe = (self.shaped(x[0]) for x in (self.cache.q_nope, self.cache.q_pe))
        return (q_nope, q_pe if q_pe.shape[-1] else None, pools, self.shaped(self.indices))

    def kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of the op."""
        found = keyword_arguments(self.cache)
        found["topk_lens"] = self.shaped(self.topk_lens)
        if self.sink is not None:
            found["sink"] = jnp.asarray(self.sink)
        return found

    def by_token(self) -> DecodeInputs:
        """Return the decode call with pages of one token that has the same keys, without sinks."""
        has_layer = self.cache.layer is not None
        view = functools.partial(tokens_as_pages, has_layer=has_layer)
        pools = jax.tree.map(view, self.cache.kv_pages)
        first = pools[0] if isinstance(pools, tuple) else pools
        table, lens = np.zeros_like(self.indices), np.zeros_like(self.topk_lens)
        for i, (slots, count) in enumerate(zip(self.indices, self.topk_lens, strict=True)):
            keys = [s for s in slots[:count] if 0 <= s < pool_sizes(first, has_layer).num_pages]
            table[i, : len(keys)], lens[i] = keys, len(keys)
        return dataclasses.replace(
            self.cache,
            q_nope=self.cache.q_nope[0][:, None],
            q_pe=self.cache.q_pe[0][:, None],
            kv_pages=pools,
            page_table=table,
            seq_lens=lens,
        )


@dataclasses.dataclass(frozen=True)
class SparseCase:
    """One call.

    Attributes:
      name: name of the case, for test ids.
      topk_lens: entries of each query's list that count.
      k: width of the lists.
      num_tokens: tokens in the cache.
      q_len: queries of a sequence in the form [batch, q_len]; None for the form [tokens].
      num_wild: how many of the entries that count are slots outside the pool.
      has_sink: whether the call has sinks, infinities among them.
      batch_invariant: argument of the op.
      why: purpose of the case, if the name does not say it.

    The other attributes are arguments of `decode_inputs`.
    """

    name: str
    topk_lens: tuple[int, ...] = (0, 1, 63, 64, 65, 130)
    k: int = 130
    num_tokens: int = 300
    q_len: int | None = None
    num_heads: int = 16
    d_ckv: int = 512
    d_kpe: int = 64
    page_size: int = 64
    dtype: str = "bfloat16"
    cache: str = "packed"
    padding: int = 0
    pack: int | None = None
    num_layers: int | None = None
    magnitude: float = 1.0
    kv_format: str | None = None
    has_codes: bool = False
    num_wild: int = 0
    has_sink: bool = False
    batch_invariant: bool = False
    why: str = ""

    def inputs(self, seed: int = 0) -> SparseInputs:
        """Return the arrays of the case. They are shared, so do not write to them."""
        return _inputs(self, seed)


@functools.lru_cache(maxsize=2)
def _inputs(case: SparseCase, seed: int) -> SparseInputs:
    names = {f.name for f in dataclasses.fields(case)}
    names &= set(inspect.signature(decode_inputs).parameters) - {"q_len"}
    tokens = len(case.topk_lens)
    cache = decode_inputs(
        seq_lens=(case.num_tokens,),
        q_len=tokens,
        seed=seed,
        **{name: getattr(case, name) for name in names},
    )
    rng = np.random.default_rng(seed + 1)
    page, place = np.divmod(np.arange(case.num_tokens), case.page_size)
    live = cache.page_table[0, page] * case.page_size + place
    # Keys from one half of the tokens: the other half becomes NaN.
    keys = rng.permutation(live)[: case.num_tokens // 2]
    unread = np.setdiff1d(np.arange(live.max() + 1), keys)
    indices = rng.choice(np.concatenate([unread, WILD_SLOTS]), (tokens, case.k))
    for row, count in zip(indices, case.topk_lens, strict=True):
        row[:count] = rng.choice(keys, count)  # some twice
        row[rng.permutation(count)[: case.num_wild]] = rng.choice(WILD_SLOTS)
    sink = None
    if case.has_sink:
        sink = rng.standard_normal(case.num_heads).astype(np.float32) * 3
        sink[:2] = np.inf, -np.inf
    return SparseInputs(
        cache=dataclasses.replace(cache, kv_pages=_with_nan(cache, unread)),
        indices=indices.astype(np.int32),
        topk_lens=np.array(case.topk_lens, np.int32),
        sink=sink,
        q_len=case.q_len,
    )


def _with_nan(inputs: DecodeInputs, slots: np.ndarray) -> Any:
    """Return the pools with NaN in these slots: all bits set, which is NaN in every format."""

    def poison(pool: np.ndarray) -> np.ndarray:
        by_slot = np.array(tokens_as_pages(pool, inputs.layer is not None))  # a copy
        layer = by_slot if inputs.layer is None else by_slot[inputs.layer]
        layer.view(np.uint8)[slots] = 0xFF
        return by_slot.reshape(pool.shape)

    return jax.tree.map(poison, inputs.kv_pages)


_SMALL = functools.partial(SparseCase, d_ckv=256, d_kpe=32, page_size=16)

SPARSE_CASES: tuple[SparseCase, ...] = (
    SparseCase("deepseek"),
    SparseCase("f16", dtype="float16"),
    SparseCase("f32", dtype="float32"),
    SparseCase("top_2048", (2048, 2000, 77), k=2048, num_tokens=5000, num_heads=64),
    SparseCase("top_2176", (2176,), k=2176, num_tokens=4500, num_heads=8, why="GLM-5.3's k"),
    SparseCase("by_sequence", q_len=2),
    SparseCase("wild", num_wild=5),
    SparseCase("nothing_but_wild", (3, 5), k=9, num_wild=5),
    SparseCase("no_keys", (0, 0), k=9),
    SparseCase("sinks", has_sink=True, num_wild=2),
    SparseCase("sinks_by_sequence", has_sink=True, q_len=3),
    SparseCase("split", cache="split", num_heads=128, topk_lens=(0, 65, 130)),
    SparseCase("stacked", num_layers=3),
    SparseCase("packs_stacked", padding=64, pack=2, num_layers=3),
    SparseCase("huge", magnitude=2.0**40),
    _SMALL("minicpm"),
    _SMALL("mistral", d_kpe=64),
    SparseCase("without_rope", d_kpe=0, num_heads=64, has_sink=True),
    SparseCase("without_rope_by_sequence", d_kpe=0, q_len=2),
    SparseCase("dims_128_32", d_ckv=128, d_kpe=32),
    SparseCase("dims_1024_64", d_ckv=1024, d_kpe=64),
    _SMALL("wide_odd", padding=3, why="no multiple of 16 bytes, which only the CPU takes"),
    _SMALL("split_stacked", cache="split", num_layers=2, dtype="float16"),
    _SMALL("batch_invariant", batch_invariant=True),
    *(_SMALL(f"heads_{n}", num_heads=n) for n in (1, 5, 40)),
    *(_SMALL(f"page_{n}", page_size=n) for n in (1, 48, 256)),
    *stored_as(
        "fp8_e4m3",
        (
            SparseCase("deepseek", num_wild=3),
            SparseCase("codes", has_codes=True, num_heads=128, topk_lens=(65, 130)),
            SparseCase("mixed", cache="mixed", has_sink=True),
            _SMALL("split", cache="split", num_layers=2),
            _SMALL("mistral", d_kpe=64),
            SparseCase("without_rope", d_kpe=0),
        ),
    ),
    *stored_as(
        "fp8_ds_mla",
        (
            SparseCase("deepseek", num_wild=3),
            SparseCase("heads_128", num_heads=128, topk_lens=(0, 65, 130)),
            SparseCase("packs_stacked", padding=16, pack=4, num_layers=3, has_sink=True),
        ),
    ),
)
