"""Paged Multi-head Latent Attention (DeepSeek's MLA) for JAX, on GPUs and CPUs."""

from jax_mla import reference
from jax_mla._check_values import check_values
from jax_mla._mesh._mesh_axes import MeshAxes
from jax_mla._runtime import _ffi
from jax_mla._runtime._backends import BackendStatus
from jax_mla._version import __version__
from jax_mla.ops.append.api import append
from jax_mla.ops.append.transforms import rope_table
from jax_mla.ops.decode.api import backends, decode
from jax_mla.ops.decode.ragged import ragged_paged_attention
from jax_mla.ops.index_append.api import index_append
from jax_mla.ops.index_topk.api import index_topk
from jax_mla.ops.merge.api import merge
from jax_mla.ops.mixed.api import mixed_attention
from jax_mla.ops.prefill.api import prefill
from jax_mla.ops.sparse.api import sparse_attention

_ffi.extension()  # registers the handlers, or raises ImportError

__all__ = [
    "BackendStatus",
    "MeshAxes",
    "__version__",
    "append",
    "backends",
    "check_values",
    "decode",
    "index_append",
    "index_topk",
    "merge",
    "mixed_attention",
    "prefill",
    "ragged_paged_attention",
    "reference",
    "rope_table",
    "sparse_attention",
]
