"""Gradients on their way to the optimizer: added up in fp32, scaled into fp32 staging memory.

Autograd adds the gradients of several micro-batches in the parameter's dtype. :class:`GradientAccumulator` has them
added up in fp32, so that ``grad32 = float(g1) + float(g2) + ...`` in order. With one micro-batch nothing is copied:
``p.grad`` is what autograd made. With several, ``p.grad`` is the fp32 sum (:mod:`lightstep.precision.gradient_sums`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from lightstep.distributed import initialized, is_sharded, local_gradient
from lightstep.precision.gradient_sums import SumsAside, SumsInPlace

Key = TypeVar("Key")

_LOW = (torch.bfloat16, torch.float16)


class ReducedGradients(Protocol):
    """Takes gradients out of the reduction over ranks before they are rounded to the parameters' dtype."""

    def connect(self, parameters: Iterable[Tensor], accumulator: GradientAccumulator) -> None:
        """From the next backward on, deliver the gradients of 16-bit parameters to ``accumulator``."""

    def takes_part(self, parameter: Tensor) -> bool:
        """Whether a gradient of this parameter is of no use before it came through here."""

    def reads_unused(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Those of the parameters whose ``p.grad`` is reduced as it is where a backward has no gradient for them."""


class GradientAccumulator:
    """The gradients of the micro-batches since the last step, one per parameter.

    A gradient is in ``p.grad``; if a reduction delivered it in fp32, it is here instead.

    Args:
        float32: add them in fp32 (``precision.reduce: float32``) instead of in the parameter's dtype.
    """

    def __init__(self, float32: bool = True) -> None:
        self.float32 = float32
        self._sums: SumsInPlace | SumsAside = SumsInPlace()
        self._watched: list[tuple[Tensor, torch.dtype, bool]] = []
        self._delivered: dict[Tensor, list[Tensor]] = {}
        self._rounded: set[Tensor] = set()
        self._uncertain: list[tuple[Tensor, Sequence[Tensor | None]]] = []
        self._reduction: ReducedGradients | None = None
        self._collected: list[Tensor] = []

    def comes_from(self, reduction: ReducedGradients) -> None:
        """Gradients of parameters watched now or later are delivered by this."""
        self._reduction = reduction
        reduction.connect([parameter for parameter, _, _ in self._watched], self)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """From now on add up the gradients of these parameters in fp32, also of frozen ones once they are thawed."""
        watched = [(p, p.dtype, p.requires_grad) for p in parameters if p.dtype in _LOW] if self.float32 else []
        kind = SumsAside if initialized() else SumsInPlace
        if _same(watched, self._watched) and type(self._sums) is kind:
            return
        if type(self._sums) is not kind:
            self._sums.carry(())
            self._sums = kind(self._rounded)
        self._watched = watched
        self._sums.carry([parameter for parameter, _, _ in watched])
        if self._reduction is not None:
            self._reduction.connect([parameter for parameter, _, _ in watched], self)

    def begin_backward(self, reduced: bool) -> None:
        """A backward begins whose gradients are to be added to those that are there.

        Args:
            reduced: over the ranks, where there are several.
        """
        if self._watched:
            watched = [parameter for parameter, _, _ in self._watched]
            self._sums.begin(watched)
            if reduced and self._reduction is not None:
                self._sums.make_way(self._reduction.reads_unused(watched))

    def end_backward(self) -> None:
        """It has ended: the sums are in ``p.grad``."""
        self._sums.finish()

    # -- what a reduction over ranks does in backward

    def deliver(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add a local gradient that is reduced over all ranks, in fp32, and did not come through ``p.grad``.

        Args:
            gradient: fp32, shape of the local shard. Kept, not copied; the reduction may still be under way until the
                end of this backward.
        """
        parts = self._delivered.setdefault(parameter, [])
        if len(parts) == 2:
            parts[0].add_(parts.pop())
        parts.append(gradient)

    def has_gradient(self, parameter: Tensor) -> bool:
        """Whether ``p.grad`` holds something that is not counted yet."""
        return parameter.grad is not None and parameter not in self._rounded

    @property
    def delivered(self) -> bool:
        """Whether there are gradients that did not come through ``p.grad``."""
        return bool(self._delivered)

    def withdraw(self, parameter: Tensor) -> Tensor | None:
        """The fp32 sum of earlier micro-batches, handed over to a strategy that reduces it together with the last."""
        return self._sums.withdraw(parameter)

    def disregard(self, parameter: Tensor) -> None:
        """What this backward leaves in ``p.grad`` is a rounded copy of what was delivered: to be dropped, not added."""
        self._rounded.add(parameter)

    def only_if_used(self, used: Tensor, parameters: Sequence[Tensor | None]) -> None:
        """Forget what was delivered for those that had a gradient on no rank; the host reads which at the next step.

        Args:
            used: one element per parameter, zero where no rank had a gradient; ready at the end of this backward.
            parameters: ``None`` where the element is nobody's.
        """
        self._uncertain.append((used, parameters))

    # -- what the step does

    def collect(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """The whole gradient of each parameter: local shard; fp32 if several were added.

        Nothing is given up until :meth:`consume`: asked again, it answers the same.

        Raises:
            RuntimeError, TypeError: some gradient is not what it should be, and ranks would drift apart or an edit be
                lost.
        """
        if self._uncertain:
            self._forget_unused()
        self._sums.finish()
        self._collected = list(parameters)
        special = self._delivered or self._rounded
        return [self._delivered_to(p) if special and self._is_special(p) else self._own(p) for p in parameters]

    def consume(self) -> None:
        """All that was collected is the caller's now."""
        self._drop(self._collected)
        self._collected = []
        self._sums.forget()

    def peek(self, parameter: Tensor) -> Tensor | None:
        """:meth:`collect` of one parameter whose gradient is complete, while backward goes on with others."""
        self._sums.finish([parameter])
        return self._delivered_to(parameter) if self._is_special(parameter) else self._own(parameter)

    def take(self, parameter: Tensor) -> Tensor | None:
        """:meth:`peek`, and the gradient is the caller's now."""
        gradient = self.peek(parameter)
        self._drop([parameter])
        return gradient

    def _drop(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            parameter.grad = None
            if self._delivered or self._rounded:
                self._delivered.pop(parameter, None)
                self._rounded.discard(parameter)

    def _forget_unused(self) -> None:
        pairs, self._uncertain = self._uncertain, []
        used = torch.cat([flags for flags, _ in pairs]).tolist()
        for parameter, flag in zip([p for _, parameters in pairs for p in parameters], used, strict=True):
            if parameter is not None and not flag:
                self._delivered.pop(parameter, None)
                if parameter in self._rounded:
                    self._rounded.discard(parameter)
                    parameter.grad = None

    def _is_special(self, parameter: Tensor) -> bool:
        return parameter in self._delivered or parameter in self._rounded

    def _delivered_to(self, parameter: Tensor) -> Tensor | None:
        """What was delivered becomes one fp32 tensor, with what is in ``p.grad`` unless that is a rounded copy."""
        parts = self._delivered.get(parameter, [])
        own = None if parameter in self._rounded else self._local(parameter)
        parameter.grad = None
        if own is not None:
            parts.append(own.to(torch.float32))
        for part in parts[1:]:
            parts[0].add_(part)
        del parts[1:]
        return parts[0] if parts else None

    def _own(self, parameter: Tensor) -> Tensor | None:
        """The whole gradient where none was delivered."""
        if self._reduction is not None:
            self._refuse_unreduced(parameter)
        return self._local(parameter)

    def _local(self, parameter: Tensor) -> Tensor | None:
        """The local part of ``p.grad``."""
        gradient = parameter.grad
        if gradient is None:
            return None
        if gradient.is_sparse:
            raise TypeError(
                f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which fp32 masters and one "
                "global norm cannot take; build its layer with sparse=False"
            )
        return local_gradient(parameter, torch.float32) if is_sharded(gradient) else _outside_autograd(gradient)

    def _refuse_unreduced(self, parameter: Tensor) -> None:
        assert self._reduction is not None
        if self._sums.is_of_this_rank(parameter) and self._reduction.takes_part(parameter):
            raise RuntimeError(
                f"a gradient of shape {tuple(parameter.shape)} is this rank's own, and ranks would drift apart: no "
                "backward since the last step was reduced over the ranks. Run each step's last micro-batch under "
                "strategy.accumulate(model, last=True), and call the model that prepare_model returned, not the module "
                "in it"
            )

    def clear(self) -> None:
        """Forget all sums (``zero_grad``)."""
        for parameter in self._rounded:
            parameter.grad = None
        self._delivered.clear()
        self._rounded.clear()
        self._uncertain.clear()
        self._collected = []
        self._sums.forget()

    def close(self) -> None:
        """Forget all sums and take the hooks off the parameters."""
        self.clear()
        self._watched = []
        self._sums.carry(())


def _same(now: Sequence[tuple[Tensor, torch.dtype, bool]], before: Sequence[tuple[Tensor, torch.dtype, bool]]) -> bool:
    """Equal, and the same tensors; comparing tensors by ``==`` would compare their elements."""
    return len(now) == len(before) and all(a[0] is b[0] and a[1:] == b[1:] for a, b in zip(now, before, strict=True))


def _outside_autograd(gradient: Tensor) -> Tensor:
    return gradient.detach() if gradient.requires_grad else gradient


def unshared(gradients: dict[Key, Tensor]) -> dict[Key, Tensor]:
    """The same gradients, none of them another's memory: users may set one tensor as two parameters' gradient."""
    seen: set[int] = set()
    for key, gradient in gradients.items():
        if gradient.data_ptr() in seen and gradient.numel():
            gradients[key] = gradient.clone()
        seen.add(gradient.data_ptr())
    return gradients
