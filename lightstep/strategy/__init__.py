"""Strategies: sharding, precision, clipping and the placement of optimizer state in one object, read from a file."""

from lightstep.strategy.base import Strategy
from lightstep.strategy.presets import available_strategies

__all__ = ["Strategy", "available_strategies"]
