"""The pool of rank processes that all distributed tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.distributed.ranks import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    from tests.distributed.ranks import Pool  # not by who hands out tests

    ranks = Pool()
    yield ranks
    ranks.close()
