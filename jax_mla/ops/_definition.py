"""How the definitions of the ops run: each as one compiled function, also outside `jit`.

Called one by one outside `jit`, the array operations of a definition would each be compiled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

Definition = TypeVar("Definition", bound=Callable[..., Any])
STATIC = (
    "causal",
    "interleaved",
    "kv_format",
    "max_seq_len",
    "packs",
    "return_lse",
    "rope_interleaved",
)


def definition(fun: Definition) -> Definition:
    """Compile a definition as a whole; in a traced function it is inlined."""
    names = [name for name in STATIC if name in inspect.signature(fun).parameters]
    return cast(Definition, jax.jit(fun, static_argnames=names, inline=True))
