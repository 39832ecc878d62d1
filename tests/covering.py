"""Cases out of several axes, without all their combinations.

A defect shows with one value, or where two meet (a dtype on a backend, a class at an update time). All combinations of
6 optimizers, 3 dtypes, 2 counts and 5 backends are 180 runs. Every pair of them meets in 30 (:func:`every_pair`), every
value has its turn in 6 (:func:`every_value`): that is for tests of one more thing that may happen, where other tests
have shown that the values get along.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., Any])


def every_pair(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` over the arguments ``axes``, in the same few cases every time."""
    values = [list(axis) for axis in axes.values()]
    cases = [tuple(axis[i] for axis, i in zip(values, case, strict=True)) for case in _cases([*map(len, values)])]
    return pytest.mark.parametrize(tuple(axes), cases)


def every_value(**axes: Iterable[Any]) -> Callable[[Test], Test]:
    """``pytest.mark.parametrize`` with every value once or more; which of them meet differs from test to test."""
    values = [list(axis) for axis in axes.values()]

    def mark(test: Test) -> Test:
        shift = zlib.crc32(test.__name__.encode())
        rows = range(max(map(len, values)))
        cases = [tuple(axis[(row + (shift >> 3 * n)) % len(axis)] for n, axis in enumerate(values)) for row in rows]
        marked: Test = pytest.mark.parametrize(tuple(axes), cases)(test)
        return marked

    return mark


def _cases(sizes: list[int]) -> list[tuple[int, ...]]:
    """Indices into axes of these sizes. Greedy: each case starts with two that have not met and adds who meets most."""
    if len(sizes) == 1:
        return [(value,) for value in range(sizes[0])]
    by_size = sorted(range(len(sizes)), key=lambda axis: -sizes[axis])
    missing = dict.fromkeys(
        frozenset(pair)
        for a, b in itertools.combinations(by_size, 2)
        for pair in itertools.product(((a, i) for i in range(sizes[a])), ((b, j) for j in range(sizes[b])))
    )
    cases: list[tuple[int, ...]] = []
    used = dict.fromkeys(((a, i) for a in by_size for i in range(sizes[a])), 0)
    while missing:
        case = dict(next(iter(missing)))
        for axis in by_size:
            if axis not in case:
                candidates = [(axis, i) for i in range(sizes[axis])]
                new = [sum(frozenset({one, other}) in missing for other in case.items()) for one in candidates]
                case[axis] = max(candidates, key=lambda one: (new[one[1]], -used[one]))[1]
        for pair in itertools.combinations(case.items(), 2):
            missing.pop(frozenset(pair), None)
        for chosen in case.items():
            used[chosen] += 1
        cases.append(tuple(case[axis] for axis in range(len(sizes))))
    return cases
