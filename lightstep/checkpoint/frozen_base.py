"""Checkpoints of adapters: what is trained is saved, the frozen base under it is named and left where it is."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightstep.sharding.model_names import NamedTensor, unwrap_model

logger = logging.getLogger(__name__)


def is_adapter(model: nn.Module) -> bool:
    """Whether adapters of PEFT are what is trained."""
    return bool(getattr(unwrap_model(model), "peft_config", None))


def without_base(tensors: Sequence[NamedTensor], optimizer: torch.optim.Optimizer | None) -> list[NamedTensor]:
    """Parameters that are trained or have been (they have optimizer state), and all buffers."""
    state: Mapping[Any, Any] = {} if optimizer is None else optimizer.state
    return [
        named
        for named in tensors
        if not isinstance(named.tensor, nn.Parameter) or named.tensor.requires_grad or named.tensor in state
    ]


def frozen_base(model: nn.Module, tensors: Sequence[NamedTensor], saved: Sequence[NamedTensor]) -> dict[str, Any]:
    """The base by reference: its name, as PEFT knows it, and the shapes of what is not saved."""
    kept = {named.name for named in saved}
    shapes = {named.name: list(named.tensor.shape) for named in tensors if named.name not in kept}
    return {"name": _name(model), "shapes": shapes}


def say_if_another(model: nn.Module, base: Mapping[str, Any]) -> None:
    """A warning when the adapters were trained on a base of another name; it may be the same weights all the same."""
    here = _name(model)
    if base["name"] != here:
        logger.warning(
            "the checkpoint holds what was trained on %r, and the model's base is %r; the base is left as it is",
            base["name"],
            here,
        )


def _name(model: nn.Module) -> str | None:
    """A name or path for ``from_pretrained``, where PEFT was told one."""
    inner = unwrap_model(model)
    configs = getattr(inner, "peft_config", None) or {}
    names = [getattr(config, "base_model_name_or_path", None) for config in configs.values()]
    return next((str(name) for name in names if name), getattr(getattr(inner, "config", None), "_name_or_path", None))
