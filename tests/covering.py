"""Cases out of several axes: every two values of different axes meet, and most combinations of three are left out.

A defect shows with one value, or where two meet (a dtype on a backend, a class at an update time). All combinations of
6 optimizers, 3 dtypes, 2 counts and 5 backends are 180 runs; every pair of them meets in 30.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def every_pair(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` over the arguments ``axes``, in the same few cases every time."""
    values = [list(axis) for axis in axes.values()]
    cases = [tuple(axis[i] for axis, i in zip(values, case, strict=True)) for case in _cases([*map(len, values)])]
    return pytest.mark.parametrize(tuple(axes), cases)


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
