"""The record of one prepared model: its wrapper, role, optimizers, gates and initial masters.

Gates make forwards and FSDP2's all-gathers wait for deferred updates. Each transformer block waits only for its own.
Units are updated in the order in which a forward reads them, so waiting for a block includes everything in front of it.
A call of the model waits for the parameters before the first block; the end of the last block waits for the rest.
Modules with parameters outside the blocks wait for these when they are called. Reads of parameters wait by themselves
(:mod:`lightstep.sharding.parameter_reads`): gates are for compiled code, and for modules that keep lists of their
parameters (``nn.LSTM``).

FSDP2 copies a unit's shards into the all-gather's input on a stream of its own, often before the unit is called: that
stream waits, too.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightstep.distributed import is_sharded, local_tensor
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.optimizer.param_groups import Place, clean_name
from lightstep.sharding.fsdp_groups import gathered_with, own_parts, parameter_groups, sharded_modules
from lightstep.sharding.model_names import unwrap_model
from lightstep.sharding.parameter_reads import (
    AwaitedParameters,
    DeferredUpdates,
    ModuleHook,
    await_reads,
    awaited,
    wait_for,
)
from lightstep.sharding.preparation import transformer_blocks
from lightstep.sharding.reduced_gradients import DirectCalls, GradientsInPlace, ReplicatedGradients
from lightstep.sharding.shard_visits import ShardVisits
from lightstep.sharding.weight_visits import WeightVisits

__all__ = ["Gates", "PreparedModel", "in_order_of_use"]


def in_order_of_use(model: nn.Module, places: Mapping[Tensor, Place]) -> Mapping[Tensor, Place]:
    """``places`` with the parameters that FSDP2's root gathers in front: all of them are read when a forward begins."""
    if not isinstance(model, FSDPModule):
        return places
    first = set(gathered_with(model))
    return {parameter: places[parameter] for parameter in sorted(places, key=lambda parameter: parameter not in first)}


class Gates:
    """Makes the readers of one model wait: its forwards, FSDP2's all-gathers, and reads of its parameters.

    Gates keep neither the model nor its optimizers alive. The forward hooks are removed with the last optimizer.
    """

    def __init__(self) -> None:
        self._updates = DeferredUpdates()
        self._gathering: _GatheringGates | None = None
        self._handles: list[Any] = []
        self._gated: tuple[int, ...] = ()

    def guard(self, model: nn.Module, optimizer: BaseOptimizer, in_backward: bool) -> None:
        """Make readers of ``model`` (unwrapped) wait for ``optimizer``'s updates of what they read.

        Call this again after the model has been sharded, or has got other modules.
        """
        if optimizer not in self._updates.optimizers:
            finalizer = weakref.finalize(optimizer, _remove_if_unused, self._updates.optimizers, self._handles)
            finalizer.atexit = False
        self._updates.add_optimizer(optimizer, in_backward)
        sharded = sharded_modules(model)
        gated = (*map(id, model.modules()), -1, *map(id, model.parameters() if sharded else ()))
        if self._handles and gated == self._gated:
            return
        if not self._handles:
            _reset_compiler()
        _remove(self._handles)
        self._gated = gated
        await_reads(list(model.modules()), self._updates)
        self._handles += self._before_units(model, sharded) if sharded else self._before_blocks(model)

    def _before_blocks(self, model: nn.Module) -> Iterator[Any]:
        blocks = transformer_blocks(model)
        early = itertools.takewhile(lambda module: module not in blocks[:1], model.modules())
        yield _before(self._updates, model, awaited(early))
        if blocks:
            yield blocks[-1].register_forward_hook(ModuleHook(lambda *_, updates=self._updates: updates.wait()))
        yield from self._outside(model, blocks, but=model)
        for block in blocks:
            yield _before(self._updates, block, awaited(block.modules()))

    def _before_units(self, model: nn.Module, sharded: Sequence[nn.Module]) -> Iterator[Any]:
        """Each FSDP module waits for the parameters that are gathered with it, other modules for their own."""
        if self._gathering is None or not self._gathering.belongs_to(sharded[0]):
            self._gathering = _GatheringGates(sharded)
        gathered = {module: gathered_with(module, sharded) for module in sharded}
        for module, parameters in gathered.items():
            yield _before(self._updates, module, awaited(own_parts(module)), parameters)
        yield from self._outside(model, sharded)

    def _outside(self, model: nn.Module, units: Sequence[nn.Module], but: nn.Module | None = None) -> Iterator[Any]:
        """Gates of modules that are in no unit, for all parameters below them except the units'."""
        inside = {part for unit in units for part in unit.modules()}
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it has no trained parameters (`scripted_modules`)
            if module is not but and module not in inside:
                holds_units = not inside.isdisjoint(module.modules())
                yield _before(self._updates, module, awaited([module] if holds_units else module.modules()))


