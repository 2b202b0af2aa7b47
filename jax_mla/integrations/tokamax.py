"""tokamax's MLA op on jax_mla: `register()` adds it to the op's `IMPLEMENTATIONS`.

Needs tokamax, with its op in `tokamax._src.ops.experimental.mla` (0.0.17 is tested).
"""

# Without `from __future__ import annotations`: tokamax reads the types of `_fwd` to record a call.
import importlib
from typing import Any

import jax
import jax.numpy as jnp

import jax_mla
from jax_mla._runtime._backends import PLATFORMS
from jax_mla.integrations import tpu_interface

_MLA = "tokamax._src.ops.experimental.mla"
NAME = "jax_mla"

try:  # by name, because type checkers need not have tokamax
    _base: Any = importlib.import_module(f"{_MLA}.base")
except ImportError as error:
    raise ImportError(
        f"jax_mla.integrations.tokamax: expected tokamax with the module {_MLA}.base (pip install "
        f"tokamax, Python 3.12 or later), got: {error}"
    ) from error


class JaxMlaMultiHeadLatentAttention(_base.MultiHeadLatentAttention):
    """tokamax's `MultiHeadLatentAttention` on the backends of jax_mla.

    Operands, results and errors are those of `tpu_interface.mla_ragged_paged_attention_v1`.
    `return_residuals` returns None for the residuals, as the op's other implementations do.
    """

    def _fwd(
        self,
        ql_nope: jax.Array,
        q_pe: jax.Array,
        new_kv_c: jax.Array,
        new_k_pe: jax.Array,
        cache_kv: jax.Array,
        kv_lens: jax.Array,
        page_indices: jax.Array,
        cu_q_lens: jax.Array,
        distribution: jax.Array,
        *,
        sm_scale: float = 1.0,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        mask_value: float | None = None,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        s_dtype: jax.typing.DTypeLike = jnp.bfloat16,
        debug_mode: bool = False,
        return_residuals: bool = False,
        config: Any = None,
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        del return_residuals, config  # there are none
        results = tpu_interface.mla_ragged_paged_attention_v1(
            ql_nope, q_pe, new_kv_c, new_k_pe, cache_kv, kv_lens, page_indices, cu_q_lens,
            distribution, sm_scale=sm_scale, sliding_window=sliding_window, soft_cap=soft_cap,
            mask_value=mask_value, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
            s_dtype=s_dtype, debug_mode=debug_mode,
        )  # fmt: skip
        return results, None

    def supported_on(self, device: Any) -> bool:
        """Return whether jax_mla has a backend for devices like this one."""
        platform = "cuda" if device.platform == "gpu" else device.platform
        if platform not in PLATFORMS:
            return False
        return any(status.chosen for status in jax_mla.backends(platform=platform))


def register(name: str = NAME) -> JaxMlaMultiHeadLatentAttention:
    """Add the op to tokamax's `IMPLEMENTATIONS` of MLA.

    Args:
      name: its name there.

    Returns:
      The op.
    """
    op = JaxMlaMultiHeadLatentAttention()
    importlib.import_module(f"{_MLA}.api").IMPLEMENTATIONS[name] = op
    return op
