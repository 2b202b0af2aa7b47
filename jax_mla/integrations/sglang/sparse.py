"""The engine's backend for sparse attention (`dsa_sparse`), exact in every step.

A layer's indexer chooses the tokens that each query attends to, one by one. The engine's own
backend takes whole pages in steps that decode, and all tokens in steps of prompts.
"""

# pyright: reportMissingImports=false
# Type checkers need not have the engine.

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from sgl_jax.srt.layers.attention.dsa_sparse_backend import DSAFusedCache

import jax_mla
from jax_mla.integrations import tpu_interface
from jax_mla.integrations.sglang.attention import JaxMlaAttentionBackend, without_head
from jax_mla.integrations.sglang.indexer import for_fp8_keys

_OP = "jax_mla.integrations.sglang"


class JaxMlaSparseBackend(JaxMlaAttentionBackend):
    """Sparse attention with jax_mla's functions; metadata, pools and sharding are the engine's.

    Query heads are split over the devices of a data-parallel rank, and index heads are not: each
    device chooses for itself, from its copy of the rank's index keys. So nothing is communicated.

    Attributes:
      topk: how many tokens a query attends to.
      index_layers: the layers with an indexer, in the order of their pools of index keys.
    """

    def __init__(self, *, topk: int, index_layers: tuple[int, ...], **options: Any) -> None:
        """Make a backend; the options are those of `JaxMlaAttentionBackend`."""
        super().__init__(**options)
        self.topk = topk
        self.index_layers = index_layers

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        layer: Any,
        forward_batch: Any,
        token_to_kv_pool: Any,
        *,
        q_rope: jax.Array,
        k_rope: jax.Array,
        q_idx: jax.Array | None = None,
        k_idx: jax.Array | None = None,
        idx_weights: jax.Array | None = None,
        dsa_topk_in: jax.Array | None = None,
        dsa_topk_pages_in: jax.Array | None = None,
        **_: Any,
    ) -> tuple[jax.Array, DSAFusedCache]:
        """Write a step's new rows and index keys into the layer's pools, choose and attend.

        The names are the engine's. It hands `topk` and `topk_pages` of a layer's result to the
        layers above as they are; here they are the lists of slots and their lengths.

        Args:
          q: [tokens, num_heads, d_ckv]. The absorbed queries.
          k: [tokens, 1, d_ckv]. The new latents.
          v: the same array as k.
          layer: the engine's `RadixAttention`.
          forward_batch: has the positions of the tokens.
          token_to_kv_pool: the engine's pools.
          q_rope: [tokens, num_heads, d_kpe].
          k_rope: [tokens, 1, d_kpe].
          q_idx: [tokens, index_heads, d]. None in a layer without an indexer.
          k_idx: [tokens, d]. The new index keys.
          idx_weights: [tokens, index_heads] float32, with every constant factor.
          dsa_topk_in: [tokens, topk] int32. What the nearest layer below with an indexer chose.
          dsa_topk_pages_in: [tokens] int32. How many of them count.

        Returns:
          out: [tokens, num_heads, d_ckv].
          The pools with what is new, and what the layer's indexer chose, None without one.
        """
        del v
        for name, value in (
            ("sliding_window", layer.sliding_window_size),
            ("soft_cap", layer.logit_cap),
        ):
            if value is not None:
                raise ValueError(f"{_OP}: {name}: expected None with sparse attention, got {value}")
        positions = forward_batch.positions
        if q_idx is None:
            index_keys, chosen = None, (dsa_topk_in, dsa_topk_pages_in)
        else:
            place = self.index_layers.index(layer.layer_id)
            pool = token_to_kv_pool.get_indexer_key_buffer(place)
            index_keys, *chosen = self._choose(q_idx, k_idx, idx_weights, pool, positions)
        rows = (without_head(k), without_head(k_rope))
        pool = token_to_kv_pool.get_fused_kv_buffer(layer.layer_id)
        out, pool = self._attend(layer, (q, q_rope, *rows), pool, positions, chosen)
        slots, lens = (None, None) if q_idx is None else chosen
        return out, DSAFusedCache(kv=pool, idx=index_keys, topk=slots, topk_pages=lens)

    def _choose(self, *operands: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Write the index keys; return their pool and the lists of all tokens."""
        data = self.attention_data_partition_axis
        of_rank, pool = P(data), P(data, None, None)

        def choose(
            q: jax.Array, k: jax.Array, weights: jax.Array, pool: jax.Array, positions: jax.Array,
            lens: jax.Array, pages: jax.Array, bounds: jax.Array, ends: jax.Array, live: jax.Array,
        ) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
            table = self._page_table(pages, ends)
            if pool.dtype == jnp.uint8:
                q, k, weights = for_fp8_keys(q, k, weights)
            pool = jax_mla.index_append(pool, k, table, positions, cu_q_lens=bounds)
            slots, counts = jax_mla.index_topk(
                q, weights, pool, table, lens, bounds, live[2], k=self.topk
            )
            return pool, slots, counts

        specs = (P(data, None, None), P(data, None), P(data, None), pool, of_rank)
        return jax.shard_map(
            choose,
            in_specs=(*specs, *[of_rank] * 5),
            out_specs=(pool, P(data, None), of_rank),
            check_vma=False,
        )(*_resharded(operands, specs), *self._step)

    def _attend(
        self,
        layer: Any,
        tokens: tuple[jax.Array, ...],
        pool: jax.Array,
        positions: jax.Array,
        chosen: Any,
    ) -> tuple[jax.Array, jax.Array]:
        """Write the new rows and attend to the tokens that were chosen."""
        data = self.attention_data_partition_axis
        heads, rows, of_rank = P(data, "tensor", None), P(data, None), P(data)

        def attend(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
            q, q_pe, ckv, kpe, pool, positions, slots, topk_lens, _, pages, bounds, ends, _ = (
                operands
            )
            table = self._page_table(pages, ends)
            scales = tpu_interface.check_options(_OP, {}, q, pool)
            of_pool: dict[str, Any] = dict(
                packs=True, kv_format=scales.kv_format, kv_scale=scales.cache
            )
            pool = jax_mla.append(pool, ckv, kpe, table, positions, cu_q_lens=bounds, **of_pool)
            out = jax_mla.sparse_attention(
                q, q_pe, pool, slots, sm_scale=float(layer.scaling), topk_lens=topk_lens,
                **of_pool,
            )  # fmt: skip
            return out, pool

        specs = (heads, heads, rows, rows, P(data, None, None, None), of_rank, rows, of_rank)
        return jax.shard_map(
            attend,
            in_specs=(*specs, *[of_rank] * 5),
            out_specs=(heads, specs[4]),
            check_vma=False,
        )(*_resharded((*tokens, pool, positions, *chosen), specs), *self._step)

    def _page_table(self, pages: jax.Array, ends: jax.Array) -> jax.Array:
        return tpu_interface.packed_page_table(pages, ends // self.page_size, self.pages_per_seq)


def _resharded(operands: Any, specs: Any) -> list[jax.Array]:
    """Return arrays as the calls take them; some of the engine's come with other shardings."""
    return [jax.sharding.reshard(x, spec) for x, spec in zip(operands, specs, strict=True)]
