"""What a user has changed in ``optimizer.state`` since the optimizer has last used it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

__all__ = ["Edit", "Reading", "Standing", "StateEdits"]


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
    """The edits of all parameters, and what has been read."""

    def __init__(self) -> None:
        self._edits: dict[Tensor, Edit] = {}
        self._readings: WeakValueDictionary[Tensor, Reading] = WeakValueDictionary()

    def __bool__(self) -> bool:
        return bool(self._edits)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(list(self._edits))

    def get(self, parameter: Any) -> Edit | None:
        return self._edits.get(parameter)

    def reading(self, parameter: Tensor) -> Reading:
        """The current reading of a parameter."""
        found = self._readings.get(parameter)
        if found is None:
            found = self._readings[parameter] = Reading(self, parameter)
        return found

    def change(self, parameter: Tensor, new: Mapping[str, Any], gone: Collection[str]) -> None:
        """Assign and delete some entries."""
        edit = self._edits.setdefault(parameter, Edit({}))
        edit.entries.update(new)
        for key in gone:
            edit.entries.pop(key, None)
        edit.gone = (edit.gone | {*gone}) - {*new}

    def replace(self, parameter: Tensor, entries: dict[str, Any]) -> None:
        """Replace all entries; what was read of them is the user's own."""
        self.release([parameter])
        self._edits[parameter] = Edit(entries, whole=True)

    def release(self, parameters: Iterable[Tensor]) -> None:
        """State was loaded for these: what was read and edited before is the user's own."""
        for parameter in parameters:
            self._edits.pop(parameter, None)
            reading = self._readings.pop(parameter, None)
            if reading is not None:
                reading.standing = Standing.RELEASED

    def outdate(self) -> None:
        """The state is about to be updated."""
        for reading in list(self._readings.values()):
            reading.standing = Standing.OUTDATED
        self._readings.clear()

    def take(self) -> dict[Tensor, Edit]:
        """Remove and return all edits."""
        edits, self._edits = self._edits, {}
        return edits

    def put_back(self, edits: Mapping[Tensor, Edit]) -> None:
        """Edits that were taken could not be applied."""
        self._edits = {**edits, **self._edits}
