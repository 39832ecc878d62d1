"""The pool of rank processes that all distributed tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    ranks = Pool()
    yield ranks
    ranks.close()
