"""torch's Muon on matrices that are divided among ranks, bit for bit, in three parts.

Momentum and the master's update are element-wise, so each rank does them on its block. Only the orthogonalization needs
whole matrices: in bf16, as in torch, on one rank for each matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["MOMENTUM", "apply_direction", "is_installed_muon", "orthogonalize", "update_momentum"]

MOMENTUM = "momentum_buffer"


def is_installed_muon(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Whether this is the installed torch's Muon, and the functions here have its bits."""
    return optimizer_class is getattr(torch.optim, "Muon", None) and _is_bit_exact()


def update_momentum(momentum: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Update the momentum; returns the update direction, to be rounded to bf16 and orthogonalized."""
    momentum.lerp_(gradient, 1 - group["momentum"])
    return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def orthogonalize(direction: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Orthogonalize a whole direction in bf16, which may be overwritten."""
    from torch.optim import _muon

    settings = (group[key] for key in ("ns_coefficients", "ns_steps", "eps"))
    result: Tensor = _muon._zeropower_via_newtonschulz(direction, *settings)
    return result


def apply_direction(master: Tensor, direction: Tensor, group: Mapping[str, Any], shape: torch.Size) -> None:
    """Weight decay, then a step of the master along the orthogonalized direction.

    Args:
        shape: of the whole matrix.
    """
    from torch.optim import _muon

    lr: Any = group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"]
    master.mul_(1 - lr * group["weight_decay"])
    master.add_(direction, alpha=-_muon._adjust_lr(lr, group["adjust_lr_fn"], shape))


@functools.cache
def _is_bit_exact() -> bool:
    """Compare two updates of a wide and of a tall matrix with those of the class."""
    numbers = torch.Generator().manual_seed(0)
    for shape in ((24, 40), (40, 24)):
        for changes in ({}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}):
            start, *gradients = torch.randn(3, *shape, generator=numbers, dtype=torch.float32, device="cpu")
            theirs, mine, momentum = start.clone(), start.clone(), torch.zeros_like(start)
            muon = torch.optim.Muon([theirs], lr=0.02, **changes)  # type: ignore[arg-type]
            (group,) = muon.param_groups
            for gradient in gradients:
                theirs.grad = gradient
                muon.step()
                try:
                    direction = orthogonalize(update_momentum(momentum, gradient, group).bfloat16(), group)
                    apply_direction(mine, direction, group, mine.shape)
                except (AttributeError, TypeError, KeyError):  # another version of torch
                    return False
            if not torch.equal(theirs, mine):
                return False
    return True
