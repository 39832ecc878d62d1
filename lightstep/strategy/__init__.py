"""Strategies: sharding, precision, clipping and the placement of optimizer state in one object, read from a file."""

from lightstep.presets import available_strategies
from lightstep.strategy.base import Strategy

__all__ = ["Strategy", "available_strategies"]
