"""Two versions of a record: for speculative updates, and for snapshots.

A speculative update writes the new record to a *spare* slab and leaves the old record as it is. The weights are
updated in place, so the previous ones are saved (2 bytes per bf16 parameter): on the device, or on the host, where they
are written after the new record. A commit swaps the two slabs; a rollback copies the previous weights back. Weights
that rest on the host have been saved before, in forward
(:class:`~lightstep.state.host_fields.KeptWeights`).

A snapshot (``snapshot.py``) *pins* the slabs of its records, and another thread reads them (records that live on the
device are copied: ``device_copies.py``). **Nobody writes to a pinned
slab** until the snapshot unpins it: before a write, :meth:`~Versions.move_if_pinned` moves the record to a spare slab.
The slab that it leaves becomes a spare one when it is unpinned.

All spare slabs are one pool, which keeps what it has allocated. If the pool is empty and the host has no room for more,
updates are not speculative (the unit is updated later), and a write to a pinned record waits for the snapshot's reader.
That reader never waits for an update.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from lightstep.state.device_copies import DeviceCopies
from lightstep.state.host_fields import KeptWeights
from lightstep.state.host_memory import HostMemoryError, HostSlab, available_bytes
from lightstep.state.host_weights import WeightGroup, groups_of
from lightstep.state.record import History, Record, Slot
from lightstep.state.schema import aligned
from lightstep.state.segment import Segment
from lightstep.state.spare_memory import GIB
from lightstep.state.staging import Staging

__all__ = ["Version", "Versions"]

logger = logging.getLogger(__name__)

LEFT_FREE = 0.1
"""The share of the host's free memory that ``auto`` does not use."""


class PreviousWeights:
    """Memory for a record's previous weights, one after another in their own dtypes, and for their fingerprints.

    Args:
        slab: host memory to which they are written; ``None``: they stay on the device.

    Attributes:
        nbytes: size of the weights.
        host: the weights on the host; ``None`` if they stay on the device.
        device: the weights on the device; ``None``: they follow the record in its slot until that is written back.
        fingerprints: on the device.
        kept: second copies on the host, by group; empty unless the weights rest there.
    """

    kept: Mapping[WeightGroup, KeptWeights] = MappingProxyType({})

    def __init__(self, record: Record, slab: HostSlab | None) -> None:
        self._offsets, self.nbytes = _offsets_of(record)
        self.slab = slab
        self.host = None if slab is None else slab.tensor(torch.uint8, self.nbytes)
        on_device = self.nbytes if slab is None else 0
        self.device = torch.empty(on_device, dtype=torch.uint8, device=record.device) if on_device else None
        self.fingerprints = _fingerprints_for(record)

    def note_kept(self) -> None:
        """An update is about to be submitted, and the weights will count as written to."""

    def save(self, segments: Sequence[Segment], staging: Staging, after_record: Tensor) -> Tensor | None:
        """Save the weights of these segments.

        Args:
            after_record: the slot's memory behind the record.

        Returns:
            Where they are until the slot is written back.
        """
        place = after_record if self.device is None else self.device
        _copy([(self._row(segment, place), segment.weights(staging)) for segment in segments])
        return place

    def restore(self, segments: Sequence[Segment], place: Tensor | None) -> None:
        """Copy them back.

        Args:
            place: what :meth:`save` has returned, unless the slot has been written back.
        """
        place = self.host if place is None else place
        assert place is not None
        copies: list[tuple[Tensor, Tensor]] = []
        for segment in segments:
            copies += zip(segment.locals, segment.parts_of(self._row(segment, place)), strict=True)
        _copy(copies)

    def _row(self, segment: Segment, buffer: Tensor) -> Tensor:
        """The weights of one segment in ``buffer`` (uint8), flat."""
        dtype, start = segment.locals[0].dtype, self._offsets[segment.first]
        return buffer[start : start + dtype.itemsize * (segment.stop - segment.first)].view(dtype)


