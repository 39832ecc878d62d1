"""Two versions of a unit: for updates that are tried, and for snapshots of the state as it was.

An update that may have to be taken back writes the unit's new record into a *spare* slab; the old record stays what
it is. The weights are updated in place, so a copy of the previous ones is kept (2 bytes per bf16 parameter): on the
device, or on the host, to which they travel behind the new record. Committing exchanges the two slabs; taking back
copies the previous weights to where they were.

A snapshot (``snapshot.py``) *pins* the slabs of the records that it is made of, and a thread of its own reads them.
The rule is: **nobody writes to a pinned slab** until the snapshot lets go of it. Whoever is about to write makes the
record :meth:`~Versions.leave` it for a spare one first. The slab that was left becomes a spare one when it is let go.

The spare slabs are one pool, which keeps what it has taken. When it is empty and there is no room for more, nothing is
tried (the unit is updated later, as if nobody had asked), and a write to a pinned record waits for the snapshot's
reader, who waits for nobody here.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightstep.state.host_memory import HostMemoryError, HostSlab, available_bytes
from lightstep.state.record import History, Record, Slot
from lightstep.state.segment import Segment, Staging
from lightstep.state.spare_memory import GIB

__all__ = ["Version", "Versions"]

logger = logging.getLogger(__name__)

_LEFT_FREE = 0.1
"""Of the host's free memory, ``auto`` leaves this much to others."""


class PreviousWeights:
    """Memory for a record's weights, a row of its length for each dtype, and for their fingerprints.

    Args:
        slab: on the host, where they travel; ``None``: they stay on the device.
        marked: they have fingerprints.

    Attributes:
        nbytes: of the rows.
        host: where they are when they have travelled; ``None`` where they stay.
        device: where they are otherwise; ``None``: behind the record in its slot, until that is written back.
        marks: the fingerprints, on the device.
    """

    def __init__(self, record: Record, slab: HostSlab | None, marked: bool) -> None:
        self._ranges, self.nbytes = _rows_of(record)
        self.slab = slab
        self.host = None if slab is None else slab.tensor(torch.uint8, self.nbytes)
        on_device = self.nbytes if slab is None else 0
        self.device = torch.empty(on_device, dtype=torch.uint8, device=record.device) if on_device else None
        count = len(record.parts)
        self.marks = torch.zeros(count, dtype=torch.int32, device=record.device) if marked else None

    def rows(self, buffer: Tensor) -> dict[torch.dtype, Tensor]:
        """As they stand in ``buffer`` (uint8)."""
        return {dtype: buffer[start:stop].view(dtype) for dtype, (start, stop) in self._ranges.items()}


def _rows_of(record: Record) -> tuple[dict[torch.dtype, tuple[int, int]], int]:
    """Where each row is, in bytes, and how many these are in all."""
    ranges, end = {}, 0
    for dtype in dict.fromkeys(part.owner.local.dtype for part in record.parts):
        ranges[dtype] = end, end + dtype.itemsize * record.elements
        end = ranges[dtype][1]
    return ranges, end


class Version:
    """A unit as it was before the update that is being tried, and the slab that the update writes to."""

    def __init__(self, record: Record, slab: HostSlab, previous: PreviousWeights) -> None:
        self.record, self.slab, self.previous = record, slab, previous
        self.bytes = slab.tensor(torch.uint8, record.nbytes)
        self.written_back: Any = None
        self._rows: dict[torch.dtype, Tensor] = {}
        self._segments: Sequence[Segment] = ()
        self._histories: list[tuple[History, dict[str, Any], object, tuple[str, ...]]] = []

    def save_weights(self, segments: Sequence[Segment], staging: Staging, marks: Tensor | None, slot: Slot) -> None:
        """Before masters are joined: some weights are their own masters.

        Args:
            slot: that of the record.
        """
        previous, self._segments = self.previous, segments
        place = slot.buffer[self.record.nbytes :] if previous.device is None else previous.device
        self._rows = previous.rows(place[: previous.nbytes])
        for segment in segments:
            weights = segment.weights(staging)
            self._rows[weights.dtype][segment.first : segment.stop].copy_(weights)
        if previous.marks is not None and marks is not None:
            previous.marks.copy_(marks)

    def save_histories(self) -> None:
        """Of the segments, once they are open."""
        self._histories = []
        for segment in self._segments:
            head = segment.parts[0]
            assert head.history is not None  # only what has state is tried
            self._histories.append((head.history, head.history.values, head.history.origin, head.keys))

    def take_back(self, marks: Tensor | None) -> None:
        """Weights, fingerprints and what is not in the record are as they were before."""
        for segment, (history, values, origin, keys) in zip(self._segments, self._histories, strict=True):
            history.values, history.origin = values, origin
            for part in segment.parts:
                part.keys = keys
        travelled = self.previous.host is not None and self.written_back is not None
        rows = self.previous.rows(self.previous.host) if travelled else self._rows  # type: ignore[arg-type]
        copies: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for segment in self._segments:
            row = rows[segment.locals[0].dtype][segment.first : segment.stop]
            weights, old = copies[row.dtype]
            weights += segment.locals
            old += segment.parts_of(row)
        for weights, old in copies.values():
            torch._foreach_copy_(weights, old, non_blocking=True)
        if self.previous.marks is not None and marks is not None:
            marks.copy_(self.previous.marks)


