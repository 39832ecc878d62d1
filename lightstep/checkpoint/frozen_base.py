"""Checkpoints of adapters: what is trained is saved. The frozen base is not saved; the checkpoint has its name."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightstep.sharding.model_names import NamedTensor, unwrap_model
from lightstep.sharding.prepared_model import PreparedModel

logger = logging.getLogger(__name__)


def has_adapters(model: nn.Module) -> bool:
    """Whether the model has PEFT adapters."""
    return bool(getattr(unwrap_model(model), "peft_config", None))


def without_base(
    model: nn.Module, tensors: Sequence[NamedTensor], optimizer: torch.optim.Optimizer | None
) -> list[NamedTensor]:
    """All buffers, and the parameters that are trainable or have optimizer state.

    Args:
        optimizer: counts beside the optimizers that a strategy made for the model.
    """
    optimizers = [*PreparedModel.of(model).optimizers, *([] if optimizer is None else [optimizer])]
    return [
        named
        for named in tensors
        if not isinstance(named.tensor, nn.Parameter)
        or named.tensor.requires_grad
        or any(named.tensor in one.state for one in optimizers)
    ]


def describe_base(model: nn.Module, tensors: Sequence[NamedTensor], saved: Sequence[NamedTensor]) -> dict[str, Any]:
    """The base's name, as PEFT knows it, and the shapes of the tensors that are not saved."""
    saved_names = {named.name for named in saved}
    shapes = {named.name: list(named.tensor.shape) for named in tensors if named.name not in saved_names}
    return {"name": _base_name(model), "shapes": shapes}


def warn_if_other_base(model: nn.Module, base: Mapping[str, Any]) -> None:
    """Log a warning if the adapters were trained on a base of another name. (Its weights may be the same.)"""
    name = _base_name(model)
    if base["name"] != name:
        logger.warning(
            "the checkpoint holds what was trained on %r, and the model's base is %r; the base is left as it is",
            base["name"],
            name,
        )


def _base_name(model: nn.Module) -> str | None:
    """The base's name or path for ``from_pretrained``; ``None`` if neither PEFT nor the model's config has one."""
    inner = unwrap_model(model)
    configs = getattr(inner, "peft_config", None) or {}
    names = [getattr(config, "base_model_name_or_path", None) for config in configs.values()]
    return next((str(name) for name in names if name), getattr(getattr(inner, "config", None), "_name_or_path", None))
