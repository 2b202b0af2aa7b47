"""Marks cases that the quick run leaves out."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], names: Collection[str]) -> list[Any]:
    """Return the cases as parameters; all but the named ones are for `--all`."""
    params = []
    for case in cases:
        marks = () if case.name in names else (pytest.mark.full,)
        params.append(pytest.param(case, marks=marks, id=case.name))
    missing = set(names) - {case.name for case in cases}
    assert not missing, missing
    return params
