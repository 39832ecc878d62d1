"""What the ranks of a run agree on. Over CPU tensors: nothing here waits for a device."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightstep.config import ConfigError
from lightstep.distributed import world_size
from lightstep.strategy import Strategy


def check_world(strategy: Strategy) -> None:
    """Raises :class:`ConfigError` when torchrun started several processes and the strategy is for one."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1 and strategy.world_size == 1:
        raise ConfigError(
            f"torchrun started {started} processes, and strategy {strategy.name} is for one; "
            "choose a sharded strategy (sharding.kind ddp or fsdp2) or start without torchrun"
        )


def mean(values: Sequence[float]) -> list[float]:
    """Element by element the mean over the ranks."""
    if world_size() == 1 or not values:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / world_size()).tolist()


def highest(value: int) -> int:
    """The largest value of any rank."""
    if world_size() == 1:
        return value
    most = torch.tensor(value)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)
