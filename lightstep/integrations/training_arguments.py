"""What ``TrainingArguments`` may say beside a strategy, and what each of them decides."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy

from lightstep.config import ConfigError, DDPSharding, FSDP2Sharding
from lightstep.optimizer.base import BaseOptimizer
from lightstep.strategy import Strategy

__all__ = ["max_norm", "norm_is_told", "refuse_asynchronous_saves", "refuse_class", "refuse_contradictions"]

logger = logging.getLogger(__name__)

_OF_DDP = {
    "ddp_find_unused_parameters": "find_unused_parameters",
    "ddp_bucket_cap_mb": "bucket_mib",
    "ddp_static_graph": "static_graph",
}
_OTHER_ARITHMETIC = ("bitsandbytes", "torchao", "galore_torch", "apollo_torch", "lomo_optim", "schedulefree", "apex")


def refuse_contradictions(args: TrainingArguments, strategy: Strategy) -> None:
    name, config = strategy.name, strategy.config
    if args.fp16:
        raise ConfigError(
            f"{name}: fp16=True in TrainingArguments scales the loss with a GradScaler of its own, and lightstep with "
            f"precision.loss_scale ({config.precision.loss_scale.kind}); leave fp16 out, and choose a strategy with "
            "precision.parameters: float16 and a dynamic precision.loss_scale (preset 'fp16')"
        )
    if args.deepspeed:
        raise ConfigError(f"{name}: deepspeed in TrainingArguments brings an optimizer of its own; leave it out")
    if args.n_gpu > 1:
        raise ConfigError(
            f"{name}: one process sees {args.n_gpu} GPUs, and the Trainer would use nn.DataParallel; start one process "
            "per GPU with torchrun, or show it one GPU (CUDA_VISIBLE_DEVICES=0)"
        )
    if args.fsdp and not isinstance(config.sharding, FSDP2Sharding):
        raise ConfigError(
            f"{name}: fsdp in TrainingArguments shards the model, and the strategy's sharding.kind is "
            f"{config.sharding.kind}; choose a strategy of kind fsdp2 (fsdp2, fsdp2-stream), or leave fsdp out"
        )
    _refuse_other_clipping(args, strategy)
    _refuse_other_ddp(args, strategy)


def refuse_asynchronous_saves(args: TrainingArguments) -> None:
    if args.save_only_model:
        raise ConfigError(
            "asynchronous_saves=True and save_only_model=True: the Trainer writes weights itself, and waits for them; "
            "leave one of the two out"
        )
    if args.push_to_hub and args.hub_strategy != HubStrategy.END:
        raise ConfigError(
            f"asynchronous_saves=True and push_to_hub with hub_strategy={args.hub_strategy.value!r}: the Trainer "
            "uploads a checkpoint before it is written; set hub_strategy='end', or leave asynchronous_saves out"
        )


def norm_is_told(args: TrainingArguments) -> bool:
    """The default of ``max_grad_norm`` cannot be told from a choice, and gives way to the strategy."""
    default = next(field.default for field in dataclasses.fields(args) if field.name == "max_grad_norm")
    return bool(args.max_grad_norm != default)


def max_norm(given: float) -> float | None:
    """As lightstep says it: the Trainer's 0 is no clipping."""
    return given if given and math.isfinite(given) else None


def _refuse_other_clipping(args: TrainingArguments, strategy: Strategy) -> None:
    """A preset's norm gives way; one that a file, a mapping or an override sets is contradicted."""
    clipping, given = strategy.config.clipping, args.max_grad_norm
    if not norm_is_told(args):
        logger.info("lightstep: clipping.max_norm %s of the strategy counts, not max_grad_norm", clipping.max_norm)
        return
    told = "max_norm" in dict(strategy.chosen.get("clipping", {}))
    if told and max_norm(given) != max_norm(clipping.max_norm or 0.0):
        raise ConfigError(
            f"{strategy.name}: max_grad_norm={given} in TrainingArguments, clipping.max_norm {clipping.max_norm} in "
            f"the strategy: gradients are clipped once, in step(). Leave max_grad_norm out, and give the strategy "
            f"{{'clipping.max_norm': {max_norm(given)}}}: Strategy.load(name, overrides)"
        )


def _refuse_other_ddp(args: TrainingArguments, strategy: Strategy) -> None:
    sharding = strategy.config.sharding
    for argument, key in _OF_DDP.items() if isinstance(sharding, DDPSharding) else ():
        given, own = getattr(args, argument), getattr(sharding, key)
        if given is not None and given != own:
            raise ConfigError(
                f"{strategy.name}: {argument}={given} in TrainingArguments, and sharding.{key} {own} in the strategy, "
                f"which wraps the model; leave {argument} out, and set sharding.{key}"
            )


def refuse_class(optimizer_class: Any, values: Mapping[str, Any], optim: str | None) -> None:
    source = "optimizer_cls_and_kwargs" if optim is None else f"optim={str(optim)!r} in TrainingArguments"
    is_class = isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    wraps = is_class and issubclass(optimizer_class, BaseOptimizer)
    library = getattr(optimizer_class, "__module__", "").partition(".")[0]
    if not is_class or wraps or library in _OTHER_ARITHMETIC or {"model", "optimizer_dict"} & set(values):
        raise ConfigError(
            f"{source} is {getattr(optimizer_class, '__name__', optimizer_class)} of {library}, which does more than "
            "update one weight from its gradient; lightstep runs any element-wise torch.optim.Optimizer class on its "
            "masters: 'adamw_torch', 'adamw_torch_fused', 'sgd', 'adagrad', 'rmsprop', or a class of your own; for "
            "Muon give rules=[{'kinds': 'hidden_matrices', 'name': 'Muon', 'lr': 0.02}, {'kinds': 'rest'}]"
        )
