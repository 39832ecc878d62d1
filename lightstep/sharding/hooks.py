"""Hooks on a user's modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

__all__ = ["NO_BACKWARD", "ModuleHook", "called_modules", "inputs_on", "weakly"]

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
