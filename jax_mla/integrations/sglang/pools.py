"""The pools of index keys: a page has its rows one after the other, or codes and their scales."""

# pyright: reportMissingImports=false
# Type checkers need not have the engine.

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sgl_jax.srt.mem_cache.memory_pool import MLATokenToKVPool

from jax_mla.ops import _index

_create_buffers = MLATokenToKVPool._create_buffers


def create_buffers(pool: MLATokenToKVPool) -> None:
    """Stand for `MLATokenToKVPool._create_buffers`.

    The engine's pools of index keys have packs of rows that fill 4 bytes, [pages, page_size / pack,
    pack, 128]. The bytes are the same, but XLA copies a pool that a step has to reshape. Beside
    rows in FP8, keys are codes with a scale each. The engine does not count the scales' 4 bytes.
    """
    num_layers, pool.num_indexer_layers = pool.num_indexer_layers, 0
    _create_buffers(pool)
    pool.num_indexer_layers = num_layers
    num_pages = pool.size // pool.page_size + pool.dp_size  # each rank has one for padding
    if pool.dtype == jnp.float8_e4m3fn:
        width, dtype = _index.FP8_WIDTH, jnp.uint8
    else:
        width, dtype = pool.indexer_key_dim, pool.dtype
    shape = (num_pages, pool.page_size, width)
    sharding = NamedSharding(pool.mesh, P(pool.kv_sharding.spec[0], None, None))
    zeros = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
    with jax.set_mesh(pool.mesh):
        pool.indexer_key_buffer = [zeros() for _ in range(num_layers)]
