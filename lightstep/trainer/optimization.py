"""Optimizer and learning rate, as the training file names them."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from lightstep.config import ConfigError
from lightstep.config_errors import suggest
from lightstep.optimizer.base import BaseOptimizer
from lightstep.strategy import Strategy
from lightstep.trainer import config as settings

_SCHEDULERS = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
)
"""transformers' names, without those that need a metric at every step."""


def make_optimizer(strategy: Strategy, model: nn.Module, wanted: settings.Optimizer) -> BaseOptimizer:
    """Raises :class:`ConfigError` for an unknown class, or arguments that it refuses."""
    chosen = optimizer_class(wanted.name)
    arguments = {"lr": wanted.lr, **wanted.arguments}
    if wanted.weight_decay is not None:
        arguments["weight_decay"] = wanted.weight_decay
    try:
        return strategy.create_optimizer(model, chosen, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer: {error}") from error


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of that name in ``torch.optim``, or at that import path."""
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module or "torch.optim"), attribute, None)
    except ImportError as error:
        raise ConfigError(f"optimizer.name is {name!r}: {error}") from error
    if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
        known = [key for key, value in vars(torch.optim).items() if inspect.isclass(value) and key != "Optimizer"]
        raise ConfigError(
            f"optimizer.name is {name!r}{suggest(name, known)}; a class of torch.optim or the import path of an "
            "Optimizer class is needed"
        )
    return found


def make_scheduler(optimizer: BaseOptimizer, wanted: settings.Scheduler, steps: int) -> Any:
    """Raises :class:`ConfigError` for an unknown schedule, or arguments that it refuses."""
    if wanted.name not in _SCHEDULERS:
        raise ConfigError(
            f"scheduler.name is {wanted.name!r}{suggest(wanted.name, list(_SCHEDULERS))}; "
            f"allowed: {', '.join(_SCHEDULERS)}"
        )
    try:
        return get_scheduler(
            wanted.name,
            optimizer,
            num_warmup_steps=wanted.warmup_steps,
            num_training_steps=steps,
            scheduler_specific_kwargs=wanted.arguments or None,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheduler: {error}") from error
