"""Checks of an Accelerator, its model and its optimizer against the strategy."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn

from lightstep import MixedPrecisionOptimizer
from lightstep.config import ConfigError, FSDP2Sharding
from lightstep.distributed import initialized
from lightstep.optimizer.base import BaseOptimizer
from lightstep.strategy import Strategy

__all__ = [
    "check_accelerator",
    "check_all_parameters",
    "check_made_by_strategy",
    "check_max_norm",
    "check_one_dtype",
    "unwrap_optimizer",
]

_SUPPORTED_KINDS = ("single", "ddp", "fsdp2")


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> BaseOptimizer:
    """The lightstep optimizer, taken out of accelerate's wrapper.

    Raises:
        TypeError: the optimizer is another library's.
    """
    inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    if isinstance(inner, BaseOptimizer):
        return inner
    kind = type(inner)
    raise TypeError(
        f"the optimizer is of class {kind.__module__}.{kind.__qualname__}, which keeps no masters, "
        f"and does not scale or clip; create it by strategy.create_optimizer(model, {kind.__name__}, lr=...)"
    )


def check_accelerator(accelerator: Accelerator, strategy: Strategy) -> None:
    """
    Raises:
        ConfigError: settings of the accelerator contradict the strategy.
    """
    kind, name = strategy.config.sharding.kind, strategy.name
    if kind not in _SUPPORTED_KINDS:
        raise ConfigError(
            f"{name}: sharding.kind {kind} has an engine that replaces accelerate and the Trainer's loop; use it in a "
            f"plain loop, or choose a strategy of kind {', '.join(_SUPPORTED_KINDS)}"
        )
    started = dist.get_world_size() if initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != started:
        raise ConfigError(
            f"{name}: {started} processes were started, and accelerate sees {accelerator.num_processes}: all of them "
            "would train on the same rows. On CPUs set use_cpu=True in TrainingArguments, or Accelerator(cpu=True)"
        )
    if accelerator.mixed_precision in ("fp16", "fp8") or accelerator.scaler is not None:
        raise ConfigError(
            f"{name}: mixed_precision is {accelerator.mixed_precision!r}, which scales or quantises in addition to "
            "lightstep's loss scale; leave it out (fp16=True in TrainingArguments), and set precision.parameters: "
            "float16 with precision.loss_scale: {kind: dynamic} in the strategy (preset 'fp16'), or use 'bf16'"
        )
    if accelerator.mixed_precision == "bf16" and strategy.config.precision.parameters == "float16":
        raise ConfigError(
            f"{name}: mixed_precision is 'bf16' (bf16=True in TrainingArguments; TRL's default), and "
            "precision.parameters is float16, which autocast would compute in bfloat16; set it to 'no' (bf16=False)"
        )
    if accelerator.device.type != strategy.device.type:
        raise ConfigError(
            f"{name}: accelerate uses {accelerator.device.type} (cpu=True, or use_cpu=True in TrainingArguments), the "
            f"strategy {strategy.device.type}; hide the device (CUDA_VISIBLE_DEVICES=''), or remove that setting"
        )
    distributed = accelerator.distributed_type
    if distributed in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise ConfigError(
            f"{name}: accelerate runs {distributed.value}, which has its own optimizer; sharding.kind is {kind}. "
            "Start without it (accelerate config, ACCELERATE_USE_* variables, deepspeed= in TrainingArguments)"
        )
    if distributed == DistributedType.FSDP:
        _check_fsdp_plugin(accelerator, strategy)
    elif kind == "single" and accelerator.num_processes > 1:
        raise ConfigError(
            f"{name}: sharding.kind single is for one process, and {accelerator.num_processes} are running; choose a "
            "strategy of kind ddp (ddp, ddp-stream) or fsdp2 (fsdp2, fsdp2-stream)"
        )


def _check_fsdp_plugin(accelerator: Accelerator, strategy: Strategy) -> None:
    sharding = strategy.config.sharding
    if not isinstance(sharding, FSDP2Sharding):
        raise ConfigError(
            f"{strategy.name}: accelerate shards with FSDP (fsdp in TrainingArguments, or a plugin), and "
            f"sharding.kind of the strategy is {sharding.kind}; choose a strategy of kind fsdp2 (fsdp2, fsdp2-stream), "
            "or switch accelerate's FSDP off"
        )
    if not accelerator.is_fsdp2:
        raise ConfigError(f"{strategy.name}: accelerate's FSDP plugin has fsdp_version 1; set fsdp_version=2")
    applied = {"kind", "compute"}
    ignored = [
        f"{key} {value}"
        for key, value in sharding.model_dump().items()
        if key not in applied and value != FSDP2Sharding(kind="fsdp2").model_dump()[key]
    ]
    if ignored:
        raise ConfigError(
            f"{strategy.name}: accelerate shards as its FSDP plugin says, and sharding.{ignored[0]} of the strategy "
            "would have no effect; set it in the plugin (fsdp_config), or switch accelerate's FSDP off and let the "
            "strategy shard"
        )


def check_one_dtype(strategy: Strategy, model: nn.Module) -> None:
    """
    Raises:
        ConfigError: the model keeps trainable parameters in fp32, which accelerate's plugin cannot shard on their own.
    """
    trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}
    kept = [name for name, dtype in trained.items() if dtype != strategy.parameter_dtype]
    if kept:
        raise ConfigError(
            f"{strategy.name}: {type(model).__name__} keeps {len(kept)} trainable parameters in float32 "
            f"(_keep_in_fp32_modules; first: {kept[0]}), and accelerate's FSDP plugin shards parameters of one dtype; "
            "switch accelerate's FSDP off (fsdp in TrainingArguments, or the plugin) and let the strategy shard"
        )


def check_made_by_strategy(strategy: Strategy, optimizer: BaseOptimizer, model: nn.Module) -> None:
    """
    Raises:
        ValueError: the optimizer was not made by this strategy for this model.
    """
    if not strategy.trains(model, optimizer):
        raise ValueError(
            f"{strategy.name}: this optimizer was not made by this strategy for this {type(model).__name__}; pass the "
            "model and the strategy that were used: optimizer = strategy.create_optimizer(model, ...)"
        )


def check_max_norm(optimizer: MixedPrecisionOptimizer, max_norm: float, norm_type: float) -> None:
    """
    Raises:
        ConfigError: the strategy clips by another norm.
    """
    expected = math.inf if optimizer.max_norm is None else optimizer.max_norm
    if (max_norm not in (expected, math.inf)) or norm_type != optimizer.norm_type:
        raise ConfigError(
            f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}): the strategy has clipping.max_norm "
            f"{optimizer.max_norm} and norm_type {optimizer.norm_type}, and gradients are clipped once, in step(); set "
            f"the norm in the strategy: Strategy.load(..., {{'clipping.max_norm': {max_norm}}})"
        )


def check_all_parameters(optimizer: MixedPrecisionOptimizer, parameters: Iterable[Tensor]) -> None:
    """
    Raises:
        ValueError: parameters of the optimizer are missing.
    """
    given = set(parameters)
    missing = [
        tuple(parameter.shape)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and parameter not in given
    ]
    if missing:
        raise ValueError(
            f"clip_grad_norm_ without {len(missing)} of the optimizer's parameters (shapes {missing[:3]}): the "
            "norm is that of all gradients; pass model.parameters()"
        )
