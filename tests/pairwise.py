"""Chooses among the products of parameters: each pair of values occurs, not each combination."""

import collections
import itertools
from collections.abc import Sequence

import pytest


def _pairs(item: pytest.Function) -> frozenset[tuple[tuple[str, str], tuple[str, str]]]:
    """Every pair of a test's parameters, each as a name and what its value looks like."""
    params = sorted((name, repr(value)) for name, value in item.callspec.params.items())
    return frozenset(itertools.combinations(params, 2))


def beyond_pairs(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the tests without which each pair of parameters still occurs, function by function.

    The choice depends on the order of collection alone. Tests of up to two parameters all stay.
    """
    functions = collections.defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            functions[item.path, item.originalname].append(item)
    beyond = set()
    for tests in functions.values():
        pairs = {test: _pairs(test) for test in tests}
        missing = set().union(*pairs.values())
        rest = list(tests)
        while missing:
            best = max(rest, key=lambda test: len(pairs[test] & missing))
            missing -= pairs[best]
            rest.remove(best)
        if any(len(test.callspec.params) > 2 for test in tests):
            beyond.update(rest)
    return beyond