def _before(
    updates: DeferredUpdates,
    module: nn.Module,
    read: list[AwaitedParameters],
    shards: Collection[Tensor] | None = None,
) -> Any:
    """A hook that waits for these parameters (``shards`` in their stead, under FSDP2) before the module runs."""

    def wait(*_: Any) -> None:
        if updates.in_backward:
            updates.wait(())
        wait_for(read, shards)

    return module.register_forward_pre_hook(ModuleHook(wait), prepend=True)


class _GatheringGates:
    """Makes the all-gathers of one FSDP2 model wait, each for the updates of its own shards.

    Args:
        modules: :func:`sharded_modules` of the model; the first one is the root.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._root = weakref.ref(modules[0])
        own = awaited(part for module in modules for part in own_parts(module))
        for group in (group for module in modules for group in parameter_groups(module)):
            group.hooks.before_read = _waiting(group.shards_later(), own)

    def belongs_to(self, root: nn.Module) -> bool:
        """Whether these are the gates of the model with this outermost FSDP module."""
        return self._root() is root


def _waiting(shards_later: Callable[[], list[nn.Parameter]], own: Sequence[AwaitedParameters]) -> Callable[[], None]:
    """A function that makes the current stream wait for the updates of the shards."""

    def wait() -> None:
        shards = shards_later()
        for updates in dict.fromkeys(updates for module in own for updates in module.updates):
            updates.wait_on_stream(shards)

    return wait


def _reset_compiler() -> None:
    """Drop code that ``torch.compile`` made before there were gates: it has no guards on hooks, and would skip them."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _remove_if_unused(optimizers: Iterable[BaseOptimizer], handles: list[Any]) -> None:
    if next(iter(optimizers), None) is None:
        _remove(handles)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


class Averages(Protocol):
    """What checkpoints need of a :class:`~lightstep.sharding.weight_average.WeightAverage`."""

    tensors: dict[str, Tensor]

    def restart(self, names: Iterable[str] | None = None) -> None: ...


