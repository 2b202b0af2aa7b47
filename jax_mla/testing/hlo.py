"""Reads from a compiled program what it communicates and what it copies."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax

_KINDS = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all|collective-broadcast"
_COLLECTIVE = re.compile(rf"= (.*?) ({_KINDS})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|bf16|[a-z]+(?:8|16|32|64))\[([\d,]*)\]")
_BITS = {"pred": 8, "bf16": 16}


@dataclasses.dataclass(frozen=True, order=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
      kind: XLA's name for it, such as all-gather.
      num_bytes: size of its results on one device.
      shapes: dimensions of its results.
    """

    kind: str
    num_bytes: int
    shapes: tuple[tuple[int, ...], ...]


def text(compiled: jax.stages.Compiled) -> str:
    """Return the optimised program."""
    return compiled.as_text() or ""


def memory(compiled: jax.stages.Compiled) -> Any:
    """Return the memory statistics of a program.

    Raises:
      ValueError: the platform has none.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("memory_analysis: expected statistics, got None")
    return stats


def collectives(compiled: jax.stages.Compiled) -> list[Collective]:
    """Return the collectives of a compiled program, sorted."""
    found = []
    for line in text(compiled).splitlines():
        if match := _COLLECTIVE.search(line):
            arrays = _ARRAY.findall(match[1])
            if match[3] and match[2] != "all-reduce":  # its -start returns operands and results
                arrays = arrays[len(arrays) // 2 :]
            shapes = tuple(
                sorted(tuple(map(int, dims.split(","))) if dims else () for _, dims in arrays)
            )
            num_bytes = sum(
                _bits(name) // 8 * math.prod(map(int, filter(None, dims.split(","))))
                for name, dims in arrays
            )
            found.append(Collective(match[2], num_bytes, shapes))
    return sorted(found)


def _bits(name: str) -> int:
    return _BITS.get(name) or int(re.sub(r"^\D+", "", name))


def num_copies(compiled: jax.stages.Compiled, shape: Sequence[int]) -> int:
    """Count the copies of arrays of a shape in a compiled program; leading 1s do not matter."""
    dims = ",".join(str(n) for n in shape)
    pattern = re.compile(rf"= \w+\[(?:1,)*{dims}\]\S* copy(-start)?\(")
    return len(pattern.findall(text(compiled)))


def pointers(array: jax.Array) -> list[int]:
    """Return the addresses of an array's buffers on the devices of this process."""
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
