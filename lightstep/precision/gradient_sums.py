"""Sums of several micro-batches' gradients in fp32, where these are reduced over ranks."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from lightstep.distributed import is_sharded, like, local_gradient, local_tensor

__all__ = ["SumsAside", "runs_compiled", "set_grad"]

_LOW = (torch.bfloat16, torch.float16)

Identity = tuple[int, int]


def set_grad(parameter: Tensor, gradient: Tensor) -> None:
    """Set ``p.grad``, whatever the dtype: torch allows another one than the parameter's if ``p.grad_dtype`` is
    ``None``."""
    if parameter.grad_dtype is not None:
        parameter.grad_dtype = None
    parameter.grad = gradient


class SumsAside:
    """For several processes, where something may reduce ``p.grad`` over the ranks in the parameter's dtype.

    While a backward runs, the sum of earlier micro-batches is kept outside ``p.grad``. It is added after the backward
    and its reduction. If a reduction has seen the newest micro-batch alone, ranks would drift apart, and the sum is
    refused (``DistributedDataParallel`` of the user's own with ``no_sync``).

    A strategy's DDP passes its fp32 result to :meth:`add_reduced`, and leaves a rounded copy in ``p.grad``. At the end
    of backward the sum of these results takes its place.

    Args:
        restore_hooks: makes autograd call the hooks of parameters that have been swapped.

    Attributes:
        reads_unused: returns those of the given parameters whose ``p.grad`` the running backward will reduce even if it
            has no gradient for them.
        must_reduce: whether a parameter's gradient gets to :meth:`add_reduced` if it is reduced.
        is_incomplete: a reduction has begun, and has left gradients out.
    """

    def __init__(self, restore_hooks: Callable[[], object]) -> None:
        self._restore_hooks = restore_hooks
        self.reads_unused: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda parameters: ()
        self.must_reduce: Callable[[Tensor], bool] = lambda parameter: False
        self.is_incomplete = False
        self._parameters: Sequence[Tensor] = ()
        self._in_backward = False
        self._reducing = False  # the running backward has reduced some gradients, but not all
        self._own_gradients: dict[Tensor, Identity] = {}  # p.grad as this rank's autograd left it
        self._shards: dict[Tensor, Identity] = {}  # p.grad as FSDP2 left it
        self._rounded = False  # FSDP2 has added to it
        self._earlier: dict[Tensor, tuple[Tensor, bool]] = {}  # earlier sum, and whether it is this rank's own
        self._placeholders: set[Tensor] = set()  # p.grad is zero, in place of the earlier sum
        self._newest: dict[Tensor, tuple[Tensor, Tensor | None]] = {}  # arguments of `add_reduced` in this backward
        self._totals: dict[Tensor, Tensor] = {}  # sums of what `add_reduced` got, while they are not in p.grad
        self._set_totals: dict[Tensor, Tensor] = {}  # those that p.grad was set to
        self._beside: dict[Tensor, Identity] = {}  # p.grad beside a total, as the last backward left both

    def set_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Sum the gradients of exactly these parameters."""
        self._parameters = parameters

    @property
    def hooks(self) -> tuple[Callable[[Tensor], None], Callable[[Tensor], None]]:
        """The hooks on the parameters: before a new gradient, and after it."""
        own = weakref.ref(self)
        return _weak_hook(own, SumsAside.before), _weak_hook(own, SumsAside._after)

    def forget_dropped(self) -> None:
        """Between backwards: who has set ``p.grad`` to ``None`` (``model.zero_grad()``) has dropped the total, too.

        Raises:
            RuntimeError: ``p.grad`` was written to in place, which has not reached the total.
        """
        left = {p: identity for p, identity in self._beside.items() if p not in self._earlier}
        for parameter, (address, version) in left.items():
            if parameter.grad is None:
                self._totals.pop(parameter, None)
            elif (now := _identity(parameter.grad))[0] == address and now[1] != version:
                raise RuntimeError(
                    f"p.grad of a parameter of shape {tuple(parameter.shape)} was written to in place (clipped, "
                    "scaled, or zeroed by zero_grad(set_to_none=False)), and it holds only what a backward without "
                    "a forward of the model has added (a penalty): the gradient that DDP has reduced before is "
                    "beside it, in fp32. Run one backward of the sum of both losses, or let step() clip "
                    "(clipping.max_norm). optimizer.zero_grad() drops the gradients"
                )
        self._beside = {}

    def before_step(self) -> None:
        """:meth:`forget_dropped`: a step is about to collect the sums."""
        self.forget_dropped()

    def begin(self) -> None:
        """A backward begins.

        If it has no gradient for a parameter, the reduction may read ``p.grad`` as it is, in the parameter's dtype. So
        fp32 sums are taken out of it and leave zeros behind.
        """
        self._restore_hooks()
        self.forget_dropped()
        if runs_compiled() and any(p.grad is not None for p in self._parameters):
            raise RuntimeError(
                "compiled autograd over several processes with precision.reduce 'float32': it would add gradients in "
                "the parameters' dtype; switch it off, or set precision.reduce to 'parameters'"
            )
        self.complete()
        self._take_totals()
        self._in_backward = True
        for parameter in self.reads_unused(self._parameters):
            if parameter.grad is not None and parameter.grad.dtype is torch.float32:
                self._take_earlier(parameter)
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
                self._placeholders.add(parameter)

    def before(self, parameter: Tensor) -> None:
        """A new gradient is about to arrive in ``p.grad``: what is there is added to it in fp32 later."""
        if not self._in_backward:  # of the user's own: loss.backward()
            self.begin()
            Variable._execution_engine.queue_callback(_end_callback(weakref.ref(self)))
        if parameter in self._placeholders:
            self._drop_placeholder(parameter)
        elif parameter.grad is not None:
            self._take_earlier(parameter)

    def _after(self, parameter: Tensor) -> None:
        """``p.grad`` has been written, by autograd or FSDP2."""
        if parameter.grad is None:
            return
        if not is_sharded(parameter):
            self._own_gradients[parameter] = _identity(parameter.grad)
            return
        address, version = _identity(local_tensor(parameter.grad))
        previous_address, previous_version = self._shards.get(parameter, (0, 0))
        if address and address == previous_address and version > previous_version:
            self._rounded = True
        self._shards[parameter] = address, version

    def _drop_placeholder(self, parameter: Tensor) -> None:
        self._placeholders.discard(parameter)
        parameter.grad = None

    def _take_earlier(self, parameter: Tensor) -> None:
        self._merge(parameter)  # the second gradient in one backward: reentrant activation checkpointing
        is_own = self.is_own_gradient(parameter)
        local = local_gradient(parameter, torch.float32)
        assert local is not None
        self._earlier[parameter] = local, is_own
        parameter.grad = None

    # -- called by a reduction while a backward runs

    def pop_earlier(self, parameter: Tensor) -> Tensor | None:
        """Remove and return the sum of earlier micro-batches, to be reduced together with the newest one."""
        return self._earlier.pop(parameter, (None, False))[0]

    def add_reduced(self, parameter: Tensor, gradient: Tensor, used: Tensor | None) -> None:
        """Add this backward's gradient over all ranks, of which the reduction will leave a rounded copy in ``p.grad``.

        Args:
            gradient: fp32, the parameter's shape; kept, not copied. It may be incomplete until the end of this
                backward.
            used: 0-dim; zero if no rank had a gradient, which then counts as none. ``None``: some rank had one.
        """
        self._newest[parameter] = gradient, used
        self._reducing = True

    def end_reduction(self) -> None:
        """:meth:`add_reduced` is not called again in this backward."""
        self._reducing = False
        Variable._execution_engine.queue_callback(_end_callback(weakref.ref(self)))

    # -- the end

    def has_gradient(self, parameter: Tensor) -> bool:
        """Whether ``p.grad`` is part of the sum."""
        return parameter.grad is not None and parameter not in self._placeholders

    def is_own_gradient(self, parameter: Tensor) -> bool:
        """Whether ``p.grad`` is this rank's own gradient, not reduced and not changed."""
        gradient = parameter.grad
        return gradient is not None and self._own_gradients.get(parameter) == _identity(gradient)

    def totals(self) -> Mapping[Tensor, Tensor]:
        """Reduced sums that are not in ``p.grad``; if :meth:`has_gradient`, ``p.grad`` is to be added.

        Raises:
            RuntimeError: sums were rounded.
        """
        if self._rounded:
            raise RuntimeError(
                "FSDP2 has added the gradients of several backwards in 16 bits, and reduce_float32 is true: create the "
                "optimizer by strategy.create_optimizer(model), which has them added in fp32; or call "
                "model.set_requires_gradient_sync(False) before all backwards of a step but the last; or pass "
                "reduce_float32=False. optimizer.zero_grad() drops the gradients"
            )
        self._restore_totals()
        return self._totals

    def end(self) -> None:
        """A graph task has ended; backward continues if it was a nested one (reentrant activation checkpointing)."""
        if not self._reducing:
            self.complete()

    def complete(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Backward has completed these gradients (``None``: all)."""
        if parameters is None:
            self._update_totals()
            if self._in_backward:
                self._find_unreduced()
            self._in_backward = self._reducing = False
        for parameter in list(self._earlier) if parameters is None else parameters:
            self._merge(parameter)
        if parameters is None:
            self._set_grads_to_totals()
            self._beside = {p: _identity(p.grad) for p in self._totals if p.grad is not None}

    def _update_totals(self) -> None:
        """Add what the reduction has passed. DDP leaves no copy if it has seen no gradient on any rank, but an earlier
        micro-batch may have had one: then the host reads ``used``."""
        newest, self._newest = self._newest, {}
        without_copy = {p: used for p, (_, used) in newest.items() if p.grad is None and used is not None}
        flags = torch.stack(list(without_copy.values())).tolist() if without_copy else []
        for parameter in (p for p, flag in zip(without_copy, flags, strict=True) if not flag):
            del newest[parameter]
        for parameter, (gradient, _) in newest.items():
            total = self._totals.get(parameter)
            self._totals[parameter] = gradient if total is None else total.add_(gradient)
            parameter.grad = None
            self._placeholders.discard(parameter)
            self._own_gradients.pop(parameter, None)

    def _find_unreduced(self) -> None:
        """DDP has moved gradients into its buckets; those that lack one (of an unused parameter) it has not reduced."""
        for parameter, identity in self._own_gradients.items():
            if parameter.grad is not None and self.must_reduce(parameter):
                self._own_gradients[parameter] = _identity(parameter.grad)
                self.is_incomplete |= self._own_gradients[parameter] != identity

    def _set_grads_to_totals(self) -> None:
        """Except where ``p.grad`` is needed: it holds what this rank has added since and has not reduced."""
        for parameter in [parameter for parameter in self._totals if parameter.grad is None]:
            self._set_totals[parameter] = self._totals.pop(parameter)
            set_grad(parameter, self._set_totals[parameter])

    def _take_totals(self) -> None:
        """Take the reduced sums out of ``p.grad``, as user code has left them there."""
        self._restore_totals()
        for parameter in self._set_totals:
            if parameter.grad is not None:
                self._totals[parameter] = parameter.grad.detach().to(torch.float32)
                parameter.grad = None
        self._set_totals.clear()

    def _restore_totals(self) -> None:
        """``DistributedDataParallel`` rounds what is in ``p.grad`` when it makes its buckets anew, in a forward."""
        for parameter, total in self._set_totals.items():
            gradient = parameter.grad
            if gradient is not None and gradient is not total and _is_rounded(gradient, total):
                set_grad(parameter, total)

    def _merge(self, parameter: Tensor) -> None:
        if parameter not in self._earlier:
            return
        earlier, was_own = self._earlier[parameter]
        earlier, is_own = earlier.to(torch.float32), was_own
        if parameter in self._placeholders:
            self._drop_placeholder(parameter)
        if parameter.grad is not None:
            is_own = self.is_own_gradient(parameter)
            if was_own and not is_own:
                raise RuntimeError(
                    f"p.grad of a parameter of shape {tuple(parameter.shape)} was changed after backward, and only the "
                    "newest micro-batch was in it: those before it are added up in fp32 beside it. Let a strategy with "
                    "sharding.kind ddp wrap the model, instead of a DistributedDataParallel of your own; or have "
                    "everything added up in p.grad: precision.reduce 'parameters' (reduce_float32=False). "
                    "optimizer.zero_grad() drops the gradients"
                )
            newest = local_gradient(parameter, torch.float32)
            assert newest is not None
            earlier = earlier.add_(newest)
        del self._earlier[parameter]
        gradient = like(parameter, earlier)
        set_grad(parameter, gradient)
        self._own_gradients.pop(parameter, None)
        if is_own:
            self._own_gradients[parameter] = _identity(gradient)

    def clear(self) -> None:
        """The gradients have been consumed or dropped."""
        self._in_backward = self._reducing = self._rounded = self.is_incomplete = False
        for parameter in (*self._set_totals, *self._placeholders):
            parameter.grad = None
        self._placeholders.clear()
        mappings: Sequence[dict[Tensor, Any]]
        mappings = (self._own_gradients, self._shards, self._earlier, self._newest, self._totals, self._set_totals)
        self._beside.clear()
        for mapping in mappings:
            mapping.clear()


def runs_compiled() -> bool:
    """Whether compiled autograd runs backwards: hooks are then called after it has read ``p.grad``."""
    module: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and (module.compiled_autograd_enabled or module.in_compiled_autograd_region)


def _weak_hook(
    reference: weakref.ref[SumsAside], tell: Callable[[SumsAside, Tensor], None]
) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        sums = reference()
        if sums is not None:
            tell(sums, parameter)

    return hook


def _end_callback(reference: weakref.ref[SumsAside], again: bool = True) -> Callable[[], None]:
    """A callback for the end of backward. It queues itself once more, to run after ``DistributedDataParallel``'s."""

    def end() -> None:
        sums = reference()
        if sums is None:
            return
        if again:
            Variable._execution_engine.queue_callback(_end_callback(reference, again=False))
        else:
            with torch.no_grad():
                sums.end()

    return end


def _is_rounded(copy: Tensor, gradient: Tensor) -> bool:
    rounded = gradient.to(copy.dtype)
    return copy.dtype in _LOW and torch.equal(copy.view(torch.int16), rounded.view(torch.int16))


def _identity(gradient: Tensor) -> Identity:
    return 0 if gradient.is_sparse else gradient.data_ptr(), gradient._version
