"""Weights in bf16 without masters, which are rounded stochastically after each update.

An update widens the weight to fp32, runs the class's own step, and rounds the result with the noise of
:mod:`lightstep.precision.noise`: a hash of a seed, the parameter's step and the element's number in the whole
parameter. The weights are therefore the same however the parameter is divided, and after resuming.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch

from lightstep.distributed import window_of
from lightstep.optimizer.classes import GroupClasses
from lightstep.precision.moments import BFloat16
from lightstep.precision.noise import Noise, numbered
from lightstep.state.schema import Codec, Managed

__all__ = ["MasterWeights", "check_master_weights", "rounding_of", "set_up_rounding"]

MasterWeights = bool | Literal["stochastic"]
"""Whether 16-bit parameters have fp32 masters; ``"stochastic"``: none, and weights are rounded stochastically."""


def check_master_weights(given: MasterWeights) -> MasterWeights:
    """Raise ``ValueError`` unless this is one of the allowed values."""
    if given is not True and given is not False and given != "stochastic":
        raise ValueError(f"master_weights is {given!r}; allowed: True, False, 'stochastic'")
    return given


def rounding_of(master_weights: MasterWeights) -> Codec | None:
    """How weights are rounded that have no masters; ``None``: by the optimizer classes themselves, to nearest."""
    return BFloat16(Noise()) if master_weights == "stochastic" else None


def set_up_rounding(items: Iterable[Managed], classes: GroupClasses, seed: int = 0) -> None:
    """Find out where the elements of those parameters are whose weights are rounded stochastically.

    Args:
        seed: of the noise.

    Raises:
        TypeError: a parameter is in fp16.
        ValueError: a class counts no steps in its state; or a parameter is divided so that elements have no numbers.
    """
    for item in items:
        if item.rounding is None:
            continue
        setting = "precision.master_weights is stochastic"
        if item.local.dtype != torch.bfloat16:
            raise TypeError(
                f"{setting}, and {item.name} is in {str(item.local.dtype).removeprefix('torch.')}: weights are rounded "
                "to bfloat16; set master_weights: true, or precision.parameters: bfloat16"
            )
        if "step" not in item.schema:
            name = classes.arithmetic_for(item.group).name
            raise ValueError(
                f"{setting}, and {name} ({', '.join(item.schema) or 'no state'}), which updates {item.name}, counts no "
                "steps in its state, on which the noise depends; set master_weights: true"
            )
        try:
            item.window = numbered(window_of(item.param), seed)
        except ValueError as error:
            raise ValueError(f"{setting}, and {item.name} cannot have it: {error}; set master_weights: true") from error
