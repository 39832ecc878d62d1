"""What the ranks of a run agree on. Over CPU tensors: nothing here waits for a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from lightstep.checkpoint.ranks import Ranks
from lightstep.config import ConfigError
from lightstep.distributed import world_size
from lightstep.strategy import Strategy
from lightstep.strategy.process_group import ProcessGroupStrategy

Result = TypeVar("Result")


def join(strategy: Strategy) -> None:
    """Have the ranks find each other, where the strategy is for several.

    Raises:
        ConfigError: torchrun started several processes and the strategy is for one, or the other way round.
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
    """Do what may fail on one rank alone, so that a failure ends all of them: none is left waiting for the others.

    Args:
        action: without communication.
        only_first: on the first rank; all get its result.
    """
    return Ranks().together(action, only_first)


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
