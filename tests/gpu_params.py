"""The CUDA backends as parameters of tests."""

from typing import Any

import pytest

from jax_mla.testing.run import gpu_statuses


def gpu_params() -> list[Any]:
    """Return one parameter for each CUDA backend; one that this GPU cannot run is skipped."""
    params = []
    for status in gpu_statuses():
        reason = f"{status.name}: {status.reason}"
        marks = [pytest.mark.gpu, pytest.mark.skipif(bool(status.reason), reason=reason)]
        params.append(pytest.param(status.name, marks=marks))
    return params
