"""What all backends have in common: parameters as parts of records, and records as segments while they are updated.

A backend adds where records live and how one gets to the device: :meth:`RecordBackend._take` and
:meth:`RecordBackend._give_back`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightstep.state.backend import AHEAD, Managed, StateBackend, Unit
from lightstep.state.entries import Entries
from lightstep.state.record import Coding, ExpectedLayouts, Layout, Part, Record, Slot, make_record
from lightstep.state.segment import LARGE, MasterSplitter, Segment, Staging, Views, segments_of
from lightstep.state.versions import Version

__all__ = ["RecordBackend", "same_rounding", "was_rounded_from"]

_PIECE = 1 << 15  # elements: torch gives no part of so few to another thread


class RecordBackend(StateBackend):
    """A backend whose state is in records."""

    on_host = True
    """Whether records live on the host."""
    stages_masters = True
    """Whether memory for the masters of a unit is taken before they are joined, and not when that is asked for."""

    def __init__(self) -> None:
        self._forget_everything()

    def _forget_everything(self) -> None:
        self._records: dict[Unit, Record] = {}
        self._parts: dict[Managed, list[Part]] = {}
        self._home: dict[Part, Record] = {}
        self._initial: dict[Managed, Tensor] = {}
        self._staging: dict[torch.device, Staging] = {}
        self._needs: dict[torch.device, Any] = {}
        self._open: tuple[Record, Slot, list[Segment]] | None = None
        self._marks: dict[Record, Tensor] | None = None
        self._entries = Entries(_no_splitter, None)  # it must not refer to the backend, which has it

    # -- what a backend adds

    @abstractmethod
    def _take(self, record: Record) -> Slot:
        """The record on the device, ready for what the caller does next."""

    @abstractmethod
    def _give_back(self, record: Record, slot: Slot, changed: bool) -> None:
        """What the caller does with it is queued."""

    @abstractmethod
    def _retake(self, record: Record, slot: Slot, arrange: Callable[[], None]) -> Slot:
        """A record that is taken is about to be arranged anew: bring its bytes home, ``arrange``, take it again."""

    def _before_edit(self, records: Iterable[Record]) -> None:
        """These are about to be read or edited where they live: they are up to date there."""

    def _before_write(self, records: Iterable[Record]) -> None:
        """These are about to be written to where they live: what a snapshot still has to read of them stays."""

    def _edited(self, records: Iterable[Record]) -> None:
        """These were edited where they live."""

    def _run(self, job: Callable[[], object]) -> None:
        """Queue work on the current stream."""
        job()

    @abstractmethod
    def _splitter_of(self, device: torch.device) -> MasterSplitter:
        """For masters on this device: the parameters', or the host where records live there."""

    # -- set-up

    def units(self) -> Sequence[Unit]:
        return list(self._records)

    def _make_records(self, units: Iterable[Unit], coding: Callable[[Managed], Coding]) -> list[Record]:
        layouts = ExpectedLayouts()
        return [make_record(unit, layouts, coding, LARGE, on_host=self.on_host) for unit in units]

    def _keep(self, managed: Sequence[Managed], records: Iterable[Record]) -> list[Record]:
        """Exactly these records from now on, in the order of the model; returns those that leave."""
        place = {item: number for number, item in enumerate(managed)}
        listed = sorted(records, key=lambda record: place[record.unit.parts[0][0]])
        leaving = [record for record in self._records.values() if record not in listed]
        self._records, self._parts, self._home = {}, {}, {}
        for index, record in enumerate(listed):
            record.unit.index = index
            self._records[record.unit] = record
            for part in sorted(record.parts, key=lambda part: part.start):
                self._parts.setdefault(part.owner, []).append(part)
                self._home[part] = record
        if self._marks is not None:
            for record in listed:
                if record not in self._marks:
                    self._marks[record] = torch.zeros(len(record.parts), dtype=torch.int32, device=record.device)
            for record in leaving:
                self._marks.pop(record, None)
        self._initial = {item: master for item, master in self._initial.items() if item in place}
        self.awaited_by_others = any(item.rows is not None for item in managed)
        devices = {record.device for record in listed}
        self._needs = {
            device: Staging().needs([one for one in listed if one.device == device], masters=self.stages_masters)
            for device in devices
        }
        return leaving

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

    def start_from(self, managed: Managed, master: Tensor) -> None:
        if not managed.own_master and not managed.updated:
            self._initial[managed] = master

    # -- one step

    def prepare(self) -> None:
        for device, needs in self._needs.items():
            self._staging_on(device, needs)
        for record in self._records.values():
            record.allocate()

    def _staging_on(self, device: torch.device, needs: Any = None) -> Staging:
        if device not in self._staging:
            self._staging[device] = Staging()
        staging = self._staging[device]
        needs = self._needs[device] if needs is None else needs
        if not staging.fits(needs):
            self._idle(device)
            staging.take(needs, device)
        return staging

    def _idle(self, device: torch.device) -> None:
        """Nothing under way on the device: memory that other streams use may be given back."""
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def acquire(
        self, unit: Unit, active: Collection[Managed], apart: Mapping[Managed, object] | None = None
    ) -> list[Segment]:
        record = self._records[unit]
        segments = segments_of(record, active, apart)
        if not segments:
            return []
        assert self._open is None, f"{unit.label} acquired before {self._open[0].unit.label} was released"
        slot, staging = self._take(record), self._staging_on(record.device)
        self._open = record, slot, segments
        splitter, tried = self._splitter_of(record.device), self._version_of(record)
        marks = None if self._marks is None else self._marks[record]

        def open_all() -> None:
            if tried is not None:
                tried.keep_weights(segments, staging, marks, slot)
            for segment in segments:
                segment.open(slot, staging, splitter, self._initial, marks, apart=tried is not None)
            if tried is not None:
                tried.keep_histories()

        self._run(open_all)
        return segments

    def ahead(self, managed: Collection[Managed], entry: str) -> int:
        known = all(entry in part.keys for item in managed for part in self._parts[item])
        return self._room_ahead if known else 0

    @property
    def _room_ahead(self) -> int:
        """Units behind the next one that are on the device as well."""
        return AHEAD

    def look_ahead(self, unit: Unit, active: Collection[Managed]) -> list[tuple[Segment, Mapping[str, Tensor]]]:
        record = self._records[unit]
        slot = self._look_at(record)
        found: list[tuple[Segment, Mapping[str, Tensor]]] = []
        for segment in segments_of(record, active, None):
            if segment not in slot.views:
                slot.views[segment] = Views(segment, slot)
            found.append((segment, slot.views[segment].entries))
        return found

    def _look_at(self, record: Record) -> Slot:
        """As :meth:`_take`, of a record that is taken later."""
        return self._take(record)

    def _version_of(self, record: Record) -> Version | None:
        """What is being tried of it, if anything is."""
        return None

    def release(self, unit: Unit, updated: Sequence[Segment]) -> None:
        if self._open is None:
            return
        record, slot, segments = self._open
        assert record.unit is unit, f"{unit.label} released, {record.unit.label} is acquired"
        outgrown: dict[Part, Layout] = {}
        for segment in updated:
            outgrown.update(segment.note())
            for owner in {part.owner for part in segment.parts} & self._initial.keys():
                if all(part.history is not None for part in self._parts[owner]):  # a cut one is in several units
                    del self._initial[owner]
        if outgrown and self._version_of(record) is not None:
            self._give_up(record, slot)
            return
        if outgrown:
            slot = self._rearrange(record, slot, segments, outgrown)
        if updated or self._only_copy(record):
            self._run(lambda: self._write(record, segments))
        self._give_back(record, slot, bool(updated))
        self._open = None

    def _give_up(self, record: Record, slot: Slot) -> None:
        """What was tried has entries that nobody expected; the record and the weights are what they were."""
        raise NotImplementedError

    def _write(self, record: Record, segments: Sequence[Segment]) -> None:
        staging, splitter = self._staging_on(record.device), self._splitter_of(record.device)
        copies: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}  # of one dtype, for one kernel
        touched = [segment for segment in segments if segment.touched]
        for segment in segments:
            weights, sources = segment.write(staging, splitter)
            if weights:
                known = copies.setdefault(sources[0].dtype, ([], []))
                known[0].extend(weights)
                known[1].extend(sources)
        for weights, sources in copies.values():
            torch._foreach_copy_(weights, sources)
        if self._marks is not None:
            for segment in touched:
                if segment.coding != "own" and segment.has_state and not segment.fingerprinted:
                    segment.mark(staging, splitter, self._marks[record])

    def _only_copy(self, record: Record) -> bool:
        """Whether joining has taken apart what is nowhere else."""
        return True

    def _rearrange(
        self, record: Record, slot: Slot, segments: Sequence[Segment], layouts: Mapping[Part, Layout]
    ) -> Slot:
        """Make room in the record for entries that nobody expected: rare, and all that allocates in a step."""
        for segment in segments:
            segment.leave()
        slot = self._retake(record, slot, lambda: record.arrange(layouts))
        for segment in segments:
            segment.enter(slot)
        return slot

    # -- state seen from outside

    def entries(self, managed: Managed) -> dict[str, Any]:
        """A weight that somebody else wrote is the master of a split one: the next step will take it for that."""
        if managed.updated:
            found = self._assembled(managed)
            if "master" in found and self._marks is not None and any(map(self._was_written, self._parts[managed])):
                place = found["master"].device
                found["master"] = managed.local.to(place, torch.float32, memory_format=torch.contiguous_format)
            return found
        initial = self._initial.get(managed)
        return {} if initial is None or not was_rounded_from(managed.local, initial) else {"master": initial}

    def _was_written(self, part: Part) -> bool:
        """By somebody else; a weight that is still to be loaded is not meant."""
        alone = [Segment([part])]
        return part.codes is None and bool(self._compare(self._home[part], alone, [part]))

    def _assembled(self, managed: Managed) -> dict[str, Any]:
        """All entries of a parameter and its master; live where nothing is cut or coded."""
        parts = self._with_state(managed)
        if not parts:
            return {}
        self._before_edit(self._home[part] for part in parts)
        return self._entries.read_all(parts, self._home)

    def describe(self, managed: Managed) -> dict[str, Any]:
        if not managed.updated:
            return super().describe(managed)
        parts = self._with_state(managed)
        if not parts:
            return {}
        history = parts[0].history
        assert history is not None
        shapes = {key: (shape or managed.local.shape, dtype) for key, dtype, shape in parts[0].block.layout.entries}
        described: dict[str, Any] = {
            key: torch.empty(shape, dtype=dtype, device="meta") for key, (shape, dtype) in shapes.items()
        }
        values = history.copied()
        found = {key: described[key] if key in described else values[key] for key in parts[0].keys}
        if not managed.own_master:
            found["master"] = torch.empty(managed.local.shape, dtype=torch.float32, device="meta")
        return found

    def _with_state(self, managed: Managed) -> list[Part]:
        parts = self._parts.get(managed, [])
        return [] if any(part.history is None for part in parts) else parts

    def load(self, managed: Managed, entries: Mapping[str, Any]) -> None:
        values = {key: value for key, value in entries.items() if key != "master"}
        master = None if managed.own_master else entries.get("master")
        self._edit(managed, lambda record, part: self._entries.write(record, part, values, master))

    def refresh(self, managed: Managed) -> None:
        def follow(record: Record, part: Part) -> None:
            if part.history is not None and part.coding != "own":
                self._entries.write_master(record, part, None)

        self._edit(managed, follow)

    def _edit(self, managed: Managed, edit: Callable[[Record, Part], None]) -> None:
        """Run ``edit`` on every part, where its record lives."""
        self._initial.pop(managed, None)
        parts = self._parts[managed]
        self._before_edit(self._home[part] for part in parts)
        self._before_write(self._home[part] for part in parts)
        for part in parts:
            edit(self._home[part], part)
        self._edited(self._home[part] for part in parts)

    def changed(self, items: Iterable[Managed]) -> list[Managed]:
        wanted = dict.fromkeys(items)
        initial = [item for item in self._initial if item in wanted]
        found = {item for item in initial if not same_rounding(item.local, self._initial[item])}
        parts = (part for item in wanted if not item.own_master for part in self._parts.get(item, ()))
        for record in dict.fromkeys(self._home[part] for part in parts):
            found.update(part.owner for part in self._changed_parts(record, wanted))
        return [item for item in wanted if item in found]

    def _changed_parts(self, record: Record, wanted: Collection[Managed]) -> list[Part]:
        """One comparison on the device for the unit; one by one where that finds something."""
        waiting = [part for part in record.parts if part.codes is not None and part.owner in wanted]
        changed = [part for part in waiting if self._entries.waits_for_its_weight(part)]
        segments = [
            segment for segment in segments_of(record, wanted, None) if segment.has_state and segment.coding != "own"
        ]
        if not segments:
            return changed
        known = [part for segment in segments for part in segment.parts if part not in waiting]
        return [*changed, *self._compare(record, segments, known)]

    def _compare(self, record: Record, segments: Sequence[Segment], parts: Sequence[Part]) -> list[Part]:
        """Those of ``parts`` (all in ``segments``) whose weights are not the ones the record belongs to."""
        assert self._marks is not None
        staging, known, splitter = (
            self._staging_on(record.device),
            self._marks[record],
            self._splitter_of(record.device),
        )
        found = known.clone()
        for segment in segments:
            segment.weights(staging)
            segment.mark(staging, splitter, found)
        differs = (found != known).tolist()
        return [part for part in parts if differs[part.index]]


def same_rounding(local: Tensor, master: Tensor) -> bool:
    """Whether ``local`` holds exactly ``master`` rounded to its dtype (bits; NaN equals itself)."""
    on_host = local.device.type == master.device.type == "cpu"
    if on_host and local.shape == master.shape and local.numel() > _PIECE:  # by pieces that stay in cache
        pieces = zip(local.reshape(-1).split(_PIECE), master.reshape(-1).split(_PIECE), strict=True)
        return all(same_rounding(one, other) for one, other in pieces)
    rounded = master.to(device=local.device, dtype=local.dtype)
    bits = torch.int32 if local.dtype == torch.float32 else torch.int16  # fp32: the model was cast since
    return torch.equal(rounded.view(bits), local.contiguous().view(bits))


def was_rounded_from(local: Tensor, master: Tensor) -> bool:
    """Whether ``master`` says more than ``local``, which it rounds to."""
    return same_rounding(local, master) and not torch.equal(master.to(local.device), local.float())


def _no_splitter(device: torch.device) -> MasterSplitter:
    raise AssertionError("there are no records")
