"""Masters and state on the host, streamed through a small ring on the device while the step goes on.

Each unit's record makes one trip each way: fetched while the units before it are being updated, written back while the
ones behind it are. The bf16 weight on the device is the upper half of its master, so only the lower half travels.

``acquire``, ``release``, ``begin`` and ``finish`` work for whatever stream (on the CPU: thread) they are called on. For
updates beside the caller's own work, submit a unit's whole walk to the compute lane::

    backend.lanes.compute.run(lambda: update(unit))    # acquire → arithmetic → release, in there
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lightstep.state.backend import Managed, Piece, Schema, StateBackend, Unit
from lightstep.state.host_entries import HostEntries
from lightstep.state.host_memory import require
from lightstep.state.lanes import LaneError, Lanes
from lightstep.state.records import Layout, MasterSplitter, Part, Record, coding_of, record_bytes
from lightstep.state.residency import Residency
from lightstep.state.ring import Ring
from lightstep.state.spare_memory import GIB, AutoBudget, device_memory
from lightstep.state.units import RingError, plan_units, smallest_piece
from lightstep.state.visit import Visit, scratch_elements

__all__ = ["StreamBackend"]

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_FAST_COPY = 4 * _MIB  # below this a copy does not reach link speed
_CPU = torch.device("cpu")


class StreamBackend(StateBackend):
    """State on the host; device memory is the ring, whatever the size of the model.

    Args:
        splitter: makes the splitter of bf16 masters for a device. prefetch_layers: units fetched ahead; the ring has
        two slots more, for the one being updated and the one draining. ring_mib: device memory of the ring, scratch
        for joined masters included. A unit takes at most one slot. slots: number of slots instead of
        ``prefetch_layers + 2``. resident_gib: see :meth:`set_residency`.

    Raises:
        RingError: at ``register``, when the ring is too small for the smallest possible piece.
        HostMemoryError: at ``register``, when the host has not enough memory.
    """

    name: ClassVar[str] = "stream"
    hands_out_state = False
    in_lanes = True

    def __init__(
        self,
        splitter: Callable[[torch.device], MasterSplitter],
        *,
        prefetch_layers: int = 2,
        ring_mib: float = 512,
        slots: int | None = None,
        resident_gib: float | Literal["auto"] = 0.0,
    ) -> None:
        self._settings: dict[str, Any] = {
            "splitter": splitter,
            "prefetch_layers": prefetch_layers,
            "ring_mib": ring_mib,
            "slots": slots,
            "resident_gib": resident_gib,
        }
        self._make_splitter = splitter
        self._slots = prefetch_layers + 2 if slots is None else slots
        self._ring_mib = ring_mib
        self._host_splitter = splitter(_CPU)
        self._start()

    def _start(self) -> None:
        self._schema: Schema = {}
        self._whole_tensors = False
        self._lanes: Lanes | None = None
        self._splitter = self._host_splitter
        self._ring: Ring | None = None
        self._scratch: Tensor | None = None
        self._computed: Any = None
        self._records: dict[Unit, Record] = {}
        self._parts: dict[Managed, list[Part]] = {}
        self._home: dict[Part, Record] = {}
        self._wanted: Collection[Managed] | None = None
        self._walk: list[Record] = []
        self._open: Visit | None = None
        self._host: HostEntries | None = None
        self._resident: Residency | None = None
        self._prepared = False

    def fresh(self) -> StreamBackend:
        return type(self)(**self._settings)

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
        """A step broke off, here or between ``acquire`` and ``release``: ``begin`` refuses until state is loaded."""
        return self._open is not None or (self._lanes is not None and self._lanes.failed)

    # -- set-up

    def register(self, managed: Sequence[Managed], schema: Schema, whole_tensors: bool = False) -> None:
        device = _common_device(managed)
        if self._lanes is not None and self._lanes.device != device:
            raise ValueError(
                f"parameters moved from {self._lanes.device} to {device} after set-up; make a new optimizer"
            )
        self._schema, self._whole_tensors = schema, whole_tensors
        staying = self._undisturbed(managed)
        kept = {part.owner for record in staying for part in record.parts}
        new = [item for item in managed if item not in kept]
        units = plan_units(new, self._bytes_of, self._capacity(new), whole_tensors=self._whole_tensors)
        records = [
            Record(unit, (), sum(self._bytes_of(owner, stop - start) for owner, start, stop in unit.parts))
            for unit in units
        ]
        freed = sum(record.nbytes for record in self._records.values() if record not in staying)
        require(sum(record.planned for record in records) - freed, "optimizer state on the host")
        if self._lanes is None:
            self._lanes = Lanes(device)
            self._resident = Residency(self._lanes, device_memory(device), self._budget(device))
            self._computed = self._lanes.event()
            self._splitter = self._host_splitter if device.type == "cpu" else self._make_splitter(device)
        self._host = HostEntries(self._host_splitter, self._splitter, schema, device)
        self._settle()
        carried = {item: self._assemble(item) for item in new if item in self._parts}
        self._reorganise(managed, staying, [self._with_parts(record) for record in records])
        for item, entries in carried.items():
            if entries:
                self.load(item, entries)

    def _undisturbed(self, managed: Sequence[Managed]) -> list[Record]:
        """Records whose parameters, and those that share units with them, are all still listed."""
        gone = set(self._parts) - set(managed)
        records = list(self._records.values())
        while True:
            hit = [record for record in records if any(part.owner in gone for part in record.parts)]
            if not hit:
                return records
            records = [record for record in records if record not in hit]
            gone |= {part.owner for record in hit for part in record.parts}

    def _reorganise(self, managed: Sequence[Managed], staying: list[Record], new: list[Record]) -> None:
        place = {item: index for index, item in enumerate(managed)}
        records = sorted([*staying, *new], key=lambda record: place[record.parts[0].owner])
        for record in self._records.values():
            if record not in staying:
                self._residency.forget([record])
                record.close()
        self._residency.unsettle()
        self._records, self._parts, self._home = {}, {}, {}
        for index, record in enumerate(records):
            record.unit.index = index
            self._records[record.unit] = record
            for part in record.parts:
                self._parts.setdefault(part.owner, []).append(part)
                self._home[part] = record
        self._walk = []

    def _with_parts(self, record: Record) -> Record:
        ranges = record.unit.parts
        marks = torch.zeros(len(ranges), dtype=torch.int64, device=self.lanes.device)
        record.parts = [Part(o, a, b, mark) for (o, a, b), mark in zip(ranges, marks.unbind(), strict=True)]
        return record

    def _bytes_of(self, owner: Managed, elements: int) -> int:
        return record_bytes(owner, elements, self._schema)

    def _capacity(self, managed: Sequence[Managed]) -> int:
        """Bytes of a slot, such that all slots and the scratch for one unit's masters fit the ring."""
        if not managed:
            return 1
        shares = self._slots + max(self._scratch_ratio(item) for item in managed)
        capacity = int(self._ring_mib * _MIB / shares)
        needs = [(smallest_piece(item, self._bytes_of, self._whole_tensors), item.name) for item in managed]
        needed, name = max(needs)
        if needed > capacity:
            cut = next(item for item in managed if item.name == name).local.is_contiguous()
            why = " (this optimizer needs whole tensors)" if self._whole_tensors else ""
            why = why or ("" if cut else " (it is not contiguous, and so it cannot be cut)")
            enough = 1.005 * needed * shares / _MIB
            raise RingError(
                f"optimizer_state.ring_mib is {self._ring_mib:g}: {self._slots} slots of {capacity} bytes, and {name} "
                f"needs {needed} bytes in one piece{why}. Set ring_mib to {enough:.3g} or more, or lower "
                "optimizer_state.prefetch_layers"
            )
        if capacity < min(_FAST_COPY, sum(self._bytes_of(item, item.local.numel()) for item in managed)):
            logger.warning(
                "optimizer_state.ring_mib is %g: slots of %.2f MiB; copies reach link speed from 4 MiB on",
                self._ring_mib,
                capacity / _MIB,
            )
        return capacity

    def _scratch_ratio(self, item: Managed) -> float:
        """Bytes of joined masters per byte of record."""
        if coding_of(item) != "split":
            return 0.0
        sample = 1 << 20
        return 4.0 * sample / self._bytes_of(item, sample)

    # -- one step

    def units(self) -> Sequence[Unit]:
        return list(self._records)

    def prepare(self) -> None:
        if self._lanes is None or self.failed:
            return  # `begin` says so
        self._residency.choose(list(self._records.values()))
        self._ensure_ring()
        self._residency.bring_up()
        self._ensure_ring()  # more go through it where the device had no room for all that was chosen
        self._prepared = True

    def begin(self, managed: Collection[Managed], backwards: bool = False) -> None:
        self.lanes.check()
        if self._open is not None:
            raise LaneError(f"the last step broke off at {self._open.record.unit.label}; load a checkpoint to go on")
        if not self._prepared:
            self.prepare()
        self._wanted = frozenset(managed)
        self._walk = [
            record
            for record in self._records.values()
            if record not in self._residency and any(part.owner in self._wanted for part in record.parts)
        ]
        if backwards:
            self._walk.reverse()
        self._ensure_ring().expect(self._walk)
        self.lanes.caller().wait(self._computed)  # the scratch, should the caller be on another stream than last time

    def acquire(self, unit: Unit) -> list[Piece]:
        record = self._records[unit]
        parts = [part for part in record.parts if self._wanted is None or part.owner in self._wanted]
        if not parts:
            return []
        assert self._open is None, f"{unit.label} acquired before {self._open.record.unit.label} was released"
        slot = self._residency.take(record) if record in self._residency else self._live_ring().take(record)
        assert self._scratch is not None
        visit = Visit(record, slot, self._splitter, self._schema, self._scratch)
        self._open = visit
        self.lanes.caller().run(lambda: visit.bring(parts))
        return visit.pieces()

    def release(self, unit: Unit, updated: Sequence[Piece]) -> None:
        if self._open is None:
            return
        visit = self._open
        assert visit.record.unit is unit, f"{unit.label} released, {visit.record.unit.label} is acquired"
        if updated or visit.record in self._residency:  # there it is the only copy that joining has taken apart
            outgrown = visit.note(updated)
            if outgrown:
                self._rearrange(visit, outgrown)
            self.lanes.caller().run(visit.send)
        if visit.record in self._residency:
            self._residency.give_back(visit.record)
        elif updated:
            self._live_ring().write_back(visit.slot, visit.record)
        else:
            self._live_ring().discard(visit.slot)
        self._open = None

    def finish(self) -> None:
        self.lanes.caller().record(self._computed)
        self._wanted, self._prepared = None, False
        self._live_ring().expect(self._walk)  # warm slots for the next step

    def _rearrange(self, visit: Visit, layouts: Mapping[Part, Layout]) -> None:
        """Make room in the record for entries that appeared: rare, and all that allocates in a step."""
        record = visit.record
        at_rest = visit.lift()
        self._idle()
        old = record.arrange(layouts, self.lanes.device)
        if old is not None:
            old.close()
        slot = visit.slot
        if record in self._residency:
            self._residency.forget([record])  # until the next step, which finds room for it or does not
            slot = self._live_ring().lend(self._slots_of(record.nbytes), record.nbytes)
        elif record.nbytes > self._live_ring().slot_bytes:
            slot = self._live_ring().grow(self._slots_of(record.nbytes), record.nbytes)
        self._residency.unsettle()
        visit.settle(slot, at_rest)

    # -- state seen from outside

    def entries(self, managed: Managed) -> dict[str, Any]:
        return self._assemble(managed) if managed.updated else {}

    def describe(self, managed: Managed) -> dict[str, Any]:
        parts = self._parts.get(managed, []) if managed.updated else []
        if not parts or any(part.layout is None for part in parts):
            return {}
        first, layout = parts[0], parts[0].layout
        assert layout is not None
        kinds = layout.kinds() if first.whole else {k: (d, managed.local.shape) for k, (d, _) in layout.kinds().items()}
        if not managed.own_master:
            kinds["master"] = torch.float32, managed.local.shape
        described = {key: torch.empty(shape, dtype=dtype, device="meta") for key, (dtype, shape) in kinds.items()}
        return {key: described.get(key, first.values.get(key)) for key in dict.fromkeys([*first.keys, *described])}

    def gather(self, managed: Managed) -> dict[str, Any]:
        """Copies: an edit could not follow what is cut, coded, or already fetched for the next step."""
        entries, home = self.entries(managed), self._home[self._parts[managed][0]].bytes
        live = None if home is None else home.untyped_storage().data_ptr()
        return {
            key: value.clone()
            if isinstance(value, Tensor) and (value.dim() == 0 or value.untyped_storage().data_ptr() == live)
            else value
            for key, value in entries.items()
        }

    def _assemble(self, managed: Managed) -> dict[str, Any]:
        """All entries of a parameter and its master, on the host; live where nothing is cut or coded."""
        parts = self._parts.get(managed, [])
        if not parts or any(part.layout is None for part in parts):
            return {}
        assert self._host is not None
        self._residency.bring_down(self._home[part] for part in parts)
        found = [self._host.read(self._home[part], part) for part in parts]
        shape = managed.local.shape
        keys = [*parts[0].keys, *(["master"] if not managed.own_master else [])]
        return {
            k: found[0][k] if len(found) == 1 or k in parts[0].values else torch.cat([f[k] for f in found]).view(shape)
            for k in keys
        }

    def load(self, managed: Managed, entries: Mapping[str, Any]) -> None:
        self._settle()
        values = {key: value for key, value in entries.items() if key != "master"}
        master = None if managed.own_master else entries.get("master")
        assert self._host is not None
        parts = self._parts[managed]
        self._residency.bring_down(self._home[part] for part in parts)
        for part in parts:
            self._host.write(self._home[part], part, values, master)
        self._residency.edited(self._home[part] for part in parts)

    def refresh(self, managed: Managed) -> None:
        parts = self._coded(managed)
        if parts:
            self.synchronize()
            self._drop_staged()
            self._residency.bring_down(self._home[part] for part in parts)
        for part in parts:
            assert self._host is not None
            assert part.layout is not None
            self._host.write_master(self._home[part], part, part.layout, None)
        self._residency.edited(self._home[part] for part in parts)

    def differs(self, managed: Managed) -> bool:
        assert self._host is not None
        return any(self._host.differs(part) for part in self._coded(managed))

    def _coded(self, managed: Managed) -> list[Part]:
        """The parts whose master is another number than the weight."""
        return [part for part in self._parts[managed] if part.layout is not None and part.coding != "own"]

    def memory(self) -> dict[str, int]:
        ring = 0 if self._ring is None else self._ring.nbytes()
        scratch = 0 if self._scratch is None else self._scratch.nbytes
        working = self._splitter.nbytes() + sum(8 * len(record.parts) for record in self._records.values())
        host = sum(record.slab.nbytes for record in self._records.values() if record.slab is not None)
        return {
            "device_bytes": 0 if self._resident is None else self._resident.nbytes(),
            "host_bytes": host,
            "ring_bytes": ring + scratch + working,
        }

    def set_residency(self, gib: float | Literal["auto"]) -> None:
        if self._lanes is not None:
            self.synchronize()
        self._settings["resident_gib"] = gib
        if self._lanes is not None:
            self._residency.set_budget(self._budget(self._lanes.device))
            self._residency.shrink(list(self._records.values()))
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
        self._residency.release()
        self._idle()
        self._ring = self._scratch = None
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
        for record in self._records.values():
            record.close()
        self._start()

    # -- small parts

    def _ensure_ring(self) -> Ring:
        """The ring and the scratch, made (again) when units need another size, or more or fewer go through the ring."""
        size = max((max(record.nbytes, record.planned) for record in self._streamed()), default=0)
        elements = max((scratch_elements(record.parts) for record in self._records.values()), default=0)
        ring, scratch = self._ring, self._scratch
        if ring is None or ring.slot_bytes < size or len(ring.slots) != self._slots_of(ring.slot_bytes):
            self._idle()
            ring = self._ring = None
            self._ring = ring = Ring(self.lanes, self._slots_of(size), max(size, 1))
        if scratch is None or scratch.numel() < elements:
            self._idle()
            scratch = self._scratch = None
            self._scratch = torch.empty(elements, dtype=torch.float32, device=self.lanes.device)
        return ring

    def _live_ring(self) -> Ring:
        return self._ensure_ring() if self._ring is None else self._ring

    def _slots_of(self, size: int) -> int:
        """How many slots of ``size`` bytes: no more than records for them, and than fit the ring; at least one."""
        streamed = len(self._streamed())
        return min(streamed, max(min(self._slots, int(self._ring_mib * _MIB) // max(size, 1)), 1))

    def _streamed(self) -> list[Record]:
        """The records that go through the ring."""
        return [record for record in self._records.values() if record not in self._residency]

    def _idle(self) -> None:
        """Nothing under way on the device: memory that other streams use may be given back."""
        self.lanes.synchronize()
        if self.lanes.device.type != "cpu":
            torch.accelerator.synchronize(self.lanes.device)

    def _drop_staged(self) -> None:
        if self._ring is not None:
            self._ring.drop()

    def _settle(self) -> None:
        """Nothing under way, nothing fetched: records may be edited. Ends a failure too."""
        if self._lanes is None:
            return
        if self._lanes.failed:
            self._lanes.reset()
            self._residency.reset()
        else:
            self._lanes.synchronize()
        self._open, self._wanted, self._prepared = None, None, False
        if self._ring is not None:
            self._ring.reset()


def _common_device(managed: Sequence[Managed]) -> torch.device:
    devices = sorted({str(item.local.device) for item in managed})
    if len(devices) != 1:
        raise ValueError(f"parameters are on {', '.join(devices) or 'no device'}; the stream backend serves one device")
    return managed[0].local.device
