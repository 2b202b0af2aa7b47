"""Read and write safetensors files with numpy, bfloat16 and fp8 included.

A file has three parts: the length of the header in 8 bytes, a JSON header {name: {dtype, shape,
data_offsets}}, and the bytes of the tensors, row-major. Files are memory-mapped: the disk is read
when a tensor is used.
"""

import itertools
import json
import math
import mmap
from collections.abc import Set
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class TensorFiles:
    """The tensors of a checkpoint directory, in one file or in several with an index.

    Attributes:
      directory: where the files are.
      names: the published names of all tensors with the prefix, without it.
      other_names: those of all other tensors.
    """

    def __init__(self, directory: str | Path, prefix: str = ""):
        """Read the index, or the header of the single file.

        Args:
          directory: holds `model.safetensors.index.json` or `model.safetensors`.
          prefix: what all names begin with that this object is asked for. Tensors with other names
            are of other parts of the model.

        Raises:
          ValueError: there is neither file, or the one that is there is damaged.
        """
        self.directory, self._prefix = Path(directory), prefix
        self._headers: dict[str, dict] = {}
        self._bytes: dict[str, tuple[mmap.mmap, int]] = {}
        if (self.directory / INDEX).exists():
            self._file_of = self._read_index()
        elif (self.directory / SINGLE).exists():
            self._file_of = dict.fromkeys(self._header(SINGLE), SINGLE)
        else:
            raise ValueError(f"{directory}: expected {INDEX} or {SINGLE}, found neither")
        self.names: Set[str] = {
            name.removeprefix(prefix) for name in self._file_of if name.startswith(prefix)
        }
        self.other_names: Set[str] = {name for name in self._file_of if not name.startswith(prefix)}

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of a tensor.

        Args:
          name: published name, without the prefix.

        Raises:
          ValueError: the tensor is missing, or its dtype is unknown. The message names it.
        """
        full, entry = self._prefix + name, self._entry(name)
        if entry["dtype"] not in DTYPES:
            known = ", ".join(DTYPES)
            raise ValueError(f"{self.directory}: {full}: expected {known}, got {entry['dtype']}")
        return DTYPES[entry["dtype"]]

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return one tensor as a view of the memory-mapped file.

        Args:
          name: published name, without the prefix.
          shape: the shape that it must have.

        Returns:
          The tensor.

        Raises:
          ValueError: the tensor is missing or cut off, or it has another shape or an unknown dtype.
            The message names it.
        """
        entry, dtype = self._entry(name), self.dtype(name)
        name = self._prefix + name
        if tuple(entry["shape"]) != shape:
            got = tuple(entry["shape"])
            raise ValueError(f"{self.directory}: {name}: expected shape {shape}, got {got}")
        file = self._file_of[name]
        data, start = self._bytes[file]
        begin, end = entry["data_offsets"]
        num_bytes = dtype.itemsize * math.prod(shape)
        if end - begin != num_bytes:
            raise ValueError(
                f"{self.directory / file}: {name}: expected {num_bytes} bytes, got {end - begin}"
            )
        return np.frombuffer(data, dtype, num_bytes // dtype.itemsize, start + begin).reshape(shape)

    def _entry(self, name: str) -> dict:
        name = self._prefix + name
        if name not in self._file_of:
            raise ValueError(f"{self.directory}: {name}: expected a tensor, got no such name")
        file = self._file_of[name]
        entry = self._header(file).get(name)
        if entry is None:
            raise ValueError(
                f"{self.directory}: {name}: expected in {file} by the index, got no such tensor"
            )
        return entry

    def _read_index(self) -> dict[str, str]:
        path = self.directory / INDEX
        try:
            files = json.loads(path.read_text())["weight_map"]
            _require(isinstance(files, dict), "weight_map", files, "a JSON object")
            for name, file in files.items():
                _require(isinstance(file, str), f"weight_map: {name}", file, "the name of a file")
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{path}: expected JSON with a weight_map ({error!r})") from error
        return files

    def _header(self, file: str) -> dict:
        if file not in self._headers:
            path = self.directory / file
            try:
                with path.open("rb") as handle:
                    data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
                length = int.from_bytes(data[:8], "little")
                header = json.loads(data[8 : 8 + length])
                _require(isinstance(header, dict), "header", header, "a JSON object")
            except (OSError, ValueError, RecursionError) as error:
                raise ValueError(f"{path}: expected a safetensors file ({error})") from error
            header.pop("__metadata__", None)
            try:
                _check_header(header, len(data) - 8 - length)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            self._headers[file] = header
            self._bytes[file] = (data, 8 + length)
        return self._headers[file]


def _require(condition: bool, name: str, got: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{name}: expected {expected}, got {got!r}")


def _check_header(header: dict[str, Any], size: int) -> None:
    """Check the entries of the tensors, whose bytes are `size` in all and are no other tensor's."""
    ranges = []
    for name, entry in header.items():
        _require(isinstance(entry, dict), name, entry, "a JSON object")
        dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        _require(isinstance(dtype, str), f"{name}: dtype", dtype, "a string")
        _require(_are_sizes(shape), f"{name}: shape", shape, "a list of integers of at least 0")
        valid = _are_sizes(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]
        _require(valid, f"{name}: data_offsets", offsets, "two integers, 0 <= begin <= end")
        expected = f"at most the {size} bytes that are there, or the file is cut off"
        _require(offsets[1] <= size, f"{name}: data_offsets", offsets, expected)
        if offsets[0] < offsets[1]:
            ranges.append((offsets, name))
    ranges.sort()
    for (before, other), (offsets, name) in itertools.pairwise(ranges):
        expected = f"to begin behind {before}, those of {other}"
        _require(before[1] <= offsets[0], f"{name}: data_offsets", offsets, expected)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write `tensors` as one safetensors file.

    Args:
      path: the file.
      tensors: by published name.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).tobytes())
