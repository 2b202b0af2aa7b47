"""The fit of the Hopper kernels' cost model finds the constants that made the times."""

import importlib.util
import pathlib
from typing import Any

import pytest

PATH = pathlib.Path(__file__).resolve().parent.parent / "tools" / "fit_tilings.py"


pytestmark = pytest.mark.skipif(
    not PATH.exists(), reason="tools/ is not part of an installed package"
)


@pytest.fixture(name="tool")
def load_tool() -> Any:
    spec = importlib.util.spec_from_file_location("fit_tilings", PATH)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_constants_are_found_again(tool: Any) -> None:
    calls = [
        (rows, batch, tokens)
        for rows in (40, 64, 128)
        for batch in (1, 8, 150)
        for tokens in (256, 1024, 8192)
    ]
    truth = tool.Constants(start=6.0, merge=3.5, block=1.5, memory=2.3, residual=0.0)
    for kernel in tool.KERNELS.values():
        times = {call: tool.estimate(truth, tool.work_of(kernel, call, 132)) for call in calls}
        found = tool.fit(kernel, times, 132)
        assert abs(found.start - 6.0) < 0.1 and abs(found.merge - 3.5) < 0.1
        assert found.residual < 1e-3
    work = tool.work_of(tool.KERNELS["jax_mla sm90:narrow16"], (64, 1, 1024), 132)
    assert (work.merges, work.blocks) == (64 / 132, 1)


def test_refined_constants_choose_better(tool: Any) -> None:
    calls = [
        (rows, batch, tokens)
        for rows in (40, 64, 128)
        for batch in (1, 8, 32)
        for tokens in (256, 1024, 8192)
    ]
    works = {
        call: {name: tool.work_of(kernel, call, 132) for name, kernel in tool.KERNELS.items()}
        for call in calls
    }
    truth = {
        name: tool.Constants(start, merge, 1.4, 2.4, 0.0)
        for name, start, merge in zip(tool.KERNELS, (4.5, 5.0, 6.5), (1.0, 2.0, 4.0), strict=True)
    }
    times = {
        call: {name: tool.estimate(truth[name], work) for name, work in works[call].items()}
        for call in calls
    }
    wrong = truth | {"jax_mla sm90:wide": tool.Constants(8.5, 4.0, 1.4, 2.4, 0.0)}
    refined = tool.refine(wrong, works, times)
    before, after = (
        sum(ratio for ratio, _, _ in tool.losses(constants, works, times)) / len(times)
        for constants in (wrong, refined)
    )
    assert before > 1.01 and after < 1 + (before - 1) / 4