class PreparedModel:
    """The record of one model, found from the user's module or any wrapper around it.

    It lives as long as the user's module, and keeps neither that nor its optimizers alive.

    Attributes:
        role: the role given to ``prepare_model``; ``None`` if the model has not been prepared.
        loaded_next: all its parameters will be loaded once it is prepared, and need no initial values.
        gates: make its readers wait for deferred updates.
        gradients: keeps the gradients that DDP reduces in fp32, if the strategy needs that.
        direct_calls: passes forwards of the user's module on to DDP.
        weight_visits: bring its weights to the device, if they rest on the host.
        optimizers: those that ``create_optimizer`` of any strategy made for it, while they exist.
    """

    _records: ClassVar[weakref.WeakKeyDictionary[nn.Module, PreparedModel]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.role: str | None = None
        self.loaded_next = False
        self.gates = Gates()
        self.gradients: ReplicatedGradients | GradientsInPlace | None = None
        self.direct_calls: DirectCalls | None = None
        self.weight_visits: WeightVisits | ShardVisits | None = None
        self.optimizers: weakref.WeakSet[BaseOptimizer] = weakref.WeakSet()
        self._wrapper: weakref.ref[nn.Module] | None = None
        self._average: weakref.ref[Averages] | None = None
        # By id: torch cannot swap tensors that have weak references, and these must not be kept alive. An id may be
        # used again; values count only if they round to the weight (`initial_master`).
        self._fp32_values: dict[int, Tensor | None] = {}

    @classmethod
    def of(cls, model: nn.Module) -> PreparedModel:
        """The record of ``model``, wrapped or not; made on the first call."""
        inner = model if model in cls._records else unwrap_model(model)
        if inner not in cls._records:
            cls._records[inner] = cls()
        return cls._records[inner]

    @property
    def wrapper(self) -> nn.Module | None:
        """The strategy's wrapper around the user's module, while it exists."""
        return None if self._wrapper is None else self._wrapper()

    @wrapper.setter
    def wrapper(self, wrapper: nn.Module) -> None:
        self._wrapper = weakref.ref(wrapper)

    @property
    def average(self) -> Averages | None:
        """The average of its weights, while it exists."""
        return None if self._average is None else self._average()

    @average.setter
    def average(self, average: Averages) -> None:
        if self.average is not None:
            raise ValueError("the model has a WeightAverage already; drop that one first")
        self._average = weakref.ref(average)

    def wait_for_updates(self) -> None:
        """Wait for all deferred updates of this model."""
        for optimizer in self.optimizers:
            optimizer.wait_for_update()
        self._settle_host_weights()

    def _settle_host_weights(self, between_steps: bool = False) -> None:
        if self.weight_visits is not None:
            self.weight_visits.end_if_interrupted(between_steps)
            self.weight_visits.weights.settle()

    def recover(self) -> None:
        """All weights and state are about to be loaded: go on after a failed step, or a failed copy of weights that
        rest on the host.

        Raises:
            RuntimeError: the device does not work any more.
        """
        engines = [o.engine for o in self.optimizers if isinstance(o, MixedPrecisionOptimizer)]
        for engine in engines:
            engine.drop_broken_step()
        weights = None if self.weight_visits is None else self.weight_visits.weights
        if weights is None or weights.lanes.error is None:
            return
        for engine in engines:
            engine.abandon_updates("a copy between host and device", weights.lanes.error)
        weights.abandon()

    @contextlib.contextmanager
    def between_steps(self, what: str) -> Iterator[None]:
        """:meth:`BaseOptimizer.between_steps` of all its optimizers."""
        with contextlib.ExitStack() as stack:
            for optimizer in sorted(self.optimizers, key=id):  # in one order: two threads may read
                stack.enter_context(optimizer.between_steps(what))
            self._settle_host_weights(between_steps=True)
            yield

    # -- optimizers made before the model is sharded

    @contextlib.contextmanager
    def exchanging_parameters(self, model: nn.Module) -> Iterator[list[MixedPrecisionOptimizer]]:
        """The body replaces the model's parameters; optimizers that are not set up get the new ones after it.

        accelerate and the transformers Trainer make the optimizer before the model is sharded. In the body these
        optimizers hold no parameters: otherwise all unsharded weights would stay in memory. Yields these optimizers.
        """
        unready = [o for o in self.optimizers if isinstance(o, MixedPrecisionOptimizer) and not o.is_set_up]
        names_by_group = _names_in_groups(model, unready)
        for optimizer in unready:
            optimizer.forget_parameters()
        try:
            yield unready
        finally:
            now = dict(_named(model))
            for group, names in names_by_group:
                group["params"] = [now[name] for name in names]

    # -- initial masters

    def keep_masters(self, values: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Keep the fp32 values (local shards) of parameters that are being rounded, until an optimizer takes them."""
        for parameter, value in values:
            self._fp32_values[id(parameter)] = value

    def forget_replaced(self, model: nn.Module) -> None:
        """Drop the values of parameters that are not the model's any more."""
        present = {id(parameter) for parameter in model.parameters()}
        self._fp32_values = {number: value for number, value in self._fp32_values.items() if number in present}

    def kept_masters(self, model: nn.Module) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Name, parameter and fp32 values, for each parameter whose values are kept."""
        for name, parameter in unwrap_model(model).named_parameters():
            value = self._fp32_values.get(id(parameter))
            if value is not None:
                yield name, (parameter, value)

    def unround(self, model: nn.Module) -> None:
        """Put kept values back into their (unsharded) parameters, which are about to be rounded again."""
        for _, (parameter, _) in list(self.kept_masters(model)):
            value = None if is_sharded(parameter) else self.initial_master(parameter)
            if value is not None:
                parameter.data = value

    def initial_master(self, parameter: Tensor, keep: bool = False) -> Tensor | None:
        """The fp32 local shard that a parameter was rounded from; without ``keep`` it is removed from here.

        ``None`` if no values are kept, or if the weight has been changed since: then the weight counts.
        """
        value = self._fp32_values.get(id(parameter)) if keep else self._fp32_values.pop(id(parameter), None)
        local = local_tensor(parameter).detach()
        if value is None or value.shape != local.shape:
            return None
        return value if torch.equal(value.to(local.dtype).to(local.device), local) else None


def _names_in_groups(
    model: nn.Module, optimizers: Iterable[MixedPrecisionOptimizer]
) -> list[tuple[dict[str, Any], list[str]]]:
    names = {id(parameter): name for name, parameter in reversed(list(_named(model)))}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [(group, [names[id(parameter)] for parameter in group["params"]]) for group in groups]


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tied parameters under each of their names."""
    for name, parameter in unwrap_model(model).named_parameters(remove_duplicate=False):
        yield clean_name(name), parameter
