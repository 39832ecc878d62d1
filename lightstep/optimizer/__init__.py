"""The optimizer interface and the mixed-precision optimizer."""

from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.optimizer.update import StepResult

__all__ = ["BaseOptimizer", "MixedPrecisionOptimizer", "StepResult"]
