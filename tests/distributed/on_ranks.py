"""Tests that are written as what each rank does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tests.distributed.ranks import Pool


def on_ranks(world_size: int, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a function a test that runs it on so many ranks of the pool: ``function(rank, world_size, **arguments)``.

    Its arguments behind ``world_size`` are those of the test: parameters, and fixtures whose values can be pickled.

    Args:
        options: of :meth:`Pool.run`.
    """

    def mark(check: Callable[..., Any]) -> Callable[..., None]:
        def test(pool: Pool, **arguments: Any) -> None:
            pool.run(check, world_size, **options, **arguments)

        pool, *_ = inspect.signature(test).parameters.values()
        own = list(inspect.signature(check).parameters.values())[2:]
        test.__signature__ = inspect.Signature([pool, *own])  # type: ignore[attr-defined]
        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        check.__qualname__ += ".check"  # where the ranks find it
        test.check = check  # type: ignore[attr-defined]
        return test

    return mark
