"""Decode in jax.numpy: what a JAX user has without a kernel."""

import jax
import jax.numpy as jnp
from contenders import DecodeFn


def reference(sm_scale: float) -> DecodeFn:
    """The op's definition, jitted: everything in float32 at highest precision."""
    import jax_mla

    def decode(q_nope, q_pe, pools, page_table, seq_lens, layer):
        out = jax_mla.reference.decode(
            q_nope, q_pe, pools, page_table, seq_lens, sm_scale=sm_scale, layer=layer
        )
        assert isinstance(out, jax.Array)
        return out.astype(q_nope.dtype)

    return decode


def plain(sm_scale: float) -> DecodeFn:
    """Gather, two products and a softmax in the input's dtype with float32 accumulation."""

    def decode(q_nope, q_pe, pools, page_table, seq_lens, layer):
        parts = pools if isinstance(pools, tuple) else (pools,)
        batch = page_table.shape[0]
        rows = jnp.concatenate(
            [part[layer, page_table].reshape(batch, -1, part.shape[-1]) for part in parts], axis=-1
        )
        q_len = q_nope.shape[1]
        q = jnp.concatenate([q_nope, q_pe], axis=-1)
        scores = jnp.einsum("bqhd,btd->bqht", q, rows, preferred_element_type=jnp.float32)
        last = seq_lens[:, None] - q_len + jnp.arange(q_len)
        visible = jnp.arange(rows.shape[1]) <= last[..., None]
        scores = jnp.where(visible[:, :, None], sm_scale * scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(q_nope.dtype)
        ckv = rows[..., : q_nope.shape[-1]]
        return jnp.einsum("bqht,btd->bqhd", weights, ckv).astype(q_nope.dtype)

    return decode
