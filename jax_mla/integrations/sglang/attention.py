"""The engine's attention backend, with jax_mla's functions in the kernel's place.

Steps that decode call `jax_mla.ragged_paged_attention`, steps of prompts `jax_mla.mixed_attention`.
"""

# pyright: reportMissingImports=false
# Type checkers need not have the engine.

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from sgl_jax.srt.layers.attention import mla_backend
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode
from sgl_jax.srt.models.deepseek_v3 import DeepseekV3Attention

import jax_mla
from jax_mla.integrations import tpu_interface

_OP = "jax_mla.integrations.sglang"


class JaxMlaAttentionBackend(mla_backend.MLAAttentionBackend):
    """`MLAAttentionBackend` without a TPU: the same metadata, pools and sharding.

    Each device has its own part of the pool (the pages of its data-parallel rank), the tokens of
    that rank, and its share of the heads. Page ids count in that part.

    Attributes:
      pages_per_seq: pages of the longest context that the model can have, the page table's width.
      implementation: that of `jax_mla.mixed_attention`.
    """

    implementation: str | None = None

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
            without_head(k),
            # The rotary key comes with another sharding than the latent.
            jax.sharding.reshard(without_head(rope["k_rope"]), rows),
            token_to_kv_pool.get_fused_kv_buffer(layer.layer_id),
            *self._step,
        )

    def attend_to_prompts(
        self,
        model: DeepseekV3Attention,
        q_nope: jax.Array,
        q_rope: jax.Array,
        compressed: jax.Array,
        k_rope: jax.Array,
        token_to_kv_pool: Any,
    ) -> tuple[jax.Array, jax.Array]:
        """Write the new rows of a step of prompts into the layer's pool and attend.

        Args:
          model: the layer's attention, which has the up-projections.
          q_nope: [tokens, num_heads, d_nope]. The queries, not absorbed.
          q_rope: [tokens, num_heads, d_kpe].
          compressed: [tokens, d_ckv]. The new latents.
          k_rope: [tokens, 1, d_kpe].
          token_to_kv_pool: the engine's pools, one a layer.

        Returns:
          out: [tokens, num_heads * d_v]. The values of all heads.
          pool: the layer's pool with the new rows.
        """
        layer = model.attn_mqa
        data = self.attention_data_partition_axis
        heads, rows, of_rank = P(data, "tensor", None), P(data, None), P(data)
        of_heads, pool = P(None, "tensor", None), P(data, None, None, None)

        def attend(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
            q_nope, q_pe, ckv, kpe, w_uk, w_uv, cache, lens, pages, bounds, ends, live = operands
            scales = tpu_interface.check_options(_OP, {}, q_nope, cache)
            return jax_mla.mixed_attention(
                q_nope,
                q_pe,
                ckv,
                kpe,
                jnp.transpose(w_uk, (1, 2, 0)),
                jnp.transpose(w_uv, (1, 0, 2)),
                cache,
                tpu_interface.packed_page_table(pages, ends // self.page_size, self.pages_per_seq),
                lens,
                bounds,
                live[2],
                sm_scale=float(layer.scaling),
                sliding_window=layer.sliding_window_size,
                soft_cap=layer.logit_cap,
                packs=True,
                kv_format=scales.kv_format,
                kv_scale=scales.cache,
                implementation=self.implementation,
            )

        out, cache = jax.shard_map(
            attend,
            in_specs=(heads, heads, rows, rows, of_heads, of_heads, pool, *[of_rank] * 5),
            out_specs=(heads, pool),
            check_vma=False,
        )(
            q_nope,
            q_rope,
            compressed,
            jax.sharding.reshard(without_head(k_rope), rows),
            model.w_uk.value,
            model.w_uv.value,
            token_to_kv_pool.get_fused_kv_buffer(layer.layer_id),
            *self._step,
        )
        return out.reshape(-1, out.shape[1] * out.shape[2]), cache

    @property
    def _step(self) -> tuple[jax.Array, ...]:
        step = self.forward_metadata
        return (
            step.seq_lens, step.page_indices, step.cu_q_lens, step.cu_kv_lens, step.distribution
        )  # fmt: skip


_forward_absorbed = DeepseekV3Attention._forward_mqa


def forward(
    model: DeepseekV3Attention,
    q_nope: jax.Array,
    q_rope: jax.Array,
    compressed: jax.Array,
    k_rope: jax.Array,
    forward_batch: Any,
    token_to_kv_pool: Any,
) -> tuple[jax.Array, jax.Array]:
    """Stand for `DeepseekV3Attention._forward_mqa`, which absorbs the up-projections."""
    tokens = q_nope, q_rope, compressed, k_rope
    backend = forward_batch.attn_backend
    is_ours = isinstance(backend, JaxMlaAttentionBackend)
    if is_ours and forward_batch.forward_mode == ForwardMode.EXTEND:
        return backend.attend_to_prompts(model, *tokens, token_to_kv_pool)
    return _forward_absorbed(model, *tokens, forward_batch, token_to_kv_pool)


def without_head(x: jax.Array) -> jax.Array:
    """Return [tokens, width] of [tokens, 1, width]: all heads share one row."""
    return x if x.ndim == 2 else jnp.squeeze(x, axis=1)
