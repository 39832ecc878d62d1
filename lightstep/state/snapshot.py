"""The state of parameters at one moment, for another thread to read while updates go on.

A snapshot holds copies of the ``Record`` and ``Part`` objects. Those of records that live on the host refer to their
memory, which is pinned: see ``versions.py``. Records that live on the device are copied in the background: see
``device_copies.py``. Only what is not in the records is copied at once: counters. A split master is joined when it is
read, with the 16-bit weight of that moment. Records are unpinned one by one as they have been read.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightstep.state.device_copies import DeviceCopies
from lightstep.state.entries import Entries, equals_rounded
from lightstep.state.lanes import LanesOfDevices
from lightstep.state.record import History, Part, Record
from lightstep.state.schema import Managed
from lightstep.state.segment import MasterSplitter
from lightstep.state.versions import Versions

__all__ = ["Snapshot"]


class Snapshot:
    """Entries of parameters, each of which is taken once, by one thread. It is made while nothing is under way.

    Args:
        versions: the pool that pins slabs.
        splitter: of bf16 masters on the host, used by nobody else; ``None``: the records have whole masters, and a
            comparison with them shows whether somebody else wrote to a weight.
        device_copies: copies the records that live on the device; ``None``: there are none.
    """

    def __init__(self, versions: Versions, splitter: MasterSplitter | None, device_copies: DeviceCopies | None) -> None:
        self._versions, self._has_whole_masters = versions, splitter is None
        self._device_copies = device_copies
        self._buffers = _Buffers()
        splitters = {} if splitter is None else {torch.device("cpu"): splitter}
        self._entries = Entries(splitters, self._buffers.like)
        self._wanted: dict[Tensor, set[str]] = {}  # not taken yet
        self._unwritten: Counter[Tensor] = Counter()
        self._weights: dict[Tensor, Callable[[], Tensor]] = {}
        self._parts: dict[Tensor, list[Part]] = {}
        self._record_of: dict[Part, Record] = {}
        self._copies: dict[Record, Record] = {}
        self._on_device: frozenset[Record] = frozenset()  # whose records live there
        self._histories: dict[History, History] = {}
        self._readers: Counter[Record] = Counter()  # parts that are still to be read
        self._current: tuple[Tensor, dict[str, Any]] | None = None
        self._taken: dict[tuple[Tensor, str], Tensor] = {}
        self._lock = threading.Lock()

    def add(
        self,
        item: Managed,
        wanted: Collection[str],
        parts: Sequence[Part],
        record_of: Mapping[Part, Record],
        weight: Callable[[], Tensor] | None,
    ) -> None:
        """Add a parameter and the entries of it that will be taken.

        Args:
            parts: those of the parameter, in order.
            record_of: the record of each part.
            weight: returns its local weight of this moment on the host, later; ``None``: it is its own master.
        """
        owner = copy.copy(item)
        owner.local, owner.home = item.local.to("meta"), None
        self._wanted[item.param] = set(wanted)
        self._unwritten[item.param] = len(wanted)
        if weight is not None:
            self._weights[item.param] = weight
        self._parts[item.param] = [self._copy_part(part, owner) for part in parts]
        for part, copied in zip(parts, self._parts[item.param], strict=True):
            record = record_of[part]
            if record not in self._copies:
                self._copies[record] = record.shadow()
            self._record_of[copied] = self._copies[record]
            self._readers[self._copies[record]] += 1

    def _copy_part(self, part: Part, owner: Managed) -> Part:
        assert part.history is not None
        if part.history not in self._histories:
            self._histories[part.history] = History(part.history.copy_values(), 1)
        copied = copy.copy(part)
        copied.owner, copied.history = owner, self._histories[part.history]
        return copied

    def pin(self, lanes_of: LanesOfDevices, find_edits: bool) -> None:
        """Pin the records of all parameters that were added, as they are after what the current stream has queued.

        Args:
            find_edits: somebody else may have written to weights since they were updated.
            lanes_of: the lanes of a device, in which records that live there are copied.

        Raises:
            HostMemoryError: the host has no room for the copies; nothing is pinned.
        """
        for record, copied in self._copies.items() if find_edits else ():
            if record.fingerprints is not None:
                copied.fingerprints = record.fingerprints.to("cpu", copy=True)
        on_device = {record: copied for record, copied in self._copies.items() if record.slot is not None}
        if on_device:
            assert self._device_copies is not None
            self._device_copies.queue(on_device, lanes_of)
        for record, copied in self._copies.items():
            if record not in on_device:
                assert copied.slab is not None
                self._versions.pin(copied.slab)
        self._on_device = frozenset(on_device.values())
        self._copies, self._histories = {}, {}

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._wanted

    def begin(self) -> None:
        """Queue the copies of records on the device: updates may be waiting for them. Called once, by the thread that
        will take the entries, as soon as it runs."""
        if self._device_copies is not None:
            self._device_copies.begin()

    def take(self, parameter: Tensor, key: str) -> Tensor:
        """One entry on the host, in the parameter's local shape: a view of the record, or assembled from parts. It may
        be taken once, and stays valid until :meth:`written`."""
        if self._current is None or self._current[0] is not parameter:
            self._current = parameter, self._entries_of(parameter)
        value: Tensor = self._current[1].pop(key)
        self._taken[parameter, key] = value
        self._wanted[parameter].remove(key)
        if not self._wanted[parameter]:
            self._recycle(self._current[1].values())
            self._current = None
        return value

    def written(self, parameter: Tensor, key: str) -> None:
        """The reader is done with an entry that it took. Any thread may call this."""
        with self._lock:
            self._recycle([self._taken.pop((parameter, key))])
            self._unwritten[parameter] -= 1
            if not self._unwritten[parameter]:
                self._unpin(parameter)

    def _entries_of(self, parameter: Tensor) -> dict[str, Any]:
        """All entries; the master of a weight that somebody else wrote to is that weight."""
        parts = self._parts[parameter]
        if self._device_copies is not None:
            self._device_copies.wait_for({self._record_of[part] for part in parts} & self._on_device)
        if parameter in self._weights:
            parts[0].owner.local = self._weights.pop(parameter)()  # the owner is a copy, too
        found = self._entries.read(self._record_of[parts[0]], parts[0]) if len(parts) == 1 else self._assemble(parts)
        if "master" in found and self._was_edited(parts, found["master"]):
            self._recycle([found["master"]])
            found["master"] = parts[0].owner.local.to(torch.float32, memory_format=torch.contiguous_format)
        return found

    def _assemble(self, parts: Sequence[Part]) -> dict[str, Any]:
        """The entries of a parameter that was cut into several parts."""
        local, whole = parts[0].owner.local, {}
        for part in parts:
            assert part.history is not None
            found = self._entries.read(self._record_of[part], part)
            for key, value in found.items():
                if key in part.history.values:
                    whole[key] = value
                    continue
                if key not in whole:
                    whole[key] = self._buffers.like(local, value.dtype)
                whole[key].view(-1)[part.start : part.stop].copy_(value.view(-1))
                self._recycle([value])
        return whole

    def _was_edited(self, parts: Sequence[Part], master: Tensor) -> bool:
        """Whether somebody else wrote to the weight before the snapshot was made."""
        if self._has_whole_masters:
            return not equals_rounded(parts[0].owner.local, master)
        return any(self._entries.was_edited(self._record_of[part], part) for part in parts)

    def _recycle(self, values: Collection[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self._buffers.release(value)

    def close(self) -> None:
        """Unpin all records. Nobody reads what was taken any more."""
        with self._lock:
            self._current, self._taken, self._weights = None, {}, {}
            for parameter in list(self._parts):
                self._unpin(parameter)
            self._buffers.free()
        if self._device_copies is not None:
            self._device_copies.close()

    def _unpin(self, parameter: Tensor) -> None:
        for part in self._parts.pop(parameter):
            part.owner.local = part.owner.local.to("meta")
            record = self._record_of.pop(part)
            self._readers[record] -= 1
            if not self._readers[record] and record not in self._on_device:
                assert record.slab is not None
                self._versions.unpin(record.slab)


class _Buffers:
    """Reusable memory for assembled entries: touching fresh pages would cost more than the copies."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._in_use: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def like(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor on the host, with the shape of ``tensor``."""
        nbytes = tensor.numel() * dtype.itemsize
        with self._lock:
            fitting = [buffer for buffer in self._free if buffer.nbytes >= nbytes]
            if fitting:
                buffer = min(fitting, key=lambda buffer: buffer.nbytes)
                self._free = [other for other in self._free if other is not buffer]
            else:
                self._free = sorted(self._free, key=lambda buffer: buffer.nbytes)[:-1]  # replaced by a larger one
                buffer = torch.empty(max(nbytes, 1), dtype=torch.uint8, device="cpu")
            self._in_use[buffer.data_ptr()] = buffer
        return buffer[:nbytes].view(dtype).view(tensor.shape)

    def release(self, tensor: Tensor) -> None:
        """Make the memory free again; does nothing if it is not from here."""
        with self._lock:
            buffer = self._in_use.pop(tensor.data_ptr(), None)
            if buffer is not None:
                self._free.append(buffer)

    def free(self) -> None:
        with self._lock:
            self._free, self._in_use = [], {}
