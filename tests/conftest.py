"""What every test gets: one thread (bitwise repeatable sums, many workers on few cores) and a fixed seed."""

from __future__ import annotations

import gc
import multiprocessing

import pytest
import torch

torch.set_num_threads(1)

# By the one process that ranks and examples are forked from. (GPUs cannot be used after a fork: ranks that see some
# import these themselves.)
multiprocessing.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        "transformers.trainer",
        "transformers.models.llama.modeling_llama",
        "lightstep.strategy.base",
        "lightstep.sharding",
        "lightstep.checkpoint",
        "tests.snippets",
        "tests.distributed.models",
    ]
)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """The collector, which some tests call, need not look at a million objects of imported modules each time."""
    gc.collect()
    gc.freeze()
