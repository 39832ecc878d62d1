"""Whether an optimizer class needs whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightstep.optimizer.arithmetic import BaseArithmetic

__all__ = ["needs_whole_tensors"]


def needs_whole_tensors(
    optimizer_class: type[torch.optim.Optimizer], hyperparameters: Mapping[str, Any], group: Mapping[str, Any]
) -> bool:
    """Whether an optimizer is not element-wise under the settings of one group.

    Raises:
        TypeError: the class cannot be updated unit by unit.
    """
    arithmetic = BaseArithmetic(optimizer_class, dict(hyperparameters))
    arithmetic.inspect_groups([group])
    return arithmetic.whole_tensors
