"""The public function `prefill`."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict, Unpack, overload

from jax import Array

from jax_mla.kv_cache import KvPages, KvScale, pool_sizes
from jax_mla.ops import _checks, _eager, _ragged, _sink
from jax_mla.ops.decode import checks as decode_checks
from jax_mla.ops.prefill import checks, run
from jax_mla.ops.prefill import operands as ops
from jax_mla.ops.prefill.operands import OP


class PrefillOptions(TypedDict, total=False):
    """The optional arguments of `prefill` that do not change the type of its result."""

    max_q_len: int | None
    prefix_chunk: int
    sliding_window: int | None
    soft_cap: float | None
    sink: Array | None
    layer: Array | int | None
    packs: bool
    kv_format: str | None
    kv_scale: KvScale | None
    page_begin: Array | int | None
    axis_name: str | tuple[str, ...] | None
    implementation: str | None


@overload
def prefill(
    q_nope: Array, q_pe: Array | None, ckv: Array, kpe: Array | None, w_uk: Array, w_uv: Array,
    kv_pages: KvPages | None = ..., page_table: Array | None = ..., seq_lens: Array | None = ...,
    cu_q_lens: Array | None = ..., num_seqs: Array | int | None = ..., *,
    sm_scale: float, return_lse: Literal[False] = ..., **options: Unpack[PrefillOptions],
) -> Array: ...  # fmt: skip
@overload
def prefill(
    q_nope: Array, q_pe: Array | None, ckv: Array, kpe: Array | None, w_uk: Array, w_uv: Array,
    kv_pages: KvPages | None = ..., page_table: Array | None = ..., seq_lens: Array | None = ...,
    cu_q_lens: Array | None = ..., num_seqs: Array | int | None = ..., *,
    sm_scale: float, return_lse: Literal[True], **options: Unpack[PrefillOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def prefill(
    q_nope: Array, q_pe: Array | None, ckv: Array, kpe: Array | None, w_uk: Array, w_uv: Array,
    kv_pages: KvPages | None = ..., page_table: Array | None = ..., seq_lens: Array | None = ...,
    cu_q_lens: Array | None = ..., num_seqs: Array | int | None = ..., *,
    sm_scale: float, return_lse: bool, **options: Unpack[PrefillOptions],
) -> Array | tuple[Array, Array]: ...  # fmt: skip
@_eager.lets_infs_pass
def prefill(
    q_nope: Annotated[Array, "[tokens, num_heads, d_nope]"],
    q_pe: Annotated[Array | None, "[tokens, num_heads, d_kpe]"],
    ckv: Annotated[Array, "[tokens, d_ckv]"],
    kpe: Annotated[Array | None, "[tokens, d_kpe]"],
    w_uk: Annotated[Array, "[num_heads, d_nope, d_ckv]"],
    w_uv: Annotated[Array, "[num_heads, d_ckv, d_v]"],
    kv_pages: KvPages | None = None,
    page_table: Annotated[Array | None, "[seqs, max_pages_per_seq] int32"] = None,
    seq_lens: Annotated[Array | None, "[seqs] int32"] = None,
    cu_q_lens: Annotated[Array | None, "[seqs + 1] int32"] = None,
    num_seqs: Array | int | None = None,
    *,
    sm_scale: float,
    max_q_len: int | None = None,
    prefix_chunk: int = 8192,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sink: Annotated[Array | None, "[num_heads] float32"] = None,
    layer: Array | int | None = None,
    packs: bool = False,
    kv_format: str | None = None,
    kv_scale: KvScale | None = None,
    page_begin: Array | int | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Array | tuple[Array, Array]:
    """Attend from the new tokens of long prompts, with keys and values of every head.

    The result is what `decode` gives between the two up-projections, computed in the other order:

        k[t]   = [ckv[t] @ w_uk.T | kpe[t]]                 for each head
        out[i] = sum over t of softmax(sm_scale * [q_nope[i] | q_pe[i]] . k[t]) * (ckv[t] @ w_uv)

    Token i sees the cached tokens of its sequence and the new ones up to itself. The new tokens are
    not read from the cache. Still call `append` first, as for `decode`: after this function it
    would make XLA copy the pool.

    **When it pays:** from about 170 new tokens per sequence. Each query and key take 3.4 times less
    work than in `decode`. But every key has to be computed first, and cached ones again in each
    call. For fewer new tokens call `decode`, however long the cached part is.

    XLA computes the keys and values. The attention (see `implementation`) runs

    * on Hopper, on a kernel of this package, which takes prompts of any lengths end to end, in
      bfloat16 and float16. Its sizes d_nope, d_kpe, d_v are 128, 64, 128 (DeepSeek, Kimi), 192, 64,
      256 (GLM), 64, 64, 128 (Mistral) and 64, 32, 64 (MiniCPM3);
    * elsewhere on CUDA, on JAX's cuDNN attention, for Hopper and later;
    * on a CPU, and for float32, on JAX's XLA attention, which holds all scores of a call in memory.

    The last two need queries, keys and values padded to [seqs, max_q_len], so give them the prompts
    of a step, not the sequences that decode. On a GPU for which cuDNN has no such attention, pass
    "xla", or absorb the weights and call `decode`.

    **Sharding:** heads may be sharded on Auto axes under `jit`; nothing is communicated. In a
    `shard_map` the call is local: data parallelism, heads, and pages with `axis_name`.

    Args:
      q_nope: [tokens, num_heads, d_nope], bfloat16, float16 or float32. The query without rotary
        part, as the model makes it: not multiplied by W_UK.
      q_pe: [tokens, num_heads, d_kpe], dtype of q_nope, like all arrays below. The rotary part;
        None, like kpe, if the rows have none.
      ckv: [tokens, d_ckv]. The latents of the new tokens.
      kpe: [tokens, d_kpe]. The rotary keys of the new tokens.
      w_uk: [num_heads, d_nope, d_ckv]. The part of `kv_b_proj` for keys.
      w_uv: [num_heads, d_ckv, d_v]. The part of `kv_b_proj` for values, transposed.
      kv_pages: the cache, as for `decode`; None if no prompt has a cached part. Then page_table and
        seq_lens are None as well.
      page_table: [seqs, max_pages_per_seq] int32, as for `decode`. The pages of the new tokens are
        not used.
      seq_lens: [seqs] int32. Tokens of each sequence, including the new ones. The new tokens take
        the last places; those for which there is no place are padding, or an error if both this
        and cu_q_lens are numpy arrays.
      cu_q_lens: [seqs + 1] int32. Sequence b has the tokens cu_q_lens[b] to cu_q_lens[b + 1]. None:
        tokens / seqs each, or one sequence without a cache. In a numpy array, values that
        decrease or lie outside [0, tokens] are an error. In a JAX array they are clamped, and a
        value below an earlier one is replaced by it.
      num_seqs: int or int32 scalar. Sequences beyond it are absent, whatever the arrays hold there;
        None: all are present.
      sm_scale: factor on the scores, a positive Python number: (d_nope + d_kpe) ** -0.5, times what
        YaRN adds.
      max_q_len: static bound on the new tokens of one sequence, for example the longest prompt of
        the step, rounded up to one of a few sizes. A longer prompt is an error if cu_q_lens is a
        numpy array; in a JAX array its further tokens count as padding, and out is 0 there. None
        for the only safe bound, which is all tokens if cu_q_lens is given.
      prefix_chunk: cached tokens, of all sequences together, whose keys and values are in memory at
        a time, but at least one page, or one per sequence where they are padded. A token takes
        num_heads * (d_nope + d_v) values, with cuDNN num_heads * d_kpe more: 8192 tokens of 128
        heads take 0.5 or 0.6 GiB in bfloat16. XLA keeps them in float32, with d_v padded to the
        width of the keys.
      sliding_window: the most tokens that a query sees, its own and those before it, as for
        `decode`. Cached pages of which no query sees a token are not read.
      soft_cap: a limit of the scores, as for `decode`. With it or sliding_window, XLA attends on
        every platform, and holds all scores of a call in memory: for long prompts absorb the
        weights and call `ragged_paged_attention`, as `mixed_attention` does.
      sink: [num_heads] float32. One more score per head, without a value: out is multiplied by
        exp(lse) / (exp(lse) + exp(sink)). Minus infinity means no sink.
      layer: which layer of a stacked pool, as for `decode`.
      packs: whether the pages of the pool are cut into packs, as for `decode`.
      kv_format: name of the format in which the cache is stored, as for `decode`. On every platform
        XLA decodes the cached rows. The new tokens are used as given, not as `append` rounds them.
      kv_scale: scale of a cache in "fp8_e4m3", as for `decode`.
      page_begin: global id of the pool's first page, as for `decode`. Cached tokens on pages
        outside the pool do not count.
      axis_name: manual mesh axes over which the pages are split (context parallelism written by
        hand in a `shard_map`), with page_begin. Each device attends to its own pages, and one max
        and one sum reduction of float32 [tokens, num_heads, d_v] merge the results.
      return_lse: whether to also return the log-sum-exp of the scores.
      implementation: "sm90" (the kernel), "cudnn", "xla", or "reference" (the definition, in
        float32, which holds all scores of a sequence). None: on CUDA the kernel if this process's
        GPU runs it on such a call, otherwise cuDNN for bfloat16 and float16; XLA elsewhere, which
        holds all scores. Export a program for CUDA where there is a GPU: a process without one
        would choose XLA. In a region that is manual over some mesh axes and Auto over others, the
        kernel and the reference do not run.

    Returns:
      out: [tokens, num_heads, d_v], dtype of q_nope. The values of each head, after W_UV.
      lse: only with return_lse. [tokens, num_heads] float32, natural logarithm, without the sink.
      For padding, a token that belongs to no sequence, out is 0 and lse is -inf.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes or values do not fit, the implementation does not take the call, or an
        operand is sharded over Explicit axes. Raised while tracing.
      NotImplementedError: the call is differentiated.
    """
    table_as_given, lens_as_given, bounds_as_given = page_table, seq_lens, cu_q_lens
    tokens, weights = checks.tokens_and_weights(OP, (q_nope, q_pe, ckv, kpe), (w_uk, w_uv))
    num_tokens = tokens.ckv.shape[0]
    cache, capacity, sizes = None, 0, None
    if kv_pages is not None and page_table is not None and seq_lens is not None:
        cache = checks.cache(
            OP,
            tokens,
            kv_pages,
            page_table,
            seq_lens,
            layer,
            packs,
            page_begin,
            kv_format,
            kv_scale,
        )
        sizes = pool_sizes(cache.kv_pages[0], layer is not None)
        capacity = _checks.capacity(OP, "page_table", cache.page_table, sizes.page_size)
    else:
        _refuse_parts_of_a_cache(
            kv_pages=kv_pages, page_table=page_table, seq_lens=seq_lens, layer=layer,
            packs=packs or None, kv_format=kv_format, kv_scale=kv_scale, page_begin=page_begin,
            axis_name=axis_name,
        )  # fmt: skip
    window = decode_checks.sliding_window(OP, sliding_window, capacity or num_tokens)
    cap = decode_checks.soft_cap(OP, soft_cap)
    seqs = None if cache is None else cache.page_table.shape[0]
    default_q_len = num_tokens
    if cu_q_lens is None:
        seqs = seqs or 1
        default_q_len = _tokens_each(num_tokens, seqs)
    else:
        cu_q_lens = _checks.array(OP, "cu_q_lens", cu_q_lens, _checks.INDICES)
        _checks.rank(OP, "cu_q_lens", cu_q_lens, (1,), "[seqs + 1]")
        if cu_q_lens.shape[0] < 2 or (seqs is not None and cu_q_lens.shape[0] != seqs + 1):
            raise ValueError(
                f"{OP}: cu_q_lens: expected [seqs + 1]"
                f"{' of at least one sequence' if seqs is None else f' = [{seqs + 1}]'}, "
                f"got shape {cu_q_lens.shape}"
            )
        seqs = cu_q_lens.shape[0] - 1
    num_seqs = _checks.index(OP, "num_seqs", num_seqs, seqs + 1, "a number of sequences")
    if bounds_as_given is not None:
        _ragged.check(OP, bounds_as_given, num_seqs, seqs, num_tokens)
    if sizes is not None:
        _ragged.check_lens(OP, lens_as_given, num_seqs, capacity)
        _ragged.check_new_tokens(OP, lens_as_given, bounds_as_given, num_seqs)
        new = _ragged.new_tokens(bounds_as_given, num_seqs)
        new = default_q_len if bounds_as_given is None else new
        if page_begin is None and new is not None:
            seen = window - 1 if window else None
            _ragged.check_pages(OP, table_as_given, lens_as_given, num_seqs, sizes, new, seen)
    if max_q_len is None:
        max_q_len = default_q_len
    else:
        max_q_len = checks.count(OP, "max_q_len", max_q_len)
        _refuse_longer_prompts(max_q_len, bounds_as_given, num_seqs)
    if axis_name is not None:
        if page_begin is None:
            raise ValueError(f"{OP}: page_begin: expected an index with axis_name, got None")
        axis_name = _checks.axis_names(OP, axis_name)
    params = ops.Params(
        sm_scale=checks.scale(OP, sm_scale),
        max_q_len=ops.at_most(max_q_len, num_tokens),
        prefix_chunk=checks.count(OP, "prefix_chunk", prefix_chunk),
        has_layer=layer is not None,
        axis_name=axis_name,
        implementation=checks.implementation(
            OP, implementation, tokens, weights, has_masks=window > 0 or cap > 0
        ),
        kv_format=kv_format,
        sliding_window=window,
        soft_cap=cap,
    )
    sink = _sink.check(OP, sink, tokens.q_nope.shape[1])
    with_lse = _checks.flag(OP, "return_lse", return_lse)
    num_seqs = checks.num_seqs_as_scalar(num_seqs, tokens)
    out, lse = run.attend(tokens, weights, cache, cu_q_lens, num_seqs, sink, params=params)
    return (out, lse) if with_lse else out


def _refuse_parts_of_a_cache(**given: object) -> None:
    names = [name for name, x in given.items() if x is not None]
    if names:
        raise ValueError(
            f"{OP}: kv_pages, page_table, seq_lens: expected all of them, or none of "
            f"{', '.join(given)}; got only {', '.join(names)}"
        )


def _tokens_each(num_tokens: int, seqs: int) -> int:
    if num_tokens % seqs:
        raise ValueError(
            f"{OP}: cu_q_lens: expected an array unless seqs divides tokens, got None with "
            f"{num_tokens} tokens and {seqs} sequences"
        )
    return num_tokens // seqs


def _refuse_longer_prompts(max_q_len: int, cu_q_lens: object, num_seqs: object) -> None:
    """Refuse a bound that a prompt exceeds, if the prompts' lengths are known on the host."""
    new = _ragged.new_tokens(cu_q_lens, num_seqs)
    if new is None:
        return
    longest = max(new, default=0)
    if longest > max_q_len:
        raise ValueError(
            f"{OP}: max_q_len: expected at least the new tokens of every sequence, up to {longest} "
            f"in cu_q_lens, got {max_q_len}"
        )
