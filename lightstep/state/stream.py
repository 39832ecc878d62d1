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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from lightstep.state.backend import EntrySpec, Managed, Piece, Schema, StateBackend, Unit, adopt_entry
from lightstep.state.host_memory import require
from lightstep.state.lanes import LaneError, Lanes
from lightstep.state.records import Layout, Part, Record, coding_of, is_staged, lay_out, record_bytes
from lightstep.state.ring import Ring, Slot
from lightstep.state.units import RingError, plan_units, smallest_piece

__all__ = ["MasterSplitter", "StreamBackend"]

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_FAST_COPY = 4 * _MIB  # below this a copy does not reach link speed
_SCRATCH_ALIGNMENT = 64  # elements
_CPU = torch.device("cpu")


class MasterSplitter(Protocol):
    """fp32 masters as bf16 weights and what is missing, and back; see ``lightstep.precision.split``."""

    def split(self, master: Tensor, weight: Tensor, low: Tensor, extra: Tensor) -> None: ...
    def join(self, weight: Tensor, low: Tensor, extra: Tensor, master: Tensor) -> None: ...
    def fingerprint(self, weight: Tensor, out: Tensor) -> None: ...
    def nbytes(self) -> int: ...


@dataclass(eq=False)
class _Held:
    """A part that is out for an update: what the base optimizer was given."""

    part: Part
    piece: Piece
    views: dict[str, Tensor]  # the entries in the slot


@dataclass(eq=False)
class _Open:
    """The unit that is acquired and not yet released."""

    record: Record
    slot: Slot
    held: list[_Held] = field(default_factory=list)


