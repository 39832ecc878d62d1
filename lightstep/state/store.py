"""Where masters and optimizer state live between steps, and how they reach the device for an update.

A step processes one unit at a time:

1. A *unit* is a few parameters, or a range of one. Its state is one :class:`~lightstep.state.record.Record`: a flat
   buffer that holds one field after another (``low | exp_avg | exp_avg_sq``), each with the values of all parameters.
2. :meth:`Store.acquire` makes the record available on the device, in a :class:`~lightstep.state.record.Slot`.
3. It returns *segments* (:mod:`lightstep.state.segment`): runs of parameters that an element-wise optimizer class
   updates as one. Each has one flat fp32 tensor of masters, joined from the weights and the record.
4. The base optimizer updates the segments.
5. :meth:`Store.release` writes the masters to weights and record, and the record to where it lives.

The three backends of a strategy file are one store:

========= =============================== ==================================================================
backend   records live                    slots
========= =============================== ==================================================================
resident  on the device                   none: work is done in place
bulk      on the host                     one for each record; they exist during a step
stream    on the host, the first          a ring of ``prefetch_layers + 2``, refilled as they are written back
          ``resident_gib`` on the device
========= =============================== ==================================================================

A record on the host is copied once each way in a step: it is fetched while earlier units are updated, and written back
while later ones are. The bf16 weight on the device is the upper half of its master, so only the lower half is copied.

``acquire``, ``release``, ``begin`` and ``finish`` may be called on any stream (on the CPU: thread). For updates that
run concurrently with the caller's own work, submit all work on a unit to the compute lane::

    store.lanes.compute.run(lambda: update(unit))    # acquire → arithmetic → release, in there
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal

import torch
from torch import Tensor

from lightstep.distributed import Replicas
from lightstep.state.device_copies import DeviceCopies
from lightstep.state.entries import Entries, was_rounded_from
from lightstep.state.host_copy_pool import HostCopyPool
from lightstep.state.host_memory import HostMemoryError, require
from lightstep.state.host_weights import HostWeights, WeightGroup, groups_of
from lightstep.state.lanes import LaneError, Lanes, LanesOfDevices
from lightstep.state.record import (
    Coding,
    ExpectedLayouts,
    Layout,
    Part,
    Record,
    Records,
    Slot,
    coding_of,
    make_record,
)
from lightstep.state.replicas import ReplicaShare
from lightstep.state.residency import Budget, Residency
from lightstep.state.ring import Ring
from lightstep.state.schema import Managed, Unit
from lightstep.state.segment import LARGE, MasterSplitter, Segment, Views, segments_of
from lightstep.state.snapshot import Snapshot
from lightstep.state.spare_memory import GIB, AutoBudget, device_memory
from lightstep.state.staging import Splitters, StagingOfDevices
from lightstep.state.units import RingPlan, pack_whole
from lightstep.state.versions import Versions
from lightstep.state.weight_comparison import KeptRecords, changed_weights, was_edited

__all__ = ["AHEAD", "Store"]


AHEAD = 2
"""How many units that ranks update together may be started ahead of the current one, if there is room for them."""

_CPU = torch.device("cpu")


class Store:
    """Masters and optimizer state of the parameters that are registered.

    Args:
        splitter: makes the splitter of bf16 masters for a device, and with ``checksums=True`` one whose fingerprints
            take less time on the CPU. Masters of bf16 weights are split on the host, and on the device if a fused
            kernel updates them.
        home: where records live between steps.
        slots: number of slots of the ring; ``None``: ``prefetch_layers + 2``; ``all``: one for each record, which
            exists during a step. If a slot has to be larger for the largest matrix, there are fewer.
        prefetch_layers: number of units that are prefetched. The two other slots are for the unit that is updated and
            the one that is written back.
        ring_mib: device memory of the ring, including scratch for joined masters. A unit takes at most one slot.
        resident_gib: see :meth:`set_residency`.
        spare_host_gib: host memory for second versions of records: for speculative updates, allocated by
            :meth:`reserve_speculation`, and while a snapshot is read.
        previous_weights: where speculative updates save the previous weights; ``auto``: on the host if some state stays
            on the device, else on the device while it has room.
        beside_compute: updates run while the model computes, whose own small copies must get through between those of
            records (:class:`~lightstep.state.lanes.CopyLane`).
        replicas: the ranks that hold the same part of the model and share the work; ``None``: there are no others.

    Attributes:
        host_weights: the weights of the parameters, if they rest on the host.
        peers_wait: other processes wait for updates made here. So no update may be postponed until it is needed here.

    Raises:
        RingError: at :meth:`register`, if the ring is too small for the smallest possible piece.
        HostMemoryError: at :meth:`register`, if the host does not have enough memory.
    """

    WHOLE_UNIT = 128 * 2**20
    """Elements of whole parameters that are updated together where records live on the device. It bounds the memory for
    scaled gradients."""

    def __init__(
        self,
        splitter: Callable[..., MasterSplitter],
        *,
        home: Literal["device", "host"] = "host",
        slots: int | Literal["all"] | None = None,
        prefetch_layers: int = 2,
        ring_mib: float = 512,
        resident_gib: float | Literal["auto"] = 0.0,
        spare_host_gib: float | Literal["auto"] = "auto",
        previous_weights: Literal["auto", "device", "host"] = "auto",
        beside_compute: bool = True,
        replicas: Replicas | None = None,
    ) -> None:
        self._settings: dict[str, Any] = {
            "splitter": splitter,
            "home": home,
            "slots": slots,
            "prefetch_layers": prefetch_layers,
            "ring_mib": ring_mib,
            "resident_gib": resident_gib,
            "spare_host_gib": spare_host_gib,
            "previous_weights": previous_weights,
            "beside_compute": beside_compute,
        }
        self._make_splitter = splitter
        self._on_host, self._one_slot_each = home == "host", slots == "all"
        self._slots = prefetch_layers + 2 if slots is None or slots == "all" else slots
        self._ring_plan = RingPlan(self._slots, ring_mib)
        self._share = None if replicas is None else ReplicaShare(replicas)
        self._start()

    def _start(self) -> None:
        self._records = Records()
        self._fingerprinted = self._on_host
        self._lanes = LanesOfDevices(self._settings["beside_compute"])
        self._splitters = Splitters(self._make_splitter)
        self._staging = StagingOfDevices(self._lanes)
        # What follows must not refer to the store: that would be a reference cycle.
        self._entries = Entries(self._splitters)
        self._compared = KeptRecords(self._records, self._entries, self._staging, self._splitters)
        self._device: torch.device | None = None  # the one that all parameters are on
        self._ring: Ring | None = None
        self._computed: Any = None
        self._walk: list[Record] = []
        self._acquired: tuple[Record, Slot, list[Segment]] | None = None
        self.host_weights: HostWeights | None = None
        self._held: list[WeightGroup] = []  # for the unit that is acquired
        settings = self._settings
        self._versions = Versions(
            settings["spare_host_gib"], settings["previous_weights"], has_resident_state=settings["resident_gib"] != 0
        )
        self._residency = Residency(self._lanes, self._versions)
        self._prepared = False
        self._updates_together = False  # ranks update some parameters together
        self._reserved: tuple[Collection[Unit], Sequence[Unit]] = (), ()
        self.peers_wait = self._share is not None

    def fresh(self) -> Store:
        """A new store with the same settings and no parameters."""
        return type(self)(**self._settings, replicas=None if self._share is None else self._share.replicas.copy())

    @property
    def name(self) -> str:
        """Of the backend in a strategy file."""
        return "resident" if not self._on_host else "bulk" if self._one_slot_each else "stream"

    # -- lanes

    @property
    def lanes(self) -> Lanes:
        """Streams (threads on the CPU) of the parameters' device, for updates that run concurrently with the caller's
        own work.

        Raises:
            ValueError: the parameters are on several devices.
        """
        if self._device is None:
            listed = sorted({str(record.device) for record in self._records})
            raise ValueError(
                f"parameters are on {', '.join(listed) or 'no device'}; updates that run beside the model need all of "
                "them on one device: set optimizer_state.update: at_step"
            )
        return self._lanes[self._device]

    @property
    def supports_lanes(self) -> bool:
        """Whether updates in backward run in the lanes: there are copies to hide."""
        return self._on_host

    @property
    def is_lane_thread(self) -> bool:
        """Whether the calling thread is one of the lanes, which cannot wait for its own jobs."""
        return threading.get_ident() in self._lanes.threads

    @property
    def interrupted_work(self) -> str | None:
        """What the store is in the middle of in the calling thread, for messages. Waiting for it there would never
        end."""
        if threading.get_ident() in self._lanes.threads:
            return "a deferred update"
        if self.host_weights is not None and self.host_weights.is_locked_here:
            return "a copy of weights from or to the host"
        return None

    @property
    def failed(self) -> bool:
        """Whether a step failed, in the lanes or between :meth:`acquire` and :meth:`release`. State must then be loaded
        before the next :meth:`begin`."""
        return self._acquired is not None or (self._on_host and any(lanes.failed for lanes in self._lanes.values()))

    # -- set-up

    @property
    def compares_weights(self) -> bool:
        """Whether :meth:`entries` finds weights that somebody else wrote to, and returns masters that follow them."""
        return self._on_host

    def register(self, managed: Sequence[Managed]) -> None:
        """Manage exactly these parameters. New ones are added; those no longer listed are removed with their state."""
        device = managed[0].local.device if managed else None
        if self._share is None:
            self._register(managed, device)
            return
        layouts = ExpectedLayouts()
        own = self._share.assign(managed, lambda item: layouts.record_bytes(item, item.planned_elements))
        # A replica without a share has lanes, too: it receives the others' weights in them.
        self._share.run_on_all(lambda: self._register(own, device) if managed else self._free())

    def _register(self, managed: Sequence[Managed], device: torch.device | None) -> None:
        """:meth:`register`; without parameters, ``device`` is that of the lanes."""
        devices = {item.local.device for item in managed} or ({device} if device is not None else set())
        has_moved = self._check_device(devices)
        if not self._on_host and not self._records and any(map(_has_split_master, managed)):
            self._fingerprinted = True
        staying = [] if has_moved else self._records.unaffected_by(managed)
        kept = {part.owner for record in staying for part in record.parts}
        new = [item for item in managed if item not in kept]
        layouts = ExpectedLayouts()
        records = [
            make_record(unit, layouts, self._coding, LARGE, on_host=self._on_host, fingerprinted=self._fingerprinted)
            for unit in self._plan_units(new)
        ]
        if self._on_host:
            freed = sum(record.nbytes for record in self._records if record not in staying)
            gradients = sum(group.missing_gradients for group in groups_of(item.home for item in new))
            what = "optimizer state and gradients on the host" if gradients else "optimizer state on the host"
            require(sum(record.nbytes for record in records) - freed + gradients, what)
        if has_moved:
            self._free()
        self._use_device(devices)
        self.host_weights = next((item.home.group.owner for item in managed if item.home is not None), None)
        self._reset_pipeline()
        carried = {item: self._read_entries(item) for item in new}
        for record in self._records.replace(managed, [*staying, *records]):
            self._residency.forget(record)
            record.close()
        self._updates_together = any(item.rows is not None for item in managed)
        self.peers_wait = self._share is not None or self._updates_together
        self._staging.plan(list(self._records), masters=self._on_host)
        self._residency.invalidate()
        self._walk = []
        for item, entries in carried.items():
            if entries:
                self.load(item, entries)

    def _check_device(self, devices: Collection[torch.device]) -> bool:
        """Whether all parameters have moved to another device."""
        if self._on_host and len(devices) != 1:
            raise ValueError(
                f"parameters are on {', '.join(sorted(map(str, devices))) or 'no device'}; the {self.name} backend "
                "needs all of them on one device"
            )
        return self._on_host and self._device is not None and self._device not in devices

    def _use_device(self, devices: Collection[torch.device]) -> None:
        """Make what belongs to the parameters' device, before the first are registered."""
        is_first = self._device is None
        self._device = next(iter(devices)) if len(devices) == 1 else None
        if is_first and set(devices) == {_CPU}:
            # Fingerprints are not compared with those of a device.
            self._splitters[_CPU] = self._make_splitter(_CPU, checksums=True)
        if is_first and self._on_host:
            device = self.lanes.device
            self._residency = Residency(self._lanes, self._versions, device_memory(device), self._budget(device))

    def _plan_units(self, managed: Sequence[Managed]) -> list[Unit]:
        if not self._on_host:
            return pack_whole(managed, self.WHOLE_UNIT)
        return self._ring_plan.units(managed, self._one_slot_each)

    def _coding(self, owner: Managed) -> Coding:
        found = coding_of(owner)
        may_split = self._on_host or (self._fingerprinted and owner.fused_update)
        return "whole" if found == "split" and not may_split else found

    def set_initial_master(self, managed: Managed, master: Tensor) -> None:
        """Use ``master`` (fp32, local shape) instead of the weight as the master of the parameter's first update."""
        if not (managed.is_remote or managed.own_master or managed.updated):
            self._records.initial_masters[managed] = master

    # -- one step

    def units(self) -> Sequence[Unit]:
        """All units that are updated here, in update order."""
        return list(self._records.by_unit)

    def prepare(self) -> None:
        """Allocate the device memory that a step needs, before anything is changed. No step may be under way.

        With replicas :meth:`begin` does it: one of them must not fail before the others have decided on the step.

        Raises:
            torch.OutOfMemoryError: the device has no room. Nothing has changed, and this may be called again.
        """
        if self._share is None and (not self._prepared or self._residency.has_to_choose):
            self._prepare()

    def _prepare(self) -> None:
        if self.failed or (self._device is None and self._on_host):
            return  # `begin` raises the error
        records = self._records
        if self._residency.has_to_choose:
            self._residency.choose(self._records)
        is_new = any(record.bytes is None and record.nbytes for record in records)
        self._staging.prepare()
        for record in records:
            if record.bytes is None:
                record.allocate()
        self._ensure_ring()
        self._residency.bring(records)
        self._ensure_ring()  # larger if the device had no room for all records that were chosen to stay
        if is_new:
            self._residency.invalidate()
        self._prepared, self._reserved = True, ((), ())

    def begin(self, managed: Collection[Managed], order: Sequence[Unit] | None = None) -> None:
        """Start a step that updates these parameters.

        Args:
            order: the expected order of :meth:`acquire`; ``None``: that of :meth:`units`. Units may be acquired in
                another order, which is slower.
        """
        if self._share is not None:
            self._share.begin()
        if self._on_host:
            self.lanes.check()
        if self._acquired is not None:
            raise LaneError(f"the last step broke off at {self._acquired[0].unit.label}; load a checkpoint to go on")
        if not self._prepared:
            self._prepare()
        if self._on_host:
            self._walk = self._walk_in(self._records.by_unit if order is None else order, frozenset(managed))
            self._live_ring().prefetch(self._walk)
        if self._computed is not None:
            self.lanes.caller().wait(self._computed)  # the last step may have used the staging on another stream

    def _walk_in(self, order: Iterable[Unit], wanted: AbstractSet[Managed]) -> list[Record]:
        """The records of these parameters that go through the ring, in the order in which they are first needed."""
        chosen, by_unit = self._residency.chosen, self._records.by_unit
        needed = [by_unit[unit] for unit in order if not wanted.isdisjoint(unit.owners)]
        walk = [record for record in needed if record not in chosen]
        return list(self._fetch_order(walk)) if self._updates_together else walk

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

    def acquire(self, unit: Unit, active: Collection[Managed], speculative: bool = False) -> list[Segment]:
        """Masters and state of the unit's ``active`` parameters on the device, ready for work on the current stream.

        Args:
            speculative: what is written until :meth:`release` can be rolled back; some parameter must be active.
        """
        record = self._records.by_unit[unit]
        if speculative:
            self._versions.begin(record)
        if all(part.owner not in active for part in record.parts):
            return []
        assert self._acquired is None, f"{unit.label} acquired before {self._acquired[0].unit.label} was released"
        if self.host_weights is not None:
            self._hold_weights(record)
        segments, slot = segments_of(record, active), self._acquire_slot(record)
        self._acquired = record, slot, segments
        staging, splitter = self._staging[record.device], self._splitters[record.device]
        version, initial = self._versions.speculative.get(record), self._records.initial_masters
        for segment in segments:
            segment.open(slot, staging, splitter, initial, record.fingerprints, copy_history=version is not None)
        if version is not None:
            version.save(segments, staging, slot)
        return segments

    def _acquire_slot(self, record: Record) -> Slot:
        """The record on the device, ready for the caller's next work."""
        if record.slot is None:
            return self._live_ring().acquire(record)
        if self._versions.device_copies is not None:
            self._versions.before_write(record)
        if record.slot.arriving:
            self._settle(record)
        return record.slot

    def ahead(self, managed: Collection[Managed], entry: str) -> int:
        """How many units after the next one :meth:`look_ahead` can return; 0 unless all of these have ``entry``.

        Only units that ranks update together count, because those are the same on all ranks.
        """
        known = all(entry in part.keys for item in managed for part in self._records.parts[item])
        return self._lookahead if known else 0

    @property
    def _lookahead(self) -> int:
        """All slots except the one that is updated and the one that is written back."""
        return AHEAD if self.name != "stream" else min(max(self._slots - 2, 0), AHEAD)

    def look_ahead(self, unit: Unit, active: Collection[Managed]) -> list[tuple[Segment, Views]]:
        """The segments that :meth:`acquire` will return for a later unit, and what the record has of them, for work on
        the current stream.

        A write to an entry is kept: :meth:`acquire` returns the new value.
        """
        record = self._records.by_unit[unit]
        slot = self._live_ring().peek(record) if record.slot is None else self._acquire_slot(record)
        return [(segment, segment.views_in(slot)) for segment in segments_of(record, active)]

    def release(self, unit: Unit, updated: Sequence[Segment]) -> None:
        """Finish the unit: write the ``updated`` segments to their parameters and to where their state lives."""
        record = self._records.by_unit[unit]
        is_final = self._share is not None and record not in self._versions.speculative
        if self._acquired is not None:
            assert self._acquired[0] is record, f"{unit.label} released, {self._acquired[0].unit.label} is acquired"
            self._write_home(*self._acquired, updated)
            self._acquired = None
        if self.host_weights is not None:
            self._release_weights(record if updated else None)
        if self._share is not None and is_final:
            self._share.updated(unit)

    def _write_home(self, record: Record, slot: Slot, segments: Sequence[Segment], updated: Sequence[Segment]) -> None:
        """Write the ``updated`` ones of these segments to the record, and that to where it lives."""
        outgrown: dict[Part, Layout] = {}
        for segment in updated:
            outgrown.update(segment.update_history())
        if self._records.initial_masters:
            self._records.drop_initial_masters(record)
        version = self._versions.speculative.get(record)
        if outgrown and version is not None:  # the update made unexpected entries: it is made again later
            self.roll_back(record.unit)
            self._live_ring().discard(slot)  # type: ignore[arg-type]
            return
        if outgrown:
            slot = self._relayout(record, slot, segments, outgrown)
        if updated or record.slot is not None:  # there, joining took bits out of the record
            self._write(record, segments)
        if record.slot is None and updated:
            if version is None and self._versions.pinned:
                self._versions.move_if_pinned(record)
            self._live_ring().write_back(slot, record, version or record)  # type: ignore[arg-type]
        elif record.slot is None:
            self._live_ring().discard(slot)  # type: ignore[arg-type]

    def _hold_weights(self, record: Record) -> None:
        """Have the record's weights, which rest on the host, on the device."""
        assert self.host_weights is not None
        for group in groups_of(part.owner.home for part in record.parts):
            self.host_weights.hold(group.weights, group, update=True)
            self._held.append(group)

    def _release_weights(self, written: Record | None) -> None:
        """End what :meth:`_hold_weights` began, after the caller's work so far.

        Args:
            written: the record whose weights have been updated.
        """
        assert self.host_weights is not None
        places: dict[WeightGroup, list[tuple[int, int, int]]] = {}
        for part in () if written is None else written.parts:
            home = part.owner.home
            if home is not None:
                places.setdefault(home.group, []).append((home.number, part.start, part.stop))
        for group in self._held:
            if group in places:
                field = group.weights
                self.host_weights.write_back(field, [field.bytes_of(*place) for place in places[group]])
                group.note_updated([number for number, _, _ in places[group]])
            self.host_weights.release(group.weights, update=True)
        self._held = []

    def _write(self, record: Record, segments: Sequence[Segment]) -> None:
        staging, splitter = self._staging[record.device], self._splitters[record.device]
        copies: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}  # by dtype: one kernel each
        for segment in segments:
            weights, sources = segment.write()
            if weights:
                known = copies.setdefault(sources[0].dtype, ([], []))
                known[0].extend(weights)
                known[1].extend(sources)
        for weights, sources in copies.values():
            torch._foreach_copy_(weights, sources)
        if record.fingerprints is not None:
            rows = [segment.weight_row(staging) for segment in segments if not segment.fingerprinted]
            if rows:
                splitter.fingerprint_rows(rows, record.fingerprints)

    def _relayout(
        self, record: Record, slot: Slot, segments: Sequence[Segment], layouts: Mapping[Part, Layout]
    ) -> Slot:
        """Make room in the record for unexpected entries. This is rare, and the only allocation in a step."""
        for segment in segments:
            segment.copy_out()
        self._lanes.wait_until_idle(record.device)
        if record.slot is None:
            self._versions.move_if_pinned(record, keep=True)
        record.relayout(layouts)
        self._residency.invalidate()
        if record.slot is not None:
            slot = record.slot
        else:
            if record.nbytes > slot.buffer.nbytes:
                slot = self._live_ring().grow(self._slot_sizes(), record)
            if record.host is not None:
                slot.buffer[: record.nbytes].copy_(record.host)
        for segment in segments:
            segment.rebind(slot)
        return slot

    def finish(self, next_order: Sequence[Unit] | None = None) -> Sequence[Managed]:
        """End the step: order the caller's next work after what is still under way.

        Args:
            next_order: the expected order of the next step; ``None``: that of this one.

        Returns:
            The parameters that were written to because other replicas keep them, updated or not.
        """
        if self._share is not None:
            self._share.send_all()
        if self._device in self._lanes:
            self._computed = self.lanes.event() if self._computed is None else self._computed
            self.lanes.caller().record(self._computed)
        is_complete = self._staging.is_steady and self._staging.is_kept and not self._one_slot_each
        self._prepared = is_complete and not self._residency.has_to_choose
        if self._one_slot_each:
            if self._ring is not None:
                self._ring.free()
            self._ring = None
        elif self._on_host:
            if next_order is not None:
                updated = {item for item in self._records.parts if item.updated}
                self._walk = self._walk_in(next_order, updated)
            self._live_ring().prefetch(self._walk)  # for the next step
        return () if self._share is None else self._share.arrive()

    def abandon(self) -> None:
        """The step failed: send what other processes wait for. Raises nothing."""
        if self._share is not None:
            with contextlib.suppress(Exception):
                self._share.send_all()
                self._share.arrive()

    def arrival_jobs(self, complete_with: Mapping[Managed, int], end: int) -> dict[Managed, int]:
        """The index of the job that starts to send each own weight, and to receive each one of another replica.

        Args:
            complete_with: the index of the job that completes the update of each own parameter.
            end: the index of the job that ends the step.
        """
        return {} if self._share is None else self._share.arrival_jobs(complete_with, end)

    def receive(self, managed: Iterable[Managed]) -> None:
        """Order the caller's next work after the communication of these weights, which has started: the work may write
        to them."""
        if self._share is not None:
            self._share.receive(managed)

    # -- speculative updates

    def reserve_speculation(self, units: Collection[Unit]) -> Sequence[Unit]:
        """Allocate memory for speculative updates of these units; returns those with enough of it. No step may be
        under way."""
        if not (units and self._on_host):
            return ()
        if self._prepared and not self._versions.may_reserve and units == self._reserved[0]:
            return self._reserved[1]
        try:
            if not self._prepared:  # with replicas
                self._prepare()  # what comes to stay on the device has one version there, and is not tried
        except (torch.OutOfMemoryError, HostMemoryError):
            return ()  # :meth:`begin` raises it
        waiting = {
            record for part, record in self._records.of_part.items() if part.expected_weight is not None
        }  # for weights
        records = [record for record in self._streamed() if record.unit in units and record not in waiting]
        ready = self._versions.reserve(records)
        try:
            self._ensure_ring()
        except torch.OutOfMemoryError:
            self._versions.keep_on_device()
            self._ensure_ring()
            ready = self._versions.reserve(records)
        self._reserved = () if waiting else units, [record.unit for record in ready]
        return self._reserved[1]

    def prefer_resident(self, units: Sequence[Unit]) -> None:
        """From the next step on, prefer the state of these units when choosing what stays on the device."""
        self._residency.prefer([self._records.by_unit[unit] for unit in units])

    def expect_speculation(self, units: Iterable[Unit]) -> None:
        """The next backward will probably update these units speculatively, and no others."""
        if self.host_weights is not None:
            self._versions.keep_weights_of([self._records.by_unit[unit] for unit in units])

    def note_kept_weights(self, units: Iterable[Unit]) -> None:
        """These units are about to be updated speculatively, and their weights will count as written to."""
        if self.host_weights is not None:
            self._versions.note_kept_weights([self._records.by_unit[unit] for unit in units])

    def speculative(self, units: Iterable[Unit]) -> list[Unit]:
        """Those of the units with a speculative update that was neither committed nor rolled back."""
        return [unit for unit in units if self._records.by_unit[unit] in self._versions.speculative]

    def commit(self, units: Iterable[Unit]) -> None:
        """Make the speculative updates of these units final."""
        for unit in self.speculative(units):
            self._versions.commit(self._records.by_unit[unit])
            if self._share is not None:
                self._share.updated(unit)

    def roll_back(self, unit: Unit) -> None:
        """Undo the unit's speculative update; weights are restored by work on the current stream."""
        record = self._records.by_unit[unit]
        version = self._versions.discard(record)
        if version.written_back is not None:
            self.lanes.caller().wait(version.written_back)
        if self.host_weights is not None:
            self._hold_weights(record)
        version.roll_back()
        if self.host_weights is not None:
            self._release_weights(record)

    def drop_speculation(self, unit: Unit) -> None:
        """Forget the unit's speculative update after a failure; its weights stay as they are."""
        self._versions.discard(self._records.by_unit[unit]).saved = None

    # -- state seen from outside

    def entries(self, managed: Managed) -> dict[str, Any]:
        """The state of one parameter: the base optimizer's entries and ``"master"`` (unless it is its own master).

        Tensors have the local shard's shape (or 0 dimensions) and are live where possible. Before the first update
        there is only the master given to :meth:`set_initial_master`. ``{}`` if another replica owns the state. Call
        :meth:`synchronize` first. The master of a split weight that somebody else wrote to is that weight, as the next
        step will see it.
        """
        if managed.is_remote:
            return {}
        if managed.updated:
            found = self._read_entries(managed)
            if "master" in found and self._fingerprinted and self._was_edited(managed):
                place = found["master"].device
                found["master"] = managed.resting.to(place, torch.float32, memory_format=torch.contiguous_format)
            return found
        initial = self._records.initial_masters.get(managed)
        return {} if initial is None or not was_rounded_from(managed.resting, initial) else {"master": initial}

    def _was_edited(self, managed: Managed) -> bool:
        weights = self.host_weights
        with contextlib.nullcontext() if weights is None else weights.holding(groups_of([managed.home])):
            return any(was_edited(self._compared, part) for part in self._records.parts[managed])

    def _read_entries(self, managed: Managed) -> dict[str, Any]:
        """All entries of a parameter and its master; live unless the parameter is cut or the entry is coded."""
        parts = self._records.parts_with_state(managed)
        for part in parts:
            self._settle(self._records.of_part[part])
        # If only some records live on the device, entries must not tell which.
        return self._entries.read_all(parts, self._records.of_part, _CPU if self._on_host else None) if parts else {}

    def describe(self, managed: Managed) -> dict[str, Any]:
        """:meth:`entries` with all tensors on the meta device."""
        if managed.is_remote:
            return {}
        if not managed.updated:
            return {key: torch.empty_like(value, device="meta") for key, value in self.entries(managed).items()}
        parts = self._records.parts_with_state(managed)
        return self._entries.describe(parts[0]) if parts else {}

    def gather(self, managed: Managed) -> dict[str, Any]:
        """Copies of :meth:`entries`, from the replica that owns them. A collective where replicas share the work."""
        own = {} if managed.is_remote else self._copied_entries(managed)
        return own if self._share is None else self._share.gather(managed, own)

    def _copied_entries(self, managed: Managed) -> dict[str, Any]:
        """Clones what is in a record; all else that :meth:`entries` returns has been made for the caller."""
        records = [record.bytes for record in self._records.of(managed)]
        initial = self._records.initial_masters.get(managed)
        lent = {_memory(memory) for memory in (*records, initial) if memory is not None}
        entries = self.entries(managed).items()
        return {
            key: value.clone() if isinstance(value, Tensor) and _memory(value) in lent else value
            for key, value in entries
        }

    def load(self, managed: Managed, entries: Mapping[str, Any]) -> None:
        """Replace the state of one parameter; a missing ``"master"`` is rebuilt from the parameter.

        Does nothing if another replica owns the state.
        """
        if managed.is_remote:
            return
        self._reset_pipeline()
        values = {key: value for key, value in entries.items() if key != "master"}
        master = None if managed.own_master else entries.get("master")
        self._edit(managed, lambda record, part: self._entries.write(record, part, values, master))

    def refresh(self, managed: Managed) -> None:
        """Set the master to the parameter's value, in fp32."""
        if managed.is_remote:
            return
        if self._on_host and not managed.own_master:
            self.synchronize()
            self._drop_prefetched(managed)

        def follow(record: Record, part: Part) -> None:
            if part.history is not None and part.has_master:
                self._entries.write_master(record, part, None)

        self._edit(managed, follow)

    def _edit(self, managed: Managed, edit: Callable[[Record, Part], None]) -> None:
        """Call ``edit`` for every part; its record may be changed where it lives."""
        self._records.initial_masters.pop(managed, None)
        managed.settle()
        parts = self._records.parts[managed]
        sizes = {record: record.nbytes for record in self._records.of(managed)}
        for record in sizes:
            self._settle(record)
            self._versions.before_write(record)
        for part in parts:
            edit(self._records.of_part[part], part)
        if any(record.nbytes != size for record, size in sizes.items()):
            self._residency.invalidate()

    def _settle(self, record: Record) -> None:
        """The caller's next work may use the record where it lives."""
        slot = record.slot
        if slot is not None and slot.arriving:
            self._lanes[record.device].caller().wait(slot.staged)
            slot.arriving = False

    def changed(self, items: Iterable[Managed]) -> list[Managed]:
        """The parameters that no longer equal their rounded masters, because somebody else wrote to them. May wait for
        the device."""
        items, weights = list(items), self.host_weights
        if not items:
            return []
        for record in () if self._fingerprinted else self._records.by_unit.values():
            self._settle(record)
        for lanes in self._lanes.values():
            lanes.caller_waits_for_updates()  # they gather weights in the same memory
        with contextlib.nullcontext() if weights is None else weights.holding(groups_of(item.home for item in items)):
            return changed_weights(self._compared, items)

    def pin(
        self,
        wanted: Mapping[Managed, Collection[str]],
        weight_of: Callable[[Tensor], Callable[[], Tensor]],
        copies: HostCopyPool | None,
    ) -> Snapshot | None:
        """A snapshot of these entries, for another thread to read while updates go on.

        Nothing may be under way. The snapshot may lack some parameters, or be ``None``: read those by other means.

        Args:
            weight_of: for a parameter, a function that returns its present local weight on the host when it is called.
            copies: host memory for copies of what is on the device, until the snapshot is closed. ``None``: nothing is
                updated before that, and the snapshot lacks what is on the device.
        """
        if self._versions.in_use:
            return None
        if self._on_host:
            self.synchronize()
        kept = {item: keys for item, keys in wanted.items() if item.updated and self._can_pin(item, copies is not None)}
        on_device = any(item.local.device.type != "cpu" for item in kept)
        for item in self.changed(kept) if self._fingerprinted and on_device else ():
            del kept[item]  # a device finds edits now; on the CPU the reader's thread does
        if not kept:
            return None
        splitter = self._make_splitter(_CPU, checksums=True) if self._fingerprinted else None
        device_copies = None if copies is None else DeviceCopies(copies)
        snapshot = Snapshot(self._versions, splitter, device_copies)
        for item, keys in kept.items():
            weight = None if item.own_master else weight_of(item.param)
            snapshot.add(item, keys, self._records.parts[item], self._records.of_part, weight)
        snapshot.pin(self._lanes, find_edits=not on_device)
        self._versions.device_copies = device_copies
        return snapshot

    def _can_pin(self, managed: Managed, may_copy: bool) -> bool:
        """Whether a snapshot can have this parameter: its records are on the host, or may be copied from the device."""
        records = [self._records.of_part[part] for part in self._records.parts_with_state(managed)]
        return bool(records) and all(
            may_copy if record.slot is not None else record.slab is not None for record in records
        )

    def memory(self) -> dict[str, int]:
        """``device_bytes``, ``host_bytes`` and ``ring_bytes`` allocated between steps, here."""
        records = self._records
        working = self._splitters.nbytes()
        working += sum(record.fingerprints.nbytes for record in records if record.fingerprints is not None)
        working += self._staging.nbytes()
        working += 0 if self._ring is None else self._ring.nbytes()
        working += 0 if self._share is None else self._share.nbytes()
        held = sum(record.slot.buffer.nbytes for record in records if record.slot is not None)
        host = sum(record.slab.nbytes for record in records if record.slab is not None)
        weights = {"host_bytes": 0, "device_bytes": 0} if self.host_weights is None else self.host_weights.memory()
        return {
            "device_bytes": held + self._versions.device_bytes() + weights["device_bytes"],
            "host_bytes": host + self._versions.host_bytes() + weights["host_bytes"],
            "ring_bytes": working,
        }

    def set_residency(self, gib: float | Literal["auto"]) -> None:
        """Set how many GiB of state stay on the device; ``"auto"`` measures what is free. Nothing may be under way.
        Each replica may have another size.

        Raises:
            ValueError: this backend cannot keep a part of the state on the device.
        """
        if self.name != "stream":
            raise ValueError(
                f"set_residency: optimizer_state.backend is {self.name}, which does not divide the state between "
                "device and host; backend stream does"
            )
        self.synchronize()
        self._settings["resident_gib"] = gib
        self._versions.has_resident_state = gib != 0
        if self._device is not None:
            self._residency.set_budget(self._budget(self._device))
            self._residency.shrink(self._records)
            if self._ring is not None:
                self._ensure_ring()
            self._prepared = False

    def take_residency_of(self, other: Store) -> None:
        """Before :meth:`register`: what :meth:`set_residency` has set there holds here, too."""
        if self.name == other.name:
            self._settings["resident_gib"] = other._settings["resident_gib"]
            self._versions.has_resident_state = other._versions.has_resident_state

    def _budget(self, device: torch.device) -> Budget:
        gib = self._settings["resident_gib"]
        return AutoBudget(device_memory(device)) if gib == "auto" else int(gib * GIB)

    def release_device_memory(self) -> None:
        """Free all device memory; it is allocated again at the next use. Nothing may be under way.

        Raises:
            HostMemoryError: the host has no room for what is on the device; nothing has changed.
        """
        if not self._records:
            return
        self.synchronize()
        self._residency.evict_all(list(self._records))
        for device in {record.device for record in self._records}:
            self._lanes.wait_until_idle(device)
        self._ring = None
        self._versions.free_device_memory()
        self._staging.free()
        self._splitters.free()
        if self.host_weights is not None:
            self.host_weights.free()
        if self._share is not None:
            self._share.free()
        self._prepared = False

    def synchronize(self) -> None:
        """Wait until all queued work has reached the parameters and the state."""
        self._lanes.synchronize()
        if self.host_weights is not None:
            self.host_weights.synchronize()

    def close(self) -> None:
        """Free all memory."""
        self._free()
        if self._share is not None:
            self._share.close()

    def _free(self) -> None:
        for lanes in self._lanes.values():
            with contextlib.suppress(LaneError):
                lanes.synchronize()
            lanes.close()
        self._versions.release()
        for record in self._records:
            record.close()
        self._start()

    # -- small parts

    def _ensure_ring(self) -> None:
        """Make the ring, and replace it if records of other sizes, or more or fewer of them, go through it."""
        if not self._on_host:
            return
        sizes = self._slot_sizes()
        if self._ring is not None and sorted(self._ring.sizes) == sorted(sizes):
            return
        if self._ring is not None:  # its memory is freed
            self._lanes.wait_until_idle(self.lanes.device)
            self._ring = None
        try:
            self._ring = Ring(self.lanes, sizes, self._versions.slot_bytes)
        except torch.OutOfMemoryError as error:
            what = "all optimizer state at once" if self._one_slot_each else f"a ring of {len(sizes)} slots"
            advice = "set backend: stream" if self._one_slot_each else "lower optimizer_state.ring_mib"
            raise torch.OutOfMemoryError(
                f"no room on {self._device} for {what} ({sum(sizes) / 2**20:.0f} MiB); {advice}"
            ) from error

    def _live_ring(self) -> Ring:
        if self._ring is None:
            self._ensure_ring()
        assert self._ring is not None, "records live on the device"
        return self._ring

    def _slot_sizes(self) -> list[int]:
        """One slot for each record that goes through the ring, with the previous weights that follow it; or as many of
        the largest size as :class:`RingPlan` has room for, and :meth:`look_ahead` needs."""
        sizes = [self._versions.slot_bytes(record) for record in self._streamed()]
        if self._one_slot_each:
            return sizes
        largest = max([1, *sizes])
        needed = self._lookahead + 1 if self.peers_wait else 1
        return [largest] * min(len(sizes), max(self._ring_plan.slot_count(largest), needed))

    def _streamed(self) -> list[Record]:
        """The records that go through the ring."""
        return [record for record in self._records if record not in self._residency.chosen]

    def _drop_prefetched(self, managed: Managed) -> None:
        """Drop what was fetched if a record of this parameter is in it."""
        records = set(self._records.of(managed))
        if self._ring is not None and not records.isdisjoint(self._ring.staged()):
            self._ring.drop_prefetched()

    def _reset_pipeline(self) -> None:
        """Wait for all work and drop what was fetched, so that records may be edited. Clears a failure."""
        for lanes in self._lanes.values():
            if lanes.failed:
                lanes.reset()
                self._residency.reset(self._records)
            else:
                lanes.synchronize()
        self._acquired, self._prepared = None, False
        if self.host_weights is not None:
            self._release_weights(None)
            if self.host_weights.lanes.failed:
                self.host_weights.abandon()
            self.host_weights.synchronize()
        if self._ring is not None:
            self._ring.reset()


def _has_split_master(owner: Managed) -> bool:
    return owner.fused_update and coding_of(owner) == "split"


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
