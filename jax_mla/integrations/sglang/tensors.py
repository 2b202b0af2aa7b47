"""What the files of a checkpoint hold, without reading a weight."""

from __future__ import annotations

import json
import pathlib
from typing import NamedTuple


class Tensor(NamedTuple):
    """What a file says of a tensor."""

    dtype: str
    shape: list[int]


def headers(directory: str) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, by name; none before it was downloaded."""
    tensors: dict[str, Tensor] = {}
    for path in pathlib.Path(directory).glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        tensors |= {name: Tensor(x["dtype"], x["shape"]) for name, x in header.items()}
    return tensors
