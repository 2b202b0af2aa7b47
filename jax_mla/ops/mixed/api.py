"""The public function `mixed_attention`."""

from __future__ import annotations

from typing import Annotated

from jax import Array

from jax_mla._mesh import _dispatch
from jax_mla._runtime import _backends
from jax_mla.kv_cache import Cache, KvScale, like, pool_sizes
from jax_mla.ops import _checks, _ragged
from jax_mla.ops.decode import checks as decode_checks
from jax_mla.ops.mixed import run
from jax_mla.ops.mixed.run import OP
from jax_mla.ops.prefill import checks
from jax_mla.ops.prefill.operands import REFERENCE, SM90, XLA

IMPLEMENTATIONS = (None, SM90, REFERENCE)  # the others pad every sequence to all tokens


def mixed_attention(
    q_nope: Annotated[Array, "[tokens, num_heads, d_nope]"],
    q_pe: Annotated[Array | None, "[tokens, num_heads, d_kpe]"],
    ckv: Annotated[Array, "[tokens, d_ckv]"],
    kpe: Annotated[Array | None, "[tokens, d_kpe]"],
    w_uk: Annotated[Array, "[num_heads, d_nope, d_ckv]"],
    w_uv: Annotated[Array, "[num_heads, d_ckv, d_v]"],
    kv_pages: Cache,
    page_table: Annotated[Array, "[seqs, max_pages_per_seq] int32"],
    seq_lens: Annotated[Array, "[seqs] int32"],
    cu_q_lens: Annotated[Array, "[seqs + 1] int32"],
    num_seqs: Array | int | None = None,
    *,
    sm_scale: float,
    max_absorbed_tokens: int | None = None,
    prefix_chunk: int = 8192,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    layer: Array | int | None = None,
    packs: bool = False,
    kv_format: str | None = None,
    kv_scale: KvScale | None = None,
    page_begin: Array | int | None = None,
    backend: str | None = None,
    implementation: str | None = None,
) -> tuple[Array, Cache]:
    """Write the new rows of a step with prompts into the cache, and attend in the cheapest way.

    The step is that of `ragged_paged_attention`: the new tokens of all sequences, end to end, some
    of prompts and some of sequences that decode. The result is the same as that of

        latents, kv_pages = ragged_paged_attention(q_nope @ w_uk, ...)
        out = latents @ w_uv

    There the up-projections are applied to the queries and the results (absorbed attention), which
    is cheaper for few new tokens. For many it is cheaper to compute the keys and values of every
    head, as `prefill` does: on a Hopper GPU a prompt of thousands of tokens takes a third to a half
    of the time. This function chooses for each sequence, on the device. A sequence goes to
    `prefill` if it has enough new tokens (171 with DeepSeek's sizes), or if the sequences with
    fewer new tokens have used up max_absorbed_tokens.

    All sequences use absorbed attention

    * where `prefill` has no kernel of this package: on everything but Hopper GPUs, with other head
      sizes, and in a program that is exported on a machine without such a GPU;
    * in a step with too few tokens for `prefill`, or with fewer than 32768 tokens times heads,
      where the choice costs more than it saves. Under `jit`, the heads are those of all devices.

    On a GPU, `prefill` reads cached tokens in a loop. The host waits for each iteration, unless XLA
    puts loops into its command buffers. docs/quickstart.md has the compiler option. Without it,
    small steps are slow.

    `prefill` uses the new tokens as given; `ragged_paged_attention` reads them from the cache. So
    results differ by the rounding of an FP8 cache. And a new token is seen even if its row is not
    written, because the length is too large for the table, or the pool does not hold the page or
    the layer.

    For a step in which all sequences decode, call `ragged_paged_attention` without cu_q_lens.

    **Sharding:** as for `prefill`. Heads may be sharded on Auto axes under `jit`. In a `shard_map`
    the call is local, and the pool holds all pages of its sequences: results for parts of a cache
    cannot be merged. The `shard_map` has to be manual over all mesh axes. Under `vmap` only the
    queries may be mapped.

    Args:
      q_nope: [tokens, num_heads, d_nope], bfloat16, float16 or, on the CPU, float32. The query
        without rotary part, as the model makes it: not multiplied by W_UK.
      q_pe: [tokens, num_heads, d_kpe], dtype of q_nope, like all arrays below. The rotary part;
        None, like kpe, if the rows have none.
      ckv: [tokens, d_ckv]. The new latents.
      kpe: [tokens, d_kpe]. The new rotary keys.
      w_uk: [num_heads, d_nope, d_ckv]. The part of `kv_b_proj` for keys.
      w_uv: [num_heads, d_ckv, d_v]. The part of `kv_b_proj` for values, transposed.
      kv_pages: the cache, as for `decode`. Donate it, so that it is updated in place.
      page_table: [seqs, max_pages_per_seq] int32, as for `ragged_paged_attention`.
      seq_lens: [seqs] int32, the same. Tokens in the cache, including the new ones of this step.
      cu_q_lens: [seqs + 1] int32, the same. Where the tokens of each sequence begin.
      num_seqs: the same. How many of the sequences the step has; None for all.
      sm_scale: factor on the scores, a positive Python number.
      max_absorbed_tokens: the most new tokens, of all sequences together, that use absorbed
        attention if others go to `prefill`. Make it at least the number of sequences that may
        decode beside prompts: in `prefill`, each of them needs the keys and values of its whole
        cached part. It is a static array size. None: 512, or two for each sequence if that is more.
      prefix_chunk: cached tokens whose keys and values are in memory at a time, see `prefill`.
      sliding_window: the most tokens that a query sees, see `decode`. With it or soft_cap all
        sequences are attended absorbed, unless implementation is "reference".
      soft_cap: a limit of the scores, see `decode`.
      layer: which layer of a stacked pool, as for `decode`.
      packs: whether the pages of the pool are cut into packs, as for `decode`.
      kv_format: name of the format in which the cache is stored, as for `decode`, but queries
        cannot be float8_e4m3fn. On CUDA, queries with an FP8 cache are bfloat16.
      kv_scale: scale of a cache in "fp8_e4m3", as for `decode`.
      page_begin: global id of the pool's first page, as for `decode`.
      backend: name of the backend of `ragged_paged_attention`, see `decode`.
      implementation: that of `prefill`: "sm90" (its kernel) or "reference" (the definition). Then
        the choice does not depend on the number of heads. None: the kernel, or all absorbed.

    Returns:
      out: [tokens, num_heads, d_v], dtype of q_nope. The values of each head, after W_UV; 0 for
        padding, a token that belongs to no sequence.
      kv_pages: the cache with the new rows, in the form of kv_pages.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes or values do not fit, no backend takes the call, or an operand is sharded
        over Explicit axes. Raised while tracing or lowering. Messages of backends name
        `ragged_paged_attention`.
      jax.errors.JaxRuntimeError: as for `ragged_paged_attention`.
      NotImplementedError: the call is differentiated.
    """
    table_as_given, lens_as_given, bounds_as_given = page_table, seq_lens, cu_q_lens
    tokens, weights = checks.tokens_and_weights(OP, (q_nope, q_pe, ckv, kpe), (w_uk, w_uv))
    if auto := checks.auto_axes_of_manual_region(tokens, weights):
        raise ValueError(
            f"{OP}: mesh: expected all axes manual, or none, got a manual region in which "
            f"{sorted(auto)} are Auto; call it in a shard_map over all axes"
        )
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
    _dispatch.check_pools(OP, "kv_pages", cache.kv_pages, layer is not None)
    num_tokens, num_rows = tokens.ckv.shape[0], cache.page_table.shape[0]
    sizes = pool_sizes(cache.kv_pages[0], layer is not None)
    capacity = _checks.capacity(OP, "page_table", cache.page_table, sizes.page_size)
    window = decode_checks.sliding_window(OP, sliding_window, capacity)
    cap = decode_checks.soft_cap(OP, soft_cap)
    cu_q_lens = _checks.array(OP, "cu_q_lens", cu_q_lens, _checks.INDICES)
    num_seqs = _checks.index(OP, "num_seqs", num_seqs, num_rows + 1, "a number of sequences")
    _ragged.check(OP, bounds_as_given, num_seqs, num_rows, num_tokens)
    _ragged.check_lens(OP, lens_as_given, num_seqs, capacity)
    _ragged.check_new_tokens(OP, lens_as_given, bounds_as_given, num_seqs)
    if page_begin is None:
        new = _ragged.new_tokens(bounds_as_given, num_seqs)
        seen = (num_tokens if new is None else new) + window - 1 if window else None
        _ragged.check_pages(OP, table_as_given, lens_as_given, num_seqs, sizes, seen=seen)
    if max_absorbed_tokens is None:
        max_absorbed_tokens = max(512, 2 * num_rows) if isinstance(num_rows, int) else 512
    chosen = checks.implementation(
        OP, implementation, tokens, weights, served=IMPLEMENTATIONS, has_masks=window > 0 or cap > 0
    )
    params = run.Params(
        sm_scale=checks.scale(OP, sm_scale),
        max_absorbed_tokens=checks.count(OP, "max_absorbed_tokens", max_absorbed_tokens),
        prefix_chunk=checks.count(OP, "prefix_chunk", prefix_chunk),
        has_layer=layer is not None,
        has_page_begin=page_begin is not None,
        kv_format=kv_format,
        backend=_backends.check_name(OP, backend) or None,
        implementation=None if chosen == XLA else chosen,
        sliding_window=window,
        soft_cap=cap,
    )
    num_seqs = checks.num_seqs_as_scalar(num_seqs, tokens)
    out, pools = run.attend(tokens, weights, cache, cu_q_lens, num_seqs, params=params)
    return out, like(kv_pages, pools)
