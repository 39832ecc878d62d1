"""The state of parameters as it was at one moment, read later by another thread, whatever is updated meanwhile.

A snapshot is made of twins of records and parts. A twin has the record's bytes, which ``versions.py`` keeps everybody
from writing to, and copies of what is not in the record: counters, and the 16-bit weights whose masters' lower halves
the record has. It is read like any record, and let go of record by record.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightstep.state.backend import Managed
from lightstep.state.entries import Entries
from lightstep.state.record import History, Part, Record
from lightstep.state.versions import Versions

__all__ = ["Snapshot"]


class Snapshot:
    """Entries of parameters, each of which is taken once.

    Args:
        versions: keep the records from being written to.
        entries: reads records on the host; nobody else uses it.
        wanted: which entries will be taken.
        parts, home: where they are. Nothing is under way there.
        weight_of: a copy on the host of a parameter's local weight.
    """

    def __init__(
        self,
        versions: Versions,
        entries: Entries,
        wanted: Mapping[Managed, Collection[str]],
        parts: Mapping[Managed, Sequence[Part]],
        home: Mapping[Part, Record],
        weight_of: Callable[[Tensor], Tensor],
    ) -> None:
        self._versions, self._entries = versions, entries
        self._left = {item.param: set(keys) for item, keys in wanted.items()}
        self._parts: dict[Tensor, list[Part]] = {}
        self._home: dict[Part, Record] = {}
        self._readers: Counter[Record]  # parts of it that are still to be read
        self._read: tuple[Tensor, dict[str, Any]] | None = None
        twins: dict[Record, Record] = {}
        histories: dict[History, History] = {}
        for item in wanted:
            owner = copy.copy(item)
            split = any(part.coding == "split" for part in parts[item])
            owner.local = weight_of(item.param) if split else item.local.to("meta")
            self._parts[item.param] = [_twin(part, owner, histories) for part in parts[item]]
            for part, twin in zip(parts[item], self._parts[item.param], strict=True):
                if home[part] not in twins:
                    twins[home[part]] = home[part].twin()
                self._home[twin] = twins[home[part]]
        self._readers = Counter(self._home.values())
        for record in self._readers:
            assert record.slab is not None
            versions.pin(record.slab)

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._left

    def take(self, parameter: Tensor, key: str) -> Tensor:
        """One entry of the parameter's local shape, on the host and the caller's own."""
        parts = self._parts[parameter]
        if self._read is None or self._read[0] is not parameter:
            self._read = parameter, self._entries.read_all(parts, self._home)
        value: Tensor = self._read[1].pop(key)
        if value.untyped_storage().data_ptr() == _storage(self._home[parts[0]]):
            value = value.clone()
        self._left[parameter].remove(key)
        if not self._left[parameter]:
            self._read = None
            self._let_go(parameter)
        return value

    def close(self) -> None:
        """Let go of what nobody has taken."""
        self._read = None
        for parameter in list(self._parts):
            self._let_go(parameter)

    def _let_go(self, parameter: Tensor) -> None:
        for part in self._parts.pop(parameter):
            record = self._home.pop(part)
            self._readers[record] -= 1
            if not self._readers[record]:
                del self._readers[record]
                assert record.slab is not None
                self._versions.unpin(record.slab)


def _storage(record: Record) -> int:
    return -1 if record.bytes is None else record.bytes.untyped_storage().data_ptr()


def _twin(part: Part, owner: Managed, histories: dict[History, History]) -> Part:
    assert part.history is not None
    if part.history not in histories:
        histories[part.history] = History(part.history.copied(), 1)
    twin = copy.copy(part)
    twin.owner, twin.history = owner, histories[part.history]
    return twin
