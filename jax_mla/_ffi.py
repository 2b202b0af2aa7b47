"""Loads the extension module and registers its handlers with XLA.

XLA refuses a handler whose FFI version is newer than its own, and it does so when the backend
starts: one such registration leaves the process without any CPU or GPU backend. So the versions
are compared here, before anything is registered.
"""

from __future__ import annotations

import functools
import importlib
import pathlib
import re
import types

import jax.ffi

_VERSION_MACRO = re.compile(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", re.MULTILINE)


def runtime_api_version() -> tuple[int, int]:
    """Returns the XLA FFI version (major, minor) of the installed jaxlib."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    found = dict(_VERSION_MACRO.findall(header.read_text()))
    return int(found["MAJOR"]), int(found["MINOR"])


def check_api_version(built: tuple[int, int], runtime: tuple[int, int]) -> None:
    """Raises ImportError if a handler built for `built` cannot run in `runtime`.

    Args:
      built: FFI version (major, minor) of the headers the extension was built with.
      runtime: FFI version (major, minor) of the running jaxlib.

    Raises:
      ImportError: the extension needs a newer jaxlib; the message says what to install.
    """
    if built[0] == runtime[0] and built[1] <= runtime[1]:
        return
    # Imported late: the version is only wanted for the message.
    import jaxlib.version

    raise ImportError(
        f"jax_mla was built for XLA FFI {built[0]}.{built[1]}, but jaxlib "
        f"{jaxlib.version.__version__} offers {runtime[0]}.{runtime[1]}. Install a newer jaxlib "
        "(pip install --upgrade jax jaxlib), or rebuild jax_mla against this one "
        "(pip install --force-reinstall --no-deps --no-cache-dir jax_mla)."
    )


@functools.cache
def extension() -> types.ModuleType:
    """Loads the extension, checks its FFI version and registers its handlers, once.

    Returns:
      The module `jax_mla._extension`.

    Raises:
      ImportError: the extension is missing or was built for a newer jaxlib.
    """
    try:
        module = importlib.import_module("jax_mla._extension")
    except ImportError as error:
        raise ImportError(
            "jax_mla's extension module cannot be loaded; install the package (pip install .) or, "
            f"in a source tree, run tools/dev_build.sh: {error}"
        ) from error
    check_api_version(module.ffi_api_version(), runtime_api_version())
    for platform, targets in module.targets().items():
        for name, handler in targets.items():
            jax.ffi.register_ffi_target(name, handler, platform=platform)
    return module