class KeptPreviousWeights(PreviousWeights):
    """The same for weights that rest on the host, and are kept there a second time before they are updated."""

    def __init__(self, record: Record, kept: Mapping[WeightGroup, KeptWeights]) -> None:
        self.nbytes, self.slab, self.host, self.device = 0, None, None, None
        self.fingerprints = _fingerprints_for(record)
        self.kept = {group: kept[group] for group in _groups_of_record(record)}
        self._parts: dict[KeptWeights, list[tuple[int, int, int]]] = {}
        for part in record.parts:
            home = part.owner.home
            assert home is not None
            self._parts.setdefault(self.kept[home.group], []).append((home.number, part.start, part.stop))
        self._are_kept = False

    def note_kept(self) -> None:
        self._are_kept = all(kept.is_current(number) for kept, parts in self._parts.items() for number, _, _ in parts)

    def save(self, segments: Sequence[Segment], staging: Staging, after_record: Tensor) -> Tensor | None:
        for kept, parts in self._parts.items():
            if self._are_kept:
                kept.wait()
            else:
                kept.keep_now(parts)
        return None

    def restore(self, segments: Sequence[Segment], place: Tensor | None) -> None:
        copies: list[tuple[Tensor, Tensor]] = []
        for segment in segments:
            for local, part in zip(segment.locals, segment.parts, strict=True):
                home = part.owner.home
                assert home is not None
                copies.append((local, part.slice(self.kept[home.group].on_host[home.number])))
        _copy(copies)


class Version:
    """A unit as it was before its speculative update, and the slab to which the update is written."""

    def __init__(self, record: Record, slab: HostSlab, previous: PreviousWeights) -> None:
        self.record, self.slab, self.previous = record, slab, previous
        self.host = slab.tensor(torch.uint8, record.nbytes)
        self.written_back: Any = None
        self._place: Tensor | None = None  # the previous weights
        self._segments: Sequence[Segment] = ()
        self._histories: list[tuple[History, dict[str, Any], object, tuple[str, ...]]] = []

    def save(self, segments: Sequence[Segment], staging: Staging, slot: Slot) -> None:
        """Save the weights of these segments, which are open, and their entries that are not in the record.

        Call it before masters are joined: some weights are their own masters.

        Args:
            slot: the record's slot.
        """
        previous, self._segments = self.previous, segments
        self._place = previous.save(segments, staging, slot.buffer[self.record.nbytes :])
        if previous.fingerprints is not None and self.record.fingerprints is not None:
            previous.fingerprints.copy_(self.record.fingerprints)
        self._histories = []
        for segment in segments:
            head = segment.parts[0]
            assert head.history is not None  # only units with state are updated speculatively
            self._histories.append((head.history, head.history.values, head.history.origin, head.keys))

    def roll_back(self) -> None:
        """Restore weights, fingerprints and the entries that are not in the record."""
        for segment, (history, values, origin, keys) in zip(self._segments, self._histories, strict=True):
            history.values, history.origin = values, origin
            for part in segment.parts:
                part.keys = keys
        on_host = self.previous.host is not None and self.written_back is not None
        self.previous.restore(self._segments, None if on_host else self._place)
        if self.previous.fingerprints is not None and self.record.fingerprints is not None:
            self.record.fingerprints.copy_(self.previous.fingerprints)


class _Pin:
    """A snapshot reads a slab. The slab is spare once both have left it, the reader and the record.

    Two threads leave, and no lock protects that. A signal handler may run in the middle of either function, save a
    checkpoint, and wait for the thread that writes it: it would wait for ever, if that needed a lock held here.
    """

    def __init__(self) -> None:
        self.record_has_left = False
        self._leaving = itertools.count()
        self._reading = threading.Lock()
        self._reading.acquire()

    def is_second_to_leave(self) -> bool:
        """Called once by each."""
        return next(self._leaving) == 1

    def end(self) -> None:
        """The reader has left."""
        self._reading.release()

    def wait(self) -> None:
        """Block the calling thread until the reader has left."""
        with self._reading:
            return


