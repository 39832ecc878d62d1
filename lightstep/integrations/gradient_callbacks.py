"""Gradients for callbacks that read or change them: clipped before the step, and still there after it.

The Trainer clips before ``on_pre_optimizer_step``, and drops gradients after ``on_optimizer_step``. A lightstep step
clips by itself and consumes the gradients. So where a callback defines one of these events, and only there, gradients
are clipped in ``p.grad`` before the step, in fp32 and unscaled, and the step clips nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from lightstep.clipping import clip_coefficient, global_grad_norm
from lightstep.config import ConfigError
from lightstep.distributed import like, local_gradient, local_tensor
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.precision.gradient_sums import set_grad

__all__ = ["ClippedGradients", "check_gradients_are_kept"]

_LOW = (torch.bfloat16, torch.float16)


def check_gradients_are_kept(optimizer: MixedPrecisionOptimizer, callbacks: Sequence[str]) -> None:
    """
    Args:
        callbacks: the classes that define ``on_pre_optimizer_step`` or ``on_optimizer_step``.

    Raises:
        ConfigError: there are some, and gradients are freed before, or each layer is clipped by its own norm.
    """
    if not callbacks:
        return
    if optimizer.engine.update_time.in_backward:
        why, remedy = "optimizer_state.update in_backward has used and freed the gradients", "update: at_step"
    elif optimizer.clip_layers and optimizer.max_norm is not None:
        why, remedy = "clipping.scope unit clips each layer when it is updated", "clipping.scope: global"
    else:
        return
    raise ConfigError(
        f"{', '.join(callbacks)}: on_pre_optimizer_step and on_optimizer_step get the clipped gradients, and {why} "
        f"before; set {remedy}, or use other events"
    )


class ClippedGradients:
    """The gradients of one step, clipped in ``p.grad``, unscaled, in fp32.

    A norm that is not finite makes them NaN, and the step is skipped as it would be without this.

    Args:
        optimizer: its gradients are complete.
        parameters: the model's, in its order; those that are not in the optimizer do not count.

    Attributes:
        norm: the norm of all gradients, unscaled and before clipping; 0-dim fp32.
    """

    def __init__(self, optimizer: MixedPrecisionOptimizer, parameters: Iterable[Tensor]) -> None:
        self._optimizer, self._scale = optimizer, optimizer.loss_scale
        own = {p for group in optimizer.param_groups for p in group["params"]}
        self._parameters = [p for p in parameters if p in own]
        self._kept: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            if not self._scale.is_identity:
                self._multiply(self._scale.tensor().reciprocal())
            self.norm = global_grad_norm(self._parameters, optimizer.norm_type)
            if optimizer.max_norm is not None:
                coefficient = clip_coefficient(self.norm, optimizer.max_norm)
                self._multiply(coefficient.where(self.norm.isfinite(), torch.nan))

    def _multiply(self, factor: Tensor) -> None:
        """Multiply each ``p.grad`` in fp32, in place if it is fp32."""
        for parameter in self._parameters:
            gradient = local_gradient(parameter, torch.float32)
            if gradient is None or parameter.grad is None:
                continue
            own = factor.to(gradient.device)
            if gradient.dtype not in _LOW and gradient.data_ptr() == local_tensor(parameter.grad).data_ptr():
                gradient.mul_(own)
            else:
                set_grad(parameter, like(parameter, gradient.float() * own))

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """The body steps: it clips nothing, and gets the gradients that callbacks have left, scaled again."""
        optimizer, max_norm = self._optimizer, self._optimizer.max_norm
        self._kept = [(p, p.grad) for p in self._parameters if p.grad is not None]
        with torch.no_grad():
            for parameter, gradient in self._kept if not self._scale.is_identity else ():
                set_grad(parameter, gradient * self._scale.tensor(gradient.device))
        optimizer.max_norm = None
        try:
            yield
        finally:
            optimizer.max_norm = max_norm

    def restore(self) -> None:
        """Put the gradients back that the step has consumed, until the caller drops them (``zero_grad``)."""
        for parameter, gradient in self._kept:
            set_grad(parameter, gradient)
