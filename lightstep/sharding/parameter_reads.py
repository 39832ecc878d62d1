"""Hooks on a user's modules, and reads of their parameters that wait for deferred updates.

Every read of a parameter from a module (``module.weight``, ``parameters()``, ``state_dict()``, ``model.to()``, a deep
copy, a pickle) goes through the dictionary ``module._parameters``. In a model with deferred updates that is an
:class:`AwaitedParameters`, which waits before it returns anything. If nothing is pending, a read costs one comparison
of numbers.

FSDP2 replaces entries by writing to the dictionary, which does not wait; its own reads of shards are gated. Compiled
code does not go through the dictionary, and relies on the gates in front of forwards
(:mod:`lightstep.sharding.prepared_model` has both). A module that is given one of the parameters later (a
parametrization, a loss that keeps the head's weight) gets such a dictionary, too. So does one that is given a parameter
which rests on the host.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.engine import Engine
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.optimizer.step_guard import eager
from lightstep.state.host_weights import HostWeights, WeightGroup, groups_of

__all__ = [
    "NO_BACKWARD",
    "AwaitedParameters",
    "DeferredUpdates",
    "ModuleHook",
    "await_host",
    "await_reads",
    "awaited",
    "called_modules",
    "differentiable",
    "differentiable_results",
    "inputs_on",
    "wait_for",
    "weakly",
]

NO_BACKWARD = -1
"""torch's number of the graph task, where none runs."""


