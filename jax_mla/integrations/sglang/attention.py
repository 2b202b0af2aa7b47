"""The engine's attention backend, with `jax_mla.ragged_paged_attention` in the kernel's place."""

# pyright: reportMissingImports=false
# Type checkers need not have the engine.

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from sgl_jax.srt.layers.attention import mla_backend

from jax_mla.integrations import tpu_interface


class JaxMlaAttentionBackend(mla_backend.MLAAttentionBackend):
    """`MLAAttentionBackend` without a TPU: the same metadata, pools and sharding.

    Each device has its own part of the pool (the pages of its data-parallel rank), the tokens of
    that rank, and its share of the heads. Page ids count in that part.

    Attributes:
      pages_per_seq: pages of the longest context that the model can have, the page table's width.
    """

    def __init__(self, *, pages_per_seq: int, **options: Any) -> None:
        """Make a backend; the options are those of `MLAAttentionBackend`."""
        super().__init__(**options, vmem_limit_bytes=0)  # None would ask the TPU for its memory
        self.pages_per_seq = pages_per_seq

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        layer: Any,
        forward_batch: Any,
        token_to_kv_pool: Any,
        **rope: Any,
    ) -> tuple[jax.Array, jax.Array]:
        """Write a step's new rows into the layer's pool and attend.

        Args:
          q: [tokens, num_heads, d_ckv]. The absorbed queries.
          k: [tokens, 1, d_ckv]. The new latents.
          v: the same array as k.
          layer: the engine's `RadixAttention`.
          forward_batch: not used; the step's metadata is in the backend.
          token_to_kv_pool: the engine's pools, one a layer.
          **rope: q_rope [tokens, num_heads, d_kpe] and k_rope [tokens, 1, d_kpe].

        Returns:
          out: [tokens, num_heads, d_ckv].
          pool: the layer's pool with the new rows.
        """
        del v, forward_batch
        step = self.forward_metadata
        data = self.attention_data_partition_axis
        heads, rows, of_rank = P(data, "tensor", None), P(data, None), P(data)
        pool = P(data, None, None, None)

        def attend(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
            return tpu_interface.mla_ragged_paged_attention_sglang(
                *operands,
                sm_scale=float(layer.scaling),
                sliding_window=layer.sliding_window_size,
                soft_cap=layer.logit_cap,
                pages_per_seq=self.pages_per_seq,
            )

        return jax.shard_map(
            attend,
            in_specs=(heads, heads, rows, rows, pool, of_rank, of_rank, of_rank, of_rank, of_rank),
            out_specs=(heads, pool),
            check_vma=False,
        )(
            q,
            rope["q_rope"],
            _without_head(k),
            # The rotary key comes with another sharding than the latent.
            jax.sharding.reshard(_without_head(rope["k_rope"]), rows),
            token_to_kv_pool.get_fused_kv_buffer(layer.layer_id),
            step.seq_lens,
            step.page_indices,
            step.cu_q_lens,
            step.cu_kv_lens,
            step.distribution,
        )


def _without_head(x: jax.Array) -> jax.Array:
    """Return [tokens, width] of [tokens, 1, width]: all heads share one row."""
    return x if x.ndim == 2 else jnp.squeeze(x, axis=1)
