"""scikit-build-core's build backend; asks for CUTLASS's headers only where CUDA is built.

pyproject.toml names this file. Its requirements are fixed there, and a wheel of CUTLASS would be
downloaded where no compiler for CUDA is.
"""

import os
import shutil
from typing import Any

from scikit_build_core import build
from scikit_build_core.build import *  # noqa: F403 (the other hooks of a build backend)

CUTLASS = "nvidia-cutlass==4.2.0.0"


def builds_cuda() -> bool:
    """Return whether cmake/cuda.cmake may build the CUDA kernels, which look for the headers."""
    wanted = os.environ.get("JAX_MLA_CUDA", "").upper()
    named = os.environ.get("CUDACXX") or "CMAKE_CUDA_COMPILER" in os.environ.get("CMAKE_ARGS", "")
    has_compiler = bool(named or shutil.which("nvcc"))
    return wanted == "ON" or (wanted != "OFF" and has_compiler)


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return what a build needs besides pyproject.toml's requirements."""
    extra = [CUTLASS] if builds_cuda() else []
    return [*build.get_requires_for_build_wheel(config_settings), *extra]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """Return what an editable build needs besides pyproject.toml's requirements."""
    extra = [CUTLASS] if builds_cuda() else []
    return [*build.get_requires_for_build_editable(config_settings), *extra]
