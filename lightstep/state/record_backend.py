"""The base class of ``resident``, ``bulk`` and ``stream``: it keeps state in records and updates their segments.

A subclass decides where records live and how they reach the device: :meth:`RecordBackend._acquire_slot` and
:meth:`RecordBackend._release_slot`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightstep.state.backend import AHEAD, StateBackend
from lightstep.state.entries import Entries
from lightstep.state.record import Coding, ExpectedLayouts, Layout, Part, Record, Slot, make_record
from lightstep.state.schema import Managed, Unit
from lightstep.state.segment import Segment, segments_of
from lightstep.state.staging import LARGE, MasterSplitter, Staging
from lightstep.state.versions import Version

__all__ = ["Compared", "RecordBackend", "equals_rounded", "was_rounded_from"]

_PIECE = 1 << 15  # elements; torch's CPU kernels do not divide so few among threads


class Compared(NamedTuple):
    """Parts of a record whose weights are compared with those that the record belongs to, and their segments."""

    record: Record
    segments: Sequence[Segment]
    parts: Sequence[Part]


class RecordBackend(StateBackend):
    """A backend that keeps the state of each unit in a record."""

    on_host = True
    """Whether records live on the host."""
    stages_masters = True
    """Whether memory for joined masters is allocated by :meth:`prepare`; if not, when masters are first joined."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._records: dict[Unit, Record] = {}
        self._parts: dict[Managed, list[Part]] = {}
        self._record_of: dict[Part, Record] = {}
        self._initial_masters: dict[Managed, Tensor] = {}
        self._staging: dict[torch.device, Staging] = {}
        self._staging_sizes: dict[torch.device, Any] = {}
        self._acquired: tuple[Record, Slot, list[Segment]] | None = None
        self._fingerprints: dict[Record, Tensor] | None = None
        self._entries = Entries(_no_splitter, None)  # must not refer to the backend: that would be a reference cycle

    # -- for subclasses

    @abstractmethod
    def _acquire_slot(self, record: Record) -> Slot:
        """The record on the device, ready for the caller's next work."""

    @abstractmethod
    def _release_slot(self, record: Record, slot: Slot, changed: bool) -> None:
        """Take the slot back; the caller's work on it is queued."""

    @abstractmethod
    def _reacquire_slot(self, record: Record, slot: Slot, relayout: Callable[[], None]) -> Slot:
        """Write an acquired record back, call ``relayout``, and acquire it again."""

    def _before_edit(self, records: Iterable[Record]) -> None:
        """Make the records up to date where they live: they are about to be read or edited there."""

    def _before_write(self, records: Iterable[Record]) -> None:
        """Protect what a snapshot still has to read: the records are about to be written to where they live."""

    def _after_edit(self, records: Iterable[Record]) -> None:
        """The records were edited where they live."""

    def _run(self, job: Callable[[], object]) -> None:
        """Run ``job``, which queues work on the current stream."""
        job()

    @abstractmethod
    def _splitter_for(self, device: torch.device) -> MasterSplitter:
        """The splitter for masters on this device: the parameters' device, or the host if records live there."""

    # -- set-up

    def units(self) -> Sequence[Unit]:
        return list(self._records)

    def _make_records(self, units: Iterable[Unit], coding: Callable[[Managed], Coding]) -> list[Record]:
        layouts = ExpectedLayouts()
        return [make_record(unit, layouts, coding, LARGE, on_host=self.on_host) for unit in units]

    def _set_records(self, managed: Sequence[Managed], records: Iterable[Record]) -> list[Record]:
        """Use exactly these records, in model order; returns those that are no longer used."""
        place = {item: number for number, item in enumerate(managed)}
        listed = sorted(records, key=lambda record: place[record.unit.owners[0]])
        leaving = [record for record in self._records.values() if record not in listed]
        self._records, self._parts, self._record_of = {}, {}, {}
        for index, record in enumerate(listed):
            record.unit.index = index
            self._records[record.unit] = record
            for part in sorted(record.parts, key=lambda part: part.start):
                self._parts.setdefault(part.owner, []).append(part)
                self._record_of[part] = record
        if self._fingerprints is not None:
            for record in listed:
                if record not in self._fingerprints:
                    self._fingerprints[record] = torch.zeros(len(record.parts), dtype=torch.int32, device=record.device)
            for record in leaving:
                self._fingerprints.pop(record, None)
        self._initial_masters = {item: master for item, master in self._initial_masters.items() if item in place}
        self.peers_wait = any(item.rows is not None for item in managed)
        devices = {record.device for record in listed}
        self._staging_sizes = {
            device: Staging().required_sizes(
                [one for one in listed if one.device == device], masters=self.stages_masters
            )
            for device in devices
        }
        return leaving

    def _unaffected_records(self, managed: Sequence[Managed]) -> list[Record]:
        """Records whose parameters, and all that share units with those, are still listed."""
        gone = set(self._parts) - set(managed)
        records = list(self._records.values())
        while True:
            hit = [record for record in records if any(part.owner in gone for part in record.parts)]
            if not hit:
                return records
            records = [record for record in records if record not in hit]
            gone |= {part.owner for record in hit for part in record.parts}

    def set_initial_master(self, managed: Managed, master: Tensor) -> None:
        if not managed.own_master and not managed.updated:
            self._initial_masters[managed] = master

    # -- one step

    def prepare(self) -> None:
        for device, sizes in self._staging_sizes.items():
            self._staging_on(device, sizes)
        for record in self._records.values():
            record.allocate()

    def _staging_on(self, device: torch.device, sizes: Any = None) -> Staging:
        if device not in self._staging:
            self._staging[device] = Staging()
        staging = self._staging[device]
        sizes = self._staging_sizes[device] if sizes is None else sizes
        if not staging.fits(sizes):
            self._wait_until_idle(device)
            staging.allocate(sizes, device)
        return staging

    def _wait_until_idle(self, device: torch.device) -> None:
        """Wait for all work on the device. Memory that other streams use may be freed then."""
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def acquire(self, unit: Unit, active: Collection[Managed]) -> list[Segment]:
        record = self._records[unit]
        segments = segments_of(record, active)
        if not segments:
            return []
        assert self._acquired is None, f"{unit.label} acquired before {self._acquired[0].unit.label} was released"
        slot, staging = self._acquire_slot(record), self._staging_on(record.device)
        self._acquired = record, slot, segments
        splitter, version = self._splitter_for(record.device), self._speculative_version(record)
        fingerprints = None if self._fingerprints is None else self._fingerprints[record]

        def open_all() -> None:
            if version is not None:
                version.save_weights(segments, staging, fingerprints, slot)
            for segment in segments:
                segment.open(
                    slot, staging, splitter, self._initial_masters, fingerprints, copy_history=version is not None
                )
            if version is not None:
                version.save_histories()

        self._run(open_all)
        return segments

    def ahead(self, managed: Collection[Managed], entry: str) -> int:
        known = all(entry in part.keys for item in managed for part in self._parts[item])
        return self._lookahead if known else 0

    @property
    def _lookahead(self) -> int:
        """How many units after the next one are on the device."""
        return AHEAD

    def look_ahead(self, unit: Unit, active: Collection[Managed]) -> list[tuple[Segment, Mapping[str, Tensor]]]:
        record = self._records[unit]
        slot = self._peek_slot(record)
        return [(segment, segment.views_in(slot).entries) for segment in segments_of(record, active)]

    def _peek_slot(self, record: Record) -> Slot:
        """:meth:`_acquire_slot` for a record that is acquired later."""
        return self._acquire_slot(record)

    def _speculative_version(self, record: Record) -> Version | None:
        """The record's speculative update, if there is one."""
        return None

    def release(self, unit: Unit, updated: Sequence[Segment]) -> None:
        if self._acquired is None:
            return
        record, slot, segments = self._acquired
        assert record.unit is unit, f"{unit.label} released, {record.unit.label} is acquired"
        outgrown: dict[Part, Layout] = {}
        for segment in updated:
            outgrown.update(segment.update_history())
            for owner in {part.owner for part in segment.parts} & self._initial_masters.keys():
                if all(part.history is not None for part in self._parts[owner]):  # its parts may be in several units
                    del self._initial_masters[owner]
        if outgrown and self._speculative_version(record) is not None:
            self._cancel_speculation(record, slot)
            return
        if outgrown:
            slot = self._relayout(record, slot, segments, outgrown)
        if updated or self._slot_is_only_copy(record):
            self._run(lambda: self._write(record, segments))
        self._release_slot(record, slot, bool(updated))
        self._acquired = None

    def _cancel_speculation(self, record: Record, slot: Slot) -> None:
        """Undo a speculative update that made unexpected entries: record and weights are restored."""
        raise NotImplementedError

    def _write(self, record: Record, segments: Sequence[Segment]) -> None:
        staging, splitter = self._staging_on(record.device), self._splitter_for(record.device)
        copies: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}  # by dtype: one kernel each
        modified = [segment for segment in segments if segment.is_modified]
        for segment in segments:
            weights, sources = segment.write(staging, splitter)
            if weights:
                known = copies.setdefault(sources[0].dtype, ([], []))
                known[0].extend(weights)
                known[1].extend(sources)
        for weights, sources in copies.values():
            torch._foreach_copy_(weights, sources)
        if self._fingerprints is not None:
            rows = [
                segment.weight_row(staging)
                for segment in modified
                if segment.coding != "own" and segment.has_state and not segment.fingerprinted
            ]
            splitter.fingerprint_rows(rows, self._fingerprints[record])

    def _slot_is_only_copy(self, record: Record) -> bool:
        """Whether the slot must be written even if nothing was updated: joining took bits out of the record."""
        return True

    def _relayout(
        self, record: Record, slot: Slot, segments: Sequence[Segment], layouts: Mapping[Part, Layout]
    ) -> Slot:
        """Make room in the record for unexpected entries. This is rare, and the only allocation in a step."""
        for segment in segments:
            segment.copy_out()
        slot = self._reacquire_slot(record, slot, lambda: record.relayout(layouts))
        for segment in segments:
            segment.rebind(slot)
        return slot

    # -- state seen from outside

    def entries(self, managed: Managed) -> dict[str, Any]:
        """The master of a split weight that somebody else wrote to is that weight, as the next step will see it."""
        if managed.updated:
            found = self._read_entries(managed)
            if (
                "master" in found
                and self._fingerprints is not None
                and any(map(self._was_edited, self._parts[managed]))
            ):
                place = found["master"].device
                found["master"] = managed.local.to(place, torch.float32, memory_format=torch.contiguous_format)
            return found
        initial = self._initial_masters.get(managed)
        return {} if initial is None or not was_rounded_from(managed.local, initial) else {"master": initial}

    def gather(self, managed: Managed) -> dict[str, Any]:
        """Clones what is in a record; all else that :meth:`entries` returns has been made for the caller."""
        records = [self._record_of[part].bytes for part in self._parts.get(managed, ())]
        lent = {_memory(memory) for memory in (*records, self._initial_masters.get(managed)) if memory is not None}
        entries = self.entries(managed).items()
        return {
            key: value.clone() if isinstance(value, Tensor) and _memory(value) in lent else value
            for key, value in entries
        }

    def _was_edited(self, part: Part) -> bool:
        """Whether somebody else wrote to the weight. A weight that is still to be loaded does not count."""
        alone = Compared(self._record_of[part], [Segment([part])], [part])
        return part.expected_weight is None and bool(self._differing_parts([alone]))

    def _read_entries(self, managed: Managed) -> dict[str, Any]:
        """All entries of a parameter and its master; live unless the parameter is cut or the entry is coded."""
        parts = self._parts_with_state(managed)
        if not parts:
            return {}
        self._before_edit(self._record_of[part] for part in parts)
        return self._entries.read_all(parts, self._record_of)

    def describe(self, managed: Managed) -> dict[str, Any]:
        if not managed.updated:
            return super().describe(managed)
        parts = self._parts_with_state(managed)
        if not parts:
            return {}
        history = parts[0].history
        assert history is not None
        shapes = {key: (shape or managed.local.shape, dtype) for key, dtype, shape in parts[0].block.layout.entries}
        described: dict[str, Any] = {
            key: torch.empty(shape, dtype=dtype, device="meta") for key, (shape, dtype) in shapes.items()
        }
        values = history.copy_values()
        found = {key: described[key] if key in described else values[key] for key in parts[0].keys}
        if not managed.own_master:
            found["master"] = torch.empty(managed.local.shape, dtype=torch.float32, device="meta")
        return found

    def _parts_with_state(self, managed: Managed) -> list[Part]:
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
        """Call ``edit`` for every part, with its record up to date where it lives."""
        self._initial_masters.pop(managed, None)
        parts = self._parts[managed]
        self._before_edit(self._record_of[part] for part in parts)
        self._before_write(self._record_of[part] for part in parts)
        for part in parts:
            edit(self._record_of[part], part)
        self._after_edit(self._record_of[part] for part in parts)

    def changed(self, items: Iterable[Managed]) -> list[Managed]:
        wanted = dict.fromkeys(items)
        initial = [item for item in self._initial_masters if item in wanted]
        found = {item for item in initial if not equals_rounded(item.local, self._initial_masters[item])}
        with_masters = [item for item in wanted if not item.own_master]
        records = list({self._record_of[part]: None for item in with_masters for part in self._parts.get(item, ())})
        compared = [self._compared_parts(record, wanted) for record in records]  # first: the next line may change it
        found.update(part.owner for record in records for part in self._overwritten_parts(record, wanted))
        if compared := [one for one in compared if one.segments]:
            found.update(part.owner for part in self._differing_parts(compared))
        return [item for item in wanted if item in found]

    def _overwritten_parts(self, record: Record, wanted: Collection[Managed]) -> list[Part]:
        """The record's parts whose weights were to be loaded, and are others now."""
        waiting = (part for part in record.parts if part.expected_weight is not None and part.owner in wanted)
        return [part for part in waiting if self._entries.awaits_weight(part)]

    def _compared_parts(self, record: Record, wanted: Collection[Managed]) -> Compared:
        """The record's parts whose weights have to be compared."""
        segments = [segment for segment in segments_of(record, wanted) if segment.has_state and segment.coding != "own"]
        parts = [part for segment in segments for part in segment.parts if part.expected_weight is None]
        return Compared(record, segments, parts)

    def _differing_parts(self, compared: Sequence[Compared]) -> list[Part]:
        """The parts whose weights are not those that their records belong to. The host waits once for each device."""
        differs: dict[torch.device, list[Tensor]] = {}
        for record, segments, _ in compared:
            differs.setdefault(record.device, []).append(self._differs(record, segments))
        flags = {device: iter(torch.cat(found).tolist()) for device, found in differs.items()}
        differing = []
        for record, _, parts in compared:
            own = list(islice(flags[record.device], len(record.parts)))
            differing += [part for part in parts if own[part.index]]
        return differing

    def _differs(self, record: Record, segments: Sequence[Segment]) -> Tensor:
        """For each of the record's parts, whether its weight's fingerprint is another one; only for these segments."""
        assert self._fingerprints is not None
        staging, splitter = self._staging_on(record.device), self._splitter_for(record.device)
        known = self._fingerprints[record]
        found = known.clone()
        for segment in segments:
            segment.weights(staging)
        splitter.fingerprint_rows([segment.weight_row(staging) for segment in segments], found)
        return found != known


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def equals_rounded(local: Tensor, master: Tensor) -> bool:
    """Whether ``local`` is bit for bit ``master`` rounded to its dtype."""
    on_host = local.device.type == master.device.type == "cpu"
    if on_host and local.shape == master.shape and local.numel() > _PIECE:  # in pieces that stay in the cache
        pieces = zip(local.reshape(-1).split(_PIECE), master.reshape(-1).split(_PIECE), strict=True)
        return all(equals_rounded(one, other) for one, other in pieces)
    rounded = master.to(device=local.device, dtype=local.dtype)
    bits = torch.int32 if local.dtype == torch.float32 else torch.int16  # fp32: the model was cast afterwards
    return torch.equal(rounded.view(bits), local.contiguous().view(bits))


def was_rounded_from(local: Tensor, master: Tensor) -> bool:
    """Whether ``local`` is ``master`` rounded, and ``master`` has bits that it lost."""
    return equals_rounded(local, master) and not torch.equal(master.to(local.device), local.float())


def _no_splitter(device: torch.device) -> MasterSplitter:
    raise AssertionError("there are no records")
