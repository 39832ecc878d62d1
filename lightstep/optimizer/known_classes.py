"""What is known of an optimizer class without running it, and its plain ``step``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightstep.optimizer.group_values import copied, same_value, settings_of
from lightstep.optimizer.undisturbed import undisturbed

__all__ = ["counts_steps", "is_torchs_own", "torchs_own_needs_whole_tensors", "undecorated_step"]

_CPU = torch.device("cpu")  # explicit everywhere: users may change torch's default device and dtype


def torchs_own_needs_whole_tensors(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Whether a class of torch's is not element-wise; they are known, and need no trial."""
    declared = getattr(optimizer_class, "whole_tensors", None)
    return optimizer_class.__name__ in ("Adafactor", "Muon") if declared is None else bool(declared)


def counts_steps(
    optimizer_class: type[torch.optim.Optimizer], hyperparameters: Mapping[str, Any], shape: tuple[int, ...]
) -> bool:
    """Whether a step changes the optimizer's groups, numeric attributes, or state that is no parameter's.

    Args:
        shape: the shape of a parameter that the class takes.
    """
    parameter = torch.zeros(shape, dtype=torch.float32, device=_CPU)
    parameter.grad = torch.ones_like(parameter)
    with undisturbed(_CPU):
        optimizer = optimizer_class([parameter], **copied(dict(hyperparameters)))

        def numbers() -> dict[str, Any]:
            kept = {key: value for key, value in vars(optimizer).items() if type(value) in (int, float, bool)}
            shared = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
            return copied({"attributes": kept, "group": settings_of(optimizer.param_groups[0]), "shared": shared})

        before = numbers()
        undecorated_step(optimizer_class)(optimizer)
        return not same_value(before, numbers())


def is_torchs_own(optimizer_class: type) -> bool:
    return optimizer_class.__module__.startswith("torch.optim.")


def undecorated_step(optimizer_class: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """``step`` without the wrapper that calls hooks: the outer optimizer calls them, once per step."""
    step: Any = optimizer_class.step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step
