"""CUTLASS's headers, for tests that compile kernels: those of nvidia-cutlass, wherever it lies."""

import importlib.util
import pathlib

import pytest

_package = importlib.util.find_spec("cutlass_library")
_folders = _package.submodule_search_locations if _package else None
SOURCE = pathlib.Path(_folders[0] if _folders else "missing") / "source"
INCLUDE = SOURCE / "include"

needs_cutlass = pytest.mark.skipif(not INCLUDE.exists(), reason="needs nvidia-cutlass")
