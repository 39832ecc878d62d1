"""Reads of a model's parameters that wait for deferred updates of just these.

Whoever gets a parameter from a module (``module.weight``, ``parameters()``, ``state_dict()``, ``model.to()``, a deep
copy, a pickle) finds it in the dictionary ``module._parameters``. In a model whose updates may be deferred that is an
:class:`AwaitedParameters`, which waits before it hands anything out. Where nothing is pending a read costs one
comparison of numbers. FSDP2 exchanges entries by writing, which does not wait; its own reads of shards are gated
(:mod:`lightstep.sharding.gathering_gates`). Compiled code reads past the dictionary, and relies on the gates in front
of forwards (:mod:`lightstep.sharding.forward_gates`). A module that is given one of the parameters later (a
parametrization, a loss that keeps the head's weight) gets such a dictionary with it.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.engine import Engine
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer

__all__ = ["AwaitedParameters", "DeferredUpdates", "await_reads", "awaited", "updates_of", "wait_for"]


class DeferredUpdates:
    """The updates of some optimizers of one model, which may still be under way.

    Attributes:
        steps: how many steps such optimizers have made, of all models, and how often they have changed weights before
            one. A module whose parameters were waited for since the last time need not wait again.
        in_backward: updates begin before ``step()``, and no count says when.
    """

    steps: ClassVar[int] = 0
    _all: ClassVar[weakref.WeakSet[DeferredUpdates]] = weakref.WeakSet()
    _following: ClassVar[Any] = None  # the handle of torch's hook, once there was a model

    def __init__(self) -> None:
        self.optimizers: weakref.WeakSet[BaseOptimizer] = weakref.WeakSet()
        self.in_backward = False
        # An engine until its optimizer is gone and the last update made: the collector may delete an optimizer in one
        # thread while another one reads.
        self._engines: list[tuple[weakref.finalize[Any, Any], Engine]] = []
        if DeferredUpdates._following is None:
            DeferredUpdates._following = register_module_parameter_registration_hook(_follow_parameter)
        self._all.add(self)
        self._known: tuple[tuple[int, int], frozenset[int]] = ((-1, -1), frozenset())

    def follow(self, optimizer: BaseOptimizer, in_backward: bool) -> None:
        """Wait for this optimizer's updates, too."""
        self.in_backward |= in_backward
        if optimizer not in self.optimizers:
            self.optimizers.add(optimizer)
            optimizer.register_step_post_hook(_count_step)
            optimizer.tell_of_updates(_count_step)
            if isinstance(optimizer, MixedPrecisionOptimizer):
                end = weakref.finalize(optimizer, _end_engines, weakref.ref(self))
                end.atexit = False
                self._engines.append((end, optimizer.engine))

    def _left(self) -> list[tuple[weakref.finalize[Any, Any], Engine]]:
        """Engines whose optimizers are gone."""
        return [entry for entry in self._engines if entry[0].peek() is None]

    def end_engines(self) -> None:
        """An optimizer is gone."""
        for entry in self._left():
            entry[1].end(then=partial(self._engines.remove, entry))

    @classmethod
    def of(cls, parameter: Tensor) -> list[DeferredUpdates]:
        """All that may update this parameter."""
        return [one for one in list(cls._all) if one._may_train(parameter) and one._trains(parameter)]

    def _may_train(self, parameter: Tensor) -> bool:
        """Whether it may be one of the optimizers' parameters: whole models are made while others train."""
        groups = [group["params"] for optimizer in self.optimizers for group in optimizer.param_groups]
        state = self.steps, sum(map(len, groups))
        if self._known[0] != state:
            self._known = state, frozenset(id(trained) for params in groups for trained in params)
        return id(parameter) in self._known[1]

    def _trains(self, parameter: Tensor) -> bool:
        return any(parameter is trained for trained in self._trained())

    def _trained(self) -> Iterator[Tensor]:
        return (p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"])

    @property
    def pending(self) -> bool:
        """Whether updates of the last step may still be under way."""
        left = any(engine.schedule.pending for _, engine in self._left())
        return left or any(optimizer.has_deferred_updates for optimizer in self.optimizers)

    def wait(self, parameters: Collection[Tensor] | None = None) -> None:
        """What is done next sees these parameters updated; ``None``: all of them."""
        for optimizer in self.optimizers:
            if self.in_backward or optimizer.has_deferred_updates:
                optimizer.wait_for_update(parameters)
        self._finish_left()

    def wait_for_step(self) -> None:
        """What is done next sees everything updated that a step has decided."""
        for optimizer in self.optimizers:
            if self.in_backward or optimizer.has_deferred_updates:
                optimizer.wait_for_step()
        self._finish_left()

    def wait_on_stream(self, parameters: Collection[Tensor]) -> None:
        """The current stream waits for the updates of these parameters, and no other does."""
        for optimizer in self.optimizers:
            optimizer.wait_on_stream(parameters)
        self._finish_left()

    def _finish_left(self) -> None:
        for _, engine in self._left():
            engine.finish_update()


def _count_step(*_: Any) -> None:
    DeferredUpdates.steps += 1


def _end_engines(reference: weakref.ref[DeferredUpdates]) -> None:
    updates = reference()
    if updates is not None:
        updates.end_engines()


def _follow_parameter(module: nn.Module, _: str, parameter: Tensor | None) -> None:
    """A module is given a parameter, and may be none of the model's: reads of it wait."""
    for updates in [] if parameter is None else DeferredUpdates.of(parameter):
        _await_reads_of(module, updates)


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
        if vars(module)["_parameters"]:
            _await_reads_of(module, updates)
    return awaited(modules)


def _await_reads_of(module: nn.Module, updates: DeferredUpdates) -> None:
    own = vars(module)["_parameters"]
    if not isinstance(own, AwaitedParameters):
        own = vars(module)["_parameters"] = AwaitedParameters(own)
    if updates not in own.updates:
        own.updates.append(updates)
    own.steps = -1


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
