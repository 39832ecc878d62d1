"""The result of one ``step()``, read from the device on demand."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class StepResult:
    """The outcome of one :meth:`BaseOptimizer.step`; true when the step was applied.

    Creating one waits for nothing. Reading ``applied`` (also ``bool(result)``), ``loss_scale`` or the value of
    ``grad_norm`` (``.item()``, ``print``) makes the host wait until the device has measured the step's norm. A loop
    that never reads the result never waits, so the host can queue the next iteration meanwhile.

    Attributes:
        grad_norm: 0-dim fp32 tensor on the gradients' device: the global norm, unscaled, before clipping.
        loss: what the closure returned, or ``None``.
        redone: with ``optimizer_state.update: overlap``, the number of steps before this one whose updates in backward
            were rolled back and run again when the norm was known: mostly because gradients had to be clipped.
        rolled_back: with ``overlap``, how often so far updates in backward were rolled back before ``step()``, which
            then ran them: a weight was read, or a gradient or hyper-parameter changed. The log of
            ``lightstep.optimizer.overlap`` has each reason (level ``INFO``), also of ``redone``.
    """

    __slots__ = ("_loss_scale", "_overflow", "grad_norm", "loss", "redone", "rolled_back")

    def __init__(
        self,
        grad_norm: Tensor,
        overflow: Tensor,
        loss_scale: Tensor | None,
        loss: Any = None,
        redone: int = 0,
        rolled_back: int = 0,
    ) -> None:
        self.grad_norm = grad_norm
        self.loss = loss
        self.redone, self.rolled_back = redone, rolled_back
        self._overflow = overflow
        self._loss_scale = loss_scale

    @property
    def applied(self) -> bool:
        """Whether the weights were updated; reading it waits for the device."""
        return not bool(self._overflow)

    @property
    def loss_scale(self) -> float:
        """The scale this step used; reading it waits for the device."""
        return 1.0 if self._loss_scale is None else float(self._loss_scale)

    def __bool__(self) -> bool:
        return self.applied

    def __repr__(self) -> str:
        return (
            f"StepResult(applied={self.applied}, grad_norm={float(self.grad_norm):.6g}, loss_scale={self.loss_scale:g})"
        )
