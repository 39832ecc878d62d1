"""One process, one device. The only communication is that of weights with rollout workers."""

from __future__ import annotations

from torch import nn

from lightstep.config import ConfigError
from lightstep.strategy.base import Strategy


class SingleDeviceStrategy(Strategy):
    """The whole model on one device."""

    def _check_world_size(self) -> None:
        training = self.roles.trainer_ranks
        if len(training) > 1:
            raise ConfigError(
                f"{self.name}: sharding.kind single trains in one process, and roles.rollout.ranks leaves "
                f"{len(training)} of them to train; take ddp or fsdp2, or more ranks for rollout"
            )

    def _prepare(self, model: nn.Module) -> nn.Module:
        return self._place_model(model)