class StreamBackend(StateBackend):
    """State on the host; device memory is the ring, whatever the size of the model.

    Args:
        splitter: makes the splitter of bf16 masters for a device.
        prefetch_layers: units fetched ahead; the ring has two slots more, for the one being updated and the one draining.
        ring_mib: device memory of the ring, scratch for joined masters included. A unit takes at most one slot.
        whole_tensors: the optimizer is not element-wise; no tensor is cut.
        slots: number of slots instead of ``prefetch_layers + 2``.

    Raises:
        RingError: at ``register``, when the ring is too small for the smallest possible piece.
        HostMemoryError: at ``register``, when the host has not enough memory.
    """

    name: ClassVar[str] = "stream"

    def __init__(
        self,
        splitter: Callable[[torch.device], MasterSplitter],
        *,
        prefetch_layers: int = 2,
        ring_mib: float = 512,
        whole_tensors: bool = False,
        slots: int | None = None,
    ) -> None:
        self._settings = {
            "splitter": splitter,
            "prefetch_layers": prefetch_layers,
            "ring_mib": ring_mib,
            "whole_tensors": whole_tensors,
            "slots": slots,
        }
        self._make_splitter = splitter
        self._slots = prefetch_layers + 2 if slots is None else slots
        self._ring_mib = ring_mib
        self._whole_tensors = whole_tensors
        self._host_splitter = splitter(_CPU)
        self._start()

    def _start(self) -> None:
        self._schema: Schema = {}
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
        self._open: _Open | None = None

    def fresh(self) -> StreamBackend:
        return type(self)(**self._settings)  # type: ignore[arg-type]

    @property
    def lanes(self) -> Lanes:
        """The lanes of the parameters' device; they exist once parameters are registered."""
        assert self._lanes is not None, "no parameters are registered"
        return self._lanes

    @property
    def failed(self) -> bool:
        """A step broke off, here or between ``acquire`` and ``release``: ``begin`` refuses until state is loaded."""
        return self._open is not None or (self._lanes is not None and self._lanes.failed)

    # -- set-up

    def register(self, managed: Sequence[Managed], schema: Schema) -> None:
        device = _common_device(managed)
        if self._lanes is not None and self._lanes.device != device:
            raise ValueError(
                f"parameters moved from {self._lanes.device} to {device} after set-up; make a new optimizer"
            )
        self._schema = schema
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
            self._computed = self._lanes.event()
            self._splitter = self._host_splitter if device.type == "cpu" else self._make_splitter(device)
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
                record.close()
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

    def _capacity(self, managed: Iterable[Managed]) -> int:
        """Bytes of a slot, such that all slots and the scratch for one unit's masters fit the ring."""
        bounds = [(item, max(smallest_piece(item, self._bytes_of, self._whole_tensors), 1)) for item in managed]
        if not bounds:
            return 1
        ratio = max(self._scratch_ratio(item) for item, _ in bounds)
        capacity = int(self._ring_mib * _MIB / (self._slots + ratio))
        item, needed = max(bounds, key=lambda bound: bound[1])
        if needed > capacity:
            enough = needed * (self._slots + ratio) / _MIB
            raise RingError(
                f"optimizer_state.ring_mib is {self._ring_mib:g}: {self._slots} slots of {max(capacity, 0)} bytes, and {item.name} needs "
                f"{needed} bytes in one piece{'' if not self._whole_tensors else ' (this optimizer needs whole tensors)'}. "
                f"Set ring_mib to {enough:.3g} or more, or lower optimizer_state.prefetch_layers"
            )
        if capacity < _FAST_COPY and sum(self._bytes_of(item, item.local.numel()) for item, _ in bounds) > capacity:
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

    def begin(self, managed: Collection[Managed]) -> None:
        self.lanes.check()
        if self._open is not None:
            raise LaneError(f"the last step broke off at {self._open.record.unit.label}; load a checkpoint to go on")
        self._wanted = frozenset(managed)
        self._walk = [
            record for record in self._records.values() if any(part.owner in self._wanted for part in record.parts)
        ]
        self._ensure_ring().expect(self._walk)
        self.lanes.caller().wait(self._computed)  # the scratch, should the caller be on another stream than last time

    def acquire(self, unit: Unit) -> list[Piece]:
        record = self._records[unit]
        parts = [part for part in record.parts if self._wanted is None or part.owner in self._wanted]
        if not parts:
            return []
        assert self._open is None, f"{unit.label} acquired before {self._open.record.unit.label} was released"
        slot = self._live_ring().take(record)
        self._open = _Open(record, slot)
        held = self._open.held
        self.lanes.caller().run(lambda: held.extend(self._bring(record, slot, parts)))
        return [one.piece for one in held]

    def release(self, unit: Unit, updated: Sequence[Piece]) -> None:
        if self._open is None:
            return
        out, ring = self._open, self._live_ring()
        assert out.record.unit is unit, f"{unit.label} released, {out.record.unit.label} is acquired"
        changed = set(updated)
        held = [one for one in out.held if one.piece in changed]
        if not held:
            ring.discard(out.slot)
        else:
            if any([self._outgrown(one) for one in held]):  # all of them: it also takes note of the plain values
                self._adopt(out, held)
            self.lanes.caller().run(lambda: self._send(out))
            ring.write_back(out.slot, out.record)
        self._open = None

    def finish(self) -> None:
        self.lanes.caller().record(self._computed)
        self._wanted = None
        self._live_ring().expect(self._walk)  # warm slots for the next step

    def _bring(self, record: Record, slot: Slot, parts: Sequence[Part]) -> list[_Held]:
        """Masters and entries of these parts as the base optimizer wants them."""
        held, cursor = [], 0
        for part in parts:
            master = self._master(record, slot, part, cursor)
            cursor += -(-part.elements // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT
            views = record.views(part, slot.buffer) if part.layout is not None else {}
            state = {key: views[key] if key in views else part.values[key] for key in part.keys}
            held.append(_Held(part, Piece(part.owner, part.start, part.stop, master, state), views))
        return held

    def _master(self, record: Record, slot: Slot, part: Part, cursor: int) -> Tensor:
        """The part's fp32 master on the device; ``cursor`` is its place in the scratch."""
        weight, layout = part.of(part.owner.local), part.layout
        if part.coding == "own":
            return weight
        if part.codes is not None:  # a master was loaded, the model that goes with it was not: the master counts
            weight.copy_(part.codes.view(weight.dtype).view(part.shape))
            part.codes = None
        if part.coding == "whole":
            if layout is not None and layout.master is not None:
                return record.view(part, layout.master, slot.buffer).view(part.shape)
            return weight.to(torch.float32, memory_format=torch.contiguous_format)
        assert self._scratch is not None
        master = self._scratch[cursor : cursor + part.elements]
        if layout is None:
            master.view(part.shape).copy_(weight)
        else:
            assert layout.low is not None
            low, extra = record.view(part, layout.low, slot.buffer), record.extra(part, slot.buffer)
            self._splitter.join(_flat(weight), low, extra, master)
        return master.view(part.shape)

    def _send(self, out: _Open) -> None:
        """Masters to weights and low halves, entries to the slot where the base optimizer has put them elsewhere."""
        for one in out.held:
            if one.part.layout is None:
                continue
            for key, view in one.views.items():
                value = one.piece.state[key]
                if value is not view and value.data_ptr() != view.data_ptr():
                    view.copy_(value)
            self._write_weight(out, one.part, one.piece.master)

    def _write_weight(self, out: _Open, part: Part, master: Tensor) -> None:
        layout, local = part.layout, part.of(part.owner.local)
        assert layout is not None
        if part.coding == "own":
            return
        if layout.master is not None:
            whole = out.record.view(part, layout.master, out.slot.buffer)
            if whole.data_ptr() != master.data_ptr():  # its first update
                whole.copy_(master.reshape(-1))
            local.copy_(master)
            weight = _flat(local)
        else:
            assert layout.low is not None
            weight = _flat(local)
            low, extra = out.record.view(part, layout.low, out.slot.buffer), out.record.extra(part, out.slot.buffer)
            self._splitter.split(master.view(-1), weight, low, extra)
            if weight.data_ptr() != local.data_ptr():  # not contiguous: it was split into a copy
                local.copy_(weight.view(part.shape))
        self._splitter.fingerprint(weight, part.mark)

    # -- state that appears or changes its kind

    def _outgrown(self, one: _Held) -> bool:
        """Whether the base optimizer's entries are no longer those of the record (always so after the first update)."""
        part, state = one.part, one.piece.state
        part.keys = tuple(state)
        part.values = {key: value for key, value in state.items() if not is_staged(key, value, self._schema)}
        return part.layout is None or part.layout.kinds() != self._kinds(state)

    def _kinds(self, state: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {k: (v.dtype, tuple(v.shape)) for k, v in state.items() if is_staged(k, v, self._schema)}

    def _adopt(self, out: _Open, held: Sequence[_Held]) -> None:
        """Make room in the record for the entries that ``held`` have now. Rare, and the one place in a step that allocates."""
        record = out.record
        layouts = {one.part: lay_out(one.part, self._kinds(one.piece.state), self._schema) for one in held}
        out_of_slot = {one.part for one in out.held}
        saved = {
            part: _region(record, part, out.slot.buffer).clone()
            for part in record.parts
            if part.layout and part not in out_of_slot
        }
        for one in out.held:
            for key, view in one.views.items():
                if one.piece.state.get(key) is view:
                    one.piece.state[key] = view.clone()
            if one.part.layout is not None and one.part.layout.master is not None:
                one.piece.master = one.piece.master.clone()
        self._idle()
        old = record.arrange(layouts, self.lanes.device)
        if old is not None:
            old.close()
        if record.nbytes > self._live_ring().slot_bytes:
            out.slot = self._live_ring().grow(self._slots_of(record.nbytes), record.nbytes)
        for part, region in saved.items():
            _region(record, part, out.slot.buffer).copy_(region)
        for one in out.held:
            one.views = record.views(one.part, out.slot.buffer) if one.part.layout is not None else {}

    # -- state seen from outside

    def entries(self, managed: Managed) -> dict[str, Any]:
        return self._assemble(managed) if managed.updated else {}

    def _assemble(self, managed: Managed) -> dict[str, Any]:
        """All entries of a parameter and its master, on the host: live where it is one part and no bits are in the way."""
        parts = self._parts.get(managed, [])
        if not parts or any(part.layout is None for part in parts):
            return {}
        found = [self._assemble_part(part) for part in parts]
        shape = managed.local.shape
        keys = [*parts[0].keys, *(["master"] if not managed.own_master else [])]
        return {
            k: found[0][k] if len(found) == 1 or k in parts[0].values else torch.cat([f[k] for f in found]).view(shape)
            for k in keys
        }

    def _assemble_part(self, part: Part) -> dict[str, Any]:
        record, layout = self._home[part], part.layout
        assert layout is not None
        found: dict[str, Any] = {**part.values, **record.views(part)}
        if layout.master is not None:
            found["master"] = record.view(part, layout.master).view(part.shape)
        elif layout.low is not None:
            extra = record.extra(part).clone()  # joining clears the signs: the copy becomes the moment
            weight = (
                _flat(part.of(part.owner.local)).to(_CPU) if part.codes is None else part.codes.view(torch.bfloat16)
            )
            found["master"] = torch.empty(part.elements)
            self._host_splitter.join(weight, record.view(part, layout.low), extra, found["master"])
            found["master"] = found["master"].view(part.shape)
            if layout.carrier is not None:
                found[layout.carrier] = extra.view(layout.entries[layout.carrier].shape)
        return found

    def load(self, managed: Managed, entries: Mapping[str, Any]) -> None:
        self._settle()
        values = {key: value for key, value in entries.items() if key != "master"}
        master = None if managed.own_master else entries.get("master")
        for part in self._parts[managed]:
            record = self._home[part]
            if values or master is not None:
                self._load_part(record, part, values, master)
            else:
                record.rearrange_on_host({part: None}, self.lanes.device)
                part.forget()

    def _load_part(self, record: Record, part: Part, values: Mapping[str, Any], master: Tensor | None) -> None:
        staged = {k: self._staged_value(part, k, v) for k, v in values.items() if is_staged(k, v, self._schema)}
        part.keys = tuple(values)
        part.values = {
            k: adopt_entry(self._spec(k), v, self.lanes.device) for k, v in values.items() if k not in staged
        }
        negative = any(
            bool((v < 0).any()) for k, v in staged.items() if (spec := self._spec(k)) and spec.never_negative
        )
        layout = lay_out(part, self._kinds(staged), self._schema, bits_in_signs=not negative)
        record.rearrange_on_host({part: layout}, self.lanes.device)
        for key, view in record.views(part).items():
            view.copy_(staged[key])
        self._load_master(record, part, layout, master)

    def _staged_value(self, part: Part, key: str, value: Tensor) -> Tensor:
        spec = self._spec(key)
        dtype = value.dtype if spec is None or spec.dtype is None else spec.dtype
        if part.owner.own_master and dtype == torch.float32:
            dtype = part.owner.local.dtype
        # Other shapes than the parameter's are whole-tensor optimizers' own; such a part is whole.
        return part.of(value.detach()).to(device=_CPU, dtype=dtype)

    def _load_master(self, record: Record, part: Part, layout: Layout, master: Tensor | None) -> None:
        """``master`` (local shape) into the record; without one the parameter's value."""
        part.codes = None
        if part.coding == "own":
            return
        weight = _flat(part.of(part.owner.local)).to(_CPU)
        loaded = weight.float() if master is None else part.of(master.detach()).to(_CPU, torch.float32).reshape(-1)
        rounded = torch.empty_like(weight)
        if layout.master is not None:
            record.view(part, layout.master).copy_(loaded)
            rounded.copy_(loaded)
        else:
            assert layout.low is not None
            self._host_splitter.split(loaded, rounded, record.view(part, layout.low), record.extra(part))
        mark = torch.zeros((), dtype=torch.int64)
        self._host_splitter.fingerprint(rounded, mark)
        part.mark.copy_(mark)
        if not torch.equal(rounded.view(torch.int16), weight.view(torch.int16)):
            part.codes = rounded.view(torch.int16)

    def refresh(self, managed: Managed) -> None:
        parts = [part for part in self._parts[managed] if part.layout is not None and part.coding != "own"]
        if parts:
            self.synchronize()
            self._drop_staged()
        for part in parts:
            assert part.layout is not None
            self._load_master(self._home[part], part, part.layout, None)

    def differs(self, managed: Managed) -> bool:
        return any(
            self._part_differs(part)
            for part in self._parts[managed]
            if part.layout is not None and part.coding != "own"
        )

    def _part_differs(self, part: Part) -> bool:
        weight = _flat(part.of(part.owner.local))
        if part.codes is not None:
            if not torch.equal(weight.view(torch.int16).to(_CPU), part.codes):
                return True
            part.codes = None
            return False
        mark = torch.zeros_like(part.mark)
        self._splitter.fingerprint(weight, mark)
        return not torch.equal(mark, part.mark)

    def memory(self) -> dict[str, int]:
        ring = 0 if self._ring is None else self._ring.nbytes()
        scratch = 0 if self._scratch is None else self._scratch.nbytes
        working = self._splitter.nbytes() + sum(8 * len(record.parts) for record in self._records.values())
        host = sum(record.slab.nbytes for record in self._records.values() if record.slab is not None)
        return {"device_bytes": 0, "host_bytes": host, "ring_bytes": ring + scratch + working}

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
        """The ring and the scratch, made (again) when units need another size."""
        size = max((max(record.nbytes, record.planned) for record in self._records.values()), default=0)
        elements = max((_scratch_of(record.parts) for record in self._records.values()), default=0)
        ring, scratch = self._ring, self._scratch
        if ring is None or ring.slot_bytes < size or len(ring.slots) != self._slots_of(ring.slot_bytes):
            self._idle()
            ring = self._ring = None
            self._ring = ring = Ring(self.lanes, self._slots_of(size), max(size, 1))
        if scratch is None or scratch.numel() < elements:
            self._idle()
            scratch = self._scratch = None
            self._scratch = torch.empty(elements, device=self.lanes.device)
        return ring

    def _live_ring(self) -> Ring:
        return self._ensure_ring() if self._ring is None else self._ring

    def _slots_of(self, size: int) -> int:
        """How many slots of ``size`` bytes: no more than units, and than fit the ring; at least one."""
        return max(min(self._slots, len(self._records), int(self._ring_mib * _MIB) // max(size, 1)), 1)

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
        if self.failed:
            self._lanes.reset()
            self._open, self._wanted = None, None
            if self._ring is not None:
                self._ring.reset()
        else:
            self._lanes.synchronize()
            self._drop_staged()

    def _spec(self, key: str) -> EntrySpec | None:
        return self._schema.get(key)


def _common_device(managed: Sequence[Managed]) -> torch.device:
    devices = sorted({str(item.local.device) for item in managed})
    if len(devices) != 1:
        raise ValueError(f"parameters are on {', '.join(devices) or 'no device'}; the stream backend serves one device")
    return managed[0].local.device


def _flat(weight: Tensor) -> Tensor:
    """``weight`` as one contiguous vector; a copy only where it is not contiguous."""
    return weight.reshape(-1)


def _scratch_of(parts: Sequence[Part]) -> int:
    sizes = (part.elements for part in parts if part.coding == "split")
    return sum(-(-size // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT for size in sizes)


def _region(record: Record, part: Part, buffer: Tensor) -> Tensor:
    assert part.layout is not None
    return buffer[record.bases[part] :][: part.layout.nbytes]