class Versions:
    """The pool of spare slabs, and the previous weights.

    Args:
        budget: GiB of host memory; ``auto``: nine tenths of what is free.
        previous_weights: where they are kept; ``auto``: on the host if some state is resident, else on the device while
            it has room.
        has_resident_state: some state stays on the device between steps; may be set later.

    Attributes:
        speculative: the records that have a speculative update.
        may_reserve: another :meth:`reserve` of the same records may return others, because spare slabs came or went.
        device_copies: what the last snapshot copies of records that live on the device.
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
        self._pinned: dict[HostSlab, _Pin] = {}
        self.speculative: dict[Record, Version] = {}
        self._previous: dict[Record, PreviousWeights] = {}
        self._kept: dict[WeightGroup, KeptWeights] = {}
        self._wanted: list[Record] = []  # whose weights the next forward keeps
        self.may_reserve = True
        self._reserved = False  # speculative updates are wanted
        self._device_full = False
        self.device_copies: DeviceCopies | None = None

    def host_bytes(self) -> int:
        """Size of the spare slabs, in use or not, and of previous weights on the host."""
        return self._bytes

    def device_bytes(self) -> int:
        """Size of previous weights on the device."""
        return sum(one.device.nbytes for one in self._previous.values() if one.device is not None)

    def slot_bytes(self, record: Record) -> int:
        """Size of the record in the ring, with the previous weights that follow it to the host."""
        previous = self._previous.get(record)
        if previous is not None:
            return record.nbytes + (0 if previous.host is None else previous.nbytes)
        follow = self._goes_to_host and self._reserved and not _rests_on_host(record)
        return record.nbytes + (_size_of_weights(record) if follow else 0)

    @property
    def _goes_to_host(self) -> bool:
        """Whether memory for previous weights is allocated on the host from now on."""
        return self._location == "host" or (self._location == "auto" and (self._device_full or self.has_resident_state))

    def reserve(self, records: Collection[Record]) -> list[Record]:
        """Allocate memory for speculative updates, outside of a step; returns the records with enough of it."""
        records = [record for record in records if record.slab is not None]
        self.may_reserve = False
        self._reserved = self._reserved or bool(records)
        for gone in self._previous.keys() - set(records):
            self._free_previous(gone)
        wanted: dict[int, int] = defaultdict(int)
        ready = []
        for record in records:
            assert record.slab is not None
            wanted[record.slab.nbytes] += 1
            has_slabs = self._reserve_slabs(record, wanted[record.slab.nbytes])
            if has_slabs and self._reserve_previous(record):
                ready.append(record)
        return ready

    def _reserve_slabs(self, record: Record, count: int) -> bool:
        """Whether there are ``count`` spare slabs of this record's size; allocates one that is missing."""
        assert record.slab is not None
        spare = self._spare[record.slab.nbytes]
        if len(spare) >= count:
            return True
        if any(pin.record_has_left for pin in list(self._pinned.values())):  # these become spare when they are unpinned
            return False
        slab = self._new_slab(record.slab.nbytes, record.device)
        if slab is not None:
            spare.append(slab)
        return slab is not None

    def _new_slab(self, nbytes: int, device: torch.device) -> HostSlab | None:
        """A new slab; ``None`` if there is no room."""
        if self._full or not self._fits(nbytes):
            self._full = True
            return None
        try:
            slab = HostSlab(nbytes, device=device, what="spare optimizer state", touch=False)
        except HostMemoryError:
            self._full = True
            return None
        self._bytes += slab.nbytes
        return slab

    def _fits(self, nbytes: int) -> bool:
        if self._budget != "auto":
            return self._bytes + nbytes <= self._budget * GIB
        free = available_bytes()
        return free is None or self._bytes + nbytes <= (free + self._bytes) * (1 - LEFT_FREE)

    def _reserve_previous(self, record: Record) -> bool:
        """Whether there is memory for the record's previous weights; allocates it."""
        if record in self._previous:
            return True
        try:
            if not (self._goes_to_host or self._device_full):
                self._previous[record] = PreviousWeights(record, None)
                return True
        except torch.OutOfMemoryError:
            self._device_full = True  # another try in every step would empty torch's cache in every step
            effect = "they are kept on the host" if self._goes_to_host else "fewer updates run during backward"
            logger.warning("no room on %s for previous weights: %s", record.device, effect)
        if self._goes_to_host and _rests_on_host(record):
            if not all(map(self._reserve_kept, _groups_of_record(record))):
                return False
            self._previous[record] = KeptPreviousWeights(record, self._kept)
            return True
        slab = self._new_slab(_size_of_weights(record), record.device) if self._goes_to_host else None
        if slab is not None:
            self._previous[record] = PreviousWeights(record, slab)
        return slab is not None

    def _reserve_kept(self, group: WeightGroup) -> bool:
        """Whether there is memory for a second copy of the group's weights; allocates it."""
        if group not in self._kept:
            slab = self._new_slab(group.weights.nbytes, group.owner.device)
            if slab is None:
                return False
            self._kept[group] = KeptWeights(group.weights, group.parameters, slab, group.owner.lock)
            group.kept.append(self._kept[group])
        return True

    def keep_weights_of(self, records: list[Record]) -> None:
        """The next forward keeps the weights of these records, and of no others."""
        if records == self._wanted:  # as in most steps
            return
        self._wanted = records
        wanted: dict[WeightGroup, set[int]] = {group: set() for group in self._kept}
        for record in records:
            for home in (part.owner.home for part in record.parts):
                if home is not None and home.group in wanted:
                    wanted[home.group].add(home.number)
        for group, numbers in wanted.items():
            self._kept[group].wanted = sorted(numbers)

    def note_kept_weights(self, records: Iterable[Record]) -> None:
        """See :meth:`PreviousWeights.note_kept`."""
        for record in records:
            self._previous[record].note_kept()

    def _free_previous(self, record: Record) -> None:
        self._free(self._previous.pop(record).slab)

    def _free(self, slab: HostSlab | None) -> None:
        if slab is not None:
            self._bytes -= slab.nbytes
            slab.close()

    def keep_on_device(self) -> None:
        """Keep previous weights on the device, because the ring has no room for them. No update may be speculative."""
        self._location, self._device_full = "device", True
        for record in [one for one, previous in self._previous.items() if previous.host is not None]:
            self._free_previous(record)

    # -- one unit

    def begin(self, record: Record) -> Version:
        """Make the next update of this record speculative; :meth:`reserve` has returned the record."""
        assert record.slab is not None
        previous = self._previous[record]
        for kept in previous.kept.values():
            kept.uses += 1
        version = self.speculative[record] = Version(record, self._spare[record.slab.nbytes].pop(), previous)
        return version

    def commit(self, record: Record) -> None:
        """Make the speculative update final: the record moves to its slab."""
        version = self._end(record)
        assert record.slab is not None
        self._leave(record.slab)
        record.slab, record.host, record.written_back = version.slab, version.host, version.written_back

    def discard(self, record: Record) -> Version:
        """Drop the speculative update, and return what is needed to roll it back."""
        version = self._end(record)
        self._spare[version.slab.nbytes].append(version.slab)
        return version

    def _end(self, record: Record) -> Version:
        for kept in self._previous[record].kept.values():
            kept.uses -= 1
        return self.speculative.pop(record)

    # -- snapshots

    @property
    def pinned(self) -> bool:
        """Whether any slab is pinned by a snapshot."""
        return bool(self._pinned)

    def pin(self, slab: HostSlab) -> None:
        """Protect the slab from writes. No copy to it may be under way."""
        self._pinned[slab] = _Pin()

    def unpin(self, slab: HostSlab) -> None:
        """End the protection: the slab is not read any more. Any thread may call this."""
        pin = self._pinned.pop(slab)
        if pin.is_second_to_leave():
            self._add_spare(slab)
            self.may_reserve = True
        pin.end()

    def _leave(self, slab: HostSlab) -> None:
        """The record has got another slab."""
        pin = self._pinned.get(slab)
        if pin is not None:
            pin.record_has_left = self.may_reserve = True
        if pin is None or pin.is_second_to_leave():
            self._add_spare(slab)

    def _add_spare(self, slab: HostSlab) -> None:
        self._spare[slab.nbytes].append(slab)
        if self._released:
            self._close_spare()

    def _close_spare(self) -> None:
        for slabs in list(self._spare.values()):
            with contextlib.suppress(IndexError):  # none is left: another thread may close some at the same time
                while True:
                    slabs.pop().close()

    @property
    def in_use(self) -> bool:
        """Whether a snapshot is being read."""
        return bool(self._pinned) or not (self.device_copies is None or self.device_copies.closed)

    def before_write(self, record: Record) -> None:
        """Call it before a record is written to where it lives; nothing may be under way in the lanes."""
        if record.slot is None:
            self.move_if_pinned(record, keep=True)
        elif self.device_copies is not None:
            self.device_copies.before_write(record)

    def before_move(self, records: Iterable[Record]) -> None:
        """Call it before records leave the device: their host memory will be written, their device memory freed."""
        if self.device_copies is not None:
            self.device_copies.wait()
        for record in records:
            self.move_if_pinned(record)

    def move_if_pinned(self, record: Record, keep: bool = False) -> bool:
        """Move the record to a spare slab if its own is pinned. Call it before every write to its host memory.

        Args:
            keep: copy the contents, because not all of them will be written; nothing may be under way in the lanes.

        Returns:
            Whether the record has moved.
        """
        slab = None if record.slab not in self._pinned else self._replacement_slab(record)
        if slab is None:
            return False
        room, before = slab.tensor(torch.uint8, record.nbytes), record.host
        if keep and before is not None:
            room.copy_(before)
        record.slab, record.host, record.written_back = slab, room, None
        return True

    def _replacement_slab(self, record: Record) -> HostSlab | None:
        """A slab to which the record can move; ``None`` if its own is not pinned any more. May wait for the reader."""
        assert record.slab is not None
        spare = self._spare[record.slab.nbytes]
        while (pin := self._pinned.get(record.slab)) is not None:
            slab = spare.pop() if spare else self._new_slab(record.slab.nbytes, record.device)
            if slab is not None:
                self._leave(record.slab)
                return slab
            pin.wait()
        return None

    # -- memory

    def free_device_memory(self) -> None:
        """Free the device memory; no update may be speculative."""
        self._previous = {record: one for record, one in self._previous.items() if one.device is None}
        self._device_full = False

    def release(self) -> None:
        """Free all memory, for good. Nothing may be under way except a snapshot's reader, which may go on."""
        self.speculative.clear()
        for record in list(self._previous):
            self._free_previous(record)
        for group, kept in self._kept.items():
            group.kept.remove(kept)
            self._free(kept.slab)
        self._kept, self._wanted = {}, []
        self._released = True
        self._close_spare()
        self._bytes, self._full = 0, False


