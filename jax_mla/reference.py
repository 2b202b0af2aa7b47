"""The ops in float32 `jax.numpy`: slow, exact, and the specification of every backend."""

from jax_mla.ops.append.reference import append
from jax_mla.ops.decode.reference import decode

__all__ = ["append", "decode"]
