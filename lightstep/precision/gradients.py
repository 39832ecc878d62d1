"""The gradients of a step: sums of micro-batches in fp32, and whether all of them come from scaled losses.

Autograd adds the gradients of several micro-batches in the parameter's dtype. :class:`GradientAccumulator` adds them in
fp32: ``grad32 = float(g1) + float(g2) + ...``, in this order, and leaves the sum in ``p.grad``. So user code which
scales, clips or reads it between backwards reaches all of it. With one micro-batch nothing is copied: ``p.grad`` is
what autograd made, or the fp32 result of a reduction over ranks.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle, unserializable_hook

from lightstep.distributed import initialized, is_sharded, local_gradient
from lightstep.precision.gradient_sums import SumsAside, runs_compiled, set_grad
from lightstep.precision.loss_scale import ConstantLossScale, LossScale

Key = TypeVar("Key")
Hook = Callable[[Tensor], None]

_LOW = (torch.bfloat16, torch.float16)


class LeafHooks:
    """A hook before each new gradient, a hook after it or both, on each of several parameters.

    Autograd calls the first one before it adds a gradient to ``p.grad`` (``torch.autograd.grad`` does too, and then
    adds nothing), and the second one, a post-accumulate-grad hook, afterwards.

    There are no weak references to the parameters: ``torch.utils.swap_tensors`` refuses tensors that have some, and
    ``model.to(...)`` swaps DTensors.
    """

    def __init__(self) -> None:
        self._handles: dict[Tensor, list[RemovableHandle]] = {}
        self._by_id: dict[int, Tensor] = {}
        self._attributes: dict[Tensor, dict[str, Any]] = {}  # ``vars(p)`` when its hooks were registered

    def set_parameters(
        self,
        parameters: Iterable[Tensor],
        before: Hook | None = None,
        after: Hook | None = None,
        sums_only: bool = False,
    ) -> None:
        """Keep hooks on exactly these parameters; on frozen ones too, which may be unfrozen at any time.

        Args:
            before, after: functions that are called with the parameter; they must not refer to one.
            sums_only: the first one is not called if there is no gradient to add to.
        """
        wanted = dict.fromkeys(parameters)
        for parameter in [parameter for parameter in self._handles if parameter not in wanted]:
            del self._by_id[id(parameter)], self._attributes[parameter]
            for handle in self._handles.pop(parameter):
                handle.remove()
        for parameter in wanted:
            if parameter not in self._handles:
                self._by_id[id(parameter)], self._attributes[parameter] = parameter, vars(parameter)
                self._handles[parameter] = self._register(parameter, before, after, sums_only)

    def restore(self, last: bool = False) -> list[Tensor]:
        """Make autograd call the hooks of parameters that have been swapped (``model.to`` of DTensors): a swap takes
        the tensor from its hooks, and its attributes too. Returns these parameters.

        Args:
            last: post-accumulate-grad hooks are called after those that others have registered since, which may still
                change the gradient.
        """
        swapped = [p for p, attributes in self._attributes.items() if p.__dict__ is not attributes]
        for parameter in swapped:
            _register_again(parameter)
            self._attributes[parameter] = vars(parameter)
        for parameter, handles in self._handles.items() if last else ():
            hooks = parameter._post_accumulate_grad_hooks
            for handle in handles:
                if handle.id in hooks and [*hooks][-1] != handle.id:
                    hooks[handle.id] = hooks.pop(handle.id)
        return swapped

    def _register(
        self, parameter: Tensor, before: Hook | None, after: Hook | None, sums_only: bool
    ) -> list[RemovableHandle]:
        frozen = not parameter.requires_grad
        if frozen:  # torch registers hooks only on tensors that require gradients, and keeps them
            parameter.requires_grad_(True)
        handles: list[RemovableHandle] = []
        try:
            if before is not None:
                hook = _called_with_parameter(weakref.ref(self), id(parameter), before, sums_only)
                handles.append(parameter.register_hook(_excluded(hook)))
            if after is not None:
                handles.append(parameter.register_post_accumulate_grad_hook(_excluded(after)))
            return handles
        except BaseException:  # an interrupt: else the next attempt would have them called twice
            for handle in handles:
                handle.remove()
            raise
        finally:
            if frozen:
                parameter.requires_grad_(False)


def _called_with_parameter(reference: weakref.ref[LeafHooks], number: int, hook: Hook, sums_only: bool) -> Hook:
    """A tensor hook, which autograd calls with the gradient; ``number`` is the parameter's ``id``."""

    def with_parameter(_: Tensor) -> None:
        hooks = reference()
        if hooks is not None and number in hooks._by_id:
            parameter = hooks._by_id[number]
            if not sums_only or parameter.grad is not None:
                hook(parameter)

    return with_parameter


