"""Forwards that wait for deferred updates: each transformer block for its own, so that the others' go on beside it.

Units are updated in the order in which a forward reads them, so whoever waits for a block has waited for everything in
front of it. What stands before the first block is waited for when the model is called, what stands behind the last one
when that block is done. Modules outside the blocks that own parameters wait for those when they are called, whoever
calls them.

FSDP2 reads a module's shards before the module is called, on a stream of its own: that one waits too
(:mod:`lightstep.sharding.gathering_gates`).
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.param_groups import Place
from lightstep.sharding.gathering_gates import Gathering, gathered_with, sharded_modules
from lightstep.sharding.preparation import transformer_blocks

__all__ = ["gate_forwards", "in_order_of_use"]

Selection = Callable[[], Iterable[Tensor]]


def in_order_of_use(model: nn.Module, places: Mapping[Tensor, Place]) -> Mapping[Tensor, Place]:
    """``places`` with what FSDP2's root gathers in front: all of it is read when a forward begins."""
    if not isinstance(model, FSDPModule):
        return places
    first = set(gathered_with(model))
    return {parameter: places[parameter] for parameter in sorted(places, key=lambda parameter: parameter not in first)}


def gate_forwards(model: nn.Module, optimizer: BaseOptimizer) -> None:
    """Hooks on ``model`` (unwrapped): ``optimizer``'s updates land before a forward or a state dict reads them.

    They keep neither alive, and go when the optimizer goes, or when this is called again for it.
    """
    if optimizer not in _gates:
        _forget_compiled()
    _remove(_gates.pop(optimizer, []))
    sharded = sharded_modules(model)
    selections = _of_sharded(model, sharded, optimizer) if sharded else _of_blocks(model)
    handles: list[Any] = []
    for module, parameters in selections:
        gate = _Gate(optimizer, parameters)
        handles.append(module.register_forward_pre_hook(gate, prepend=True))  # before FSDP2 reads shards
        handles.append(module.register_state_dict_pre_hook(gate))
        handles.append(module.register_load_state_dict_pre_hook(gate))
    blocks = transformer_blocks(model)
    if blocks and not sharded:
        handles.append(blocks[-1].register_forward_hook(_Gate(optimizer)))
    _gates[optimizer] = handles
    weakref.finalize(optimizer, _remove, handles)


_gates: weakref.WeakKeyDictionary[BaseOptimizer, list[Any]] = weakref.WeakKeyDictionary()
_gatherings: weakref.WeakKeyDictionary[nn.Module, Gathering] = weakref.WeakKeyDictionary()


def _forget_compiled() -> None:
    """Code that ``torch.compile`` made before there were gates would go on without them: it guards no hooks."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _of_blocks(model: nn.Module) -> list[tuple[nn.Module, Selection | None]]:
    """What each module waits for; ``None`` is everything."""
    blocks = transformer_blocks(model)
    root = _early(model, blocks) if blocks else None
    return [(model, root), *((module, _read_by(module, blocks)) for module in _gated(model, blocks))]


def _gated(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks, and what lies outside them; the root has a gate of its own."""
    inside = {module for block in blocks for module in block.modules()} - set(blocks)
    return [module for module in model.modules() if module is not model and module not in inside]


def _read_by(module: nn.Module, blocks: Sequence[nn.Module]) -> Selection:
    """The parameters that a module may read when it is called: those of its children too, unless they are blocks."""
    holds_blocks = any(child in set(blocks) for child in module.modules() if child is not module)
    return lambda: module.parameters(recurse=not holds_blocks)


def _early(model: nn.Module, blocks: Sequence[nn.Module]) -> Selection:
    """The parameters that the model may read before its first block: all that are registered in front of it."""
    early = list(itertools.takewhile(lambda module: module is not blocks[0], model.modules()))
    return lambda: (parameter for module in early for parameter in module.parameters(recurse=False))


def _of_sharded(
    model: nn.Module, sharded: Sequence[nn.Module], optimizer: BaseOptimizer
) -> list[tuple[nn.Module, Selection]]:
    """Each FSDP module waits for what is gathered with it; modules outside of them as elsewhere.

    The parameters are found now: while a module runs they are no shards.
    """
    gathering = _gatherings.get(sharded[0]) or Gathering(sharded)
    _gatherings[sharded[0]] = gathering
    gathering.optimizers.add(optimizer)
    gathered = {module: gathered_with(module, sharded) for module in sharded}
    everything = [parameter for parameters in gathered.values() for parameter in parameters]

    def needed(module: nn.Module) -> Selection:
        return lambda: everything if gathering.unguarded else gathered[module]

    inside = {part for module in sharded for part in module.modules()}
    outside = [module for module in model.modules() if module not in inside]
    found: list[tuple[nn.Module, Selection]] = [(module, needed(module)) for module in sharded]
    return [*((module, _read_by(module, sharded)) for module in outside), *found]


class _Gate:
    """A hook of any kind; in a copy of the model (pickled, too) it is open."""

    def __init__(self, optimizer: BaseOptimizer | None = None, parameters: Selection | None = None) -> None:
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else None
        self._parameters = parameters
        self._land = torch.compiler.disable(self._land_eagerly)  # dynamo would trace the waiting into the graph

    def __call__(self, *_: Any) -> None:
        self._land()

    def _land_eagerly(self) -> None:
        optimizer = self._optimizer() if self._optimizer is not None else None
        if optimizer is not None:
            optimizer.land(None if self._parameters is None else self._parameters())

    def __deepcopy__(self, memo: dict[int, Any]) -> _Gate:
        return _Gate()

    def __reduce__(self) -> Any:
        return _Gate, ()
