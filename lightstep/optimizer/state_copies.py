"""Copies of state entries that notice when they are written to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightstep.distributed import DTensor
from lightstep.optimizer.state_edits import Reading

__all__ = ["StateCopy", "StateShardCopy", "noticing", "plain"]

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
