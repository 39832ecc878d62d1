"""Gradients on their way to the optimizer: added up in fp32, scaled into fp32 staging memory.

Autograd adds the gradients of several micro-batches in the parameter's dtype. :class:`GradientAccumulator` puts
``p.grad`` aside just before each new gradient arrives, and adds it to an fp32 buffer when that has arrived, so that
``grad32 = float(g1) + float(g2) + ...`` in order. With one micro-batch nothing is copied: ``p.grad`` is what autograd
made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle, unserializable_hook
from torch.utils.weak import WeakIdKeyDictionary

from lightstep.distributed import local_gradient
from lightstep.precision.gradient_watch import GradientWatch

Key = TypeVar("Key")

_collectors: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameter → weak reference to the accumulator whose hook it carries."""


class ReducedGradients(Protocol):
    """Takes gradients out of the reduction over ranks before they are rounded to the parameters' dtype."""

    def connect(self, parameters: Iterable[Tensor], accumulator: GradientAccumulator) -> None:
        """From the next backward on, deliver the gradients of 16-bit parameters to ``accumulator``."""

    def takes_part(self, parameter: Tensor) -> bool:
        """Whether a gradient of this parameter is of no use before it came through here."""


class GradientAccumulator:
    """The gradients of the micro-batches since the last step, one per parameter.

    Args:
        float32: add them in fp32 (``precision.reduce: float32``) instead of in the parameter's dtype.
    """

    def __init__(self, float32: bool = True) -> None:
        self.float32 = float32
        self._sums: dict[Tensor, Tensor] = {}
        self._reduced: dict[Tensor, list[Tensor]] = {}
        self._rounded: set[Tensor] = set()
        self._uncertain: list[tuple[Tensor, Sequence[Tensor | None]]] = []
        self._handles: dict[Tensor, list[RemovableHandle]] = {}
        self._reduction: ReducedGradients | None = None
        self._aside: dict[Tensor, tuple[Tensor, bool]] = {}
        self._watch = GradientWatch()
        self._watching_the_end = False

    def comes_from(self, reduction: ReducedGradients) -> None:
        """Gradients of parameters watched now or later are delivered by this."""
        self._reduction = reduction
        reduction.connect(self._handles, self)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """From now on keep the sums of these parameters; others are forgotten."""
        wanted = {p for p in parameters if self.float32 and p.dtype in (torch.bfloat16, torch.float16)}
        if wanted == self._handles.keys():
            return
        for parameter in self._handles.keys() - wanted:
            self._take_off(parameter)
        for parameter in wanted - self._handles.keys():
            self._take_over(parameter)
            self._handles[parameter] = [
                parameter.register_hook(_before_accumulation(self, parameter)),
                parameter.register_post_accumulate_grad_hook(_after_accumulation(self)),
            ]
        if self._reduction is not None:
            self._reduction.connect(wanted, self)

    def _take_over(self, parameter: Tensor) -> None:
        """The newest optimizer of a parameter gets its gradients; an abandoned one may live on for a while."""
        previous = _collectors.get(parameter, lambda: None)()
        if previous is not None and previous is not self and parameter in previous._handles:
            previous._take_off(parameter)
            previous._sums.pop(parameter, None)
        _collectors[parameter] = weakref.ref(self)

    def _take_off(self, parameter: Tensor) -> None:
        for handle in self._handles.pop(parameter):
            handle.remove()

    def deliver(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add a local gradient that is reduced over all ranks, in fp32, and did not come through ``p.grad``.

        Args:
            gradient: fp32, shape of the local shard. Kept, not copied; the reduction may still be under way until the
                end of this backward.
        """
        parts = self._reduced.setdefault(parameter, [])
        if len(parts) == 2:
            parts[0].add_(parts.pop())
        parts.append(gradient)

    def has_gradient(self, parameter: Tensor) -> bool:
        """Whether ``p.grad`` holds something that is not counted yet."""
        return parameter.grad is not None and parameter not in self._rounded

    @property
    def delivered(self) -> bool:
        """Whether there are gradients that did not come through ``p.grad``."""
        return bool(self._reduced)

    def withdraw(self, parameter: Tensor) -> Tensor | None:
        """The fp32 sum of earlier micro-batches, handed over to a strategy that reduces it together with the last."""
        return self._sums.pop(parameter, None)

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

    def _settle(self) -> None:
        pairs, self._uncertain = self._uncertain, []
        used = torch.cat([flags for flags, _ in pairs]).tolist()
        for parameter, flag in zip([p for _, parameters in pairs for p in parameters], used, strict=True):
            if parameter is not None and not flag:
                self._reduced.pop(parameter, None)
                self._rounded.discard(parameter)

    def put_aside(self, parameter: Tensor) -> None:
        """A new gradient is about to arrive in ``p.grad``: what stands there makes room, for it to be added in fp32.

        ``torch.autograd.grad`` announces gradients too, and then writes none: what was put aside comes back at its end.
        """
        self._put_back(parameter)
        if parameter in self._rounded:
            self._rounded.discard(parameter)
            parameter.grad = None
        elif parameter.grad is None:
            self._sums.pop(parameter, None)  # somebody gave the micro-batches up: ``model.zero_grad()``
            self._watch.forget(parameter)
        else:
            self._watch.refuse_change(parameter)
            self._aside[parameter] = parameter.grad, self._watch.untouched(parameter)
            parameter.grad = None
            if not self._watching_the_end:
                self._watching_the_end = True
                Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._watching_the_end = False
        for parameter in list(self._aside):
            self._put_back(parameter)

    def arrived(self, parameter: Tensor) -> None:
        """The new gradient is in ``p.grad``."""
        earlier, untouched = self._aside.pop(parameter, (None, False))
        if earlier is not None:
            newest, parameter.grad = parameter.grad, earlier
            self._add_to_sum(parameter)
            parameter.grad = newest
            self._watch.added(parameter, untouched)
        self._watch.written(parameter)

    def _put_back(self, parameter: Tensor) -> None:
        """Nothing arrived after all."""
        earlier, _ = self._aside.pop(parameter, (None, False))
        if earlier is not None and parameter.grad is None:
            parameter.grad = earlier

    def _add_to_sum(self, parameter: Tensor) -> None:
        """Move ``p.grad`` into the parameter's fp32 sum."""
        gradient = _local_gradient(parameter)
        parameter.grad = None
        if parameter in self._sums:
            self._sums[parameter].add_(gradient)
        else:
            self._sums[parameter] = gradient.to(torch.float32)

    def take(self, parameter: Tensor) -> Tensor | None:
        """The whole gradient of one parameter (local shard; fp32 if several were added), which is then forgotten.

        Raises:
            RuntimeError: some of it is not what it should be, and ranks would drift apart or an edit be lost.
        """
        if self._uncertain:
            self._settle()
        self._watching_the_end = False  # a backward that failed did not come to its end
        self._put_back(parameter)
        rounded = parameter in self._rounded
        if not rounded and parameter not in self._reduced:
            self._watch.refuse_change(parameter)
            self._refuse_unreduced(parameter)
        if rounded or (parameter.grad is None and parameter not in self._reduced):
            self._rounded.discard(parameter)
            parameter.grad = None
            if not rounded:
                self._sums.pop(parameter, None)  # given up, as in put_aside
        self._watch.forget(parameter)
        parts = self._reduced.pop(parameter, [])
        if not parts and parameter not in self._sums:
            gradient = None if parameter.grad is None else _local_gradient(parameter)
            parameter.grad = None
            return gradient
        if parameter.grad is not None:
            self._add_to_sum(parameter)
        if parameter in self._sums:
            parts = [*parts, self._sums.pop(parameter)]
        for part in parts[1:]:
            parts[0].add_(part)
        return parts[0]

    def _refuse_unreduced(self, parameter: Tensor) -> None:
        if self._reduction is not None and self._reduction.takes_part(parameter) and self._watch.untouched(parameter):
            raise RuntimeError(
                f"a gradient of shape {tuple(parameter.shape)} is this rank's own, and ranks would drift apart: no "
                "backward since the last step was reduced over the ranks. Run each step's last micro-batch under "
                "strategy.accumulate(model, last=True), and call the model that prepare_model returned, not the module "
                "in it"
            )

    def clear(self) -> None:
        """Forget all sums (``zero_grad``)."""
        self._sums.clear()
        self._reduced.clear()
        self._rounded.clear()
        self._uncertain.clear()
        self._aside.clear()
        self._watching_the_end = False
        self._watch.clear()

    def close(self) -> None:
        """Forget all sums and take the hooks off the parameters."""
        self.clear()
        self.watch(())


def _before_accumulation(accumulator: GradientAccumulator, parameter: Tensor) -> Callable[[Tensor], None]:
    """A tensor hook: autograd calls it with each new gradient before adding it to ``p.grad``."""
    accumulator_ref, parameter_ref = weakref.ref(accumulator), weakref.ref(parameter)

    @unserializable_hook
    def hook(_: Tensor) -> None:
        owner, leaf = accumulator_ref(), parameter_ref()
        if owner is not None and leaf is not None:
            owner.put_aside(leaf)

    return hook


def _after_accumulation(accumulator: GradientAccumulator) -> Callable[[Tensor], None]:
    """A post-accumulate-grad hook."""
    accumulator_ref = weakref.ref(accumulator)

    @unserializable_hook
    def hook(leaf: Tensor) -> None:
        owner = accumulator_ref()
        if owner is not None:
            owner.arrived(leaf)

    return hook


def _local_gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise TypeError(
            f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which fp32 masters and one global "
            "norm cannot take; build its layer with sparse=False"
        )
    local = local_gradient(parameter, torch.float32)
    assert local is not None
    return local


def unshared(gradients: dict[Key, Tensor]) -> dict[Key, Tensor]:
    """The same gradients, none of them another's memory: users may set one tensor as two parameters' gradient."""
    seen: set[int] = set()
    for key, gradient in gradients.items():
        if gradient.data_ptr() in seen and gradient.numel():
            gradients[key] = gradient.clone()
        seen.add(gradient.data_ptr())
    return gradients
