"""One process, one device. The only communication is that of weights with rollout workers, and that of a model which
something else has sharded."""

from __future__ import annotations

from torch import nn

from lightstep.config import ConfigError
from lightstep.distributed import is_sharded
from lightstep.strategy.base import Strategy


class SingleDeviceStrategy(Strategy):
    """The whole model on one device, or shards that were made before: by the caller's own ``fully_shard``."""

    def _prepare(self, model: nn.Module) -> nn.Module:
        return self._place_model(model)

    def _check_prepared(self, model: nn.Module) -> None:
        super()._check_prepared(model)
        if self.world_size > 1 and not any(map(is_sharded, model.parameters())):
            raise ConfigError(
                f"{self.name}: sharding.kind single trains a whole model in one process, and roles.rollout.ranks "
                f"leaves {self.world_size} of them to train, which would train apart; take ddp or fsdp2, or more ranks "
                "for rollout"
            )
