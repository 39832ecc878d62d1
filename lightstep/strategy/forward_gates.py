"""Forwards that wait for deferred updates: each transformer block for its own, so that the others' go on beside it.

Units are updated in model order, so whoever waits for a block has waited for everything in front of it. What stands
before the first block is waited for when the model is called, what stands behind the last one when that block is done.
Modules outside the blocks that own parameters wait for those when they are called, whoever calls them.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightstep.optimizer.base import BaseOptimizer
from lightstep.strategy.model_setup import transformer_blocks

__all__ = ["gate_forwards"]

Selection = Callable[[], Iterable[Tensor]]


def gate_forwards(model: nn.Module, optimizer: BaseOptimizer) -> None:
    """Hooks on ``model`` (unwrapped): ``optimizer``'s updates land before a forward or a state dict reads them.

    They keep neither alive, and go when the optimizer goes.
    """
    blocks = transformer_blocks(model)
    gates = [(model, _early(model, blocks)) if blocks else (model, None)]
    gates += [(module, _read_by(module, blocks)) for module in _gated(model, blocks)]
    handles: list[RemovableHandle] = []
    for module, parameters in gates:
        gate = _Gate(optimizer, parameters)
        handles.append(module.register_forward_pre_hook(gate))
        handles.append(module.register_state_dict_pre_hook(gate))
        handles.append(module.register_load_state_dict_pre_hook(gate))
    if blocks:
        handles.append(blocks[-1].register_forward_hook(_Gate(optimizer)))
    weakref.finalize(optimizer, _remove, handles)


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


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


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
