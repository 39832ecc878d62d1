"""Checks of what a user gives accelerate or the Trainer: what contradicts the strategy is refused in one sentence."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

from lightstep.extras import needs

with needs("train"):
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType

from lightstep.config import ConfigError, DDPSharding, FSDP2Sharding
from lightstep.distributed import initialized
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.strategy import Strategy

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = logging.getLogger(__name__)

# -- accelerate --------------------------------------------------------------------------------------------------------

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
    offloads = isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
    if strategy.config.weights.placement == "host" and offloads:
        raise ConfigError(
            f"{strategy.name}: accelerate's FSDP plugin has cpu_offload (fsdp_config: offload_params), and "
            "weights.placement is host: both keep the shards on the host; leave cpu_offload out"
        )
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


def check_clipping(
    optimizer: MixedPrecisionOptimizer, parameters: Iterable[Tensor], max_norm: float, norm_type: float
) -> None:
    """
    Raises:
        ConfigError: the strategy clips by another norm.
        ValueError: parameters of the optimizer are missing.
    """
    expected = math.inf if optimizer.max_norm is None else optimizer.max_norm
    if (max_norm not in (expected, math.inf)) or norm_type != optimizer.norm_type:
        raise ConfigError(
            f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}): the strategy has clipping.max_norm "
            f"{optimizer.max_norm} and norm_type {optimizer.norm_type}, and gradients are clipped once, in step(); set "
            f"the norm in the strategy: Strategy.load(..., {{'clipping.max_norm': {max_norm}}})"
        )
    given, own = set(parameters), [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    missing = [tuple(parameter.shape) for parameter in own if parameter not in given]
    if missing:
        raise ValueError(
            f"clip_grad_norm_ without {len(missing)} of the optimizer's parameters (shapes {missing[:3]}): the "
            "norm is that of all gradients; pass model.parameters()"
        )


# -- the Trainer -------------------------------------------------------------------------------------------------------

_DDP_KEYS = {
    "ddp_find_unused_parameters": "find_unused_parameters",
    "ddp_bucket_cap_mb": "bucket_mib",
    "ddp_static_graph": "static_graph",
}
_UNSUPPORTED_LIBRARIES = (
    "bitsandbytes",
    "torchao",
    "galore_torch",
    "apollo_torch",
    "lomo_optim",
    "schedulefree",
    "apex",
)


def check_arguments(args: TrainingArguments, strategy: Strategy) -> None:
    name = strategy.name
    if args.n_gpu > 1:
        raise ConfigError(
            f"{name}: one process sees {args.n_gpu} GPUs, and the Trainer would use nn.DataParallel; start one process "
            "per GPU with torchrun, or make one GPU visible (CUDA_VISIBLE_DEVICES=0)"
        )
    if args.save_on_each_node and args.world_size > int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size)):
        raise ConfigError(
            f"{name}: save_on_each_node=True on several nodes, and all processes save to one folder, on a disk that "
            "all nodes share; leave save_on_each_node out"
        )
    _check_clipping(args, strategy)
    _check_ddp_arguments(args, strategy)


def check_asynchronous_saves(args: TrainingArguments) -> None:
    if args.save_only_model:
        raise ConfigError(
            "asynchronous_saves=True and save_only_model=True: the Trainer writes the weights itself, and waits for "
            "that; leave one of the two out"
        )
    if args.push_to_hub and args.hub_strategy.value != "end":
        raise ConfigError(
            f"asynchronous_saves=True and push_to_hub with hub_strategy={args.hub_strategy.value!r}: the Trainer "
            "uploads a checkpoint before it is written; set hub_strategy='end', or leave asynchronous_saves out"
        )


def is_max_norm_chosen(args: TrainingArguments) -> bool:
    """Whether ``max_grad_norm`` differs from its default, which cannot be told from a choice and is ignored."""
    default = next(field.default for field in dataclasses.fields(args) if field.name == "max_grad_norm")
    return bool(args.max_grad_norm != default)


def max_norm(given: float) -> float | None:
    """``max_grad_norm`` as ``clipping.max_norm``: the Trainer's 0, or a value below, means no clipping, ``None``."""
    return given if given and given > 0 and math.isfinite(given) else None


