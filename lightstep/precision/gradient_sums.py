"""Adding the gradients of several micro-batches in fp32: hooks on 16-bit parameters.

``p.grad`` ends up as the fp32 sum either way, so that whoever scales, clips or reads it between backwards reaches all
of it (torch allows a gradient of another dtype where ``p.grad_dtype`` is ``None``).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from lightstep.distributed import is_sharded, like, local_gradient
from lightstep.precision.leaf_hooks import LeafHooks

__all__ = ["SumsAside", "SumsInPlace"]

Identity = tuple[int, int]

ReadsUnused = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class SumsInPlace:
    """One process: before a second gradient arrives ``p.grad`` becomes fp32, and autograd adds to that.

    ``torch.autograd.grad`` announces gradients too, and then adds none: nothing is lost by having made room.
    """

    def __init__(self) -> None:
        self._hooks = LeafHooks()
        self._parameters: Sequence[Tensor] = ()

    def carry(self, parameters: Sequence[Tensor]) -> None:
        """Exactly these parameters' gradients are added up."""
        self._parameters = parameters
        self._hooks.carry(parameters, before=_widening)

    def begin(self) -> None:
        """A backward begins. Compiled autograd takes hold of ``p.grad`` before it calls hooks."""
        if _compiled_autograd():
            for parameter in self._parameters:
                _widen(parameter)

    def has_gradient(self, parameter: Tensor) -> bool:
        """Whether ``p.grad`` holds something that counts."""
        return parameter.grad is not None

    def totals(self) -> Mapping[Tensor, Tensor]:
        """What was reduced, beside ``p.grad``."""
        return {}

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

    While a backward runs, the sum of earlier micro-batches stands aside. When the backward has ended and been reduced,
    the sum is added to what is in ``p.grad``. A reduction that reaches the newest micro-batch alone is refused, because
    ranks would drift apart (``DistributedDataParallel`` of the user's own with ``no_sync``).

    A reduction that is known (:meth:`reduced`) gives its fp32 result here, and leaves a rounded copy in ``p.grad``. The
    copy does not count. So an edit of it is refused, and whoever removes it gives the gradient up.

    Args:
        reads_unused: given parameters, those whose ``p.grad`` this backward reduces as it is if it has no gradient for
            them.
    """

    def __init__(self, reads_unused: ReadsUnused) -> None:
        self.reads_unused = reads_unused
        self._hooks = LeafHooks()
        self._parameters: Sequence[Tensor] = ()
        self._running = False  # a backward, as far as is known
        self._reducing = False  # more of its gradients are to be reduced
        self._written: dict[Tensor, Identity] = {}  # p.grad as this rank's autograd left it
        self._aside: dict[Tensor, tuple[Tensor, bool]] = {}  # the sum, and whether it is of this rank alone
        self._placeholders: set[Tensor] = set()  # p.grad is zeros in the place of a sum that stands aside
        self._newest: dict[Tensor, tuple[Tensor, Tensor | None]] = {}  # given to `reduced` in this backward
        self._totals: dict[Tensor, Tensor] = {}  # of all that was given to `reduced`
        self._copies: dict[Tensor, tuple[Identity, Tensor]] = {}  # p.grad as the reduction left it, and what it rounds

    def carry(self, parameters: Sequence[Tensor]) -> None:
        """Exactly these parameters' gradients are added up."""
        self._parameters = parameters
        own = weakref.ref(self)
        self._hooks.carry(parameters, lambda p: _told(own, SumsAside.before, p), lambda p: _told(own, _arrived, p))

    def begin(self) -> None:
        """A backward begins.

        Where it has no gradient for a parameter, ``p.grad`` may be reduced as it is, in the parameter's dtype: sums in
        fp32 stand aside and leave zeros in their places.
        """
        if _compiled_autograd() and any(p.grad is not None for p in self._parameters):
            raise RuntimeError(
                "compiled autograd over several processes with precision.reduce 'float32': it would add gradients in "
                "the parameters' dtype; switch it off, or set precision.reduce to 'parameters'"
            )
        self.finish()
        self._check_copies()
        for parameter in self._copies:
            parameter.grad = None
        self._copies.clear()
        self._running = True
        for parameter in self.reads_unused(self._parameters):
            if parameter.grad is not None and parameter.grad.dtype is torch.float32:
                self._set_aside(parameter)
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
                self._placeholders.add(parameter)

    def before(self, parameter: Tensor) -> None:
        """A new gradient is about to arrive in ``p.grad``."""
        if not self._running:  # nobody has called `begin`
            self.begin()
            Variable._execution_engine.queue_callback(_ending(weakref.ref(self)))
        if parameter in self._placeholders:
            self._drop_placeholder(parameter)
        elif parameter.grad is not None:
            self._set_aside(parameter)

    def _drop_placeholder(self, parameter: Tensor) -> None:
        self._placeholders.discard(parameter)
        parameter.grad = None

    def _set_aside(self, parameter: Tensor) -> None:
        self._merge(parameter)  # several gradients in one backward: reentrant activation checkpointing
        of_this_rank = self.is_of_this_rank(parameter)
        local = local_gradient(parameter, torch.float32)
        assert local is not None
        self._aside[parameter] = local.to(torch.float32), of_this_rank
        parameter.grad = None

    # -- what a reduction over the ranks does while a backward runs

    def withdraw(self, parameter: Tensor) -> Tensor | None:
        """The sum of earlier micro-batches, to be reduced together with the newest one."""
        return self._aside.pop(parameter, (None, False))[0]

    def reduced(self, parameter: Tensor, gradient: Tensor, used: Tensor | None) -> None:
        """This backward's gradient over all ranks, of which a rounded copy will be in ``p.grad`` at its end.

        Args:
            gradient: fp32. Kept, not copied.
            used: zero (0-dim) if no rank had a gradient, and there shall be none; ``None`` if that cannot be.
        """
        self._newest[parameter] = gradient, used
        self._reducing = True

    def all_reduced(self) -> None:
        """:meth:`reduced` is not called again in this backward."""
        self._reducing = False
        Variable._execution_engine.queue_callback(_ending(weakref.ref(self)))

    # -- the end

    def has_gradient(self, parameter: Tensor) -> bool:
        """Whether ``p.grad`` holds something that counts."""
        return parameter.grad is not None and parameter not in self._copies and parameter not in self._placeholders

    def is_of_this_rank(self, parameter: Tensor) -> bool:
        """Whether ``p.grad`` is what this rank's autograd made, and nobody reduced or changed it."""
        gradient = parameter.grad
        return gradient is not None and self._written.get(parameter) == _identity(gradient)

    def totals(self) -> Mapping[Tensor, Tensor]:
        """What was reduced since the gradients were taken last, by parameter; what counts in ``p.grad`` adds to it."""
        self._check_copies()
        return self._totals

    def end(self) -> None:
        """A graph task has ended. Backward goes on if that was part of another (reentrant activation checkpointing)."""
        if not self._reducing:
            self.finish()

    def finish(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Backward is done with these (``None``: all)."""
        if parameters is None:
            self._running = self._reducing = False
            self._add_reduced()
        for parameter in list(self._aside) if parameters is None else parameters:
            self._merge(parameter)

    def _add_reduced(self) -> None:
        """DDP leaves no copy where it has seen no gradient on any rank, but one of an earlier micro-batch may have been
        there: the host reads whether it was."""
        newest, self._newest = self._newest, {}
        unseen = {p: used for p, (_, used) in newest.items() if p.grad is None and used is not None}
        flags = torch.stack(list(unseen.values())).tolist() if unseen else []
        for parameter in (p for p, flag in zip(unseen, flags, strict=True) if not flag):
            del newest[parameter]
        for parameter, (gradient, _) in newest.items():
            self._placeholders.discard(parameter)
            total = self._totals.get(parameter)
            self._totals[parameter] = gradient if total is None else total.add_(gradient)
            if parameter.grad is not None:
                self._copies[parameter] = _identity(parameter.grad), gradient
                self._written.pop(parameter, None)

    def _check_copies(self) -> None:
        for parameter, (identity, gradient) in list(self._copies.items()):
            copy = parameter.grad
            if copy is None:
                del self._copies[parameter], self._totals[parameter]
            elif _identity(copy) != identity and not _is_rounded(copy, gradient):  # DDP may move its buckets
                raise RuntimeError(
                    f"p.grad of a parameter of shape {tuple(parameter.shape)} was changed after backward, and it is a "
                    "rounded copy of the gradient, which was reduced in fp32: the edit would be lost. Clip by "
                    "clipping.max_norm, scale the loss, or set precision.reduce to 'parameters', under which p.grad "
                    "is the gradient. optimizer.zero_grad() gives the gradients up"
                )

    def _merge(self, parameter: Tensor) -> None:
        if parameter not in self._aside:
            return
        earlier, was_of_this_rank = self._aside[parameter]
        of_this_rank = was_of_this_rank
        if parameter in self._placeholders:
            self._drop_placeholder(parameter)
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
        self._running = self._reducing = False
        for parameter in (*self._copies, *self._placeholders):
            parameter.grad = None
        for kept in (self._written, self._aside, self._placeholders, self._newest, self._totals, self._copies):
            kept.clear()


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
                sums.end()

    return end


def _is_rounded(copy: Tensor, gradient: Tensor) -> bool:
    return torch.equal(copy.view(torch.int16), gradient.to(copy.dtype).view(torch.int16))


def _identity(gradient: Tensor) -> Identity:
    return 0 if gradient.is_sparse else gradient.data_ptr(), gradient._version
