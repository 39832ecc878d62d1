"""Reads of a model's parameters that wait for deferred updates of just these.

Whoever gets a parameter from a module (``module.weight``, ``parameters()``, ``state_dict()``, ``model.to()``, a deep
copy, a pickle) finds it in the dictionary ``module._parameters``. In a model whose updates may be deferred that is an
:class:`AwaitedParameters`, which waits before it hands anything out. Where nothing is pending a read costs one
comparison of numbers. FSDP2 exchanges entries by writing, which does not wait; its own reads of shards are gated
(:mod:`lightstep.sharding.gathering_gates`). Compiled code reads past the dictionary, and relies on the gates in front
of forwards (:mod:`lightstep.sharding.forward_gates`).
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightstep.optimizer.base import BaseOptimizer

__all__ = ["AwaitedParameters", "DeferredUpdates", "await_reads", "awaited", "updates_of", "wait_for"]


class DeferredUpdates:
    """The updates of some optimizers of one model, which may still be under way.

    Attributes:
        steps: how many steps such optimizers have made, of all models, and how often they have changed weights before
            one. A module whose parameters were waited for since the last time need not wait again.
        in_backward: updates begin before ``step()``, and no count says when.
    """

    steps: ClassVar[int] = 0

    def __init__(self) -> None:
        self.optimizers: weakref.WeakSet[BaseOptimizer] = weakref.WeakSet()
        self.in_backward = False

    def follow(self, optimizer: BaseOptimizer, in_backward: bool) -> None:
        """Wait for this optimizer's updates, too."""
        self.in_backward |= in_backward
        if optimizer not in self.optimizers:
            self.optimizers.add(optimizer)
            optimizer.register_step_post_hook(_count_step)
            optimizer.tell_of_updates(_count_step)

    @property
    def pending(self) -> bool:
        """Whether updates of the last step may still be under way."""
        return any(optimizer.has_deferred_updates for optimizer in self.optimizers)

    def wait(self, parameters: Collection[Tensor] | None = None) -> None:
        """What is done next sees these parameters updated; ``None``: all of them."""
        for optimizer in self.optimizers:
            if self.in_backward or optimizer.has_deferred_updates:
                optimizer.wait_for_update(parameters)

    def wait_for_step(self) -> None:
        """What is done next sees everything updated that a step has decided."""
        for optimizer in self.optimizers:
            if self.in_backward or optimizer.has_deferred_updates:
                optimizer.wait_for_step()

    def wait_on_stream(self, parameters: Collection[Tensor]) -> None:
        """The current stream waits for the updates of these parameters, and no other does."""
        for optimizer in self.optimizers:
            optimizer.wait_on_stream(parameters)


def _count_step(*_: Any) -> None:
    DeferredUpdates.steps += 1


class AwaitedParameters(dict[str, "nn.Parameter | None"]):
    """A module's ``_parameters``. In a copy of the module it is a plain dictionary.

    Attributes:
        updates: what is waited for. A module may be in several models that have optimizers of their own.
        steps: :attr:`DeferredUpdates.steps` when they were last waited for.
    """

    __slots__ = ("steps", "updates")

    def __init__(self, plain: dict[str, nn.Parameter | None]) -> None:
        super().__init__(plain)
        self.updates: list[DeferredUpdates] = []
        self.steps = -1

    def held(self) -> list[nn.Parameter]:
        """The parameters, without waiting."""
        return [parameter for parameter in super().values() if parameter is not None]

    def _wait(self) -> None:
        if torch.compiler.is_dynamo_compiling():  # first: dynamo guards on whatever is looked at
            return
        if self.steps != DeferredUpdates.steps and not _is_zero_grad(sys._getframe(2)):
            wait_for((self,))

    def __getitem__(self, name: str) -> nn.Parameter | None:
        self._wait()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._wait()
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self._wait()
        return super().pop(name, *default)

    def items(self) -> Any:
        self._wait()
        return super().items()

    def values(self) -> Any:
        self._wait()
        return super().values()

    def __iter__(self) -> Iterator[str]:  # without it dict(self) and {**self} copy past the methods above
        return super().__iter__()

    def copy(self) -> dict[str, nn.Parameter | None]:
        return dict(self.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        return copy.deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)


def _is_zero_grad(frame: Any) -> bool:
    """Whether ``module.zero_grad()`` asks, on whatever lies around the model: it looks at ``p.grad`` and not at ``p``.

    Plain loops call it right after ``step()``, where waiting would leave nothing to overlap with the next forward. It
    is told by its code among the callers; should torch call it otherwise one day, it waits like any other reader.
    """
    code = getattr(nn.Module.zero_grad, "__code__", None)
    for _ in range(6):  # items <- named_parameters' lambda <- _named_members <- named_parameters <- parameters <- it
        if frame is None or frame.f_code is code:
            return frame is not None
        frame = frame.f_back
    return False


def await_reads(modules: Iterable[nn.Module], updates: DeferredUpdates) -> list[AwaitedParameters]:
    """Have reads of these modules' own parameters wait for ``updates``; their ``_parameters``, where they have any."""
    for module in modules:
        own = vars(module)["_parameters"]
        if own and not isinstance(own, AwaitedParameters):
            own = vars(module)["_parameters"] = AwaitedParameters(own)
        if own and updates not in own.updates:
            own.updates.append(updates)
            own.steps = -1
    return awaited(modules)


def awaited(modules: Iterable[nn.Module]) -> list[AwaitedParameters]:
    """The ``_parameters`` of those modules whose reads wait."""
    return [own for module in modules if isinstance(own := vars(module)["_parameters"], AwaitedParameters)]


def updates_of(modules: Iterable[AwaitedParameters]) -> list[DeferredUpdates]:
    """All updates that these modules' parameters may wait for."""
    return list(dict.fromkeys(updates for own in modules for updates in own.updates))


def wait_for(modules: Iterable[AwaitedParameters], shards: Collection[Tensor] | None = None) -> None:
    """What is done next sees these modules' parameters updated.

    Args:
        modules: nothing is done if all of them have been waited for since the last step.
        shards: what to wait for in their stead: the parameters of modules that FSDP2 has gathered are no shards.
    """
    steps = DeferredUpdates.steps
    stale = [own for own in modules if own.steps != steps]
    if not stale:
        return
    found = [p for own in stale for p in own.held()] if shards is None else shards
    for updates in updates_of(stale):
        updates.wait(found)
    for own in stale:
        if not any(updates.in_backward for updates in own.updates):  # the next ones may begin at any time
            own.steps = steps
