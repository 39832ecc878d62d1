"""The loss scale inside a DeepSpeed engine, seen as a :class:`LossScale`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightstep.precision.loss_scale import LossScale


class EngineLossScale(LossScale):
    """DeepSpeed's scale, which DeepSpeed alone moves.

    DeepSpeed grows its scale before it divides the gradients by it, so that the step that grows would divide by twice
    what the loss was multiplied with. The scale is therefore pinned from backward to the end of the step.

    Args:
        zero: the engine's ZeRO optimizer.
    """

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self.renew()

    @property
    def _scaler(self) -> Any:
        """Another object once a checkpoint was loaded; ``None`` where DeepSpeed never scales."""
        return getattr(self._zero, "loss_scaler", None)

    @property
    def scale(self) -> float:
        """The scale of the next backward."""
        scaler = self._scaler
        return 1.0 if scaler is None else float(scaler.cur_scale)

    def renew(self) -> None:
        """Take over the scaler that DeepSpeed has now."""
        if self._dynamic:
            self._scaler.raise_error_at_min_scale = False  # an overflow skips the step there too
        self.pin()

    def pin(self) -> None:
        """DeepSpeed multiplies and divides by the scale as it is now until this is called again."""
        if self._dynamic:
            self._zero.override_loss_scale(self.scale)

    @property
    def _dynamic(self) -> bool:
        return bool(getattr(self._scaler, "dynamic", False))

    def tensor(self, device: torch.device | None = None) -> Tensor:
        return torch.tensor(self.scale, dtype=torch.float32, device=device)

    def update(self, overflow: bool | Tensor) -> None:
        """Nothing: DeepSpeed updates its scale in ``step()``."""

    @property
    def is_identity(self) -> bool:
        return not self._dynamic and self.scale == 1.0

    @property
    def power_of_two(self) -> bool:
        return self._dynamic or math.frexp(self.scale)[0] == 0.5

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: the scale is in DeepSpeed's checkpoint files."""

    def __repr__(self) -> str:
        return f"EngineLossScale(scale={self.scale:g})"
