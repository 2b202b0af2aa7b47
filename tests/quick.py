"""What the quick run leaves out: tests that only `--all` runs."""

import collections
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def some(cases: Iterable[Any], names: Collection[str]) -> list[Any]:
    """Return the cases as parameters; all but the named ones are for `--all`."""
    cases = list(cases)
    missing = set(names) - {case.name for case in cases}
    assert not missing, missing
    return [
        pytest.param(case, marks=() if case.name in names else pytest.mark.full, id=case.name)
        for case in cases
    ]


def seeds(number: int, quick: int) -> list[Any]:
    """Return seeds of random inputs as parameters; those from `quick` on are for `--all`."""
    return [pytest.param(i, marks=() if i < quick else pytest.mark.full) for i in range(number)]


def _values(item: pytest.Function) -> frozenset[tuple[str, str]]:
    """Every value of a test's parameters, as a name and what it looks like."""
    return frozenset((name, repr(value)) for name, value in item.callspec.params.items())


def beyond_values(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the tests without which each value of a parameter still occurs, function by function.

    The choice depends on the order of collection alone. Tests of one parameter all stay.
    """
    functions = collections.defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            functions[item.path, item.originalname].append(item)
    beyond = set()
    for tests in functions.values():
        values = {test: _values(test) for test in tests}
        missing = set().union(*values.values())
        rest = list(tests)
        while missing:
            best = max(rest, key=lambda test: len(values[test] & missing))
            missing -= values[best]
            rest.remove(best)
        if any(len(test.callspec.params) > 1 for test in tests):
            beyond.update(rest)
    return beyond
