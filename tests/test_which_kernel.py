"""The page on Hopper's kernels says what the selector chooses."""

import importlib.util
import pathlib
import shutil
import subprocess
import sys
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools/which_kernel.py"


@pytest.fixture(scope="module")
def tool() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("which_kernel", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_the_page_is_what_the_selector_chooses() -> None:
    done = subprocess.run([sys.executable, str(TOOL), "--check"], check=False)
    assert done.returncode == 0, "run python tools/which_kernel.py"


def test_only_what_is_between_the_markers_changes(tool: types.ModuleType) -> None:
    page = f"before\n{tool.BEGIN}old\n{tool.END}behind\n"
    assert tool.with_tables(page, "new\n") == f"before\n{tool.BEGIN}\nnew\n\n{tool.END}behind\n"
    with pytest.raises(ValueError, match="expected the lines"):
        tool.with_tables("no markers", "new\n")
