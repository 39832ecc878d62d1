"""Forwards that wait for deferred updates: each transformer block for its own, so that the others' go on beside it.

Units are updated in the order in which a forward reads them, so whoever waits for a block has waited for everything in
front of it. What stands before the first block is waited for when the model is called, what stands behind the last one
when that block is done. Modules outside the blocks that own parameters wait for those when they are called, whoever
calls them. Reads wait by themselves (:mod:`lightstep.sharding.parameter_reads`): gates are for compiled code, and for
modules that keep lists of their parameters (``nn.LSTM``).

FSDP2 reads a module's shards before the module is called, on a stream of its own: that one waits too
(:mod:`lightstep.sharding.gathering_gates`).
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.param_groups import Place
from lightstep.sharding.gathering_gates import GatheringGates, gathered_with, own_parts, sharded_modules
from lightstep.sharding.hooks import ModuleHook
from lightstep.sharding.parameter_reads import AwaitedParameters, DeferredUpdates, await_reads, awaited, wait_for
from lightstep.sharding.preparation import transformer_blocks

__all__ = ["Gates", "in_order_of_use"]


def in_order_of_use(model: nn.Module, places: Mapping[Tensor, Place]) -> Mapping[Tensor, Place]:
    """``places`` with what FSDP2's root gathers in front: all of it is read when a forward begins."""
    if not isinstance(model, FSDPModule):
        return places
    first = set(gathered_with(model))
    return {parameter: places[parameter] for parameter in sorted(places, key=lambda parameter: parameter not in first)}


class Gates:
    """What holds back readers of one model: its forwards, FSDP2's gathering, and reads of its parameters.

    Gates keep neither the model nor its optimizers alive. With the last optimizer the hooks in front of forwards go.
    """

    def __init__(self) -> None:
        self._updates = DeferredUpdates()
        self._gathering: GatheringGates | None = None
        self._handles: list[Any] = []
        self._gated: tuple[int, ...] = ()

    def guard(self, model: nn.Module, optimizer: BaseOptimizer, in_backward: bool) -> None:
        """Readers of ``model`` (unwrapped) wait for what they read of ``optimizer``'s updates, from now on.

        To be called again when the model has been sharded, or has got other modules.
        """
        if optimizer not in self._updates.optimizers:
            opening = weakref.finalize(optimizer, _open_without, self._updates.optimizers, self._handles)
            opening.atexit = False
        self._updates.follow(optimizer, in_backward)
        sharded = sharded_modules(model)
        gated = (*map(id, model.modules()), -1, *map(id, model.parameters() if sharded else ()))
        if self._handles and gated == self._gated:
            return
        if not self._handles:
            _forget_compiled()
        _remove(self._handles)
        self._gated = gated
        await_reads(list(model.modules()), self._updates)
        self._handles += self._before_units(model, sharded) if sharded else self._before_blocks(model)

    def _before_blocks(self, model: nn.Module) -> Iterator[Any]:
        blocks = transformer_blocks(model)
        early = itertools.takewhile(lambda module: module not in blocks[:1], model.modules())
        yield self._before(model, awaited(early))
        if blocks:
            yield blocks[-1].register_forward_hook(
                ModuleHook(lambda *_, updates=self._updates: updates.wait_for_step())
            )
        yield from self._outside(model, blocks, but=model)
        for block in blocks:
            yield self._before(block, awaited(block.modules()))

    def _before_units(self, model: nn.Module, sharded: Sequence[nn.Module]) -> Iterator[Any]:
        """Each FSDP module waits for what is gathered with it; modules outside of them as elsewhere."""
        if self._gathering is None or not self._gathering.belongs_to(sharded[0]):
            self._gathering = GatheringGates(sharded)
        gathered = {module: gathered_with(module, sharded) for module in sharded}
        for module, parameters in gathered.items():
            yield self._before(module, awaited(own_parts(module)), parameters)
        yield from self._outside(model, sharded)

    def _outside(self, model: nn.Module, units: Sequence[nn.Module], but: nn.Module | None = None) -> Iterator[Any]:
        """Gates of what lies in no unit: for all that is read in there, but for the units'."""
        inside = {part for unit in units for part in unit.modules()}
        for module in model.modules():
            if module is not but and module not in inside:
                holds_units = not inside.isdisjoint(module.modules())
                yield self._before(module, awaited([module] if holds_units else module.modules()))

    def _before(
        self, module: nn.Module, read: list[AwaitedParameters], shards: Collection[Tensor] | None = None
    ) -> Any:
        """A hook that waits for the parameters ``read``, before FSDP2 reads shards."""
        updates = self._updates

        def wait(*_: Any) -> None:
            if updates.in_backward:
                updates.wait(())
            wait_for(read, shards)

        return module.register_forward_pre_hook(ModuleHook(wait), prepend=True)


def _forget_compiled() -> None:
    """Code that ``torch.compile`` made before there were gates would go on without them: it guards no hooks."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _open_without(optimizers: Iterable[BaseOptimizer], handles: list[Any]) -> None:
    if next(iter(optimizers), None) is None:
        _remove(handles)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
