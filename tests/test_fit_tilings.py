"""The fit of the Hopper kernels' cost model finds the constants that made the times."""

import importlib.util
import pathlib

import pytest

PATH = pathlib.Path(__file__).resolve().parent.parent / "tools" / "fit_tilings.py"


@pytest.mark.skipif(not PATH.exists(), reason="tools/ is not part of an installed package")
def test_constants_are_found_again() -> None:
    spec = importlib.util.spec_from_file_location("fit_tilings", PATH)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    calls = [
        (rows, batch, tokens)
        for rows in (40, 64, 128)
        for batch in (1, 8, 150)
        for tokens in (256, 1024, 8192)
    ]
    truth = tool.Constants(start=6.0, merge=3.5, block=1.5, memory=2.3, residual=0.0)
    for kernel in tool.KERNELS.values():
        times = {call: tool.estimate(kernel, truth, call, 132) for call in calls}
        found = tool.fit(kernel, times, 132)
        assert abs(found.start - 6.0) < 0.1 and abs(found.merge - 3.5) < 0.1
        assert found.residual < 1e-3
    work = tool.work_of(tool.KERNELS["jax_mla sm90:narrow16"], (64, 1, 1024), 132)
    assert (work.merges, work.blocks) == (64 / 132, 1)
