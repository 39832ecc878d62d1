"""Records on the device at one moment, copied to the host in the background.

The thread that reads the copies allocates their memory, which takes long the first time, and queues them in a lane,
record by record. Meanwhile the caller goes on with forward and backward. Only the update of a record waits: on the host
until its copy is queued, and on the device until it is complete. A copy that fails is an error of the reader alone: the
state on the device is whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from lightstep.error_text import error_text
from lightstep.state.host_copy_pool import HostCopyPool
from lightstep.state.lanes import Lanes, LanesOfDevices
from lightstep.state.record import Record, Slot

__all__ = ["DeviceCopies"]


class DeviceCopies:
    """Copies of records, in memory of ``copies``.

    :meth:`before_write` must be called before a record is written to. Its memory stays alive until it has been copied,
    even if its owner drops it. The reader calls :meth:`begin` first.
    """

    def __init__(self, copies: HostCopyPool) -> None:
        self._copies = copies
        self._queue: dict[Record, Callable[[], Any]] = {}  # queues a record's copy, returns the event after it
        self._unqueued: set[Record] = set()
        self._copied: dict[Record, Any] = {}  # the events
        self._shadows: dict[Record, Record] = {}
        self._awaited: dict[Record, Lanes] = {}  # records whose next write must wait for the copy
        self._sources: dict[Record, Slot] = {}
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self.closed = False

    def queue(self, shadows: Mapping[Record, Record], lanes_of: LanesOfDevices) -> None:
        """Copy these records, as they are after what the current stream has queued; their shadows get the copies.

        Raises:
            HostMemoryError: the host has no room.
        """
        self._copies.reserve(sum(record.nbytes for record in shadows))
        for record, shadow in shadows.items():
            assert record.slot is not None
            lanes = lanes_of[record.device]
            ready = lanes.caller().record(lanes.event())
            self._sources[record] = record.slot
            self._awaited[record] = lanes
            self._queue[record] = partial(self._copy, record, shadow, lanes, ready)
            self._unqueued.add(record)
            self._shadows[shadow] = record

    def begin(self) -> None:
        """Queue the copies, or wait until an update has done so. Called by the reader."""
        self._queue_copies()
        self._wait_until_queued(self._shadows.values())
        if self._error is not None:
            raise self._error

    @torch.no_grad()
    def _queue_copies(self) -> None:
        """Whoever comes first queues all of them."""
        with self._changed:
            queue, self._queue = self._queue, {}
        try:
            for record, queue_copy in queue.items():
                copied = queue_copy()
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

    def _copy(self, record: Record, shadow: Record, lanes: Lanes, ready: Any) -> Any:
        """Queue the copy of one record; returns the event after it."""
        source, lane = self._sources[record].buffer, lanes.device_to_host
        shadow.host = self._copies.allocate(source)
        lane.wait(ready)
        lane.copy(shadow.host, source, on_error=partial(self._note, f"copying the state of {record.unit.label}"))
        return lane.record(lanes.event())

    def _note(self, what: str, error: Exception) -> None:
        """A copy has failed."""
        noted = RuntimeError(f"{what} failed ({error_text(error)})")
        noted.__cause__ = error
        self._error = noted

    def before_write(self, record: Record) -> None:
        """Order the caller's next work after the copy of this record."""
        lanes = self._awaited.pop(record, None)
        if lanes is None:
            return
        if self._queue:  # the reader does not run yet
            self._queue_copies()
        self._wait_until_queued([record])
        if record in self._copied:  # else the save has failed
            lanes.caller().wait(self._copied[record])

    def _wait_until_queued(self, records: Collection[Record]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._unqueued.isdisjoint(records))

    def wait_for(self, shadows: Collection[Record]) -> None:
        """The host waits for the copies of these.

        Raises:
            RuntimeError: a copy has failed.
        """
        for shadow in shadows:
            record = self._shadows[shadow]
            self._copied[record].synchronize()
            self._sources.pop(record, None)
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """The host waits for all copies, and the references to their sources are dropped."""
        self._wait_until_queued(self._shadows.values())
        for event in self._copied.values():
            event.synchronize()
        self._sources.clear()

    def close(self) -> None:
        """Nobody reads the copies any more. Called by the reader, or if there is none."""
        with self._changed:
            self._unqueued -= self._queue.keys()
            self._queue = {}
        try:
            self.wait()
        finally:
            self.closed = True
            for shadow in self._shadows:
                shadow.host = None
