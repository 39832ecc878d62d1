"""Masters and state stay on the device: nothing is copied, and it takes the most device memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lightstep.state.backend import PinnedState
from lightstep.state.device_snapshot import DeviceSnapshot
from lightstep.state.entries import Entries
from lightstep.state.host_copy_pool import HostCopyPool
from lightstep.state.host_memory import HostSlab, require
from lightstep.state.lanes import Lanes
from lightstep.state.record import Coding, Part, Record, Slot, coding_of
from lightstep.state.record_backend import Compared, RecordBackend, equals_rounded
from lightstep.state.schema import Managed, Unit
from lightstep.state.staging import MasterSplitter
from lightstep.state.units import split_shared_updates

__all__ = ["ResidentBackend"]

_CPU = torch.device("cpu")


class ResidentBackend(RecordBackend):
    """Records on the parameters' devices.

    A unit is whole parameters of at most ``unit_elements`` together, which bounds the memory for scaled gradients.

    Args:
        splitter: makes the splitter of bf16 masters for a device. With it, masters are split if a fused kernel updates
            them: with Adam, 10 bytes per parameter in addition to the weight instead of 12. ``None``: all are whole.
    """

    name: ClassVar[str] = "resident"
    unit_elements: ClassVar[int] = 128 * 2**20
    on_host = False
    stages_masters = False

    def __init__(self, splitter: Callable[[torch.device], MasterSplitter] | None = None) -> None:
        self._make_splitter = splitter
        self._splitters: dict[torch.device, MasterSplitter] = {}
        super().__init__()
        self._slots: dict[Record, Slot] = {}
        self._slabs: dict[torch.device, HostSlab] = {}
        self._is_offloaded = False
        self._lanes: dict[torch.device, Lanes] = {}  # for snapshots
        self._snapshot: DeviceSnapshot | None = None

    def fresh(self) -> ResidentBackend:
        return type(self)(self._make_splitter)

    def register(self, managed: Sequence[Managed]) -> None:
        self._reload()
        if not self._records and self._make_splitter is not None and any(map(_has_split_master, managed)):
            self._fingerprints = {}
        staying = self._unaffected_records(managed)
        kept = {part.owner for record in staying for part in record.parts}
        new = [item for item in managed if item not in kept]
        carried = {item: self._read_entries(item) for item in new}
        units = [unit for listed in split_shared_updates(new) for unit in _pack(listed, self.unit_elements)]
        for record in self._set_records(managed, [*staying, *self._make_records(units, self._coding)]):
            self._slots.pop(record, None)
            record.close()
        self._entries = Entries(
            functools.partial(_cached_splitter, self._splitters, self._make_splitter), self._fingerprints
        )
        for item, entries in carried.items():
            if entries:
                self.load(item, entries)

    # -- one step

    def prepare(self) -> None:
        self._reload()
        super().prepare()

    def begin(self, managed: Collection[Managed], order: Sequence[Unit] | None = None) -> None:
        self.prepare()

    def abandon(self) -> None:
        self._acquired = None

    def _acquire_slot(self, record: Record) -> Slot:
        self._before_write([record])
        slot = self._slots.get(record)
        if slot is None or slot.buffer is not record.bytes:
            memory = torch.empty(0, dtype=torch.uint8, device=record.device) if record.bytes is None else record.bytes
            slot = self._slots[record] = Slot(memory)
            if record.bytes is None:
                del self._slots[record]
        return slot

    def _release_slot(self, record: Record, slot: Slot, changed: bool) -> None:
        """Nothing to do: the slot is the record's own memory."""

    def _reacquire_slot(self, record: Record, slot: Slot, relayout: Callable[[], None]) -> Slot:
        relayout()
        return self._acquire_slot(record)

    def _coding(self, owner: Managed) -> Coding:
        if owner.own_master:
            return "own"
        return "split" if self._fingerprints is not None and _has_split_master(owner) else "whole"

    def _splitter_for(self, device: torch.device) -> MasterSplitter:
        if self._fingerprints is None:
            return None  # type: ignore[return-value]  # all masters are whole
        return _cached_splitter(self._splitters, self._make_splitter, device)

    # -- state seen from outside

    def pin(
        self,
        wanted: Mapping[Managed, Collection[str]],
        weight_of: Callable[[Tensor], Callable[[], Tensor]],
        copies: HostCopyPool | None,
    ) -> PinnedState | None:
        if copies is None or (self._snapshot is not None and not self._snapshot.closed):
            return None
        splits = self._make_splitter is not None and self._fingerprints is not None
        snapshot, found = DeviceSnapshot(copies, self._make_splitter(_CPU) if splits else None), {}  # type: ignore[misc]
        kept = self._with_state(wanted)
        edited = set(self.changed(item for items in kept.values() for item in items) if splits else ())
        for record, items in kept.items():
            entries = {item: self._raw_entries(item, wanted[item]) for item in items if item not in edited}
            if entries:
                found[record] = entries
        copies.reserve(sum(value.nbytes for each in found.values() for one in each.values() for value in one.values()))
        try:
            for record, entries in found.items():
                snapshot.add(record, entries, weight_of, self._lanes_for(record.device))
        except BaseException:
            snapshot.close()
            raise
        self._snapshot = snapshot
        return snapshot

    def _raw_entries(self, item: Managed, wanted: Collection[str]) -> dict[str, Tensor]:
        """The wanted entries. A split master is returned as its rows, because joining it would take device memory."""
        (part,) = self._parts[item]
        if part.coding != "split":
            entries = self.entries(item)
            return {key: entries[key] for key in wanted}
        rows, layout = self._record_of[part].rows(part), part.block.layout
        assert part.history is not None
        others = {key: value for key, value in part.history.copy_values().items() if key in wanted}
        own = {key: rows[key].view(part.shape) for key, _, _ in layout.entries if key in wanted}
        coded = {*wanted} & {"master", layout.carrier}
        extra = "bitmap" if layout.carrier is None else layout.carrier
        return {
            **others,
            **own,
            **({"low half": rows["low half"], extra: own.get(extra, rows[extra])} if coded else {}),
        }

    def _with_state(self, wanted: Iterable[Managed]) -> dict[Record, list[Managed]]:
        """The parameters with state, by record."""
        found: dict[Record, list[Managed]] = {}
        for item in wanted:
            if (
                item.updated
                and self._parts_with_state(item)
                and self._record_of[self._parts[item][0]].bytes is not None
            ):
                found.setdefault(self._record_of[self._parts[item][0]], []).append(item)
        return found

    def _lanes_for(self, device: torch.device) -> Lanes:
        if device not in self._lanes or self._lanes[device].failed:
            self._lanes[device] = Lanes(device)
        return self._lanes[device]

    def _before_write(self, records: Iterable[Record]) -> None:
        if self._snapshot is not None:
            self._snapshot.before_write(records)

    def _edit(self, managed: Managed, edit: Callable[[Record, Part], None]) -> None:
        self._reload()
        super()._edit(managed, edit)

    def _differing_parts(self, compared: Sequence[Compared]) -> list[Part]:
        self._before_edit(one.record for one in compared)
        if self._fingerprints is not None:
            differing = super()._differing_parts(compared)
            for device in {one.record.device for one in compared} if self._is_offloaded else ():
                self._staging_on(device).free()
            return differing
        return [part for one in compared for part in self._parts_with_other_masters(one)]

    def _parts_with_other_masters(self, compared: Compared) -> list[Part]:
        """The parts whose weights are not their masters, rounded."""
        record, segments, parts = compared
        if record.bytes is None:
            return []
        staging = self._staging_on(record.device)
        changed: set[Part] = set()
        for segment in segments:
            master = segment.parts[0].block.rows(record.bytes, segment.first, segment.stop)["master"]
            if not equals_rounded(segment.weights(staging), master):
                masters = ((part, self._entries.read(record, part)["master"]) for part in segment.parts)
                changed.update(
                    part for part, master in masters if not equals_rounded(part.slice(part.owner.local), master)
                )
        return [part for part in parts if part in changed]

    def memory(self) -> dict[str, int]:
        held = sum(record.nbytes for record in self._records.values() if record.bytes is not None)
        host = sum(slab.nbytes for slab in self._slabs.values())
        return {"device_bytes": 0 if self._is_offloaded else held, "host_bytes": host, "ring_bytes": self._ring_bytes()}

    def _ring_bytes(self) -> int:
        scratch = sum(splitter.nbytes() for device, splitter in self._splitters.items() if device.type != "cpu")
        return scratch + sum(staging.nbytes() for staging in self._staging.values())

    # -- releasing device memory

    def release_device_memory(self) -> None:
        """Offload the records to the host until the next step or load."""
        for staging in self._staging.values():
            staging.free()
        records = [record for record in self._records.values() if record.bytes is not None]
        if self._is_offloaded or not records:
            return
        places = self._host_buffers(records)
        for record, place in zip(records, places, strict=True):
            assert record.bytes is not None
            place.copy_(record.bytes, non_blocking=True)
        for device in {record.device for record in records}:
            self._wait_until_idle(device)
        self._move(records, places)
        if self._snapshot is not None:
            self._snapshot.wait()
        self._is_offloaded = True

    def _reload(self) -> None:
        """Bring offloaded records back to the device, ready for the next work on the current stream.

        Raises:
            torch.OutOfMemoryError: the device has no room for all of them; nothing has changed.
        """
        if not self._is_offloaded:
            return
        records = [record for record in self._records.values() if record.bytes is not None]
        places = [torch.empty_like(record.bytes, device=record.device) for record in records]  # type: ignore[arg-type]
        for record, place in zip(records, places, strict=True):
            place.copy_(record.bytes, non_blocking=True)  # type: ignore[arg-type]
        self._move(records, places)
        self._is_offloaded = False

    def _move(self, records: Sequence[Record], places: Sequence[Tensor]) -> None:
        for record, place in zip(records, places, strict=True):
            record.bytes = place
            self._slots.pop(record, None)

    def _host_buffers(self, records: Sequence[Record]) -> list[Tensor]:
        """Host memory for the records, in one slab per device. Slabs are reused, because page-locking is slow."""
        totals: dict[torch.device, int] = {}
        starts = []
        for record in records:
            starts.append(totals.get(record.device, 0))
            totals[record.device] = starts[-1] + -(-record.nbytes // 64) * 64
        too_small = {d: size for d, size in totals.items() if d not in self._slabs or self._slabs[d].nbytes < size}
        freed = sum(self._slabs[device].nbytes for device in too_small if device in self._slabs)
        require(sum(too_small.values()) - freed, "releasing device memory: the optimizer state on the host")
        for device, size in too_small.items():
            if device in self._slabs:
                self._slabs.pop(device).close()
            self._slabs[device] = HostSlab(size, device=device, what="released optimizer state")
        return [
            self._slabs[record.device].tensor(torch.uint8, record.nbytes, start)
            for record, start in zip(records, starts, strict=True)
        ]

    def close(self) -> None:
        for slab in self._slabs.values():
            slab.close()
        self._lanes, self._snapshot = {}, None
        self._slots, self._slabs, self._is_offloaded = {}, {}, False
        self._reset()


def _cached_splitter(
    known: dict[torch.device, MasterSplitter],
    make: Callable[[torch.device], MasterSplitter] | None,
    device: torch.device,
) -> MasterSplitter:
    if device not in known:
        assert make is not None, "masters are whole"
        known[device] = make(device)
    return known[device]


def _has_split_master(owner: Managed) -> bool:
    return owner.fused_update and coding_of(owner) == "split"


def _pack(managed: Sequence[Managed], limit: int) -> list[Unit]:
    """Units of consecutive parameters on one device: at most ``limit`` elements, or one larger parameter."""
    units: list[list[Managed]] = []
    filled = 0
    for item in managed:
        size = item.planned_elements
        fits = units and filled + size <= limit and units[-1][0].local.device == item.local.device
        if fits:
            units[-1].append(item)
            filled += size
        else:
            units.append([item])
            filled = size
    return [Unit(i, tuple((m, 0, m.local.numel()) for m in unit)) for i, unit in enumerate(units)]
