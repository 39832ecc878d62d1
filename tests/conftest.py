"""What every test gets: one thread (bitwise repeatable sums, many workers on few cores) and a fixed seed."""

from __future__ import annotations

import gc

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """The collector, which some tests call, need not look at a million objects of imported modules each time."""
    gc.collect()
    gc.freeze()
