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
        """Those of the parameters whose ``p.grad`` this backward reduces as it is if it has no gradient for them."""


class GradientAccumulator:
    """The gradients of the micro-batches since the last step, one per parameter.

    A gradient is in ``p.grad``; if FSDP2's reduction delivered it in fp32, it is here instead.

    Args:
        float32: add them in fp32 (``precision.reduce: float32``) instead of in the parameter's dtype.
    """

    def __init__(self, float32: bool = True) -> None:
        self.float32 = float32
        self._sums: SumsInPlace | SumsAside = SumsInPlace()
        self._watched: list[tuple[Tensor, torch.dtype, bool]] = []
        self._delivered: dict[Tensor, list[Tensor]] = {}
        self._reduction: ReducedGradients | None = None
        self._collected: list[Tensor] = []

    def comes_from(self, reduction: ReducedGradients) -> None:
        """Gradients of parameters watched now or later are delivered by this."""
        self._reduction = reduction
        if isinstance(self._sums, SumsAside):
            self._sums.reads_unused = reduction.reads_unused
        reduction.connect([parameter for parameter, _, _ in self._watched], self)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """From now on add up the gradients of these parameters in fp32, also of frozen ones once they are thawed."""
        watched = [(p, p.dtype, p.requires_grad) for p in parameters if p.dtype in _LOW] if self.float32 else []
        aside = initialized()
        if _same(watched, self._watched) and isinstance(self._sums, SumsAside) is aside:
            return
        if isinstance(self._sums, SumsAside) is not aside:
            self._sums.carry(())
            reads_unused = _nothing if self._reduction is None else self._reduction.reads_unused
            self._sums = SumsAside(reads_unused) if aside else SumsInPlace()
        self._watched = watched
        self._sums.carry([parameter for parameter, _, _ in watched])
        if self._reduction is not None:
            self._reduction.connect([parameter for parameter, _, _ in watched], self)

    def begin_backward(self) -> None:
        """A backward begins whose gradients are to be added to those that are there."""
        self._sums.begin()

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
        return self._sums.has_gradient(parameter)

    @property
    def delivered(self) -> bool:
        """Whether there are gradients that did not come through ``p.grad``."""
        return bool(self._delivered)

    def withdraw(self, parameter: Tensor) -> Tensor | None:
        """The fp32 sum of this rank's earlier micro-batches, for a reduction that takes it together with the last."""
        return self._aside.withdraw(parameter)

    def reduced(self, parameter: Tensor, gradient: Tensor, used: Tensor | None) -> None:
        """Add a gradient that is reduced over all ranks, of which a rounded copy will be in ``p.grad``.

        Args:
            gradient: fp32, the parameter's shape. Kept, not copied; the reduction may still be under way until the end
                of this backward.
            used: zero (0-dim) if no rank had a gradient, and there shall be none; ``None`` if that cannot be.
        """
        self._aside.reduced(parameter, gradient, used)

    def all_reduced(self) -> None:
        """:meth:`reduced` is not called again in this backward."""
        self._aside.all_reduced()

    @property
    def _aside(self) -> SumsAside:
        assert isinstance(self._sums, SumsAside), "a reduction without a process group"
        return self._sums

    # -- what the step does

    def collect(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """The whole gradient of each parameter: local shard; fp32 if several were added.

        Nothing is given up until :meth:`consume`: asked again, it answers the same.

        Raises:
            RuntimeError, TypeError: some gradient is not what it should be, and ranks would drift apart or an edit be
                lost.
        """
        self._sums.finish()
        self._collected = list(parameters)
        totals = self._sums.totals()
        return [self._total(p, totals[p]) if p in totals else self._collected_from(p) for p in parameters]

    def consume(self) -> None:
        """All that was collected is the caller's now."""
        self._drop(self._collected)
        self._collected = []
        self._sums.forget()

    def peek(self, parameter: Tensor) -> Tensor | None:
        """:meth:`collect` of one parameter whose gradient is complete, while backward goes on with others."""
        self._sums.finish([parameter])
        return self._collected_from(parameter)

    def take(self, parameter: Tensor) -> Tensor | None:
        """:meth:`peek`, and the gradient is the caller's now."""
        gradient = self.peek(parameter)
        self._drop([parameter])
        return gradient

    def _drop(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            parameter.grad = None
            self._delivered.pop(parameter, None)

    def _delivered_to(self, parameter: Tensor) -> Tensor:
        """What was delivered becomes one fp32 tensor, with what is in ``p.grad``.

        It is where the newest part was: the reduction may find the rest of its result by that part.
        """
        *earlier, newest = self._delivered[parameter]
        own = self._local(parameter)
        parameter.grad = None
        for part in earlier:
            newest.add_(part)
        if own is not None:
            newest.add_(own.to(torch.float32))
        self._delivered[parameter] = [newest]
        return newest

    def _total(self, parameter: Tensor, reduced: Tensor) -> Tensor:
        """What was reduced, and what every rank added to it afterwards (a regularisation of the weights)."""
        extra = self._local(parameter) if self._sums.has_gradient(parameter) else None
        return reduced if extra is None else reduced + extra

    def _collected_from(self, parameter: Tensor) -> Tensor | None:
        return self._delivered_to(parameter) if parameter in self._delivered else self._own(parameter)

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
        self._delivered.clear()
        self._collected = []
        self._sums.forget()

    def close(self) -> None:
        """Forget all sums and take the hooks off the parameters."""
        self.clear()
        self._watched = []
        self._sums.carry(())


def _nothing(_: Sequence[Tensor]) -> Sequence[Tensor]:
    return ()


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
