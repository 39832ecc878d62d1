"""Adding the gradients of several micro-batches in fp32: hooks on 16-bit parameters.

``p.grad`` ends up as the fp32 sum either way, so that whoever scales, clips or reads it between backwards reaches all
of it (torch allows a gradient of another dtype where ``p.grad_dtype`` is ``None``).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from lightstep.distributed import is_sharded, like, local_gradient
from lightstep.precision.leaf_hooks import LeafHooks

__all__ = ["SumsAside", "SumsInPlace"]

Identity = tuple[int, int]


class SumsInPlace:
    """One process: before a second gradient arrives ``p.grad`` becomes fp32, and autograd adds to that.

    ``torch.autograd.grad`` announces gradients too, and then adds none: nothing is lost by having made room.
    """

    def __init__(self, _: set[Tensor] | None = None) -> None:
        self._hooks = LeafHooks()

    def carry(self, parameters: Iterable[Tensor]) -> None:
        """Exactly these parameters' gradients are added up."""
        self._hooks.carry(parameters, before=_widening)

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """A backward begins. Compiled autograd takes hold of ``p.grad`` before it calls hooks."""
        if _compiled_autograd():
            for parameter in parameters:
                _widen(parameter)

    def make_way(self, parameters: Iterable[Tensor]) -> None:
        """There is nobody to reduce ``p.grad``."""

    def withdraw(self, parameter: Tensor) -> Tensor | None:
        """The sum of earlier micro-batches while a backward runs: it is in ``p.grad``."""
        return None

    def is_of_this_rank(self, parameter: Tensor) -> bool:
        """Whether ``p.grad`` is what this rank's autograd made, and nobody reduced or changed it."""
        return False

    def finish(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Backward is done with these (``None``: all): the sum of each is in ``p.grad``."""

    def forget(self) -> None:
        """The gradients have been taken or given up."""


def _widening(parameter: Tensor) -> Callable[[Tensor], None]:
    reference = weakref.ref(parameter)

    def hook(_: Tensor) -> None:
        leaf = reference()
        if leaf is not None and leaf.grad is not None and leaf.grad.dtype is not torch.float32:
            if _compiled_autograd():
                raise RuntimeError(
                    "compiled autograd is about to add gradients in the parameters' dtype, and precision.reduce is "
                    "'float32': call optimizer.backward(loss) instead of loss.backward(), or set it to 'parameters'"
                )
            _widen(leaf)

    return hook


def _widen(parameter: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.dtype is not torch.float32:
        _put(parameter, parameter.grad.float())


def _compiled_autograd() -> bool:
    module: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and (module.compiled_autograd_enabled or module.in_compiled_autograd_region)


def _put(parameter: Tensor, gradient: Tensor) -> None:
    """``p.grad`` becomes this, of whatever dtype."""
    if parameter.grad_dtype is not None:
        parameter.grad_dtype = None
    parameter.grad = gradient


class SumsAside:
    """Several processes: somebody may reduce ``p.grad`` over the ranks, in the parameter's dtype, before it is added.

    The sum of earlier micro-batches stands aside while a backward runs, and is added when that has ended and been
    reduced. A reduction that reaches the newest micro-batch alone is refused: ranks would drift apart
    (``DistributedDataParallel`` of the user's own with ``no_sync``).

    Args:
        rounded: parameters whose ``p.grad`` is a copy that does not count.
    """

    def __init__(self, rounded: set[Tensor]) -> None:
        self._rounded = rounded
        self._hooks = LeafHooks()
        self._written: dict[Tensor, Identity] = {}  # p.grad as this rank's autograd left it
        self._aside: dict[Tensor, tuple[Tensor, bool]] = {}  # the sum, and whether it was of this rank alone
        self._waiting_for_the_end = False

    def carry(self, parameters: Iterable[Tensor]) -> None:
        """Exactly these parameters' gradients are added up."""
        own = weakref.ref(self)
        self._hooks.carry(parameters, lambda p: _told(own, SumsAside.before, p), lambda p: _told(own, _arrived, p))

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """A backward begins."""
        if _compiled_autograd() and any(p.grad is not None for p in parameters):
            raise RuntimeError(
                "compiled autograd over several processes with precision.reduce 'float32': it would add gradients in "
                "the parameters' dtype; switch it off, or set precision.reduce to 'parameters'"
            )

    def make_way(self, parameters: Iterable[Tensor]) -> None:
        """In a backward that has nothing for some of these, their ``p.grad`` is reduced as it is, in their own dtype:
        sums in fp32 stand aside for :meth:`withdraw`, and zeros in their places."""
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.dtype is torch.float32:
                self._set_aside(parameter)
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
                self._rounded.add(parameter)

    def before(self, parameter: Tensor) -> None:
        """A new gradient is about to arrive in ``p.grad``."""
        if parameter in self._rounded:
            self._rounded.discard(parameter)
            parameter.grad = None
        if parameter.grad is None:
            return
        self._set_aside(parameter)
        if not self._waiting_for_the_end:
            self._waiting_for_the_end = True
            Variable._execution_engine.queue_callback(_ending(weakref.ref(self)))

    def _set_aside(self, parameter: Tensor) -> None:
        self._merge(parameter)  # several gradients in one backward: reentrant activation checkpointing
        of_this_rank = self.is_of_this_rank(parameter)
        local = local_gradient(parameter, torch.float32)
        assert local is not None
        self._aside[parameter] = local.to(torch.float32), of_this_rank
        parameter.grad = None

    def withdraw(self, parameter: Tensor) -> Tensor | None:
        """The sum of earlier micro-batches while a backward runs."""
        return self._aside.pop(parameter, (None, False))[0]

    def is_of_this_rank(self, parameter: Tensor) -> bool:
        """Whether ``p.grad`` is what this rank's autograd made, and nobody reduced or changed it."""
        gradient = parameter.grad
        return gradient is not None and self._written.get(parameter) == _identity(gradient)

    def finish(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Backward is done with these (``None``: all): the sum of each is in ``p.grad``."""
        if parameters is None:
            self._waiting_for_the_end = False
        for parameter in list(self._aside) if parameters is None else parameters:
            self._merge(parameter)

    def _merge(self, parameter: Tensor) -> None:
        if parameter not in self._aside:
            return
        earlier, was_of_this_rank = self._aside[parameter]
        of_this_rank = was_of_this_rank
        if parameter in self._rounded:
            self._rounded.discard(parameter)
            parameter.grad = None
        if parameter.grad is not None:
            of_this_rank = self.is_of_this_rank(parameter)
            if was_of_this_rank and not of_this_rank:
                raise RuntimeError(
                    f"p.grad of a parameter of shape {tuple(parameter.shape)} was changed after backward, and only the "
                    "newest micro-batch was in it: those before it are added up in fp32 beside it. Let a strategy with "
                    "sharding.kind ddp wrap the model, instead of a DistributedDataParallel of your own; or have "
                    "everything added up in p.grad: precision.reduce 'parameters' (reduce_float32=False). "
                    "optimizer.zero_grad() gives the gradients up"
                )
            newest = local_gradient(parameter, torch.float32)
            assert newest is not None
            earlier = earlier.add_(newest)
        del self._aside[parameter]
        _put(parameter, like(parameter, earlier))
        self._written.pop(parameter, None)
        if of_this_rank:
            _arrived(self, parameter)

    def forget(self) -> None:
        """The gradients have been taken or given up."""
        self._waiting_for_the_end = False
        self._written.clear()
        self._aside.clear()


def _arrived(sums: SumsAside, parameter: Tensor) -> None:
    """The new gradient is in ``p.grad``."""
    if parameter.grad is not None and not is_sharded(parameter):
        sums._written[parameter] = _identity(parameter.grad)


def _told(
    reference: weakref.ref[SumsAside], tell: Callable[[SumsAside, Tensor], None], parameter: Tensor
) -> Callable[[Tensor], None]:
    leaf = weakref.ref(parameter)

    def hook(_: Tensor) -> None:
        sums, own = reference(), leaf()
        if sums is not None and own is not None:
            tell(sums, own)

    return hook


def _ending(reference: weakref.ref[SumsAside], again: bool = True) -> Callable[[], None]:
    """The end of backward; called in its turn behind what a ``DistributedDataParallel`` does there."""

    def end() -> None:
        sums = reference()
        if sums is None:
            return
        if again:
            Variable._execution_engine.queue_callback(_ending(reference, again=False))
        else:
            with torch.no_grad():
                sums.finish()

    return end


def _identity(gradient: Tensor) -> Identity:
    return 0 if gradient.is_sparse else gradient.data_ptr(), gradient._version
