"""Coordinates the ranks of a run with CPU tensors, so nothing here waits for a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from lightstep.config import ConfigError
from lightstep.distributed import Ranks, world_size
from lightstep.strategy import Strategy
from lightstep.strategy.process_group import ProcessGroupStrategy

Result = TypeVar("Result")


def join(strategy: Strategy) -> None:
    """Start the process group if the strategy is for several ranks.

    Raises:
        ConfigError: torchrun's processes do not match the strategy, or it has asynchronous roles.
    """
    if strategy.roles.asynchronous:
        raise ConfigError(
            f"strategy {strategy.name}: roles.rollout.mode is async, and lightstep train has nothing to generate; "
            "leave roles out"
        )
    if isinstance(strategy, ProcessGroupStrategy):
        strategy.start()
    elif (started := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ConfigError(
            f"torchrun started {started} processes, and strategy {strategy.name} is for one; "
            "choose a sharded strategy (sharding.kind ddp, fsdp2 or deepspeed) or start without torchrun"
        )


def together(action: Callable[[], Result], only_first: bool = False) -> Result:
    """Run ``action`` and raise on all ranks if it fails on any, so that no rank keeps waiting.

    Args:
        action: must not communicate.
        only_first: run it on the first rank only; all ranks get its result.
    """
    return Ranks().together(action, only_first)


def mean(values: Sequence[float]) -> list[float]:
    """Elementwise mean over the ranks."""
    if world_size() == 1 or not values:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / world_size()).tolist()


def highest(value: int) -> int:
    """Maximum over the ranks."""
    if world_size() == 1:
        return value
    most = torch.tensor(value)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)
