"""Gates, which wait for deferred updates: those of forwards, and those of FSDP2's all-gathers.

Each transformer block waits only for its own updates.

Units are updated in the order in which a forward reads them, so waiting for a block includes everything in front of it.
A call of the model waits for the parameters before the first block; the end of the last block waits for the rest.
Modules with parameters outside the blocks wait for these when they are called. Reads of parameters wait by themselves
(:mod:`lightstep.sharding.parameter_reads`): gates are for compiled code, and for modules that keep lists of their
parameters (``nn.LSTM``).

FSDP2 copies a unit's shards into the all-gather's input on a stream of its own, often before the unit is called: that
stream waits, too.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.param_groups import Place
from lightstep.sharding.fsdp_groups import gathered_with, own_parts, parameter_groups, sharded_modules
from lightstep.sharding.hooks import ModuleHook
from lightstep.sharding.parameter_reads import (
    AwaitedParameters,
    DeferredUpdates,
    await_reads,
    awaited,
    updates_of,
    wait_for,
)
from lightstep.sharding.preparation import transformer_blocks

__all__ = ["Gates", "in_order_of_use"]


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
        yield self._before(model, awaited(early))
        if blocks:
            yield blocks[-1].register_forward_hook(ModuleHook(lambda *_, updates=self._updates: updates.wait()))
        yield from self._outside(model, blocks, but=model)
        for block in blocks:
            yield self._before(block, awaited(block.modules()))

    def _before_units(self, model: nn.Module, sharded: Sequence[nn.Module]) -> Iterator[Any]:
        """Each FSDP module waits for the parameters that are gathered with it, other modules for their own."""
        if self._gathering is None or not self._gathering.belongs_to(sharded[0]):
            self._gathering = _GatheringGates(sharded)
        gathered = {module: gathered_with(module, sharded) for module in sharded}
        for module, parameters in gathered.items():
            yield self._before(module, awaited(own_parts(module)), parameters)
        yield from self._outside(model, sharded)

    def _outside(self, model: nn.Module, units: Sequence[nn.Module], but: nn.Module | None = None) -> Iterator[Any]:
        """Gates of modules that are in no unit, for all parameters below them except the units'."""
        inside = {part for unit in units for part in unit.modules()}
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it has no trained parameters (`scripted_modules`)
            if module is not but and module not in inside:
                holds_units = not inside.isdisjoint(module.modules())
                yield self._before(module, awaited([module] if holds_units else module.modules()))

    def _before(
        self, module: nn.Module, read: list[AwaitedParameters], shards: Collection[Tensor] | None = None
    ) -> Any:
        """A hook that waits for these parameters (``shards`` in their stead, under FSDP2) before the module runs."""
        updates = self._updates

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
        for updates in updates_of(own):
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
