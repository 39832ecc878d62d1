"""A process that was forked while weights were being updated: their shapes and dtypes can be read there, and no values.

Data loaders fork their workers, and what these run may ask for ``model.dtype``. The updates under way go on in the
parent alone. So the child waits for nothing, and its parameters refuse whatever needs their values.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["watch"]


class _Updates(Protocol):
    """Updates of some parameters."""

    @property
    def are_under_way(self) -> bool: ...

    def parameters(self) -> Iterable[Tensor]: ...


_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_handlers: list[Any] = []  # that the interpreter calls after forks: none, or one


def watch(updates: _Updates) -> None:
    """In a child that is forked while ``updates`` are under way, make their parameters refuse reads of their values."""
    _watched.add(updates)
    if not _handlers:
        _handlers.append(_in_child)
        os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    for updates in list(_watched):
        if updates.are_under_way:
            for parameter in updates.parameters():
                _refuse_values(parameter)


def _refuse_values(parameter: Tensor) -> None:
    known = type(parameter)
    if not issubclass(known, _NotUpToDate):
        parameter.__class__ = type(known.__name__, (_NotUpToDate, known), {})


class _NotUpToDate:
    """A parameter in a fork, whose update is going on in the parent."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            name = getattr(func, "__name__", "")
            if name in _DESCRIPTIONS:
                return func(*args, **(kwargs or {}))
            if name == "__get__" and not isinstance(found := func(*args), Tensor):
                return found
        what = func.__self__.__name__ if name == "__get__" else name
        raise RuntimeError(
            f"{what} of a parameter in process {os.getpid()}, which was forked while the parameter was being updated: "
            "its values are out of date here. Call optimizer.synchronize() before processes are forked (data loaders "
            "fork their workers when iteration begins)"
        )


_DESCRIPTIONS = frozenset(
    getattr(Tensor, name).__name__
    for name in (
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "get_device", "__len__"),
        *("is_floating_point", "is_complex", "is_contiguous", "is_signed", "__hash__"),
    )
)
