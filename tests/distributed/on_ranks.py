"""Tests that are written as what each rank does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.distributed.ranks import Pool


def on_ranks(
    ranks: int | None, names: str | tuple[str, ...] = (), cases: Sequence[Any] = ((),), **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a function a test that runs it on so many ranks of the pool: ``function(rank, world_size, **arguments)``.

    Its arguments behind ``world_size`` are those of the test: parameters, and fixtures whose values can be pickled.

    Args:
        ranks: how many. ``None``: each case says so, as its ``ranks``.
        names, cases: other arguments, as for ``pytest.mark.parametrize``: of calls that follow each other in one
            process group.
        options: of :meth:`Pool.run`.
    """
    rows = [{names: case} if isinstance(names, str) else dict(zip(names, case, strict=True)) for case in cases]
    sizes = [row.pop("ranks", ranks) for row in rows]

    def mark(function: Callable[..., Any]) -> Callable[..., None]:
        def check(rank: int, world_size: int, **arguments: Any) -> None:
            for case in (row for row, size in zip(rows, sizes, strict=True) if size == world_size):
                torch.manual_seed(0)
                try:
                    function(rank, world_size, **arguments, **case)
                except BaseException as error:
                    error.add_note(f"in the case {case}")
                    raise

        def test(pool: Pool, **arguments: Any) -> None:
            for size in dict.fromkeys(sizes):
                pool.run(check, size, **options, **arguments)

        pool, *_ = inspect.signature(test).parameters.values()
        own = list(inspect.signature(function).parameters.values())[2:]
        given = [parameter for parameter in own if parameter.name not in rows[0]]
        test.__signature__ = inspect.Signature([pool, *given])  # type: ignore[attr-defined]
        test.__name__, test.__doc__, test.__module__ = function.__name__, function.__doc__, function.__module__
        check.__module__, check.__qualname__ = function.__module__, f"{function.__qualname__}.check"
        test.check = check  # type: ignore[attr-defined]
        return test

    return mark
