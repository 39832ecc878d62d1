"""State on the device at one moment, copied to the host in the background.

The thread that reads the copies allocates their memory, which takes long the first time, and queues them in a lane,
record by record. Meanwhile the caller goes on with forward and backward. Only the update of a record waits: on the host
until its copy is queued, and on the device until it is complete.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightstep.state.host_copy_pool import HostCopyPool
from lightstep.state.lanes import Lanes
from lightstep.state.record import Record
from lightstep.state.record_backend import equals_rounded
from lightstep.state.schema import Managed
from lightstep.state.staging import MasterSplitter

__all__ = ["DeviceSnapshot"]


class DeviceSnapshot:
    """Entries of parameters, copied to memory of ``copies``, each of which is taken once, by one thread.

    :meth:`before_write` must be called before a record is written to. The source memory stays alive until it has been
    copied, even if its owner drops it. The reader calls :meth:`begin` first.

    Args:
        splitter: of bf16 masters on the host, used by nobody else; ``None``: all masters are whole.
    """

    def __init__(self, copies: HostCopyPool, splitter: MasterSplitter | None) -> None:
        self._allocate, self._splitter = copies.allocate, splitter
        self._carriers: dict[Tensor, str | None] = {}  # for split masters that are not joined yet
        self._entries: dict[Tensor, dict[str, Tensor]] = {}
        self._weights: dict[Tensor, Callable[[], Tensor]] = {}
        self._record_of: dict[Tensor, Record] = {}
        self._queue: dict[Record, Callable[[], Any]] = {}  # queues a record's copies, returns the event after them
        self._unqueued: set[Record] = set()
        self._copied: dict[Record, Any] = {}  # the events
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._awaited: dict[Record, Lanes] = {}  # records whose next write must wait for the copy
        self._sources: dict[Record, list[Tensor]] = {}
        self.closed = False

    def add(
        self,
        record: Record,
        entries: Mapping[Managed, Mapping[str, Tensor]],
        weight_of: Callable[[Tensor], Callable[[], Tensor]],
        lanes: Lanes,
    ) -> None:
        """Add entries of some parameters of one record, as they are after what the current stream has queued.

        Args:
            entries: as :meth:`take` is to return them, or with the rows of a split master whose weight nobody edited.
            weight_of: for a parameter, a function that returns its present local weight on the host, later.
        """
        for item, found in entries.items():
            self._record_of[item.param] = record
            if "master" in found or "low half" in found:
                self._weights[item.param] = weight_of(item.param)
            if "low half" in found:
                (part,) = (part for part in record.parts if part.owner is item)
                self._carriers[item.param] = part.block.layout.carrier
        self._sources[record] = [value for found in entries.values() for value in found.values()]
        self._awaited[record] = lanes
        ready = lanes.caller().record(lanes.event())
        named = {item.param: tuple(found) for item, found in entries.items()}
        self._queue[record] = partial(self._copy, record, named, lanes, ready)
        self._unqueued.add(record)

    def begin(self) -> None:
        """Queue the copies, or wait until an update has done so. Called by the reader."""
        self._queue_copies()
        self._wait_until_queued(self._record_of.values())
        if self._error is not None:
            raise self._error

    @torch.no_grad()
    def _queue_copies(self) -> None:
        """Whoever comes first queues all of them."""
        with self._changed:
            queue, self._queue = self._queue, {}
        try:
            for record, queue_copies in queue.items():
                copied = queue_copies()
                with self._changed:
                    self._copied[record] = copied
                    self._unqueued.remove(record)
                    self._changed.notify_all()
        except Exception as error:
            self._error = error
        finally:
            with self._changed:
                self._unqueued -= queue.keys()
                self._changed.notify_all()

    def _copy(self, record: Record, named: Mapping[Tensor, Iterable[str]], lanes: Lanes, ready: Any) -> Any:
        """Queue the copies of one record; returns the event after them."""
        sources, lane = self._sources[record], lanes.device_to_host
        targets = [self._allocate(source) for source in sources]
        left = iter(targets)
        for parameter, keys in named.items():
            self._entries[parameter] = {key: next(left) for key in keys}
        lane.wait(ready)
        lane.copies(targets, sources, f"copying the state of {record.unit.label}")
        return lane.record(lanes.event())

    def before_write(self, records: Iterable[Record]) -> None:
        """Order the caller's next work after the copies of these records."""
        for record in records:
            lanes = self._awaited.pop(record, None)
            if lanes is None:
                continue
            if self._queue:  # the reader does not run yet
                self._queue_copies()
            self._wait_until_queued([record])
            if record in self._copied:  # else the save has failed
                lanes.caller().wait(self._copied[record])

    def _wait_until_queued(self, records: Collection[Record]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._unqueued.isdisjoint(records))

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._record_of

    def take(self, parameter: Tensor, key: str) -> Tensor:
        """One entry on the host, in the parameter's local shape. The master of a weight that somebody else wrote to is
        that weight."""
        record = self._record_of[parameter]
        self._copied[record].synchronize()
        self._sources.pop(record, None)
        if parameter in self._carriers:
            self._join(parameter, self._carriers.pop(parameter))
        value = self._entries[parameter].pop(key)
        if key == "master" and parameter in self._weights:
            weight = self._weights.pop(parameter)()
            if not equals_rounded(weight, value):
                return weight.float()
        return value

    def _join(self, parameter: Tensor, carrier: str | None) -> None:
        entries, weight = self._entries[parameter], self._weights.pop(parameter)()
        low, bits = entries.pop("low half"), entries.pop("bitmap", None)
        master = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
        extra = bits if carrier is None else entries[carrier].float().view(-1)  # the entry's own memory if it is fp32
        assert self._splitter is not None and extra is not None
        self._splitter.join(weight.reshape(-1), low, extra, master.view(-1))
        if carrier is not None and entries[carrier].dtype != torch.float32:
            entries[carrier].view(-1).copy_(extra)
        entries["master"] = master

    def written(self, parameter: Tensor, key: str) -> None:
        """Nothing to do: the next snapshot reuses the memory, after this one is closed."""

    def wait(self) -> None:
        """Wait for all copies, and drop the references to their sources."""
        self._wait_until_queued(self._record_of.values())
        for event in self._copied.values():
            event.synchronize()
        self._sources.clear()

    def close(self) -> None:
        """Release everything: no entry will be taken any more. Called by the reader, or if there is none."""
        with self._changed:
            self._unqueued -= self._queue.keys()
            self._queue = {}
        try:
            self.wait()
        finally:
            self.closed = True
            self._entries, self._weights = {}, {}
