"""sglang-jax, a serving engine in JAX, with the attention of jax_mla: DeepSeek models on GPUs.

    python -m jax_mla.integrations.sglang --model-path DIR

starts the engine's server; the arguments are the engine's. A program of its own calls `install()`
before it makes an `Engine`. docs/serving.md, "How a request runs", shows all this.

Needs sglang-jax in a version that is listed in `VERSIONS`, because the patches name its internals.
"""

import importlib.metadata

VERSIONS = ("0.1.0rc0",)  # those that the tests have run
INSTALL = f'pip install "sglang-jax=={VERSIONS[-1]}" "jax==0.10.2"'

try:
    _version = importlib.metadata.version("sglang-jax")
except importlib.metadata.PackageNotFoundError as error:
    raise ImportError(
        f"jax_mla.integrations.sglang: expected sglang-jax (Python 3.12 or 3.13): {INSTALL}"
    ) from error
if _version not in VERSIONS:
    raise ImportError(
        f"jax_mla.integrations.sglang: expected sglang-jax {' or '.join(VERSIONS)}, got "
        f"{_version}: {INSTALL}"
    )

from jax_mla.integrations.sglang.patches import install  # noqa: E402 (after the checks)

__all__ = ["VERSIONS", "install"]