class Versions:
    """The pool of spare slabs, and the previous weights.

    Args:
        budget: GiB of host memory; ``auto``: what is free, but for a tenth.
        previous_weights: where they are kept; ``auto``: on the host if state stays on the device, else on the device as
            long as it has room.
        has_resident_state: on the device between steps, some of it; may be set.
    """

    def __init__(
        self,
        budget: float | Literal["auto"],
        previous_weights: Literal["auto", "device", "host"] = "auto",
        has_resident_state: bool = False,
    ) -> None:
        self._budget, self._location = budget, previous_weights
        self.has_resident_state = has_resident_state
        self._spare: dict[int, list[HostSlab]] = defaultdict(list)
        self._bytes = 0
        self._full = False
        self._released = False
        self._pinned: dict[HostSlab, bool] = {}  # whether the record has left it
        self._unpinned = threading.Condition()
        self._speculative: dict[Record, Version] = {}
        self._previous: dict[Record, PreviousWeights] = {}
        self._reserved = False  # something is to be tried
        self._device_full = False

    def __reduce__(self) -> Any:
        """A copy, with a copied backend that has nothing yet, is another pool."""
        return Versions, (self._budget, self._location, self.has_resident_state)

    def __contains__(self, record: Record) -> bool:
        return record in self._speculative

    def get(self, record: Record) -> Version | None:
        """The version that is being tried of it."""
        return self._speculative.get(record)

    def host_bytes(self) -> int:
        """Of spare slabs, in use or not, and of previous weights."""
        return self._bytes

    def device_bytes(self) -> int:
        """Of previous weights."""
        return sum(one.device.nbytes for one in self._previous.values() if one.device is not None)

    def slot_bytes(self, record: Record) -> int:
        """Of the record in the ring, and of the weights that travel behind it."""
        previous = self._previous.get(record)
        if previous is not None:
            return record.nbytes + (0 if previous.host is None else previous.nbytes)
        return record.nbytes + (_rows_of(record)[1] if self._goes_to_host and self._reserved else 0)

    @property
    def _goes_to_host(self) -> bool:
        """Whether previous weights go to the host that have no memory yet."""
        return self._location == "host" or (self._location == "auto" and (self._device_full or self.has_resident_state))

    def reserve(self, records: Collection[Record], marked: bool) -> list[Record]:
        """Take what trying these needs, outside of a step; those of them for which there was room.

        Args:
            marked: fingerprints of their weights are kept.
        """
        records = [record for record in records if record.slab is not None]
        self._reserved = self._reserved or bool(records)
        for gone in self._previous.keys() - set(records):
            self._free_previous(gone)
        wanted: dict[int, int] = defaultdict(int)
        ready = []
        for record in records:
            assert record.slab is not None
            wanted[record.slab.nbytes] += 1
            if self._reserve_slabs(record, wanted[record.slab.nbytes]) and self._reserve_previous(record, marked):
                ready.append(record)
        return ready

    def _reserve_slabs(self, record: Record, count: int) -> bool:
        """``count`` spare slabs of the size of this record's."""
        assert record.slab is not None
        spare = self._spare[record.slab.nbytes]
        if len(spare) >= count:
            return True
        with self._unpinned:
            if any(self._pinned.values()):  # those come back
                return False
        slab = self._new_slab(record.slab.nbytes, record.device)
        if slab is not None:
            spare.append(slab)
        return slab is not None

    def _new_slab(self, nbytes: int, device: torch.device) -> HostSlab | None:
        """If there is room for it."""
        if self._full or not self._fits(nbytes):
            self._full = True
            return None
        try:
            slab = HostSlab(nbytes, device=device, what="spare optimizer state")
        except HostMemoryError:
            self._full = True
            return None
        self._bytes += slab.nbytes
        return slab

    def _fits(self, nbytes: int) -> bool:
        if self._budget != "auto":
            return self._bytes + nbytes <= self._budget * GIB
        free = available_bytes()
        return free is None or self._bytes + nbytes <= (free + self._bytes) * (1 - _LEFT_FREE)

    def _reserve_previous(self, record: Record, marked: bool) -> bool:
        """Memory for the record's previous weights."""
        if record in self._previous:
            return True
        try:
            if not (self._goes_to_host or self._device_full):
                self._previous[record] = PreviousWeights(record, None, marked)
                return True
        except torch.OutOfMemoryError:
            self._device_full = True  # asking again in every step would empty torch's cache in every step
            then = "they go to the host" if self._goes_to_host else "fewer updates run in backward"
            logger.warning("no room on %s for the weights of before: %s", record.device, then)
        slab = self._new_slab(_rows_of(record)[1], record.device) if self._goes_to_host else None
        if slab is not None:
            self._previous[record] = PreviousWeights(record, slab, marked)
        return slab is not None

    def _free_previous(self, record: Record) -> None:
        slab = self._previous.pop(record).slab
        if slab is not None:
            self._bytes -= slab.nbytes
            slab.close()

    def keep_on_device(self) -> None:
        """Previous weights do not travel: the ring has no room for them. Nothing is being tried."""
        self._location, self._device_full = "device", True
        for record in [one for one, previous in self._previous.items() if previous.host is not None]:
            self._free_previous(record)

    # -- one unit

    def begin(self, record: Record) -> Version:
        """The next update of this record is tried; :meth:`reserve` has found room for it."""
        assert record.slab is not None
        self._speculative[record] = Version(record, self._spare[record.slab.nbytes].pop(), self._previous[record])
        return self._speculative[record]

    def commit(self, record: Record) -> None:
        """What was tried is the record from now on."""
        version = self._speculative.pop(record)
        assert record.slab is not None
        with self._unpinned:
            if record.slab in self._pinned:
                self._pinned[record.slab] = True
            else:
                self._spare[record.slab.nbytes].append(record.slab)
        record.slab, record.bytes, record.written_back = version.slab, version.bytes, version.written_back

    def discard(self, record: Record) -> Version:
        """What was tried does not count."""
        version = self._speculative.pop(record)
        self._spare[version.slab.nbytes].append(version.slab)
        return version

    # -- snapshots

    @property
    def pinned(self) -> bool:
        """Whether a snapshot is still being read."""
        return bool(self._pinned)

    def pin(self, slab: HostSlab) -> None:
        """From now on nobody writes to it. What is written there has arrived."""
        with self._unpinned:
            self._pinned[slab] = False

    def unpin(self, slab: HostSlab) -> None:
        """It is not read any more; called by any thread."""
        with self._unpinned:
            left = self._pinned.pop(slab)
            if left and self._released:
                slab.close()
            elif left:
                self._spare[slab.nbytes].append(slab)
            self._unpinned.notify_all()

    def move_if_pinned(self, record: Record, keep: bool = False) -> bool:
        """Before the record's host memory is written to: where that is pinned, the record gets other memory.

        Args:
            keep: what is in it, too, and not all of it will be written; nothing may be under way in the lanes.

        Returns:
            Whether it has.
        """
        slab = None if record.slab not in self._pinned else self._replacement_slab(record)
        if slab is None:
            return False
        room, before = slab.tensor(torch.uint8, record.nbytes), record.bytes
        if keep and before is not None:
            room.copy_(before)
        record.slab, record.bytes, record.written_back = slab, room, None
        return True

    def _replacement_slab(self, record: Record) -> HostSlab | None:
        """A slab for the one that the record leaves; ``None`` when it is not pinned any more."""
        assert record.slab is not None
        spare = self._spare[record.slab.nbytes]
        with self._unpinned:
            while record.slab in self._pinned:
                slab = spare.pop() if spare else self._new_slab(record.slab.nbytes, record.device)
                if slab is not None:
                    self._pinned[record.slab] = True
                    return slab
                self._unpinned.wait()
        return None

    # -- memory

    def free_device_memory(self) -> None:
        """Give back the device memory; nothing is being tried."""
        self._previous = {record: one for record, one in self._previous.items() if one.device is None}
        self._device_full = False

    def release(self) -> None:
        """Give back all memory, for good; nothing may be under way but a snapshot's reader, who can go on."""
        self._speculative.clear()
        for record in list(self._previous):
            self._free_previous(record)
        with self._unpinned:
            self._released = True
            for slabs in self._spare.values():
                for slab in slabs:
                    slab.close()
            self._spare.clear()
        self._bytes, self._full = 0, False
