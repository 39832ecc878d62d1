"""The loss scale of a DeepSpeed engine as a :class:`LossScale`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightstep.precision.loss_scale import LossScale


class EngineLossScale(LossScale):
    """DeepSpeed's loss scale, which DeepSpeed updates itself.

    DeepSpeed grows its scale before it divides the gradients by it. In such a step it would divide by twice the scale
    that the loss was multiplied by. The scale is therefore frozen from backward to the end of the step.

    Args:
        zero: the engine's ZeRO optimizer.
    """

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self.reset()

    @property
    def _scaler(self) -> Any:
        """DeepSpeed's scaler, which loading a checkpoint replaces; ``None`` if DeepSpeed does not scale."""
        return getattr(self._zero, "loss_scaler", None)

    @property
    def scale(self) -> float:
        """The scale for the next backward."""
        scaler = self._scaler
        return 1.0 if scaler is None else float(scaler.cur_scale)

    def reset(self) -> None:
        """Set up DeepSpeed's current scaler. Call this when a checkpoint has replaced it."""
        if self._dynamic:
            self._scaler.raise_error_at_min_scale = False  # an overflow at the minimum skips the step, too
        self.freeze()

    def freeze(self) -> None:
        """Have DeepSpeed use the current scale until the next call."""
        if self._dynamic:
            self._zero.override_loss_scale(self.scale)

    @property
    def _dynamic(self) -> bool:
        return bool(getattr(self._scaler, "dynamic", False))

    def tensor(self, device: torch.device | None = None) -> Tensor:
        return torch.tensor(self.scale, dtype=torch.float32, device=device)

    def update(self, overflow: bool | Tensor) -> None:
        """Does nothing: DeepSpeed updates its scale in ``step()``."""

    @property
    def is_identity(self) -> bool:
        return not self._dynamic and self.scale == 1.0

    @property
    def power_of_two(self) -> bool:
        return self._dynamic or math.frexp(self.scale)[0] == 0.5

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing: DeepSpeed loads its scale from its own files."""

    def __repr__(self) -> str:
        return f"EngineLossScale(scale={self.scale:g})"
