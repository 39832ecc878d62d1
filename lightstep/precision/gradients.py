"""The gradients of a step: sums of micro-batches in fp32.

Autograd adds the gradients of several micro-batches in the parameter's dtype. :class:`GradientAccumulator` adds them in
fp32: ``grad32 = float(g1) + float(g2) + ...``, in this order, and leaves the sum in ``p.grad``
(:mod:`lightstep.precision.gradient_sums`). With one micro-batch nothing is copied: ``p.grad`` is what autograd made, or
the fp32 result of a reduction over ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from lightstep.distributed import initialized, is_sharded, local_gradient
from lightstep.precision.gradient_sums import SumsAside, SumsInPlace

Key = TypeVar("Key")

_LOW = (torch.bfloat16, torch.float16)


class ReducedGradients(Protocol):
    """Keeps the gradients of a reduction over ranks from being rounded to the parameters' dtype."""

    def connect(self, parameters: Iterable[Tensor], accumulator: GradientAccumulator) -> None:
        """From the next backward on, add the gradients of 16-bit parameters in fp32, by ``accumulator``."""

    def must_reduce(self, parameter: Tensor) -> bool:
        """Whether this parameter's gradient must be reduced here before a step may use it."""

    def refuse_left_out(self, parameter: Tensor) -> None:
        """Raise ``RuntimeError`` if the gradient that this parameter has was not reduced, and never will be."""

    def forget(self) -> None:
        """All gradients were used, or dropped."""

    def reads_unused(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """The parameters whose ``p.grad`` the running backward will reduce even if it has no gradient for them."""

    def keeps_unreduced(self, parameters: Iterable[Tensor]) -> bool:
        """Whether gradients of these parameters have not been reduced since the last forward without a reduction."""

    def drop_unreduced(self, parameters: Iterable[Tensor]) -> None:
        """Drop gradients that are kept for a later reduction and are not in ``p.grad``."""


class SumsElsewhere(Protocol):
    """Sums that are not in ``p.grad``: see ``lightstep.optimizer.host_gradients``."""

    is_in_place: bool
    is_incomplete: bool

    def set_parameters(self, parameters: Sequence[Tensor]) -> None: ...
    def restore_hooks(self) -> list[Tensor]: ...
    def begin(self) -> None: ...
    def has_gradient(self, parameter: Tensor) -> bool: ...
    def is_own_gradient(self, parameter: Tensor) -> bool: ...
    def totals(self) -> Mapping[Tensor, Tensor]: ...
    def complete(self, parameters: Iterable[Tensor] | None = None) -> None: ...
    def clear(self) -> None: ...


class GradientAccumulator:
    """The gradients of the micro-batches since the last step, one per parameter.

    Between backward and step they are in ``p.grad``.

    Args:
        float32: sum in fp32 (``precision.reduce: float32``), not in the parameter's dtype.
        elsewhere: takes the gradients out of ``p.grad`` in backward, and adds them up.
    """

    def __init__(self, float32: bool = True, elsewhere: SumsElsewhere | None = None) -> None:
        self.float32, self._elsewhere = float32, elsewhere
        self._sums: SumsInPlace | SumsAside | SumsElsewhere = elsewhere or SumsInPlace()
        self._watched: list[Tensor] = []
        self._kinds: list[tuple[torch.dtype, bool]] = []
        self._watched_set: frozenset[Tensor] = frozenset()
        self._reduction: ReducedGradients | None = None
        self._collected: list[Tensor] = []

    def set_reduction(self, reduction: ReducedGradients) -> None:
        """Gradients of all watched parameters are delivered by this reduction."""
        self._reduction = reduction
        if isinstance(self._sums, SumsAside):
            self._sums.reads_unused, self._sums.must_reduce = reduction.reads_unused, reduction.must_reduce
        reduction.connect(self._watched, self)

    def watch(self, parameters: Iterable[Tensor]) -> Collection[Tensor]:
        """Sum the gradients of exactly these parameters; of frozen ones too, which may be unfrozen.

        Returns those whose gradients it has not summed before: they are new, or have been cast or swapped.
        """
        watched, elsewhere = list(parameters), self._elsewhere
        if elsewhere is not None:
            elsewhere.set_parameters(watched)
        else:
            watched = [p for p in watched if p.dtype in _LOW] if self.float32 else []
        kinds = [(p.dtype, p.requires_grad) for p in watched]
        several = initialized() and elsewhere is None
        same = kinds == self._kinds and all(map(operator.is_, watched, self._watched))
        if same and isinstance(self._sums, SumsAside) is several:
            return self._sums.restore_hooks()
        before = self._watched_set.difference(self._sums.restore_hooks())
        self._watched, self._kinds, self._watched_set = watched, kinds, frozenset(watched)
        if elsewhere is None:
            if isinstance(self._sums, SumsAside) is not several:
                self._sums.set_parameters(())
                self._sums = SumsAside(_none_unused, lambda _: False) if several else SumsInPlace()
            self._sums.set_parameters(watched)
        if self._reduction is not None:
            self.set_reduction(self._reduction)
        return self._watched_set - before

    def watches(self, parameter: Tensor) -> bool:
        """Whether it sums the gradients of this parameter."""
        return parameter in self._watched_set

    def begin_backward(self) -> None:
        """A backward begins whose gradients are to be added to those that are there."""
        self._sums.begin()

    def end_backward(self) -> None:
        """The backward has ended: sums are in ``p.grad`` again."""
        self._sums.complete()

    # -- called by a reduction while a backward runs

    def before_gradient(self, parameter: Tensor) -> None:
        """FSDP2 is about to add to ``p.grad`` in the parameter's dtype: what is there is added in fp32 later."""
        self._several_ranks.before(parameter)

    def has_gradient(self, parameter: Tensor) -> bool:
        """Whether ``p.grad`` holds a gradient that no step has used."""
        return self._sums.has_gradient(parameter)

    def pop_earlier(self, parameter: Tensor) -> Tensor | None:
        """Remove and return the sum of earlier micro-batches, to be reduced together with the newest one."""
        return self._several_ranks.pop_earlier(parameter)

    def add_reduced(self, parameter: Tensor, gradient: Tensor, used: Tensor | None) -> None:
        """Add a gradient that is reduced over all ranks, and of which a rounded copy will be in ``p.grad`` (DDP).

        Args:
            gradient: fp32, the parameter's shape. Kept, not copied; it may be incomplete until the end of this
                backward.
            used: 0-dim; zero if no rank had a gradient, which then counts as none. ``None``: some rank had one.
        """
        self._several_ranks.add_reduced(parameter, gradient, used)

    def end_reduction(self) -> None:
        """:meth:`add_reduced` is not called again in this backward."""
        self._several_ranks.end_reduction()

    @property
    def _several_ranks(self) -> SumsAside:
        assert isinstance(self._sums, SumsAside), "a reduction without a process group"
        return self._sums

    # -- called by the step

    def collect(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradient of each parameter, of the local shard; fp32 if it is a sum.

        Nothing is removed until :meth:`consume`: a second call returns the same.

        Raises:
            RuntimeError: ranks would drift apart, or an edit would be lost.
            TypeError: a gradient is sparse.
        """
        self._sums.complete()
        self._collected = list(parameters)
        totals = self._sums.totals()
        checked = _local if self._reduction is None else self._checked
        if not totals:
            return [checked(p) for p in parameters]
        return [self._total(p, totals[p]) if p in totals else checked(p) for p in parameters]

    def consume(self) -> None:
        """Remove what was collected last."""
        self._drop(self._collected)
        self.clear()

    def peek(self, parameter: Tensor) -> Tensor | None:
        """:meth:`collect` for one parameter whose gradient is complete while backward continues."""
        self._sums.complete([parameter])
        return _local(parameter) if self._reduction is None else self._checked(parameter)

    @property
    def reader(self) -> Callable[[Tensor], Tensor | None]:
        """What :meth:`peek` does while the watched parameters stay the same: called for each of them in backward."""
        return _local if self._sums.is_in_place and self._reduction is None else self.peek

    def take(self, parameter: Tensor) -> Tensor | None:
        """:meth:`peek`, and remove the gradient."""
        gradient = self.peek(parameter)
        self._drop([parameter])
        return gradient

    def _drop(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            parameter.grad = None

    def _total(self, parameter: Tensor, reduced: Tensor) -> Tensor:
        """The reduced sum, and what every rank has added since (a regularisation of the weights)."""
        extra = _local(parameter) if self._sums.has_gradient(parameter) else None
        return reduced if extra is None else reduced + extra

    def _checked(self, parameter: Tensor) -> Tensor | None:
        """The local shard of ``p.grad``, which must have been reduced."""
        self._refuse_unreduced(parameter)
        return _local(parameter)

    def _refuse_unreduced(self, parameter: Tensor) -> None:
        assert self._reduction is not None
        if parameter.grad is not None:
            self._reduction.refuse_left_out(parameter)
        if not (self._sums.is_own_gradient(parameter) and self._reduction.must_reduce(parameter)):
            return
        message = f"a gradient of shape {tuple(parameter.shape)} is this rank's own, and ranks would drift apart: "
        if self._sums.is_incomplete:
            raise RuntimeError(
                f"{message}DDP has not reduced it, because parameters beside it got no gradient in this backward (a "
                "part of the model that the batch did not use). Set sharding.find_unused_parameters to true, or freeze "
                "what no batch uses"
            )
        raise RuntimeError(
            f"{message}no backward since the last step was reduced over the ranks. Run each step's last micro-batch "
            "under strategy.accumulate(model, last=True), and call the model that prepare_model returned, not the "
            "module in it"
        )

    def keeps_unreduced(self, parameters: Iterable[Tensor]) -> bool | None:
        """Whether gradients of micro-batches under ``accumulate(last=False)`` are left; ``None``: not known."""
        return None if self._reduction is None else self._reduction.keeps_unreduced(parameters)

    def drop_unreduced(self, parameters: Iterable[Tensor]) -> None:
        """Drop what FSDP2 keeps of micro-batches under ``accumulate(last=False)``."""
        if self._reduction is not None:
            self._reduction.drop_unreduced(parameters)

    def clear(self) -> None:
        """Drop all sums (``zero_grad``)."""
        self._collected = []
        self._sums.clear()
        if self._reduction is not None:
            self._reduction.forget()

    def close(self) -> None:
        """Drop all sums and remove the hooks."""
        self.clear()
        self._watched, self._kinds, self._watched_set = [], [], frozenset()
        self._sums.set_parameters(())


def _none_unused(_: Sequence[Tensor]) -> Sequence[Tensor]:
    return ()


def refuse_sparse(gradient: Tensor) -> None:
    """Raise ``TypeError`` for a sparse gradient."""
    if gradient.is_sparse:
        raise TypeError(
            f"a parameter of shape {tuple(gradient.shape)} has a sparse gradient, which fp32 masters and one "
            "global norm cannot take; build its layer with sparse=False"
        )


def unshared(gradients: dict[Key, Tensor]) -> dict[Key, Tensor]:
    """The gradients, without shared memory: users may set one tensor as the gradient of two parameters."""
    addresses = list(map(Tensor.data_ptr, gradients.values()))
    if len({*addresses}) == len(addresses):
        return gradients
    seen: set[int] = set()
    for (key, gradient), address in zip(gradients.items(), addresses, strict=True):
        if address in seen and gradient.numel():
            gradients[key] = gradient.clone()
        seen.add(address)
    return gradients


def _local(parameter: Tensor) -> Tensor | None:
    """The local shard of ``p.grad``."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.is_sparse:
        refuse_sparse(gradient)
    if type(gradient) is not Tensor and is_sharded(gradient):
        return local_gradient(parameter, torch.float32)
    return gradient.detach() if gradient.requires_grad else gradient
