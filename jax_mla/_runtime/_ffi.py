"""Loads the extension module and registers its handlers with XLA.

XLA refuses a handler whose FFI version is newer than its own, but only when the backend starts:
one such registration leaves the process without a CPU or GPU backend. So the versions are compared
here, before anything is registered.
"""

from __future__ import annotations

import functools
import importlib
import pathlib
import re
import sys
import types

import jax.ffi
import jaxlib.version

_VERSION_MACRO = re.compile(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", re.MULTILINE)
_PACKAGE = pathlib.Path(__file__).resolve().parents[1]


def runtime_api_version() -> tuple[int, int]:
    """Return the XLA FFI version (major, minor) of the installed jaxlib.

    Raises:
      ImportError: jaxlib does not have the header that says it.
    """
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        found = dict(_VERSION_MACRO.findall(header.read_text()))
        return int(found["MAJOR"]), int(found["MINOR"])
    except (OSError, KeyError) as error:
        raise ImportError(
            f"jax_mla cannot find the XLA FFI version of jaxlib {jaxlib.version.__version__} in "
            f"{header}. Reinstall jaxlib (pip install --force-reinstall --no-deps jaxlib)."
        ) from error


def check_api_version(built: tuple[int, int], runtime: tuple[int, int]) -> None:
    """Raise ImportError if a handler built for `built` cannot run in `runtime`.

    Args:
      built: FFI version (major, minor) of the headers the extension was built with.
      runtime: FFI version (major, minor) of the running jaxlib.

    Raises:
      ImportError: the extension needs a newer jaxlib; the message says what to install.
    """
    if built[0] == runtime[0] and built[1] <= runtime[1]:
        return
    raise ImportError(
        f"jax_mla was built for XLA FFI {built[0]}.{built[1]}, but jaxlib "
        f"{jaxlib.version.__version__} offers {runtime[0]}.{runtime[1]}. Install a newer jaxlib "
        "(pip install --upgrade jax jaxlib), or rebuild jax_mla for jaxlib 0.10 and later, in a "
        "clone of the repository: pip install --force-reinstall --no-deps ."
    )


def _why_not_loaded(package: pathlib.Path, error: ImportError) -> str:
    """Say why the extension of `package` cannot be loaded, and what to do about it."""
    modules = sorted(path.name for path in package.glob("_extension.*"))
    if modules:
        running = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        return (
            f"jax_mla's extension in {package} cannot be loaded by {running}. Found: "
            f"{', '.join(modules)}. Install jax_mla again with this Python. ({error})"
        )
    if (package.parent / "pyproject.toml").exists():
        return (
            f"Python imported jax_mla from its source tree, {package.parent}, which holds no "
            "compiled extension. To use an installed jax_mla, start Python in another directory. "
            "To use the source tree, install it with `pip install -e .` or build the extension "
            f"with tools/dev_build.sh. ({error})"
        )
    return (
        f"jax_mla in {package} has no compiled extension. Install it again, from a clone of the "
        f"repository: pip install --force-reinstall --no-deps . ({error})"
    )


@functools.cache
def extension() -> types.ModuleType:
    """Load the extension, check its FFI version and register its handlers, once.

    Returns:
      The module `jax_mla._extension`.

    Raises:
      ImportError: the extension is missing, is for another Python, or needs a newer jaxlib.
    """
    try:
        module = importlib.import_module("jax_mla._extension")
    except ImportError as error:
        raise ImportError(_why_not_loaded(_PACKAGE, error)) from error
    check_api_version(module.ffi_api_version(), runtime_api_version())
    for platform, targets in module.targets().items():
        for name, handler in targets.items():
            jax.ffi.register_ffi_target(name, handler, platform=platform)
    return module