def _register_again(parameter: Tensor) -> None:
    """Setting torch's tables of hooks registers them with autograd."""
    hooks, later = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    if hooks is not None:
        parameter._backward_hooks = hooks
    if later is not None:
        parameter._post_accumulate_grad_hooks = later


def _excluded(hook: Hook) -> Hook:
    """Exclude the hook from serialization and from tracing by compiled autograd."""
    hook._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compiler.disable's mark, without dynamo
    return unserializable_hook(hook)


_instances: weakref.WeakSet[ScaledBackward] = weakref.WeakSet()
"""All instances: a backward is reported to all of them, since autograd may run hooks in other threads."""


class ScaledBackward:
    """Whether all gradients that autograd wrote since the last step come from scaled losses: a step divides them by the
    scale.

    Gradients that user code assigned are accepted as they are. Not used if the scale is always 1.

    Attributes:
        unscaled: autograd has written gradients of a loss that was not scaled; they may have been dropped since.
    """

    def __init__(self) -> None:
        self._hooks = LeafHooks()
        self._watched: list[Tensor] = []
        self._scale: LossScale | None = None  # that of the last `watch`
        self._running = 0  # backwards of losses with this scale
        self.unscaled = False
        _instances.add(self)

    def watch(self, parameters: Iterable[Tensor], scale: LossScale) -> Collection[Tensor]:
        """Check the gradients of exactly these parameters; returns those that it has not checked before."""
        self._scale = scale
        wanted = [p for p in parameters if p.is_floating_point()]
        missed = {*wanted}.difference(self._watched).union(self._hooks.restore())
        self._watched = wanted
        self._hooks.set_parameters(wanted, after=_make_hook(weakref.ref(self)))
        return missed

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A backward of a scaled loss runs in the body. It counts for all optimizers with the same scale."""
        same_scale = [watch for watch in _instances if watch._scale is not None and _equal(self._scale, watch._scale)]
        for watch in same_scale:
            watch._running += 1
        try:
            yield
        finally:
            for watch in same_scale:
                watch._running -= 1

    def refuse_unscaled(self) -> None:
        """Called before gradients are used.

        Raises:
            RuntimeError: some come from a loss that was not scaled.
        """
        if self.unscaled and self._scale is not None:
            raise RuntimeError(
                "there are gradients of a loss that was not multiplied by this optimizer's loss scale "
                f"({self._scale!r}), and step() divides by it: call optimizer.backward(loss), and not "
                "loss.backward(), or set precision.loss_scale 'none' (optimizer.zero_grad() drops them)"
            )

    def close(self) -> None:
        """Remove the hooks. What has been seen is still refused."""
        self._watched = []
        self._hooks.set_parameters(())


def _equal(mine: LossScale | None, other: LossScale) -> bool:
    if isinstance(mine, ConstantLossScale) and isinstance(other, ConstantLossScale):
        return mine.scale == other.scale
    return mine is other


def _make_hook(reference: weakref.ref[ScaledBackward]) -> Callable[[Tensor], None]:
    """A post-accumulate-grad hook."""

    def hook(_: Tensor) -> None:
        watch = reference()
        if watch is not None and not watch._running:
            watch.unscaled = True

    return hook


class ReducedGradients:
    """Keeps the gradients of a reduction over ranks from being rounded to the parameters' dtype.

    The methods here are those of a reduction that needs nothing of this.
    """

    def connect(self, parameters: Iterable[Tensor], accumulator: GradientAccumulator) -> None:
        """From the next backward on, add the gradients of 16-bit parameters in fp32, by ``accumulator``."""

    def must_reduce(self, parameter: Tensor) -> bool:
        """Whether this parameter's gradient must be reduced here before a step may use it."""
        return False

    def refuse_left_out(self, parameter: Tensor) -> None:
        """Raise ``RuntimeError`` if the gradient that this parameter has was not reduced, and never will be."""

    def forget(self) -> None:
        """All gradients were used, or dropped."""

    def reads_unused(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """The parameters whose ``p.grad`` the running backward will reduce even if it has no gradient for them."""
        return ()

    def keeps_unreduced(self, parameters: Iterable[Tensor]) -> bool:
        """Whether gradients of these parameters have not been reduced since the last forward without a reduction."""
        return False

    def drop_unreduced(self, parameters: Iterable[Tensor]) -> None:
        """Drop gradients that are kept for a later reduction and are not in ``p.grad``."""


class SumsElsewhere(Protocol):
    """Sums that are not in ``p.grad``: see ``lightstep.optimizer.host_gradients``."""

    is_incomplete: bool

    def set_parameters(self, parameters: Sequence[Tensor]) -> None: ...
    def takes(self, parameter: Tensor) -> bool: ...
    def begin(self) -> None: ...
    def has_gradient(self, parameter: Tensor) -> bool: ...
    def is_own_gradient(self, parameter: Tensor) -> bool: ...
    def totals(self) -> Mapping[Tensor, Tensor]: ...
    def before_step(self) -> None: ...
    def complete(self, parameters: Iterable[Tensor] | None = None) -> None: ...
    def clear(self) -> None: ...


class GradientAccumulator:
    """The gradients of the micro-batches since the last step, one per parameter.

    Between backward and step they are in ``p.grad``. In one process they are there in backward, too: ``p.grad`` is
    converted to fp32 before autograd adds a second gradient to it. (``torch.autograd.grad`` calls the hooks for this as
    well, and adds nothing; the conversion does no harm there.) Several processes need :class:`SumsAside`.

    Args:
        float32: sum in fp32 (``precision.reduce: float32``), not in the parameter's dtype.
        elsewhere: takes the gradients out of ``p.grad`` in backward, and adds them up.

    Attributes:
        scaled: knows whether their losses were scaled.
    """

    def __init__(self, float32: bool = True, elsewhere: SumsElsewhere | None = None) -> None:
        self.float32, self._elsewhere = float32, elsewhere
        self._sums: SumsAside | SumsElsewhere | None = elsewhere
        """``None``: the sums are in ``p.grad`` as soon as autograd has added a gradient."""
        self._hooks, self.scaled = LeafHooks(), ScaledBackward()
        self._watched: list[Tensor] = []
        self._kinds: list[Any] = []  # what the last `watch` depended on
        self._seen: list[Any] = []
        self._watched_set: frozenset[Tensor] = frozenset()
        self._reduction: ReducedGradients | None = None
        self._collected: list[Tensor] = []

    def set_reduction(self, reduction: ReducedGradients) -> None:
        """Gradients of all watched parameters are delivered by this reduction."""
        self._reduction = reduction
        if isinstance(self._sums, SumsAside):
            self._sums.reads_unused, self._sums.must_reduce = reduction.reads_unused, reduction.must_reduce
        reduction.connect(self._watched, self)

    def watch(self, groups: Iterable[Mapping[str, Any]], loss_scale: LossScale) -> None:
        """Sum and check the gradients of all parameters in these groups; of frozen ones too, which may be unfrozen.

        In the first step after a cast or a swap a user's own ``loss.backward()`` may have run before anybody watched.
        """
        parameters = [p for group in groups for p in group["params"]]
        several = initialized() and self._elsewhere is None
        kinds = [several, loss_scale.is_identity, *[(p.dtype, p.requires_grad) for p in parameters]]
        seen = [loss_scale, *[one for p in parameters for one in (p, p.__dict__)]]  # a swap takes p from its attributes
        if kinds == self._kinds and all(map(operator.is_, seen, self._seen)):
            return
        not_summed = self._watch_sums(parameters, several)
        not_checked = () if loss_scale.is_identity else self.scaled.watch(parameters, loss_scale)
        if not_summed or not_checked:
            _warn_unwatched(not_summed, not_checked, loss_scale)
        self._kinds, self._seen = kinds, seen  # last: after an interrupt all of it is done again

    def _watch_sums(self, watched: list[Tensor], several: bool) -> Collection[Tensor]:
        """Returns those whose gradients it has not summed before: they are new, or have been cast or swapped.

        Args:
            several: gradients are summed where they are reduced over ranks.
        """
        widened = [p for p in watched if p.dtype in _LOW] if self.float32 else []
        if self._elsewhere is None:
            watched = widened
        else:
            self._elsewhere.set_parameters(watched)
            widened = [p for p in widened if not self._elsewhere.takes(p)]
        before = self._watched_set.difference(self._hooks.restore())
        self._watched, self._watched_set = watched, frozenset(watched)
        same_sums = isinstance(self._sums, SumsAside) is several
        if not same_sums:
            self._hooks.set_parameters(())
            self._sums = SumsAside(self._hooks.restore) if several else None
        if isinstance(self._sums, SumsAside):
            self._sums.set_parameters(watched)
            self._hooks.set_parameters(watched, *self._sums.hooks)
        else:
            self._hooks.set_parameters(widened, before=_widen_before_sum, sums_only=True)
        if self._reduction is not None:
            self.set_reduction(self._reduction)
        return self._watched_set - before

    def watches(self, parameter: Tensor) -> bool:
        """Whether it sums the gradients of this parameter."""
        return parameter in self._watched_set

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """In the body, a backward adds gradients to those that are there. Afterwards the sums are in ``p.grad``."""
        if self._sums is not None:
            self._sums.begin()
        yield
        if self._sums is not None:
            self._sums.complete()

    @property
    def aside(self) -> SumsAside:
        """Where a reduction over ranks adds its results while a backward runs."""
        assert isinstance(self._sums, SumsAside), "a reduction without a process group"
        return self._sums

    def has_gradient(self, parameter: Tensor) -> bool:
        """Whether ``p.grad`` holds a gradient that no step has used."""
        return parameter.grad is not None if self._sums is None else self._sums.has_gradient(parameter)

    # -- called by the step

    def collect(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradient of each parameter, of the local shard; fp32 if it is a sum.

        Nothing is removed until :meth:`consume`: a second call returns the same.

        Raises:
            RuntimeError: ranks would drift apart, or an edit would be lost.
            TypeError: a gradient is sparse.
        """
        sums, self._collected = self._sums, list(parameters)
        if sums is None:
            return _locals(parameters)
        sums.before_step()
        sums.complete()
        totals = sums.totals()
        for parameter in parameters:
            if parameter not in totals:
                self._refuse_unreduced(sums, parameter)
        found = zip(parameters, _locals(parameters), strict=True)
        return [_sum_of(totals[p], own if sums.has_gradient(p) else None) if p in totals else own for p, own in found]

    def consume(self) -> None:
        """Remove what was collected last."""
        for parameter in self._collected:
            parameter.grad = None
        self.clear()

    def peek(self, parameter: Tensor) -> Tensor | None:
        """:meth:`collect` for one parameter whose gradient is complete while backward continues."""
        if self._sums is not None:
            self._sums.complete([parameter])
            self._refuse_unreduced(self._sums, parameter)
        return _local(parameter)

    @property
    def reader(self) -> Callable[[Tensor], Tensor | None]:
        """What :meth:`peek` does while the watched parameters stay the same: called for each of them in backward."""
        return _local if self._sums is None else self.peek

    def take(self, parameter: Tensor) -> Tensor | None:
        """:meth:`peek`, and remove the gradient."""
        gradient = self.peek(parameter)
        parameter.grad = None
        return gradient

    def _refuse_unreduced(self, sums: SumsAside | SumsElsewhere, parameter: Tensor) -> None:
        """Refuse ``p.grad`` if it must be reduced and has not been."""
        reduction = self._reduction
        if reduction is None:
            return
        if parameter.grad is not None:
            reduction.refuse_left_out(parameter)
        if not (sums.is_own_gradient(parameter) and reduction.must_reduce(parameter)):
            return
        message = f"a gradient of shape {tuple(parameter.shape)} is this rank's own, and ranks would drift apart: "
        if sums.is_incomplete:
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
        self._collected, self.scaled.unscaled = [], False
        if self._sums is not None:
            self._sums.clear()
        if self._reduction is not None:
            self._reduction.forget()

    def close(self) -> None:
        """Drop all sums and remove the hooks."""
        self.clear()
        self._watched, self._watched_set, self._kinds = [], frozenset(), []
        self._hooks.set_parameters(())
        self.scaled.close()
        if self._sums is not None:
            self._sums.set_parameters(())


def _warn_unwatched(not_summed: Collection[Tensor], not_checked: Collection[Tensor], loss_scale: LossScale) -> None:
    """Warn of gradients that autograd has written where nobody watched it."""
    doubts = []
    if sums := [p for p in not_summed if p.grad is not None and p.grad.dtype == p.dtype]:
        dtype = str(sums[0].dtype).removeprefix("torch.")
        doubts.append(f"{len(sums)} are sums in {dtype} instead of fp32, if loss.backward() ran more than once")
    if scaled := [p for p in not_checked if p.grad is not None]:
        doubts.append(f"{len(scaled)} are divided by {loss_scale!r}, whether or not the loss was multiplied by it")
    if doubts:
        warnings.warn(
            f"there are gradients of parameters that were added to a group, cast or swapped since the last step: "
            f"{'; '.join(doubts)}. After such changes call optimizer.backward(loss), which sees them, or zero_grad()",
            stacklevel=10,
        )


def _widen_before_sum(parameter: Tensor) -> None:
    assert parameter.grad is not None
    if parameter.grad.dtype is not torch.float32:
        if runs_compiled():
            raise RuntimeError(
                "compiled autograd is about to add gradients in the parameters' dtype, and precision.reduce is "
                "'float32': call optimizer.backward(loss) instead of loss.backward(), or set it to 'parameters'"
            )
        _widen(parameter)


def _widen(parameter: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.dtype is not torch.float32:
        set_grad(parameter, parameter.grad.float())


def _sum_of(reduced: Tensor, extra: Tensor | None) -> Tensor:
    """A reduced sum, and what every rank has added since (a regularisation of the weights)."""
    return reduced if extra is None else reduced + extra


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


def _locals(parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """The local shard of each ``p.grad``; most are plain tensors."""
    found = [parameter.grad for parameter in parameters]
    for number, gradient in enumerate(found):
        is_plain = gradient is None or (type(gradient) is Tensor and not gradient.is_sparse)
        if not is_plain or (gradient is not None and gradient.requires_grad):
            found[number] = _local(parameters[number])
    return found


def _local(parameter: Tensor) -> Tensor | None:
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.is_sparse:
        refuse_sparse(gradient)
    if type(gradient) is not Tensor and is_sharded(gradient):
        return local_gradient(parameter, torch.float32)
    return gradient.detach() if gradient.requires_grad else gradient
