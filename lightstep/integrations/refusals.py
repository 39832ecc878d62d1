"""What does not go together with accelerate, and what to do instead."""

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

__all__ = ["inner_optimizer", "refuse_contradictions", "refuse_other_norm", "refuse_part", "refuse_stranger"]

_KINDS = ("single", "ddp", "fsdp2")


def inner_optimizer(optimizer: torch.optim.Optimizer) -> BaseOptimizer:
    """The lightstep optimizer inside accelerate's wrapper, or itself.

    Raises:
        TypeError: it is another library's.
    """
    inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    if isinstance(inner, BaseOptimizer):
        return inner
    kind = type(inner)
    raise TypeError(
        f"the optimizer is of class {kind.__module__}.{kind.__qualname__}, and lightstep's own is needed, which "
        f"keeps masters, scales and clips: strategy.create_optimizer(model, {kind.__name__}, lr=...)"
    )


def refuse_contradictions(accelerator: Accelerator, strategy: Strategy) -> None:
    """
    Raises:
        ConfigError: what the accelerator was told contradicts the strategy.
    """
    kind, name = strategy.config.sharding.kind, strategy.name
    if kind not in _KINDS:
        raise ConfigError(
            f"{name}: sharding.kind {kind} brings an engine of its own, which takes the place of accelerate and of the "
            f"Trainer's loop; use it in a plain loop, or choose a strategy of kind {', '.join(_KINDS)}"
        )
    started = dist.get_world_size() if initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != started:
        raise ConfigError(
            f"{name}: {started} processes were started, and accelerate sees {accelerator.num_processes}: all of them "
            "would train on the same rows. On CPUs say use_cpu=True in TrainingArguments, or Accelerator(cpu=True)"
        )
    if accelerator.mixed_precision in ("fp16", "fp8") or accelerator.scaler is not None:
        raise ConfigError(
            f"{name}: mixed_precision is {accelerator.mixed_precision!r}, which scales or quantises beside lightstep's "
            "loss scale; leave it out (fp16=True in TrainingArguments), and set precision.parameters: float16 with "
            "precision.loss_scale: {kind: dynamic} in the strategy (preset 'fp16'), or use 'bf16'"
        )
    if accelerator.mixed_precision == "bf16" and strategy.config.precision.parameters == "float16":
        raise ConfigError(
            f"{name}: mixed_precision is 'bf16' (bf16=True in TrainingArguments; TRL's default), and "
            "precision.parameters is float16, which autocast would compute in bfloat16; set it to 'no' (bf16=False)"
        )
    if accelerator.device.type != strategy.device.type:
        raise ConfigError(
            f"{name}: accelerate works on {accelerator.device.type} (cpu=True, use_cpu=True in TrainingArguments?), "
            f"the strategy on {strategy.device.type}; hide the device (CUDA_VISIBLE_DEVICES=''), or leave that out"
        )
    distributed = accelerator.distributed_type
    if distributed in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise ConfigError(
            f"{name}: accelerate runs {distributed.value}, which has an optimizer of its own; sharding.kind is {kind}. "
            "Start without it (accelerate config, ACCELERATE_USE_* variables, deepspeed= in TrainingArguments)"
        )
    if distributed == DistributedType.FSDP:
        _refuse_plugin(accelerator, strategy)
    elif kind == "single" and accelerator.num_processes > 1:
        raise ConfigError(
            f"{name}: sharding.kind single is for one process, and {accelerator.num_processes} are running; choose a "
            "strategy of kind ddp (ddp, ddp-stream) or fsdp2 (fsdp2, fsdp2-stream)"
        )


def _refuse_plugin(accelerator: Accelerator, strategy: Strategy) -> None:
    sharding = strategy.config.sharding
    if not isinstance(sharding, FSDP2Sharding):
        raise ConfigError(
            f"{strategy.name}: accelerate shards with FSDP (fsdp in TrainingArguments, or a plugin), and "
            f"sharding.kind of the strategy is {sharding.kind}; choose one of kind fsdp2 (fsdp2, fsdp2-stream), or "
            "switch accelerate's FSDP off"
        )
    if not accelerator.is_fsdp2:
        raise ConfigError(f"{strategy.name}: accelerate's FSDP plugin has fsdp_version 1; set fsdp_version=2")
    own = {"kind", "compute"}
    ignored = [
        f"{key} {value}"
        for key, value in sharding.model_dump().items()
        if key not in own and value != FSDP2Sharding(kind="fsdp2").model_dump()[key]
    ]
    if ignored:
        raise ConfigError(
            f"{strategy.name}: accelerate shards as its FSDP plugin says, and sharding.{ignored[0]} of the strategy "
            "would do nothing; set it in the plugin (fsdp_config), or switch accelerate's FSDP off and let the "
            "strategy shard"
        )


def refuse_stranger(strategy: Strategy, optimizer: BaseOptimizer, model: nn.Module) -> None:
    """
    Raises:
        ValueError: the optimizer was not made by this strategy for this model.
    """
    if not strategy.trains(model, optimizer):
        raise ValueError(
            f"{strategy.name}: this optimizer was not made by this strategy for this {type(model).__name__}; hand over "
            "the model and the strategy that were used: optimizer = strategy.create_optimizer(model, ...)"
        )


def refuse_other_norm(optimizer: MixedPrecisionOptimizer, max_norm: float, norm_type: float) -> None:
    """
    Raises:
        ConfigError: the strategy clips by another norm.
    """
    own = math.inf if optimizer.max_norm is None else optimizer.max_norm
    if (max_norm not in (own, math.inf)) or norm_type != optimizer.norm_type:
        raise ConfigError(
            f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}): the strategy has clipping.max_norm "
            f"{optimizer.max_norm} and norm_type {optimizer.norm_type}, and gradients are clipped once, in step(); say "
            f"it in one place: Strategy.load(..., {{'clipping.max_norm': {max_norm}}})"
        )


def refuse_part(optimizer: MixedPrecisionOptimizer, parameters: Iterable[Tensor]) -> None:
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
            f"clip_grad_norm_ without {len(missing)} of the optimizer's parameters (shapes {missing[:3]}): there is "
            "one norm of all gradients; pass model.parameters()"
        )
