"""What the quick run leaves out: tests that only `--all` runs."""

import collections
import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

# Every value of these occurs in each file, and not in each function. So most functions run on the
# CPU's kernels and not on the definition as well, and on one kind of mesh.
BY_FILE = ("backend", "implementation", "kind")
DEFINITION = "reference"
# A field of cases that has more values than this, such as lengths, says nothing about a case.
MANY = 8
Value = tuple[str, ...]


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


def _values(item: pytest.Function) -> set[Value]:
    """Every value of a parameter, as its name and what it looks like. Cases give their fields."""
    values = set()
    for name, value in item.callspec.params.items():
        if dataclasses.is_dataclass(value):
            fields = {field.name for field in dataclasses.fields(value)} - {"name", "why"}
            values.update((name, field, repr(getattr(value, field))) for field in fields)
            if why := getattr(value, "why", ""):  # such a case is there for a reason
                values.add((name, why))
        else:
            values.add((name, repr(value)))
    return values


def _of_wide_fields(values: Iterable[Collection[Value]]) -> set[Value]:
    """The values of those fields of cases that have too many to try each."""
    by_field = collections.defaultdict(set)
    for value in set().union(*values):
        by_field[value[:-1]].add(value)
    return set().union(*(f for name, f in by_field.items() if len(name) == 2 and len(f) > MANY))


def beyond_values(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the tests without which each value of a parameter still occurs.

    It occurs in each function that has the parameter, or, for those of BY_FILE, in each file. Tests
    of one other parameter all stay. The mark `quick(n)` says how many tests of a function stay at
    most. The choice depends on the order of collection alone.
    """
    functions = collections.defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            functions[item.path, item.originalname].append(item)
    uses = collections.defaultdict(collections.Counter)
    beyond = set()
    for (path, _), tests in functions.items():
        kept = _to_keep(tests, uses[path])
        beyond.update(test for test in tests if test not in kept)
        for test in kept:
            uses[path].update(value for value in _values(test) if value[0] in BY_FILE)
    return beyond


def _to_keep(tests: Sequence[pytest.Function], uses: collections.Counter) -> list[pytest.Function]:
    """The tests of a function that stay; `uses` counts the values of BY_FILE in its file so far."""
    mark = tests[0].get_closest_marker("quick")
    limit = mark.args[0] if mark else len(tests)
    if len(tests[0].callspec.params) == 1 and not set(BY_FILE) & set(tests[0].callspec.params):
        return list(tests[:: -(-len(tests) // limit)])
    values = {test: _values(test) for test in tests}
    wide = _of_wide_fields(values.values())
    rest = sorted(tests, key=lambda test: DEFINITION in map(test.callspec.params.get, BY_FILE))
    missing, kept = set().union(*values.values()) - wide - set(uses), []
    while rest and len(kept) < limit and (missing or not kept):
        best = max(rest, key=lambda t: (len(values[t] & missing), -sum(uses[v] for v in values[t])))
        missing -= values[best]
        rest.remove(best)
        kept.append(best)
    return kept
