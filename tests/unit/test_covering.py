"""Trimmed parametrisations leave out combinations of values, and no value."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.covering import every_pair, every_value


@pytest.mark.parametrize(("sizes", "most"), [((6, 3, 2, 5), 30), ((7, 3, 3, 2), 22), ((4,), 4), ((1, 3), 3)])
def test_every_two_values_meet(sizes: tuple[int, ...], most: int) -> None:
    axes = {f"axis{number}": [f"{number}.{value}" for value in range(size)] for number, size in enumerate(sizes)}
    names, cases = every_pair(**axes).args
    assert names == tuple(axes) and len(cases) <= most
    met = {pair for case in cases for pair in itertools.combinations(case, 2)}
    assert met == {pair for two in itertools.combinations(axes.values(), 2) for pair in itertools.product(*two)}
    assert {value for case in cases for value in case} == set(itertools.chain(*axes.values()))


def test_every_value_has_its_turn() -> None:
    axes = {"name": ["a", "b", "c"], "dtype": [1, 2], "backend": ["r", "s", "t", "u", "v"]}

    def one(name: str, dtype: int, backend: str) -> None: ...
    def other(name: str, dtype: int, backend: str) -> None: ...

    def cases(test: Any) -> list[Any]:
        return list(every_value(**axes)(test).pytestmark[-1].args[1])

    for test in (one, other):
        assert len(cases(test)) == 5
        assert [set(column) for column in zip(*cases(test), strict=True)] == [set(axis) for axis in axes.values()]
    assert {*cases(one)} != {*cases(other)}
