"""What a user has changed in ``optimizer.state`` since the optimizer has last used it.

What is read of the state are copies that notice when they are written to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightstep.distributed import DTensor

__all__ = ["Edit", "Reading", "Standing", "StateCopy", "StateEdits", "StateShardCopy", "noticing", "plain"]


class Standing(Enum):
    """What a write into entries that were read means."""

    CURRENT = "the state is as it was read: a write changes the state"
    OUTDATED = "the state has been updated since: a write would be lost"
    RELEASED = "the state has been deleted or replaced: the entries are the user's own"


class Reading:
    """The entries of one parameter as they were read, as long as somebody holds one of them.

    Attributes:
        copies: the copies that were made of tensors, by entry. Reading an entry again returns the same copy.
        standing: what a write into them means.
    """

    __slots__ = ("__weakref__", "_edits", "_parameter", "copies", "standing")

    def __init__(self, edits: StateEdits, parameter: Tensor) -> None:
        self._edits, self._parameter, self.standing = edits, parameter, Standing.CURRENT
        self.copies: WeakValueDictionary[str, Tensor] = WeakValueDictionary()

    def wrote(self, key: str, copy: Tensor) -> None:
        """Somebody has written into a copy.

        Raises:
            RuntimeError: the state has been updated since it was read.
        """
        if self.standing is Standing.RELEASED or self.copies.get(key) is not copy:  # the user's own by now
            return
        if self.standing is Standing.OUTDATED:
            raise RuntimeError(
                f"state {key!r} was written to, and what was written to had been read before the last update: the "
                f"change would be lost. Read it again: optimizer.state[parameter][{key!r}]; or edit a .clone()"
            )
        self._edits.change(self._parameter, {key: copy}, ())

    def change(self, new: Mapping[str, Any], gone: Collection[str]) -> Reading:
        """Entries are assigned or deleted; returns the reading that the new ones belong to."""
        for key in gone:
            self.copies.pop(key, None)
        self._edits.change(self._parameter, new, gone)
        return self._edits.reading(self._parameter)

    def clear(self) -> None:
        """All entries are deleted."""
        self._edits.replace(self._parameter, {})


@dataclass
class Edit:
    """New entries of one parameter.

    Attributes:
        entries: of the new values; the user's own mapping if it was assigned as a whole.
        whole: these are all entries; else the others stay.
        gone: the names of deleted entries.
    """

    entries: dict[str, Any]
    whole: bool = False
    gone: set[str] = field(default_factory=set)

    def applied_to(self, read: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """The entries of a parameter that has those that ``read`` returns without it."""
        if self.whole:
            return dict(self.entries)
        return {**{key: value for key, value in read().items() if key not in self.gone}, **self.entries}


class StateEdits:
    """The edits of all parameters, and what has been read.

    Attributes:
        unapplied: the edits.
        readings: what somebody holds of the state as it is now.
    """

    def __init__(self) -> None:
        self.unapplied: dict[Tensor, Edit] = {}
        self.readings: WeakValueDictionary[Tensor, Reading] = WeakValueDictionary()

    def reading(self, parameter: Tensor) -> Reading:
        """The current reading of a parameter."""
        found = self.readings.get(parameter)
        if found is None:
            found = self.readings[parameter] = Reading(self, parameter)
        return found

    def change(self, parameter: Tensor, new: Mapping[str, Any], gone: Collection[str]) -> None:
        """Assign and delete some entries."""
        edit = self.unapplied.setdefault(parameter, Edit({}))
        edit.entries.update(new)
        for key in gone:
            edit.entries.pop(key, None)
        edit.gone = (edit.gone | {*gone}) - {*new}

    def replace(self, parameter: Tensor, entries: dict[str, Any]) -> None:
        """Replace all entries; what was read of them is the user's own."""
        self.release([parameter])
        self.unapplied[parameter] = Edit(entries, whole=True)

    def release(self, parameters: Iterable[Tensor]) -> None:
        """State was loaded for these: what was read and edited before is the user's own."""
        for parameter in parameters:
            self.unapplied.pop(parameter, None)
            reading = self.readings.pop(parameter, None)
            if reading is not None:
                reading.standing = Standing.RELEASED

    def outdate(self) -> None:
        """The state is about to be updated."""
        for reading in list(self.readings.values()):
            reading.standing = Standing.OUTDATED
        self.readings.clear()

    def take(self) -> dict[Tensor, Edit]:
        """Remove and return all edits."""
        edits, self.unapplied = self.unapplied, {}
        return edits

    def put_back(self, edits: Mapping[Tensor, Edit]) -> None:
        """Edits that were taken could not be applied."""
        self.unapplied = {**edits, **self.unapplied}