def _fingerprints_for(record: Record) -> Tensor | None:
    return None if record.fingerprints is None else torch.zeros_like(record.fingerprints)


def _offsets_of(record: Record) -> tuple[dict[int, int], int]:
    """The first byte of each part's weight, by the part's first element, and the size of all weights."""
    offsets, end = {}, 0
    for part in record.parts:
        offsets[part.first] = end
        end += part.owner.local.itemsize * aligned(part.elements)
    return offsets, end


def _rests_on_host(record: Record) -> bool:
    """Whether the record's weights do."""
    return all(part.owner.home is not None for part in record.parts)


def _groups_of_record(record: Record) -> list[WeightGroup]:
    """The groups in which the record's weights rest on the host."""
    return groups_of(part.owner.home for part in record.parts)


def _size_of_weights(record: Record) -> int:
    """Bytes of the record's weights, as :class:`PreviousWeights` keeps them."""
    return _offsets_of(record)[1]


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair to the first, by kernels on a device.

    ``copy_`` took up to 1.7 ms for 22 MB within an H200, beside copies from and to the host.
    """
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for to, source in pairs:
        targets, sources = by_dtype[to.dtype]
        targets.append(to)
        sources.append(source)
    for targets, sources in by_dtype.values():
        torch._foreach_copy_(targets, sources, non_blocking=True)