def _check_clipping(args: TrainingArguments, strategy: Strategy) -> None:
    """``max_grad_norm`` overrides a preset's norm, and contradicts one from a file, a mapping or an override."""
    clipping, given = strategy.config.clipping, args.max_grad_norm
    if not is_max_norm_chosen(args):
        logger.info("lightstep: clipping.max_norm %s of the strategy is used, not max_grad_norm", clipping.max_norm)
        return
    chosen = "max_norm" in dict(strategy.chosen.get("clipping", {}))
    if chosen and max_norm(given) != clipping.max_norm:
        raise ConfigError(
            f"{strategy.name}: max_grad_norm={given} in TrainingArguments, clipping.max_norm {clipping.max_norm} in "
            f"the strategy: gradients are clipped once, in step(). Leave max_grad_norm out, and give the strategy "
            f"{{'clipping.max_norm': {max_norm(given)}}}: Strategy.load(name, overrides)"
        )


def _check_ddp_arguments(args: TrainingArguments, strategy: Strategy) -> None:
    sharding = strategy.config.sharding
    for argument, key in _DDP_KEYS.items() if isinstance(sharding, DDPSharding) else ():
        given, expected = getattr(args, argument), getattr(sharding, key)
        if given is not None and given != expected:
            raise ConfigError(
                f"{strategy.name}: {argument}={given} in TrainingArguments, and sharding.{key} {expected} in the "
                f"strategy, which wraps the model; leave {argument} out, and set sharding.{key}"
            )


def check_groups(model: nn.Module, loss: Any, values: Mapping[str, Any]) -> None:
    """
    Args:
        loss: the trainer's loss modules, if it has any (Sentence Transformers).
        values: with the groups that a class made from the Trainer may have put there, under the Trainer's keys.

    Raises:
        ConfigError: there are parameters in them that are not the model's.
    """
    groups = [*values.get("params", ()), *values.get("optimizer_dict", ())]
    own = set(model.parameters())
    others = [p for group in groups if isinstance(group, Mapping) for p in group["params"] if p not in own]
    if others:
        shapes = ", ".join(str(tuple(p.shape)) for p in others[:3])
        raise ConfigError(
            f"{len(others)} of the parameters to train (shapes {shapes}) are not the model's but of the loss, "
            f"{type(loss).__name__}: the strategy casts, places and shards the model alone. Choose a loss without "
            "weights of its own, or make them a part of the model"
        )


def check_optimizer_class(optimizer_class: Any, values: Mapping[str, Any], optim: str | None) -> None:
    source = "optimizer_cls_and_kwargs" if optim is None else f"optim={str(optim)!r} in TrainingArguments"
    is_class = isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    wraps = is_class and issubclass(optimizer_class, BaseOptimizer)
    library = getattr(optimizer_class, "__module__", "").partition(".")[0]
    per_parameter = "optimizer_dict" in values and not isinstance(values["optimizer_dict"], list)  # optimizers
    if not is_class or wraps or library in _UNSUPPORTED_LIBRARIES or per_parameter or "model" in values:
        raise ConfigError(
            f"{source} is {getattr(optimizer_class, '__name__', optimizer_class)} of {library}, which does more than "
            "update a weight from its gradient; lightstep runs any element-wise torch.optim.Optimizer class on its "
            "masters: 'adamw_torch', 'adamw_torch_fused', 'sgd', 'adagrad', 'rmsprop', or a class of your own; for "
            "Muon give rules=[{'kinds': 'hidden_matrices', 'name': 'Muon', 'lr': 0.02}, {'kinds': 'rest'}]"
        )


def check_gradients_are_kept(optimizer: MixedPrecisionOptimizer, callbacks: Sequence[str]) -> None:
    """
    Args:
        callbacks: the classes that define ``on_pre_optimizer_step`` or ``on_optimizer_step``.

    Raises:
        ConfigError: there are some, and gradients are freed before, or each layer is clipped by its own norm.
    """
    if not callbacks:
        return
    if optimizer.engine.update_time.in_backward:
        why, remedy = "optimizer_state.update in_backward has used and freed the gradients", "update: at_step"
    elif optimizer.engine.host_gradients is not None:
        why, remedy = "weights.placement host takes gradients to the host", "placement: device"
    elif optimizer.clip_layers and optimizer.max_norm is not None:
        why, remedy = "clipping.scope unit clips each layer when it is updated", "clipping.scope: global"
    else:
        return
    raise ConfigError(
        f"{', '.join(callbacks)}: on_pre_optimizer_step and on_optimizer_step get the clipped gradients, and {why} "
        f"before; set {remedy}, or use other events"
    )
