"""torch's Muon on matrices whose rows are divided among ranks, bit for bit.

Momentum and the master's update are element-wise, so each rank does them on its rows. Only what is orthogonalised has
to be whole: in bf16, as torch does it, on one rank for each matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightstep.distributed import MatrixExchange, Rows
from lightstep.state.segment import Segment

__all__ = ["is_known", "update_rows"]


def is_known(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Whether this is the installed torch's Muon, and what is done here gives its bits."""
    return optimizer_class is getattr(torch.optim, "Muon", None) and _has_its_bits()


def update_rows(
    segments: Sequence[Segment],
    gradients: Sequence[Tensor],
    settings: Sequence[Mapping[str, Any]],
    rows: Sequence[Rows],
    exchange: MatrixExchange,
) -> None:
    """One update of this rank's rows of each matrix.

    Args:
        gradients: fp32, in the segments' shapes.
        settings: of each segment's group.
    """
    directions = []
    for segment, gradient, group in zip(segments, gradients, settings, strict=True):
        if "momentum_buffer" not in segment.state:
            segment.state["momentum_buffer"] = torch.zeros_like(gradient)
        directions.append(_direction(segment.state["momentum_buffer"], gradient, group))
    shapes = [one.shape for one in rows]
    orthogonal = exchange.compute(directions, rows, lambda number, whole: _orthogonal(whole, settings[number]))
    for segment, direction, group, shape in zip(segments, orthogonal, settings, shapes, strict=True):
        _apply(segment.master, direction, group, shape)


def _direction(buffer: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
    buffer.lerp_(gradient, 1 - group["momentum"])
    return (gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer).bfloat16()


def _orthogonal(direction: Tensor, group: Mapping[str, Any]) -> Tensor:
    from torch.optim import _muon

    settings = (group[key] for key in ("ns_coefficients", "ns_steps", "eps"))
    result: Tensor = _muon._zeropower_via_newtonschulz(direction, *settings)
    return result


def _apply(master: Tensor, direction: Tensor, group: Mapping[str, Any], shape: torch.Size) -> None:
    from torch.optim import _muon

    lr: Any = group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"]
    master.mul_(1 - lr * group["weight_decay"])
    master.add_(direction, alpha=-_muon._adjust_lr(lr, group["adjust_lr_fn"], shape))


@functools.cache
def _has_its_bits() -> bool:
    """Two updates of a wide and of a tall matrix, here and by the class."""
    numbers = torch.Generator().manual_seed(0)
    for shape in ((24, 40), (40, 24)):
        for changes in ({}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}):
            start, *gradients = torch.randn(3, *shape, generator=numbers, dtype=torch.float32, device="cpu")
            theirs, mine, buffer = start.clone(), start.clone(), torch.zeros_like(start)
            muon = torch.optim.Muon([theirs], lr=0.02, **changes)  # type: ignore[arg-type]
            (group,) = muon.param_groups
            for gradient in gradients:
                theirs.grad = gradient
                muon.step()
                try:
                    direction = _orthogonal(_direction(buffer, gradient, group), group)
                    _apply(mine, direction, group, mine.shape)
                except (AttributeError, TypeError, KeyError):  # another version's
                    return False
            if not torch.equal(theirs, mine):
                return False
    return True
