"""One object that decides sharding, precision, clipping and the place of optimizer state, read from one file."""

from lightstep.strategy.base import Strategy
from lightstep.strategy.presets import available_strategies

__all__ = ["Strategy", "available_strategies"]
