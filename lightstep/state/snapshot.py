"""The state of parameters as it was at one moment, read later by another thread, whatever is updated meanwhile.

A snapshot is made of twins of records and parts. A twin has the record's bytes, which ``versions.py`` keeps everybody
from writing to, and copies of what is not in the record: counters, and the 16-bit weights whose masters' lower halves
the record has. It is read like any record, and let go of record by record.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightstep.state.backend import Managed
from lightstep.state.entries import Entries
from lightstep.state.record import History, Part, Record
from lightstep.state.segment import MasterSplitter
from lightstep.state.versions import Versions

__all__ = ["Snapshot"]


class Snapshot:
    """Entries of parameters, each of which is taken once. While it is made, nothing is under way.

    Args:
        versions: keep the records from being written to.
        splitter: of bf16 masters on the host, used by nobody else.
    """

    def __init__(self, versions: Versions, splitter: MasterSplitter) -> None:
        self._versions = versions
        self._marks: dict[Record, Tensor] = {}
        self._entries = Entries(lambda device: splitter, self._marks)
        self._wanted: dict[Tensor, set[str]] = {}
        self._parts: dict[Tensor, list[Part]] = {}
        self._home: dict[Part, Record] = {}
        self._twins: dict[Record, Record] = {}
        self._histories: dict[History, History] = {}
        self._readers: Counter[Record] = Counter()  # parts of it that are still to be read
        self._read: tuple[Tensor, dict[str, Any]] | None = None

    def add(
        self, item: Managed, wanted: Collection[str], parts: Sequence[Part], home: Mapping[Part, Record], weight: Any
    ) -> None:
        """A parameter, and which of its entries will be taken.

        Args:
            parts, home: where they are, in order.
            weight: a copy on the host of its local weight, unless it is its own master.
        """
        owner = copy.copy(item)
        owner.local = item.local.to("meta") if weight is None else weight
        self._wanted[item.param] = set(wanted)
        self._parts[item.param] = [self._twin(part, owner) for part in parts]
        for part, twin in zip(parts, self._parts[item.param], strict=True):
            record = home[part]
            if record not in self._twins:
                self._twins[record] = record.twin()
            self._home[twin] = self._twins[record]
            self._readers[self._twins[record]] += 1

    def _twin(self, part: Part, owner: Managed) -> Part:
        assert part.history is not None
        if part.history not in self._histories:
            self._histories[part.history] = History(part.history.copied(), 1)
        twin = copy.copy(part)
        twin.owner, twin.history = owner, self._histories[part.history]
        return twin

    def pin(self, marks: Mapping[Record, Tensor] | None) -> None:
        """From now on nobody writes to what was added.

        Args:
            marks: fingerprints of the records' weights; ``None``: nobody else has written to those.
        """
        if marks is not None:
            self._marks.update((twin, marks[record].to("cpu", copy=True)) for record, twin in self._twins.items())
        for twin in self._twins.values():
            assert twin.slab is not None
            self._versions.pin(twin.slab)
        self._twins, self._histories = {}, {}

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._wanted

    def take(self, parameter: Tensor, key: str) -> Tensor:
        """One entry of the parameter's local shape, on the host and the caller's own."""
        parts = self._parts[parameter]
        if self._read is None or self._read[0] is not parameter:
            self._read = parameter, self._entries_of(parts)
        value: Tensor = self._read[1].pop(key)
        if value.untyped_storage().data_ptr() == _storage(self._home[parts[0]]):
            value = value.clone()
        self._wanted[parameter].remove(key)
        if not self._wanted[parameter]:
            self._read = None
            self._let_go(parameter)
        return value

    def _entries_of(self, parts: Sequence[Part]) -> dict[str, Any]:
        """A weight that somebody else wrote is the master."""
        found = self._entries.read_all(parts, self._home)
        if "master" in found and any(self._entries.was_written(self._home[part], part) for part in parts):
            found["master"] = parts[0].owner.local.to(torch.float32, memory_format=torch.contiguous_format)
        return found

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
                assert record.slab is not None
                self._versions.unpin(record.slab)


def _storage(record: Record) -> int:
    return -1 if record.bytes is None else record.bytes.untyped_storage().data_ptr()
