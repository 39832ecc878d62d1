"""Checks of ``TrainingArguments`` against the strategy."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy

from lightstep.config import ConfigError, DDPSharding, FSDP2Sharding
from lightstep.optimizer.base import BaseOptimizer
from lightstep.strategy import Strategy

__all__ = [
    "check_arguments",
    "check_asynchronous_saves",
    "check_groups",
    "check_optimizer_class",
    "is_max_norm_chosen",
    "max_norm",
]

logger = logging.getLogger(__name__)

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
    name, config = strategy.name, strategy.config
    if args.fp16:
        raise ConfigError(
            f"{name}: fp16=True in TrainingArguments scales the loss with a GradScaler of its own, and the strategy "
            f"has precision.loss_scale ({config.precision.loss_scale.kind}); leave fp16 out, and choose a strategy "
            "with precision.parameters: float16 and a dynamic precision.loss_scale (preset 'fp16')"
        )
    if args.deepspeed:
        raise ConfigError(f"{name}: deepspeed in TrainingArguments has its own optimizer; leave it out")
    if args.n_gpu > 1:
        raise ConfigError(
            f"{name}: one process sees {args.n_gpu} GPUs, and the Trainer would use nn.DataParallel; start one process "
            "per GPU with torchrun, or make one GPU visible (CUDA_VISIBLE_DEVICES=0)"
        )
    if args.fsdp and not isinstance(config.sharding, FSDP2Sharding):
        raise ConfigError(
            f"{name}: fsdp in TrainingArguments shards the model, and the strategy's sharding.kind is "
            f"{config.sharding.kind}; choose a strategy of kind fsdp2 (fsdp2, fsdp2-stream), or leave fsdp out"
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
    if args.push_to_hub and args.hub_strategy != HubStrategy.END:
        raise ConfigError(
            f"asynchronous_saves=True and push_to_hub with hub_strategy={args.hub_strategy.value!r}: the Trainer "
            "uploads a checkpoint before it is written; set hub_strategy='end', or leave asynchronous_saves out"
        )


def is_max_norm_chosen(args: TrainingArguments) -> bool:
    """Whether ``max_grad_norm`` differs from its default, which cannot be told from a choice and is ignored."""
    default = next(field.default for field in dataclasses.fields(args) if field.name == "max_grad_norm")
    return bool(args.max_grad_norm != default)


def max_norm(given: float) -> float | None:
    """``max_grad_norm`` as ``clipping.max_norm``: the Trainer's 0 means no clipping, ``None``."""
    return given if given and math.isfinite(given) else None


def _check_clipping(args: TrainingArguments, strategy: Strategy) -> None:
    """``max_grad_norm`` overrides a preset's norm, and contradicts one from a file, a mapping or an override."""
    clipping, given = strategy.config.clipping, args.max_grad_norm
    if not is_max_norm_chosen(args):
        logger.info("lightstep: clipping.max_norm %s of the strategy is used, not max_grad_norm", clipping.max_norm)
        return
    chosen = "max_norm" in dict(strategy.chosen.get("clipping", {}))
    if chosen and max_norm(given) != max_norm(clipping.max_norm or 0.0):
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
