"""Loss scaling: the loss is multiplied by ``scale`` before backward, the gradients divided by it in ``step()``.

The scale lives in a 0-dim tensor beside the gradients and is updated there from the overflow flag, so that neither
``backward()`` nor ``step()`` waits for the device. Conventions are those of ``torch.amp.GradScaler`` and Megatron-LM
(``DynamicGradScaler``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class LossScale(ABC):
    """The number by which the loss is multiplied."""

    @property
    def scale(self) -> float:
        """The current scale; reading it waits for the device."""
        return float(self.tensor())

    @abstractmethod
    def tensor(self, device: torch.device | None = None) -> Tensor:
        """The scale as a live 0-dim fp32 tensor, moved to ``device`` when one is given."""

    @abstractmethod
    def update(self, overflow: bool | Tensor) -> None:
        """Update the scale after a step. ``overflow``: a bool or a 0-dim tensor, non-zero if the step was skipped."""

    @property
    @abstractmethod
    def is_identity(self) -> bool:
        """Whether the scale is always 1, so that no multiplication and no :meth:`update` is needed."""

    @property
    @abstractmethod
    def power_of_two(self) -> bool:
        """Whether every scale that this object can reach is a power of two, by which division is exact."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; reading them waits for the device."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`. Settings (factors, limits) do not change."""


class ConstantLossScale(LossScale):
    """One fixed scale; ``ConstantLossScale(1.0)`` is no scaling.

    Args:
        scale: positive and finite.
    """

    is_identity = False

    def __init__(self, scale: float = 1.0) -> None:
        self._value = _positive("scale", scale)
        self.is_identity = self._value == 1.0
        self._tensor = torch.tensor(self._value, dtype=torch.float32, device="cpu")

    def tensor(self, device: torch.device | None = None) -> Tensor:
        if device is not None and self._tensor.device != device:
            self._tensor = self._tensor.to(device)
        return self._tensor

    @property
    def scale(self) -> float:
        """The fixed scale."""
        return self._value

    def update(self, overflow: bool | Tensor) -> None:
        """Does nothing: the scale is constant."""

    @property
    def power_of_two(self) -> bool:
        return _power_of_two(self._value)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing: a constant scale is a setting."""

    def __repr__(self) -> str:
        return f"ConstantLossScale(scale={self._value:g})"


class DynamicLossScale(LossScale):
    """A scale that adapts to the largest value without overflow.

    After ``growth_interval`` consecutive steps without overflow the scale is multiplied by ``growth_factor``, in the
    step that completes the interval. An overflow resets that count. From the ``hysteresis``-th overflow since the last
    growth on, each overflow multiplies the scale by ``backoff_factor``. The scale stays within
    ``[min_scale, max_scale]``.

    Args:
        init_scale: first scale; fp32.
        growth_factor: larger than 1.
        backoff_factor: between 0 and 1.
        growth_interval: steps, at least 1.
        hysteresis: overflows, at least 1; refilled by growth.
        min_scale: positive.
        max_scale: at least ``min_scale``.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """

    is_identity = False

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 1.0,
        max_scale: float = 2.0**32,
    ) -> None:
        self.min_scale = _positive("min_scale", min_scale)
        self.max_scale = _positive("max_scale", max_scale)
        init_scale = _positive("init_scale", init_scale)
        if not min_scale <= init_scale <= max_scale:
            raise ValueError(
                f"init_scale is {init_scale:g}, outside [min_scale, max_scale] = [{min_scale:g}, {max_scale:g}]"
            )
        if not (growth_factor > 1 and math.isfinite(growth_factor)):
            raise ValueError(f"growth_factor is {growth_factor!r}; a finite number larger than 1 is needed")
        if not 0 < backoff_factor < 1:
            raise ValueError(f"backoff_factor is {backoff_factor!r}; a number between 0 and 1 is needed")
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = _count("growth_interval", growth_interval)
        self.hysteresis = _count("hysteresis", hysteresis)
        self._start = init_scale
        self._scale = torch.tensor(init_scale, dtype=torch.float32, device="cpu")
        self._good_steps = torch.tensor(0, dtype=torch.int32, device="cpu")
        self._hysteresis_left = torch.tensor(self.hysteresis, dtype=torch.int32, device="cpu")

    def tensor(self, device: torch.device | None = None) -> Tensor:
        if device is not None and self._scale.device != device:
            self._scale = self._scale.to(device)
            self._good_steps = self._good_steps.to(device)
            self._hysteresis_left = self._hysteresis_left.to(device)
        return self._scale

    def update(self, overflow: bool | Tensor) -> None:
        if not isinstance(overflow, Tensor):
            overflow = torch.tensor(bool(overflow), device=self._scale.device)
        overflow = overflow.to(self._scale.device) != 0
        good_steps = torch.where(overflow, 0, self._good_steps + 1)
        left = torch.where(overflow, self._hysteresis_left - 1, self._hysteresis_left).clamp_(min=0)
        grow = good_steps == self.growth_interval
        back_off = overflow & (left == 0)
        smaller = (self._scale * self.backoff_factor).clamp_(min=self.min_scale)
        larger = (self._scale * self.growth_factor).clamp_(max=self.max_scale)
        self._scale.copy_(torch.where(back_off, smaller, torch.where(grow, larger, self._scale)))
        self._good_steps.copy_(torch.where(grow, 0, good_steps))
        self._hysteresis_left.copy_(torch.where(grow, self.hysteresis, left))

    @property
    def power_of_two(self) -> bool:
        reachable = (self.growth_factor, self.backoff_factor, self.min_scale, self.max_scale, self._start)
        return all(_power_of_two(value) for value in reachable)

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": float(self._scale),
            "good_steps": int(self._good_steps),
            "hysteresis_left": int(self._hysteresis_left),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; the state of a constant scale sets only the scale.

        A constant 1 is no scaling, and says nothing about the scale that fp16 needs: it changes nothing. The scale is
        clamped to this object's ``[min_scale, max_scale]``.
        """
        scale = _positive("scale", float(state_dict["scale"]))
        if scale == 1 and "good_steps" not in state_dict:
            return
        self._start = min(max(scale, self.min_scale), self.max_scale)
        self._scale.fill_(self._start)
        self._good_steps.fill_(min(int(state_dict.get("good_steps", 0)), self.growth_interval - 1))
        self._hysteresis_left.fill_(min(int(state_dict.get("hysteresis_left", self.hysteresis)), self.hysteresis))

    def __repr__(self) -> str:
        return (
            f"DynamicLossScale(scale={self.scale:g}, growth_factor={self.growth_factor:g}, "
            f"backoff_factor={self.backoff_factor:g}, growth_interval={self.growth_interval}, "
            f"hysteresis={self.hysteresis}, min_scale={self.min_scale:g}, max_scale={self.max_scale:g})"
        )


def _positive(name: str, value: float) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not _SMALLEST <= value <= _LARGEST:
        raise ValueError(f"{name} is {value!r}; a positive finite number in the range of fp32 is needed")
    return float(value)


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise ValueError(f"{name} is {value!r}; a whole number of at least 1 is needed")
    return int(value)


def _power_of_two(value: float) -> bool:
    return math.frexp(value)[0] == 0.5
