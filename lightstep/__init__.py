"""Optimizer state on the host, at the speed of optimizer state on the GPU, bit for bit the same weights."""

from lightstep.checkpoint.checkpoint import CheckpointError
from lightstep.clipping import clip_grad_norm_, global_grad_norm
from lightstep.config import ConfigError
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.optimizer.result import StepResult
from lightstep.precision.loss_scale import ConstantLossScale, DynamicLossScale, LossScale
from lightstep.rollout.engine import RolloutEngine, TransformersEngine
from lightstep.rollout.transport import (
    TrainingEnded,
    WeightInfo,
    WeightTransferError,
    WeightTransport,
)
from lightstep.state.bulk import load_fsdp_optimizer, offload_fsdp_optimizer
from lightstep.strategy import Strategy, available_strategies

__version__ = "0.1.0"

__all__ = [
    "BaseOptimizer",
    "CheckpointError",
    "ConfigError",
    "ConstantLossScale",
    "DynamicLossScale",
    "LossScale",
    "MixedPrecisionOptimizer",
    "RolloutEngine",
    "StepResult",
    "Strategy",
    "TrainingEnded",
    "TransformersEngine",
    "WeightInfo",
    "WeightTransferError",
    "WeightTransport",
    "available_strategies",
    "clip_grad_norm_",
    "global_grad_norm",
    "load_fsdp_optimizer",
    "offload_fsdp_optimizer",
]
