"""The definitions of the ops in float32 jax.numpy. They are slow; every backend must match them."""

from jax_mla._quantization import decode_rows, encode_rows
from jax_mla.ops._index import encode_index_keys
from jax_mla.ops.append.reference import append
from jax_mla.ops.append.transforms import rms_norm, rotate
from jax_mla.ops.decode.ragged_reference import ragged_paged_attention
from jax_mla.ops.decode.reference import decode
from jax_mla.ops.index_append.reference import index_append
from jax_mla.ops.index_append.transforms import layer_norm
from jax_mla.ops.index_topk.reference import index_topk
from jax_mla.ops.sparse.reference import sparse_attention

__all__ = [
    "append",
    "decode",
    "decode_rows",
    "encode_index_keys",
    "encode_rows",
    "index_append",
    "index_topk",
    "layer_norm",
    "ragged_paged_attention",
    "rms_norm",
    "rotate",
    "sparse_attention",
]