_REPLACES_MEMORY = ("__set__", "resize_", "resize_as_")
"""Functions that give a tensor other memory; its copy would keep the old one."""
_NOWHERE = -1
"""The address of a tensor without memory: an empty one."""


class _Noticing:
    """Copies of entries, and their views. Writing into one, by whatever function of torch, changes the state."""

    _reading: Reading
    _key: str
    _copy: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        copies = [value for value in tree_leaves((args, kwargs)) if isinstance(value, _Noticing)]
        _refuse_sharing(name, args)
        before = [_version(copy) for copy in copies]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*tree_map(plain, args), **tree_map(plain, kwargs))
        for copy, version in zip(copies, before, strict=True):
            if _version(copy) != version:
                copy._reading.wrote(copy._key, copy._copy)
        if name == "__iter__":
            return iter(_with_views(list(result), copies))
        if name in ("numpy", "__array__"):
            result.flags.writeable = False  # numpy itself refuses writes, which nobody would notice
        is_value = name == "tolist" or not isinstance(result, (Tensor, tuple, list))
        return result if is_value else _with_views(result, copies)

    def set_(self, *_: Any, **__: Any) -> Any:
        """torch does not pass this one to :meth:`__torch_function__`."""
        _refuse_new_memory("set_", self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)

    def __copy__(self) -> Any:
        return self.detach()  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: Any) -> Tensor:
        copied: Tensor = plain(self).clone()
        return copied


class StateCopy(_Noticing, Tensor):
    """A copy of an entry."""


class StateShardCopy(_Noticing, DTensor):
    """A copy of an entry whose parameter is a DTensor."""

    def to_local(self, **options: Any) -> Tensor:
        return cast(Tensor, _view_of(self, plain(self).to_local(**options)))


def noticing(copy: Any, key: str, reading: Reading) -> Any:
    """A tensor with the memory of ``copy`` that tells ``reading`` when it is written to; anything else as it is."""
    copy = plain(copy)
    if not isinstance(copy, Tensor):
        return copy
    if copy.is_inference():  # torch does not count writes into those
        with torch.inference_mode(False):
            copy = copy.clone()
    reading.copies[key] = copy
    return _made(copy, key, copy, reading)


def plain(value: Any) -> Any:
    """The same memory as an ordinary tensor; anything else as it is."""
    if not isinstance(value, _Noticing):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach() if isinstance(value, DTensor) else value.as_subclass(Tensor)  # type: ignore[attr-defined]


def _made(value: Any, key: str, copy: Tensor, reading: Reading) -> Any:
    if isinstance(value, DTensor):
        made: Any = value.detach()
        made.__class__ = StateShardCopy
    else:
        made = value.detach().as_subclass(StateCopy)
    made._reading, made._key, made._copy = reading, key, copy
    return made


def _view_of(parent: Any, value: Tensor) -> Any:
    return _made(value, parent._key, parent._copy, parent._reading)


def _with_views(result: Any, copies: Iterable[Any]) -> Any:
    """The result of a function; what shares memory with a copy notices writes, too."""
    parents = {_storage(copy): copy for copy in copies if _storage(copy) != _NOWHERE}

    def wrapped(value: Any) -> Any:
        parent = parents.get(_storage(value)) if isinstance(value, Tensor) else None
        return value if parent is None else _view_of(parent, value)

    return tree_map(wrapped, result) if parents else result


def _refuse_sharing(name: str, args: Any) -> None:
    """Refuse what would be written to unnoticed."""
    if not args or not isinstance(args[0], _Noticing):
        return
    if name in _REPLACES_MEMORY:
        _refuse_new_memory(name, args[0])
    if name in ("__dlpack__", "__cuda_array_interface__"):
        raise RuntimeError(
            f"{name} on a copy of optimizer state: what another library writes into it would be lost. Pass a .clone(), "
            f"and assign the result: optimizer.state[parameter][{args[0]._key!r}] = new"
        )


def _refuse_new_memory(name: str, copy: Any) -> NoReturn:
    raise RuntimeError(
        f"{name} on a copy of optimizer state would not change the state. Assign the new tensor: "
        f"optimizer.state[parameter][{copy._key!r}] = new"
    )


def _storage(value: Any) -> int:
    """Address of the tensor's storage, which its views share."""
    with torch._C.DisableTorchFunctionSubclass():
        local = value._local_tensor if isinstance(value, DTensor) else value
        try:
            return local.untyped_storage().data_ptr() or _NOWHERE
        except (RuntimeError, NotImplementedError):  # a sparse tensor
            return _NOWHERE


def _version(value: Any) -> tuple[int, int]:
    with torch._C.DisableTorchFunctionSubclass():
        local = value._local_tensor if isinstance(value, DTensor) else value
        return value._version, local._version
