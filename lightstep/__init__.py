"""Optimizer state on the host, at the speed of optimizer state on the GPU, bit for bit the same weights."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightstep.version import __version__ as __version__

if TYPE_CHECKING:
    from lightstep.checkpoint import CheckpointError
    from lightstep.clipping import clip_grad_norm_, global_grad_norm
    from lightstep.config import ConfigError
    from lightstep.optimizer.base import BaseOptimizer
    from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
    from lightstep.optimizer.param_table import param_table
    from lightstep.optimizer.rules import Rule
    from lightstep.optimizer.update import StepResult
    from lightstep.precision.loss_scale import ConstantLossScale, DynamicLossScale, LossScale
    from lightstep.rollout.engine import RolloutEngine, TransformersEngine
    from lightstep.rollout.servers import SglangFolder, SglangServer, VllmNcclServer, VllmServer
    from lightstep.rollout.transport import (
        TrainingEnded,
        WeightInfo,
        WeightTransferError,
        WeightTransport,
    )
    from lightstep.sharding.weight_average import WeightAverage
    from lightstep.state.torch_offload import load_fsdp_optimizer, offload_fsdp_optimizer
    from lightstep.strategy import Strategy, available_strategies

__all__ = [
    "BaseOptimizer",
    "CheckpointError",
    "ConfigError",
    "ConstantLossScale",
    "DynamicLossScale",
    "LossScale",
    "MixedPrecisionOptimizer",
    "RolloutEngine",
    "Rule",
    "SglangFolder",
    "SglangServer",
    "StepResult",
    "Strategy",
    "TrainingEnded",
    "TransformersEngine",
    "VllmNcclServer",
    "VllmServer",
    "WeightAverage",
    "WeightInfo",
    "WeightTransferError",
    "WeightTransport",
    "available_strategies",
    "clip_grad_norm_",
    "global_grad_norm",
    "load_fsdp_optimizer",
    "offload_fsdp_optimizer",
    "param_table",
]

_MODULES = {
    "checkpoint": ["CheckpointError"],
    "clipping": ["clip_grad_norm_", "global_grad_norm"],
    "config": ["ConfigError"],
    "optimizer.base": ["BaseOptimizer"],
    "optimizer.optimizer": ["MixedPrecisionOptimizer"],
    "optimizer.param_table": ["param_table"],
    "optimizer.update": ["StepResult"],
    "optimizer.rules": ["Rule"],
    "precision.loss_scale": ["ConstantLossScale", "DynamicLossScale", "LossScale"],
    "rollout.engine": ["RolloutEngine", "TransformersEngine"],
    "rollout.servers": ["SglangFolder", "SglangServer", "VllmNcclServer", "VllmServer"],
    "rollout.transport": ["TrainingEnded", "WeightInfo", "WeightTransferError", "WeightTransport"],
    "sharding.weight_average": ["WeightAverage"],
    "state.torch_offload": ["load_fsdp_optimizer", "offload_fsdp_optimizer"],
    "strategy": ["Strategy", "available_strategies"],
}
"""The module that defines each name. It is imported on first use, because torch's DTensors alone take a second."""

_HOME = {name: module for module, names in _MODULES.items() for name in names}

if not TYPE_CHECKING:  # hides missing attributes from type checkers otherwise

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
