"""One process, one device. No communication."""

from __future__ import annotations

from torch import nn

from lightstep.strategy.base import Strategy


class SingleDeviceStrategy(Strategy):
    """The whole model on one device."""

    def _prepare(self, model: nn.Module) -> nn.Module:
        return self._placed(model)
