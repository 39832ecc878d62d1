"""The optimizer contract and the mixed-precision optimizer that keeps it."""

from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.optimizer.result import StepResult

__all__ = ["BaseOptimizer", "MixedPrecisionOptimizer", "StepResult"]
