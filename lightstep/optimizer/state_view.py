"""``optimizer.state``: reading and assigning state entries."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightstep.distributed import DTensor
from lightstep.optimizer.engine import Engine

__all__ = ["Entries", "StateView"]

Change = Callable[[Mapping[str, Any], Collection[str]], None]


class StateView(MutableMapping[Tensor, dict[str, Any]]):
    """``optimizer.state``: parameter → entries, read from the state backend at each access.

    Assigning replaces a parameter's state; assigning to an entry replaces that entry. A tensor that was read is the
    state itself or a copy, depending on the backend: ``stream`` returns copies, ``resident`` and ``bulk`` return copies
    of step counts only. Writing to a copy raises. As in torch, a parameter without state has ``{}``.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        entries, item = self._engine.parameter_state(parameter), self._engine.managed.get(parameter)
        if item is not None:
            is_live = self._engine.backend.is_live
            entries = {key: value if is_live(item, key) else _read_only(value) for key, value in entries.items()}
        return Entries(entries, _make_writer(weakref.ref(self._engine), parameter))

    def __setitem__(self, parameter: Tensor, entries: Mapping[str, Any]) -> None:
        _replace(self._engine, parameter, entries)

    def __delitem__(self, parameter: Tensor) -> None:
        self[parameter] = {}

    def __contains__(self, parameter: object) -> bool:
        item = self._engine.managed.get(parameter)
        return item is not None and item.updated

    def __iter__(self) -> Iterator[Tensor]:
        return (item.param for item in self._engine.managed if item.updated)

    def __len__(self) -> int:
        return sum(item.updated for item in self._engine.managed)


def _replace(engine: Engine, parameter: Tensor, entries: Mapping[str, Any]) -> None:
    engine.replace_state(parameter, {key: plain(value) for key, value in entries.items()})


def _make_writer(
    reference: weakref.ref[Engine], parameter: Tensor
) -> Callable[[Mapping[str, Any], Collection[str]], None]:
    """A function that writes entries to a parameter's state; it does not keep the optimizer alive."""

    def change(new: Mapping[str, Any], gone: Collection[str]) -> None:
        engine = reference()
        if engine is not None:
            entries = {**engine.parameter_state(parameter), **new}
            _replace(engine, parameter, {key: value for key, value in entries.items() if key not in gone})

    return change


class _ReadOnlyCopy:
    """Copies of entries. Writing to one raises, since it would not change the state."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (_writes(func) and _any_read_only(args[0])) or _any_read_only(kwargs.get("out")):
            raise RuntimeError(
                f"{func.__name__} on a copy of optimizer state: the state itself is elsewhere, and the change would be "
                "lost. Assign instead: optimizer.state[parameter]['exp_avg'] = new; or edit a .clone()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*tree_map(plain, args), **tree_map(plain, kwargs))
            copies = [value for value in tree_leaves(args) if isinstance(value, _ReadOnlyCopy)]
            shares = isinstance(result, Tensor) and _storage(result) in map(_storage, copies)
            return _read_only(result) if shares else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        copied: Tensor = plain(self).clone()
        return copied


class ReadOnly(_ReadOnlyCopy, Tensor):
    """A copy of an entry."""


class ReadOnlyShard(_ReadOnlyCopy, DTensor):
    """A copy of an entry whose parameter is a DTensor."""

    def to_local(self, **options: Any) -> Tensor:
        return cast(Tensor, _read_only(plain(self).to_local(**options)))


def plain(value: Any) -> Any:
    """A read-only copy as an ordinary tensor; anything else as it is."""
    if not isinstance(value, _ReadOnlyCopy):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach() if isinstance(value, DTensor) else value.as_subclass(Tensor)  # type: ignore[attr-defined]


def _read_only(value: Any) -> Any:
    """``value`` as a read-only copy; nobody else holds a reference to it."""
    if type(value) is DTensor:
        value.__class__ = ReadOnlyShard
    return value.as_subclass(ReadOnly) if type(value) is Tensor else value


def _storage(value: Any) -> int:
    """Address of the tensor's storage, which its views share."""
    if not isinstance(value, Tensor):
        return -1
    with torch._C.DisableTorchFunctionSubclass():
        local = value._local_tensor if isinstance(value, DTensor) else value
        return local.untyped_storage().data_ptr()


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", "__set__") or (name.startswith("__i") and name in _IN_PLACE_OPERATORS)


_OPERATORS = "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift"
_IN_PLACE_OPERATORS = {f"__i{name}__" for name in _OPERATORS.split()}


def _any_read_only(target: Any) -> bool:
    return isinstance(target, _ReadOnlyCopy) or (isinstance(target, (list, tuple)) and any(map(_any_read_only, target)))


class Entries(dict[str, Any]):
    """One parameter's entries as they were read; assigning to an entry or deleting it changes the state.

    Args:
        change: called with new entries and the names of deleted ones.
    """

    def __init__(
        self, entries: Mapping[str, Any], change: Callable[[Mapping[str, Any], Collection[str]], None]
    ) -> None:
        super().__init__(entries)
        self._change = change

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self._change({}, [key])

    def update(self, *arguments: Any, **entries: Any) -> None:
        new = dict(*arguments, **entries)
        super().update(new)
        self._change(new, ())

    def __ior__(self, other: Any) -> Entries:  # type: ignore[misc,override]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        if key not in self:
            return super().pop(key, *default)
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[str, Any]:
        key = next(reversed(self))
        return key, self.pop(key)

    def clear(self) -> None:
        gone = list(self)
        super().clear()
        self._change({}, gone)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)
