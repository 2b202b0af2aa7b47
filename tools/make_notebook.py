"""Make docs/quickstart.ipynb from docs/quickstart.md: the same text and the same programs.

    python tools/make_notebook.py [--check]

The page's `python` blocks become cells of code, and all between them cells of text. With --check
nothing is written: the exit status is 1 if the notebook is not what the script makes. Needs no
packages.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, NOTEBOOK = DOCS / "quickstart.md", DOCS / "quickstart.ipynb"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# The one cell that the page does not have. It has to run before JAX is imported.
SETUP = """\
# A CPU that plays eight devices, for the part about meshes. For GPUs, leave this cell out.
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
"""


def cells(page: str) -> list[tuple[str, str]]:
    """Return the kind and the text of each cell."""
    introduction, *parts = [part.strip("\n") for part in BLOCK.split(page)]
    # Code and text take turns.
    rest = [("markdown" if i % 2 else "code", part) for i, part in enumerate(parts) if part]
    return [("markdown", introduction), ("code", SETUP.strip("\n")), *rest]


def notebook(page: str) -> str:
    """Return the notebook's file, without results."""
    made: list[dict[str, Any]] = []
    for i, (kind, text) in enumerate(cells(page)):
        cell = {"cell_type": kind, "id": f"cell-{i}", "metadata": {}}
        of_kind = {"execution_count": None, "outputs": []} if kind == "code" else {}
        made.append(cell | of_kind | {"source": text.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    """Write or check the notebook."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    made = notebook(PAGE.read_text())
    if NOTEBOOK.exists() and NOTEBOOK.read_text() == made:
        return 0
    if check:
        print("run tools/make_notebook.py", file=sys.stderr)
        return 1
    NOTEBOOK.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