def weakly(owner: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` of ``owner``, which is not kept alive; does nothing once that is gone."""
    reference = weakref.ref(owner)

    def call(*arguments: Any) -> Any:
        found = reference()
        return None if found is None else method(found, *arguments)

    return call


def called_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that a user calls: the model, or those in it if it has no forward (the stages of a pipeline)."""
    if "forward" in vars(model) or type(model).forward is not nn.Module.forward:
        return [model]
    return [called for child in model.children() for called in called_modules(child)]


def differentiable(given: Any, attributes: bool = False) -> list[Tensor]:
    """The tensors with gradients in containers and dataclasses, as FSDP2 finds them.

    Args:
        attributes: also those in attributes of other objects.
    """
    found: list[Tensor] = []
    waiting, seen = [given], set[int]()
    while waiting:
        for leaf in tree_leaves(waiting.pop()):
            if isinstance(leaf, Tensor):
                found += [leaf] if leaf.requires_grad else []
            elif id(leaf) not in seen and not isinstance(leaf, (type, nn.Module)):
                seen.add(id(leaf))
                if is_dataclass(leaf):
                    waiting.append([getattr(leaf, field.name, None) for field in fields(leaf)])
                elif attributes:
                    waiting.append(list(getattr(leaf, "__dict__", {}).values()))
    return found


def differentiable_results(output: Any) -> list[Tensor]:
    """The tensors with gradients that a forward returns. Attributes of other objects count if there are none beside
    them: a cache of keys and values has tensors of other modules."""
    return differentiable(output) or differentiable(output, attributes=True)


def inputs_on(device: torch.device, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """A pre-hook with keywords that moves a forward's inputs to the device, as FSDP2 does with those of its root."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    return tree_map_only(Tensor, move, arguments), tree_map_only(Tensor, move, named)


class ModuleHook:
    """A hook of any kind that runs outside of compiled graphs. In a copy (or pickle) of the module it does nothing.

    Args:
        call: the function to call. It must refer to the module by weak references only.
    """

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = None if call is None else torch.compiler.disable(call)  # dynamo would trace it into the graph

    def __call__(self, *arguments: Any) -> Any:
        return None if self._call is None else self._call(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        return ModuleHook()

    def __reduce__(self) -> Any:
        return ModuleHook, ()


class DeferredUpdates:
    """The updates of one model's optimizers, which may still be pending.

    Attributes:
        steps: a count, over all models, of steps and of other moments at which weights may have changed. A module whose
            parameters have been waited for at the present count need not wait again.
        in_backward: updates may begin before ``step()`` at any time, and are not counted.
    """

    steps: ClassVar[int] = 0
    _all: ClassVar[weakref.WeakSet[DeferredUpdates]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.optimizers: weakref.WeakSet[BaseOptimizer] = weakref.WeakSet()
        self.in_backward = False
        # Each engine until its optimizer is gone and its last update done: the garbage collector may delete an
        # optimizer in one thread while another thread reads.
        self._engines: list[tuple[weakref.finalize[Any, Any], Engine]] = []
        _watch_registrations()
        self._all.add(self)
        self._trained_ids: tuple[tuple[int, int], frozenset[int]] = (
            (-1, -1),
            frozenset(),
        )  # with the state they are of

    def add_optimizer(self, optimizer: BaseOptimizer, in_backward: bool) -> None:
        """Wait for this optimizer's updates, too."""
        self.in_backward |= in_backward
        if optimizer not in self.optimizers:
            self.optimizers.add(optimizer)
            optimizer.register_step_post_hook(_count_step)
            optimizer.add_update_listener(_count_step)
            if isinstance(optimizer, MixedPrecisionOptimizer):
                finalizer = weakref.finalize(optimizer, _shut_down_orphaned, weakref.ref(self))
                finalizer.atexit = False
                self._engines.append((finalizer, optimizer.engine))

    def shut_down_orphaned(self) -> None:
        """Shut down the engines whose optimizers are gone."""
        for entry in [entry for entry in self._engines if entry[0].peek() is None]:
            entry[1].shut_down(on_done=partial(self._engines.remove, entry))

    @classmethod
    def of(cls, parameter: Tensor) -> list[DeferredUpdates]:
        """All instances with an optimizer that trains this parameter."""
        return [updates for updates in list(cls._all) if updates._may_train(parameter) and updates._trains(parameter)]

    def _may_train(self, parameter: Tensor) -> bool:
        """A quick check before :meth:`_trains`: whole models are constructed while others train."""
        groups = [group["params"] for optimizer in self.optimizers for group in optimizer.param_groups]
        state = self.steps, sum(map(len, groups))
        if self._trained_ids[0] != state:
            self._trained_ids = state, frozenset(id(trained) for params in groups for trained in params)
        return id(parameter) in self._trained_ids[1]

    def _trains(self, parameter: Tensor) -> bool:
        groups = (group["params"] for optimizer in self.optimizers for group in optimizer.param_groups)
        return any(parameter is trained for params in groups for trained in params)

    # An optimizer that is gone will not step: all of its engine's updates are waited for.

    def wait(self, parameters: Collection[Tensor] | None = None) -> None:
        """Wait for the updates of these parameters; ``None``: for all updates that a ``step()`` has decided."""
        for finalizer, engine in list(self._engines):
            if engine.queue.may_be_pending:
                if finalizer.peek() is None:
                    engine.queue.wait_outside_step()
                elif parameters is None:
                    engine.queue.wait_outside_step(decided=True)
                else:
                    engine.queue.wait_outside_step(engine.managed.lookup(parameters))

    @eager
    def wait_on_stream(self, parameters: Collection[Tensor]) -> None:
        """The current stream waits for the updates of these parameters, and no other does."""
        for finalizer, engine in list(self._engines):
            if finalizer.peek() is None:
                engine.queue.wait_outside_step()
            elif engine.queue.may_be_ahead:
                engine.queue.wait_on_stream_outside_step(engine.managed.lookup(parameters))


def _count_step(*_: Any) -> None:
    DeferredUpdates.steps += 1


def _shut_down_orphaned(reference: weakref.ref[DeferredUpdates]) -> None:
    updates = reference()
    if updates is not None:
        updates.shut_down_orphaned()


_hosts: weakref.WeakSet[HostWeights] = weakref.WeakSet()
_registration_hooks: list[Any] = []  # the handle of torch's hook, once there is a model


def _watch_registrations() -> None:
    if not _registration_hooks:
        _registration_hooks.append(register_module_parameter_registration_hook(_on_registration))


def _on_registration(module: nn.Module, _: str, parameter: Tensor | None) -> None:
    """A module, perhaps outside the model, is given a parameter: make its reads wait if the parameter is trained, or
    rests on the host."""
    if parameter is None:
        return
    for updates in DeferredUpdates.of(parameter):
        _await_reads_of(module, updates)
    homes = [home for weights in list(_hosts) if (home := weights.home_of(parameter)) is not None]
    if homes:
        own = _awaited_parameters_of(module)
        own.groups = list(dict.fromkeys([*own.groups, *groups_of(homes)]))


class AwaitedParameters(dict[str, "nn.Parameter | None"]):
    """A module's ``_parameters``, whose reads wait. In a copy of the module it is a plain dictionary.

    Attributes:
        updates: the updates to wait for; several if the module is in several models with optimizers of their own.
        groups: weights that rest on the host, which is then waited for.
        steps: :attr:`DeferredUpdates.steps` at the last wait.
    """

    __slots__ = ("groups", "steps", "updates")

    def __init__(self, plain: dict[str, nn.Parameter | None]) -> None:
        super().__init__(plain)
        self.updates: list[DeferredUpdates] = []
        self.groups: list[WeightGroup] = []
        self.steps = -1

    def _wait(self) -> None:
        if torch.compiler.is_dynamo_compiling():  # first: dynamo guards on everything that is read
            return
        is_stale = self.steps != DeferredUpdates.steps
        if not (is_stale or self.groups):
            return
        if (call := _call_of_zero_grad(sys._getframe(2))) is not None:
            self._drop_gradients(call.f_locals.get("set_to_none", True))
            return
        if is_stale:
            wait_for((self,))
        for group in self.groups:
            group.settle()

    def _drop_gradients(self, set_to_none: bool) -> None:
        """``module.zero_grad()`` does not see gradients that have been taken to the host."""
        own = [parameter for parameter in dict.values(self) if parameter is not None]
        for weights in dict.fromkeys(group.owner for group in self.groups if group.is_owned):
            weights.drop_gradients(own, set_to_none)

    def __getitem__(self, name: str) -> nn.Parameter | None:  # every forward reads so: without another call
        if not torch.compiler.is_dynamo_compiling() and (self.steps != DeferredUpdates.steps or self.groups):
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

    def __iter__(self) -> Iterator[str]:  # without it dict(self) and {**self} bypass the methods above
        return super().__iter__()

    def copy(self) -> dict[str, nn.Parameter | None]:
        return dict(self.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        return copy.deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)


def _call_of_zero_grad(frame: Any) -> Any:
    """The frame of ``module.zero_grad()``, of any module around the model, if that is the caller: it reads ``p.grad``
    and not ``p``.

    Plain loops call it right after ``step()``, where waiting would leave nothing to overlap with the next forward. It
    is found among the frames by its code object. If torch changes the call one day, it waits like any other reader.
    """
    code = getattr(nn.Module.zero_grad, "__code__", None)
    for _ in range(6):  # items <- named_parameters' lambda <- _named_members <- named_parameters <- parameters <- it
        if frame is None or frame.f_code is code:
            return frame
        frame = frame.f_back
    return None


def await_reads(modules: Iterable[nn.Module], updates: DeferredUpdates) -> list[AwaitedParameters]:
    """Make reads of these modules' own parameters wait for ``updates``; returns their ``_parameters``."""
    for module in modules:
        if not isinstance(module, torch.jit.ScriptModule) and vars(module)["_parameters"]:
            _await_reads_of(module, updates)
    return awaited(modules)


def await_host(modules: Iterable[nn.Module], weights: HostWeights) -> None:
    """Make reads of these modules' own parameters, outside of forwards, wait until they are complete on the host."""
    _hosts.add(weights)
    _watch_registrations()
    for module in modules:
        if vars(module)["_parameters"]:
            own = _awaited_parameters_of(module)
            parameters = [parameter for parameter in dict.values(own) if parameter is not None]
            own.groups = groups_of(map(weights.home_of, parameters))


def _awaited_parameters_of(module: nn.Module) -> AwaitedParameters:
    own = vars(module)["_parameters"]
    if not isinstance(own, AwaitedParameters):
        own = vars(module)["_parameters"] = AwaitedParameters(own)
    return own


def _await_reads_of(module: nn.Module, updates: DeferredUpdates) -> None:
    own = _awaited_parameters_of(module)
    if updates not in own.updates:
        own.updates.append(updates)
    own.steps = -1


def awaited(modules: Iterable[nn.Module]) -> list[AwaitedParameters]:
    """The ``_parameters`` of those modules whose reads wait."""
    return [own for module in modules if isinstance(own := vars(module).get("_parameters"), AwaitedParameters)]


def wait_for(modules: Iterable[AwaitedParameters], shards: Collection[Tensor] | None = None) -> None:
    """Wait for the updates of these modules' parameters.

    Args:
        modules: modules that have been waited for since the last step are left out.
        shards: the parameters to wait for in their stead: parameters that FSDP2 has gathered are not the shards.
    """
    steps = DeferredUpdates.steps
    stale = [own for own in modules if own.steps != steps]
    if not stale:
        return
    # `dict.values`: without waiting
    parameters = [p for own in stale for p in dict.values(own) if p is not None] if shards is None else shards
    found = dict.fromkeys(updates for own in stale for updates in own.updates)
    for updates in found:
        updates.wait(parameters)
    uncounted = {updates for updates in found if updates.in_backward}  # the next ones may begin at any time
    for own in stale:
        if not uncounted or uncounted.isdisjoint(own.updates):
            own.steps = steps
