"""The ring: device buffers through which the records of all units pass. They are prefetched and written back.

The host only submits work. Three events per slot order it: ``staged`` (host→device), ``updated`` (compute) and
``drained`` (device→host). A slot is refilled as soon as it has been written back, also for the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from lightstep.state import record
from lightstep.state.lanes import LaneError, Lanes
from lightstep.state.record import Record
from lightstep.state.versions import Version

__all__ = ["Ring", "Slot"]


class Slot(record.Slot):
    """One device buffer and the events that order its use."""

    def __init__(self, nbytes: int, lanes: Lanes) -> None:
        super().__init__(torch.empty(nbytes, dtype=torch.uint8, device=lanes.device))
        self.staged, self.updated, self.drained = lanes.event(), lanes.event(), lanes.event()
        self.modified_early = False  # its record was modified before it was acquired


class Ring:
    """Slots of these sizes (bytes). One unit at a time is acquired.

    Args:
        needed: the size of the slot that a record needs.

    Raises:
        torch.OutOfMemoryError: the device has no room for it.
    """

    def __init__(self, lanes: Lanes, sizes: Sequence[int], needed: Callable[[Record], int]) -> None:
        self._lanes, self._needed = lanes, needed
        self._staged: dict[Record, Slot] = {}
        self._upcoming: deque[Record] = deque()
        self._free: deque[Slot] = deque()
        self.slots: list[Slot] = []
        self._allocate(sizes)

    def _allocate(self, sizes: Sequence[int]) -> None:
        """Replace the slots; nothing may be under way on the device."""
        self._free.clear()
        self.slots.clear()
        self.sizes = list(sizes)
        self._are_alike = len(set(sizes)) == 1
        self.slots.extend(Slot(nbytes, self._lanes) for nbytes in sizes)
        self._lanes.wait_for_caller()
        self._free.extend(self.slots)

    def nbytes(self) -> int:
        return sum(slot.buffer.nbytes for slot in self.slots)

    def staged(self) -> list[Record]:
        """The records that are fetched or being fetched, the next one first."""
        return list(self._staged)

    def prefetch(self, records: Sequence[Record]) -> None:
        """Fetch these records, which will be acquired or peeked at in this order, as slots become free."""
        ahead = list(self._staged)
        if ahead != list(records[: len(ahead)]):
            self.drop_prefetched()
            ahead = []
        self._upcoming = deque(records[len(ahead) :])
        self._fetch_next()

    def acquire(self, record: Record) -> Slot:
        """The slot with ``record``, ready for the caller's next work (on its current stream or thread)."""
        self._lanes.check()
        if record not in self._staged:
            self.drop_prefetched()
            if record in self._upcoming:
                self._upcoming.remove(record)
            self._fetch(record)
        slot, caller = self._staged.pop(record), self._lanes.caller()
        caller.wait(slot.staged)
        caller.wait(slot.drained)
        slot.modified_early = False
        return slot

    def peek(self, record: Record) -> Slot:
        """The slot of a record that will be acquired soon, ready for the caller's next work."""
        self._lanes.check()
        assert record in self._staged, f"{record.unit.label} was not prefetched"
        slot, caller = self._staged[record], self._lanes.caller()
        caller.wait(slot.staged)
        caller.wait(slot.drained)
        slot.modified_early = True
        return slot

    def _take_smallest(self, record: Record) -> Slot:
        """Of the smallest free slots that suffice for the record, the one that has been free longest."""
        needed = self._needed(record)
        slot = min((one for one in self._free if one.buffer.nbytes >= needed), key=_size)
        self._free.remove(slot)
        return slot

    def grow(self, sizes: Sequence[int], record: Record) -> Slot:
        """Replace the slots by larger ones, and return one for this record. The contents of all old slots are lost."""
        self.drop_prefetched()
        self._allocate(sizes)
        return self._take_smallest(record)

    def write_back(self, slot: Slot, record: Record, to: Record | Version) -> None:
        """Copy ``slot``, which the caller has updated, to the host, then refill it.

        The previous weights that follow the record in the slot are copied too, if they are kept on the host.
        """
        caller, lane = self._lanes.caller(), self._lanes.device_to_host
        caller.record(slot.updated)
        source, target = slot.buffer[: record.nbytes], to.host
        lane.wait(slot.updated)
        if target is not None:
            lane.copy(target, source, f"writing back {record.unit.label}")
        if isinstance(to, Version) and to.weights_on_host is not None:
            weights = slot.buffer[record.nbytes : record.nbytes + to.weights_nbytes]
            lane.copy(to.weights_on_host, weights, f"saving the previous weights of {record.unit.label}")
        to.written_back = lane.record(slot.drained)
        self._free.append(slot)
        self._fetch_next()

    def discard(self, slot: Slot) -> None:
        """Refill ``slot``, which the caller has not changed, once the caller has read it."""
        self._lanes.caller().record(slot.updated)
        self._free.append(slot)
        self._fetch_next()

    def drop_prefetched(self) -> None:
        """Drop what was fetched, because the records were edited or others are needed; it will be fetched again.

        Raises:
            LaneError: a record was modified before it was acquired.
        """
        lost = next((record for record, slot in self._staged.items() if slot.modified_early), None)
        if lost is not None:
            raise LaneError(f"{lost.unit.label} would be fetched again in the middle of its update: load a checkpoint")
        while self._staged:
            record, slot = self._staged.popitem()  # the last one
            self._upcoming.appendleft(record)
            self._free.append(slot)

    def reset(self) -> None:
        """After a failure: make every slot free, and fetch nothing."""
        self._free, self._staged, self._upcoming = deque(self.slots), {}, deque()
        for slot in self.slots:
            slot.modified_early = False

    def free(self) -> None:
        """Free the slots, in the order of the caller's stream: it waits for what is under way in them."""
        caller = self._lanes.caller()
        for slot in self.slots:
            for event in (slot.staged, slot.updated, slot.drained):
                caller.wait(event)
            if caller.stream is not None:  # its memory may come from another stream's pool
                slot.buffer.record_stream(caller.stream)
        self._staged.clear()
        self._upcoming.clear()
        self._free.clear()
        self.slots.clear()

    def _fetch_next(self) -> None:
        while self._free and self._upcoming:
            self._fetch(self._upcoming.popleft())

    def _fetch(self, record: Record) -> None:
        """Queue the copy of ``record`` to a free slot, after the slot's last use and the record's last write-back."""
        slot = self._free.popleft() if self._are_alike else self._take_smallest(record)
        lane = self._lanes.host_to_device
        source, target = record.host, slot.buffer[: record.nbytes]
        if source is not None:
            for event in (slot.updated, slot.drained, record.written_back):
                if event is not None:
                    lane.wait(event)
            lane.copy(target, source, f"fetching {record.unit.label}")
            lane.record(slot.staged)
        self._staged[record] = slot


def _size(slot: Slot) -> int:
    return slot.buffer.nbytes
