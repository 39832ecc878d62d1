"""Masters and state on the host, streamed through a small ring of device buffers during the step.

Each unit's record is copied once each way: it is fetched while earlier units are updated, and written back while later
ones are. The bf16 weight on the device is the upper half of its master, so only the lower half is copied.

``acquire``, ``release``, ``begin`` and ``finish`` may be called on any stream (on the CPU: thread). For updates that
run concurrently with the caller's own work, submit all work on a unit to the compute lane::

    backend.lanes.compute.run(lambda: update(unit))    # acquire → arithmetic → release, in there
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lightstep.state.backend import AHEAD, PinnedState
from lightstep.state.checksummed_weights import ChecksummedWeights
from lightstep.state.entries import Entries
from lightstep.state.host_copy_pool import HostCopyPool
from lightstep.state.host_memory import require
from lightstep.state.lanes import LaneError, Lanes
from lightstep.state.record import ExpectedLayouts, Part, Record, Slot, coding_of, rounded_entries
from lightstep.state.record_backend import Compared, RecordBackend
from lightstep.state.residency import Residency
from lightstep.state.ring import Ring
from lightstep.state.schema import Managed, Unit, aligned
from lightstep.state.snapshot import Snapshot
from lightstep.state.spare_memory import GIB, AutoBudget, device_memory
from lightstep.state.staging import LARGE, MasterSplitter, Staging
from lightstep.state.units import RingError, plan_units, smallest_piece
from lightstep.state.versions import Version, Versions

__all__ = ["StreamBackend"]

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_FAST_COPY = 4 * _MIB  # below this a copy does not reach link speed
_FEWEST_SLOTS = 3  # one is fetched, one updated and one written back
_CPU = torch.device("cpu")


class StreamBackend(RecordBackend):
    """State on the host. On the device it takes only the ring, whatever the size of the model.

    Args:
        splitter: makes the splitter of bf16 masters for a device.
        prefetch_layers: number of units that are prefetched. The ring has two more slots, for the unit that is updated
            and the one that is written back; fewer slots, if one has to be larger for the largest matrix.
        ring_mib: device memory of the ring, including scratch for joined masters. A unit takes at most one slot.
        slots: number of slots, instead of ``prefetch_layers + 2``.
        resident_gib: see :meth:`set_residency`.
        spare_host_gib: host memory for second versions of records: for speculative updates, allocated by
            :meth:`reserve_speculation`, and while a snapshot is read.
        previous_weights: where speculative updates save the previous weights; ``auto``: on the host if some state stays
            on the device, else on the device while it has room.
        beside_compute: updates run while the model computes, whose own small copies must get through between those of
            records (:class:`~lightstep.state.lanes.CopyLane`).

    Raises:
        RingError: at ``register``, if the ring is too small for the smallest possible piece.
        HostMemoryError: at ``register``, if the host does not have enough memory.
    """

    name: ClassVar[str] = "stream"
    compares_weights = True
    supports_lanes = True

    def __init__(
        self,
        splitter: Callable[[torch.device], MasterSplitter],
        *,
        prefetch_layers: int = 2,
        ring_mib: float = 512,
        slots: int | None = None,
        resident_gib: float | Literal["auto"] = 0.0,
        spare_host_gib: float | Literal["auto"] = "auto",
        previous_weights: Literal["auto", "device", "host"] = "auto",
        beside_compute: bool = True,
    ) -> None:
        self._settings: dict[str, Any] = {
            "splitter": splitter,
            "prefetch_layers": prefetch_layers,
            "ring_mib": ring_mib,
            "slots": slots,
            "resident_gib": resident_gib,
            "spare_host_gib": spare_host_gib,
            "previous_weights": previous_weights,
            "beside_compute": beside_compute,
        }
        self._make_splitter = splitter
        self._slots = prefetch_layers + 2 if slots is None else slots
        self._ring_mib = ring_mib
        self._host_splitter: MasterSplitter = splitter(_CPU)
        self._start()

    def _start(self) -> None:
        self._reset()
        self._lanes: Lanes | None = None
        self._splitter = self._host_splitter
        self._ring: Ring | None = None
        self._computed: Any = None
        self._walk: list[Record] = []
        self._resident: Residency | None = None
        settings = self._settings
        self._versions = Versions(
            settings["spare_host_gib"], settings["previous_weights"], has_resident_state=settings["resident_gib"] != 0
        )
        self._preferred_resident: Sequence[Record] = ()
        self._scratch_bytes = 0.0
        self._prepared = False

    def fresh(self) -> StreamBackend:
        return type(self)(**self._settings)

    @property
    def is_lane_thread(self) -> bool:
        return self._lanes is not None and self._lanes.is_lane_thread

    @property
    def lanes(self) -> Lanes:
        """The lanes of the parameters' device; they exist once parameters are registered."""
        assert self._lanes is not None, "no parameters are registered"
        return self._lanes

    @property
    def _residency(self) -> Residency:
        assert self._resident is not None, "no parameters are registered"
        return self._resident

    @property
    def failed(self) -> bool:
        """Whether a step failed, in the lanes or between ``acquire`` and ``release``. State must then be loaded before
        the next ``begin``."""
        return self._acquired is not None or (self._lanes is not None and self._lanes.failed)

    # -- set-up

    def register(self, managed: Sequence[Managed], device: torch.device | None = None) -> None:
        """As :meth:`StateBackend.register`. Without parameters, ``device`` is the device of the lanes."""
        device = _common_device(managed) if managed or device is None else device
        if self._lanes is not None and self._lanes.device != device:
            raise ValueError(
                f"parameters moved from {self._lanes.device} to {device} after set-up; make a new optimizer"
            )
        self._layouts = ExpectedLayouts()
        staying = self._unaffected_records(managed)
        kept = {part.owner for record in staying for part in record.parts}
        new = [item for item in managed if item not in kept]
        units = plan_units(new, self._bytes_of, self._capacity(new))
        records = self._make_records(units, coding_of)
        freed = sum(record.nbytes for record in self._records.values() if record not in staying)
        require(sum(record.nbytes for record in records) - freed, "optimizer state on the host")
        if self._lanes is None:
            self._lanes = Lanes(device, small_pieces=self._settings["beside_compute"])
            memory = device_memory(device)
            self._resident = Residency(self._lanes, memory, self._budget(device), self._versions.move_if_pinned)
            if device.type == "cpu":
                self._splitter = self._host_splitter = ChecksummedWeights(self._make_splitter(_CPU))
            else:
                self._splitter = self._make_splitter(device)
            self._computed, self._fingerprints = self._lanes.event(), {}
        self._reset_pipeline()
        carried = {item: self._read_entries(item) for item in new}
        for record in self._set_records(managed, [*staying, *records]):
            self._residency.drop([record])
            record.close()
        self._residency.invalidate()
        on_host = self._host_splitter
        self._entries, self._walk = Entries(lambda _: on_host, self._fingerprints), []
        for item, entries in carried.items():
            if entries:
                self.load(item, entries)

    def _bytes_of(self, owner: Managed, elements: int) -> int:
        """Size in a record; at least that of the weights, which bounds the units of stateless optimizers too."""
        return max(self._layouts.record_bytes(owner, elements), aligned(elements) * owner.local.itemsize)

    def _capacity(self, managed: Sequence[Managed]) -> int:
        """Bytes of a slot, such that all slots and the scratch memory for one unit fit into the ring."""
        if not managed:
            return 1
        scratch = max(self._scratch_ratio(item) for item in managed)
        capacity = int(self._ring_mib * _MIB / (self._slots + scratch))
        needed, name = max((smallest_piece(item, self._bytes_of), item.name) for item in managed)
        if needed > capacity:
            capacity = self._larger_slot(needed, min(self._slots, _FEWEST_SLOTS) + scratch, name, managed)
        self._scratch_bytes = scratch * capacity
        if capacity < min(_FAST_COPY, sum(self._bytes_of(item, item.local.numel()) for item in managed)):
            logger.warning(
                "optimizer_state.ring_mib is %g: slots of %.2f MiB; copies reach link speed from 4 MiB on",
                self._ring_mib,
                capacity / _MIB,
            )
        return capacity

    def _larger_slot(self, needed: int, shares: float, name: str, managed: Sequence[Managed]) -> int:
        """``needed`` bytes, if the ring has room for ``shares`` times as many."""
        if needed * shares <= self._ring_mib * _MIB:
            return needed
        largest = next(item for item in managed if item.name == name)
        why = " (its optimizer needs whole tensors)" if largest.whole_tensors else ""
        why = why or ("" if largest.local.is_contiguous() else " (it is not contiguous, and so it cannot be cut)")
        allowed, enough = int(self._ring_mib * _MIB / shares), 1.005 * needed * shares / _MIB
        raise RingError(
            f"optimizer_state.ring_mib is {self._ring_mib:g}, which allows slots of {allowed} bytes, and {name} needs "
            f"{needed} bytes in one piece{why}. Set ring_mib to "
            f"{math.ceil(enough) if enough >= 10 else f'{enough:.3g}'} or more"
        )

    def _scratch_ratio(self, item: Managed) -> float:
        """Bytes of joined masters, gathered weights and widened entries per byte of record."""
        sample = 1 << 20
        gathered = 0 if item.local.numel() >= LARGE else item.local.itemsize
        joined = 4 if coding_of(item) == "split" else 0
        widened = 4 * len(rounded_entries(item))
        record_bytes = self._bytes_of(item, sample)
        return (joined + gathered + widened) * sample / record_bytes if record_bytes else 0.0

    # -- one step

    def prepare(self) -> None:
        if self._lanes is None or self.failed:
            return  # `begin` raises the error
        self._residency.choose(self._by_residency_priority())
        new = any(record.bytes is None and record.nbytes for record in self._records.values())
        super().prepare()
        self._ensure_ring()
        self._residency.reload()
        self._ensure_ring()  # larger if the device had no room for all records that were chosen to stay
        if new:
            self._residency.invalidate()
        self._prepared = True

    def begin(self, managed: Collection[Managed], order: Sequence[Unit] | None = None) -> None:
        self.lanes.check()
        if self._acquired is not None:
            raise LaneError(f"the last step broke off at {self._acquired[0].unit.label}; load a checkpoint to go on")
        if not self._prepared:
            self.prepare()
        wanted = frozenset(managed)
        self._walk = self._walk_in(self._records if order is None else order, wanted.__contains__)
        self._ensure_ring().prefetch(self._walk)
        self.lanes.caller().wait(self._computed)  # the last step may have used the scratch memory on another stream

    def _walk_in(self, order: Iterable[Unit], is_wanted: Callable[[Managed], bool]) -> list[Record]:
        """The records that go through the ring, in the order in which they are first needed."""
        records = (self._records[unit] for unit in order)
        streamed = (record for record in records if record not in self._residency)
        return list(self._fetch_order([one for one in streamed if any(is_wanted(part.owner) for part in one.parts)]))

    def _fetch_order(self, walk: Sequence[Record]) -> Iterator[Record]:
        """The records in the order in which :meth:`look_ahead` or :meth:`acquire` first needs them."""
        together = [record for record in walk if record.parts[0].owner.rows is not None]
        places = {record: place for place, record in enumerate(together)}
        asked = 0
        for record in walk:
            if record not in places:
                yield record
                continue
            stop = places[record] + self._lookahead + 1
            yield from together[asked:stop]
            asked = max(asked, stop)

    def finish(self, next_order: Sequence[Unit] | None = None) -> None:
        self.lanes.caller().record(self._computed)
        self._prepared = False
        if next_order is not None:
            self._walk = self._walk_in(next_order, lambda owner: owner.updated)
        self._live_ring().prefetch(self._walk)  # for the next step

    # -- speculative updates

    def reserve_speculation(self, units: Collection[Unit]) -> Sequence[Unit]:
        waiting = {
            record for part, record in self._record_of.items() if part.expected_weight is not None
        }  # for weights
        records = [record for record in self._streamed() if record.unit in units and record not in waiting]
        ready = self._versions.reserve(records, self._fingerprints is not None)
        try:
            self._ensure_ring()
        except torch.OutOfMemoryError:
            self._versions.keep_on_device()
            self._ensure_ring()
            ready = self._versions.reserve(records, self._fingerprints is not None)
        return [record.unit for record in ready]

    def prefer_resident(self, units: Sequence[Unit]) -> None:
        wanted = [self._records[unit] for unit in units]
        if wanted != self._preferred_resident:
            self._preferred_resident = wanted
            self._residency.invalidate()

    def speculate(self, unit: Unit) -> None:
        self._versions.begin(self._records[unit])

    def is_speculative(self, unit: Unit) -> bool:
        return self._records[unit] in self._versions

    def commit(self, unit: Unit) -> None:
        self._versions.commit(self._records[unit])

    def roll_back(self, unit: Unit) -> None:
        record = self._records[unit]
        version = self._versions.discard(record)
        fingerprints = None if self._fingerprints is None else self._fingerprints[record]
        if version.written_back is not None:
            self.lanes.caller().wait(version.written_back)
        self._run(lambda: version.roll_back(fingerprints))

    def drop_speculation(self, unit: Unit) -> None:
        self._versions.discard(self._records[unit])

    def _speculative_version(self, record: Record) -> Version | None:
        return self._versions.get(record)

    def _cancel_speculation(self, record: Record, slot: Any) -> None:
        self.roll_back(record.unit)
        self._live_ring().discard(slot)
        self._acquired = None

    def _run(self, job: Callable[[], object]) -> None:
        self.lanes.caller().run(job)

    def _splitter_for(self, device: torch.device) -> MasterSplitter:
        return self._host_splitter if device.type == "cpu" else self._splitter

    def _acquire_slot(self, record: Record) -> Slot:
        return self._residency.acquire(record) if record in self._residency else self._live_ring().acquire(record)

    @property
    def _lookahead(self) -> int:
        """All slots except the one that is updated and the one that is written back."""
        return min(max(self._slots - 2, 0), AHEAD)

    def _peek_slot(self, record: Record) -> Slot:
        return self._acquire_slot(record) if record in self._residency else self._live_ring().peek(record)

    def _release_slot(self, record: Record, slot: Any, changed: bool) -> None:
        if record in self._residency:
            self._residency.release(record)
        elif changed:
            version = self._versions.get(record)
            if version is None:
                self._versions.move_if_pinned(record)
            self._live_ring().write_back(slot, record, version or record)
        else:
            self._live_ring().discard(slot)

    def _slot_is_only_copy(self, record: Record) -> bool:
        return record in self._residency

    def _reacquire_slot(self, record: Record, slot: Slot, relayout: Callable[[], None]) -> Slot:
        self._residency.write_back([record])
        self._wait_until_idle(self.lanes.device)
        self._versions.move_if_pinned(record, keep=True)
        relayout()
        if record in self._residency:
            self._residency.drop([record])  # the next step may choose it again
            slot = self._live_ring().acquire_empty(self._slot_count(record.nbytes), record.nbytes)
        elif record.nbytes > self._live_ring().slot_bytes:
            slot = self._live_ring().grow(self._slot_count(self._slot_bytes()), self._slot_bytes())
        self._residency.invalidate()
        if record.bytes is not None:
            slot.buffer[: record.nbytes].copy_(record.bytes)
        return slot

    # -- state seen from outside

    def load(self, managed: Managed, entries: Mapping[str, Any]) -> None:
        self._reset_pipeline()
        super().load(managed, entries)

    def refresh(self, managed: Managed) -> None:
        if not managed.own_master:
            self.synchronize()
            self._drop_prefetched(managed)
        super().refresh(managed)
        if self._versions.any_speculative:  # a step is under way
            self._residency.reload()

    def _before_write(self, records: Iterable[Record]) -> None:
        for record in records:
            self._versions.move_if_pinned(record, keep=True)

    def pin(
        self,
        wanted: Mapping[Managed, Collection[str]],
        weight_of: Callable[[Tensor], Callable[[], Tensor]],
        copies: HostCopyPool | None,
    ) -> PinnedState | None:
        if self._lanes is None or self._versions.pinned:
            return None
        self.synchronize()
        kept = {item: keys for item, keys in wanted.items() if item.updated and self._is_on_host(item)}
        compared = self._lanes.device.type != "cpu"  # a device finds edits now; on the CPU the reader's thread does
        for item in self.changed(kept) if compared else ():
            del kept[item]
        if not kept:
            return None
        self._residency.write_back({self._record_of[part]: None for item in kept for part in self._parts[item]})
        snapshot = Snapshot(self._versions, ChecksummedWeights(self._make_splitter(_CPU)))
        for item, keys in kept.items():
            snapshot.add(
                item, keys, self._parts[item], self._record_of, None if item.own_master else weight_of(item.param)
            )
        snapshot.pin(None if compared else self._fingerprints)
        return snapshot

    def _is_on_host(self, managed: Managed) -> bool:
        parts = self._parts_with_state(managed)
        return bool(parts) and all(self._record_of[part].slab is not None for part in parts)

    def _before_edit(self, records: Iterable[Record]) -> None:
        self._residency.write_back(records)

    def _after_edit(self, records: Iterable[Record]) -> None:
        self._residency.mark_stale(records)

    def _staging_on(self, device: torch.device, sizes: Any = None) -> Staging:
        try:
            return super()._staging_on(device, sizes)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"no room on {device} for the masters of one unit beside the ring; lower optimizer_state.ring_mib"
            ) from error

    def _differing_parts(self, compared: Sequence[Compared]) -> list[Part]:
        differing = super()._differing_parts(compared)
        if self._ring is None:  # device memory was released
            self._staging_on(self.lanes.device).free()
        return differing

    def memory(self) -> dict[str, int]:
        ring = 0 if self._ring is None else self._ring.nbytes()
        scratch = sum(staging.nbytes() for staging in self._staging.values())
        working = self._splitter.nbytes() + sum(4 * len(record.parts) for record in self._records.values())
        host = sum(record.slab.nbytes for record in self._records.values() if record.slab is not None)
        return {
            "device_bytes": self._versions.device_bytes() + (0 if self._resident is None else self._resident.nbytes()),
            "host_bytes": host + self._versions.host_bytes(),
            "ring_bytes": ring + scratch + working,
        }

    def set_residency(self, gib: float | Literal["auto"]) -> None:
        if self._lanes is not None:
            self.synchronize()
        self._settings["resident_gib"] = gib
        self._versions.has_resident_state = gib != 0
        if self._lanes is not None:
            self._residency.set_budget(self._budget(self._lanes.device))
            self._residency.shrink(self._by_residency_priority())
            if self._ring is not None:
                self._ensure_ring()
            self._prepared = False

    def _budget(self, device: torch.device) -> int | AutoBudget:
        gib = self._settings["resident_gib"]
        return AutoBudget(device_memory(device)) if gib == "auto" else int(gib * GIB)

    def release_device_memory(self) -> None:
        if self._lanes is None:
            return
        self.synchronize()
        self._residency.evict_all()
        self._wait_until_idle(self._lanes.device)
        self._ring = None
        self._versions.free_device_memory()
        for staging in self._staging.values():
            staging.free()
        self._splitter.free()
        self._prepared = False

    def synchronize(self) -> None:
        if self._lanes is not None:
            self._lanes.synchronize()

    def close(self) -> None:
        if self._lanes is not None:
            with contextlib.suppress(LaneError):
                self._lanes.synchronize()
            self._lanes.close()
        self._versions.release()
        for record in self._records.values():
            record.close()
        self._start()

    # -- small parts

    def _ensure_ring(self) -> Ring:
        """The ring; replaced if slots must be larger, or if another number of records goes through it."""
        size, ring = self._slot_bytes(), self._ring
        if ring is None or ring.slot_bytes < size or len(ring.slots) != self._slot_count(ring.slot_bytes):
            self._wait_until_idle(self.lanes.device)
            ring = self._ring = None
            self._ring = ring = Ring(self.lanes, self._slot_count(size), max(size, 1))
        return ring

    def _live_ring(self) -> Ring:
        return self._ensure_ring() if self._ring is None else self._ring

    def _slot_count(self, size: int) -> int:
        """Number of slots of ``size`` bytes: as many as records and ``ring_mib`` allow, and at least one; at least as
        many as :meth:`look_ahead` needs if ranks update parameters together."""
        streamed, needed = len(self._streamed()), self._lookahead + 1 if self.peers_wait else 1
        room = int(self._ring_mib * _MIB - self._scratch_bytes + self._slots)  # capacities were rounded down
        return min(streamed, max(min(self._slots, room // max(size, 1)), needed))

    def _slot_bytes(self) -> int:
        """Size of the largest record that goes through the ring, with the previous weights that follow it."""
        return max(map(self._versions.slot_bytes, self._streamed()), default=0)

    def _streamed(self) -> list[Record]:
        """The records that go through the ring."""
        return [record for record in self._records.values() if record not in self._residency]

    def _wait_until_idle(self, device: torch.device) -> None:
        self.lanes.synchronize()
        super()._wait_until_idle(device)

    def _by_residency_priority(self) -> list[Record]:
        """The records, in the order in which they are chosen to stay on the device."""
        listed = dict.fromkeys(self._records.values())
        return list(dict.fromkeys([*(one for one in self._preferred_resident if one in listed), *listed]))

    def _drop_prefetched(self, managed: Managed) -> None:
        """Drop what was fetched if a record of this parameter is in it."""
        records = {self._record_of[part] for part in self._parts[managed]}
        if self._ring is not None and not records.isdisjoint(self._ring.staged()):
            self._ring.drop_prefetched()

    def _reset_pipeline(self) -> None:
        """Wait for all work and drop what was fetched, so that records may be edited. Clears a failure."""
        if self._lanes is None:
            return
        if self._lanes.failed:
            self._lanes.reset()
            self._residency.reset()
        else:
            self._lanes.synchronize()
        self._acquired, self._prepared = None, False
        if self._ring is not None:
            self._ring.reset()


def _common_device(managed: Sequence[Managed]) -> torch.device:
    devices = sorted({str(item.local.device) for item in managed})
    if len(devices) != 1:
        raise ValueError(
            f"parameters are on {', '.join(devices) or 'no device'}; the stream backend needs all of them on one device"
        )
    return managed[0].local.device
