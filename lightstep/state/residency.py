"""Records that stay on the device between steps: as many as fit a budget, from the front of the walk on.

A resident record keeps the layout and the coding that it has on the host, in a buffer of its own that takes the place
of a ring slot: no fetch, no write-back, and the same bits. Its host memory stays allocated, so it can always be brought
down. The front of the walk is what a forward needs first, and while it is updated the link is free for the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch

from lightstep.state.lanes import Lanes
from lightstep.state.record import Record
from lightstep.state.ring import Slot
from lightstep.state.spare_memory import GIB, AutoBudget, DeviceMemory

__all__ = ["Residency"]

logger = logging.getLogger(__name__)


class Residency:
    """The device buffers of resident records.

    The newest bytes of a record are in its buffer after an update, until it is brought down (``_dirty``), and on the
    host after an edit, until the next step (``_stale``).

    Args:
        memory: of the lanes' device, where it is known.
        budget: bytes, or what decides about them before each step.
        before_write: called with a record before all of its host memory is written.
    """

    def __init__(
        self,
        lanes: Lanes,
        memory: DeviceMemory | None,
        budget: int | AutoBudget,
        before_write: Callable[[Record], object],
    ) -> None:
        self._lanes, self._memory, self._before_write = lanes, memory, before_write
        self._budget = budget
        self._allowed = 0 if isinstance(budget, AutoBudget) else budget
        self._chosen: set[Record] = set()
        self._slots: dict[Record, Slot] = {}
        self._dirty: set[Record] = set()
        self._stale: set[Record] = set()
        self._is_current = False
        self._ever = False  # anything was resident

    def __contains__(self, record: Record) -> bool:
        """Whether the record is, or is about to be, resident: it does not go through the ring."""
        return record in self._chosen

    def nbytes(self) -> int:
        """Device memory held."""
        return sum(slot.buffer.nbytes for slot in self._slots.values())

    # -- before a step, with no step under way

    def choose(self, records: Sequence[Record]) -> None:
        """Decide which of ``records`` (all, in the order of the walk) shall be resident; the others leave."""
        state_exists = any(part.history is not None for record in records for part in record.parts)
        if isinstance(self._budget, AutoBudget) and state_exists:
            allowed = self._budget.before_step(self.nbytes())
            self._is_current = self._is_current and allowed == self._allowed
            self._allowed = allowed
        if not self._is_current:
            self.shrink(records)
            self._chosen = set(_front(records, self._allowed))

    def shrink(self, records: Sequence[Record]) -> None:
        """What is over the budget leaves at once; before the next step others may come."""
        staying = _front(records, self._allowed)
        self.evict([record for record in self._slots if record not in staying])

    def reload(self) -> None:
        """Buffers for the chosen, filled from the host. Where the device has no room, fewer are chosen."""
        if self._is_current:
            return
        new = sorted((record for record in self._chosen if record not in self._slots), key=_unit_index)
        # So that no buffer lies in the middle of what activations will use again.
        cached = self._empty_cache() if new else 0
        no_room = False
        for record in new:
            try:
                self._slots[record] = _new_slot(record.nbytes, self._lanes)
            except torch.OutOfMemoryError:
                no_room = True
                break
            self._stale.add(record)
        if no_room:
            self._shrink_to_fit(cached)
        for record in sorted(self._chosen & self._stale, key=_unit_index):
            self._fetch(record)
        if new:
            self._ever = True
            if isinstance(self._budget, AutoBudget):
                self._budget.changed()
        self._is_current = True

    def set_budget(self, budget: int | AutoBudget) -> None:
        """From the next step on; see :meth:`shrink`."""
        if isinstance(budget, AutoBudget) and self._ever:
            budget.changed()  # the peak so far may be that of records which are gone
        self._budget, self._is_current = budget, False
        self._allowed = 0 if isinstance(budget, AutoBudget) else budget

    def evict_all(self) -> None:
        """All of them leave, for the time being."""
        self.evict(list(self._slots))
        self._chosen.clear()
        self._is_current = False
        if isinstance(self._budget, AutoBudget):
            self._budget.remeasure()

    # -- in a step

    def acquire(self, record: Record) -> Slot:
        """The record's buffer, ready for what the caller does next."""
        slot, caller = self._slots[record], self._lanes.caller()
        for event in (slot.staged, slot.updated, slot.drained):
            caller.wait(event)
        return slot

    def release(self, record: Record) -> None:
        """What the caller does with it is queued."""
        self._lanes.caller().record(self._slots[record].updated)
        self._dirty.add(record)

    # -- records in other hands, with no step under way

    def write_back(self, records: Iterable[Record]) -> None:
        """The records' host memory becomes up to date; the host waits."""
        newer = [record for record in records if record in self._dirty]
        lane = self._lanes.device_to_host
        for record in newer:
            self._before_write(record)
            slot, target = self._slots[record], record.bytes
            assert target is not None
            lane.wait(slot.updated)
            lane.copy(target, slot.buffer, f"bringing down {record.unit.label}")
            record.written_back = lane.record(slot.drained)
        if newer:
            self._lanes.synchronize()
            self._dirty.difference_update(newer)

    def mark_stale(self, records: Iterable[Record]) -> None:
        """The records' host memory was written to (after :meth:`write_back`), or has another size now."""
        resident = [record for record in records if record in self._slots]
        self.drop(record for record in resident if self._slots[record].buffer.nbytes != record.nbytes)
        self._stale.update(record for record in resident if record in self._slots)
        self._is_current = False

    def evict(self, records: Iterable[Record]) -> None:
        """Back to the host."""
        leaving = [record for record in records if record in self._slots]
        if not leaving:
            return
        self.write_back(leaving)
        if self._lanes.device.type != "cpu":
            torch.accelerator.synchronize(self._lanes.device)  # the memory may be given to other streams
        self.drop(leaving)
        self._empty_cache()

    def drop(self, records: Iterable[Record]) -> None:
        """What the device holds of these is of no interest any more; nothing may be under way there."""
        for record in list(records):
            self._slots.pop(record, None)
            self._chosen.discard(record)
            self._dirty.discard(record)
            self._stale.discard(record)
        self._is_current = False

    def reset(self) -> None:
        """After a failure: what was on its way up may not have arrived."""
        self._stale.update(self._slots.keys() - self._dirty)
        self._is_current = False

    def invalidate(self) -> None:
        """Records came, went, or have other sizes: the next step chooses anew."""
        self._is_current = False

    # -- small parts

    def _fetch(self, record: Record) -> None:
        slot, lane, source = self._slots[record], self._lanes.host_to_device, record.bytes
        assert source is not None
        target = slot.buffer
        for event in (slot.updated, record.written_back):
            if event is not None:
                lane.wait(event)
        lane.copy(target, source, f"bringing up {record.unit.label}")
        lane.record(slot.staged)
        self._stale.discard(record)

    def _shrink_to_fit(self, cached: int) -> None:
        """The device is full: the last ones leave again until the margin is free and the ``cached`` bytes that the next
        forward will want; no more are tried."""
        short = cached + (0 if self._memory is None else self._memory.margin)
        leaving = []
        for record in sorted(self._slots, key=_unit_index, reverse=True):
            if short <= 0:
                break
            leaving.append(record)
            short -= record.nbytes
        self.evict(leaving)
        self._empty_cache()
        self._chosen = set(self._slots)
        self._allowed = self.nbytes()
        if isinstance(self._budget, AutoBudget):
            self._budget.limit_to(self._allowed)
        logger.warning(
            "optimizer_state.resident_gib: %s has no room for more than %.2f GiB; that much stays on it",
            self._lanes.device,
            self._allowed / GIB,
        )

    def _empty_cache(self) -> int:
        """The allocator's free blocks go back to the device: they may be in the pool of another stream. How many bytes
        they were."""
        before = 0 if self._memory is None else self._memory.reserved()[0]
        if self._lanes.device.type != "cpu":
            torch.accelerator.memory.empty_cache()
        return before - (0 if self._memory is None else self._memory.reserved()[0])


def _front(records: Sequence[Record], budget: int) -> list[Record]:
    """Those from the front on that fit, whole ones only; one that does not is left out, and smaller ones may follow."""
    chosen = []
    for record in records:
        if record.bytes is not None and record.nbytes <= budget:
            chosen.append(record)
            budget -= record.nbytes
    return chosen


def _unit_index(record: Record) -> int:
    return record.unit.index


def _new_slot(nbytes: int, lanes: Lanes) -> Slot:
    slot = Slot(nbytes, lanes)
    lanes.wait_for_caller()
    return slot
