"""Records that stay on the device between steps: as many as fit a budget, in model order.

A resident record has the same layout and coding as on the host, in a device buffer of its own that replaces the ring
slot: it is neither fetched nor written back, and its bits are the same. Its host memory stays allocated, so it can
always be evicted. The first records are those that a forward needs first; while they are updated, the link is free for
the others.
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

    After an update the buffer of a record is newer than its host memory until it is written back (``_dirty``). After an
    edit the host memory is newer until the next step (``_stale``).

    Args:
        memory: of the lanes' device; ``None`` if it cannot be measured.
        budget: in bytes, or an object that computes it before each step.
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
        self._was_used = False  # some record has been resident

    def __contains__(self, record: Record) -> bool:
        """Whether the record is resident or has been chosen to be: it does not go through the ring."""
        return record in self._chosen

    def nbytes(self) -> int:
        """Size of the buffers on the device."""
        return sum(slot.buffer.nbytes for slot in self._slots.values())

    # -- before a step, with no step under way

    def choose(self, records: Sequence[Record]) -> None:
        """Choose the resident ones among ``records`` (all of them, by priority), and evict the others."""
        state_exists = any(part.history is not None for record in records for part in record.parts)
        if isinstance(self._budget, AutoBudget) and state_exists:
            allowed = self._budget.before_step(self.nbytes())
            self._is_current = self._is_current and allowed == self._allowed
            self._allowed = allowed
        if not self._is_current:
            self.shrink(records)
            self._chosen = set(_front(records, self._allowed))

    def shrink(self, records: Sequence[Record]) -> None:
        """Evict what exceeds the budget. The next step may choose other records."""
        staying = _front(records, self._allowed)
        self.evict([record for record in self._slots if record not in staying])

    def reload(self) -> None:
        """Allocate buffers for the chosen records and fill them from the host. If the device is full, fewer stay."""
        if self._is_current:
            return
        new = sorted((record for record in self._chosen if record not in self._slots), key=_unit_index)
        # The cache is emptied first, so that no buffer splits a block that activations will use again.
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
            self._was_used = True
            if isinstance(self._budget, AutoBudget):
                self._budget.changed()
        self._is_current = True

    def set_budget(self, budget: int | AutoBudget) -> None:
        """Set the budget from the next step on; see :meth:`shrink`."""
        if isinstance(budget, AutoBudget) and self._was_used:
            budget.changed()  # evicted records may have made the peak
        self._budget, self._is_current = budget, False
        self._allowed = 0 if isinstance(budget, AutoBudget) else budget

    def evict_all(self) -> None:
        """Evict all records. The next step chooses again."""
        self.evict(list(self._slots))
        self._chosen.clear()
        self._is_current = False
        if isinstance(self._budget, AutoBudget):
            self._budget.remeasure()

    # -- in a step

    def acquire(self, record: Record) -> Slot:
        """The record's buffer, ready for the caller's next work."""
        slot, caller = self._slots[record], self._lanes.caller()
        for event in (slot.staged, slot.updated, slot.drained):
            caller.wait(event)
        return slot

    def release(self, record: Record) -> None:
        """The caller has queued its work on the buffer, which changes it."""
        self._lanes.caller().record(self._slots[record].updated)
        self._dirty.add(record)

    # -- reads and edits on the host, with no step under way

    def write_back(self, records: Iterable[Record]) -> None:
        """Bring the records' host memory up to date, and wait for the copies."""
        newer = [record for record in records if record in self._dirty]
        lane = self._lanes.device_to_host
        for record in newer:
            self._before_write(record)
            slot, target = self._slots[record], record.bytes
            assert target is not None
            lane.wait(slot.updated)
            lane.copy(target, slot.buffer, f"writing back {record.unit.label}")
            record.written_back = lane.record(slot.drained)
        if newer:
            self._lanes.synchronize()
            self._dirty.difference_update(newer)

    def mark_stale(self, records: Iterable[Record]) -> None:
        """The records' host memory was edited (after :meth:`write_back`), or has another size now."""
        resident = [record for record in records if record in self._slots]
        self.drop(record for record in resident if self._slots[record].buffer.nbytes != record.nbytes)
        self._stale.update(record for record in resident if record in self._slots)
        self._is_current = False

    def evict(self, records: Iterable[Record]) -> None:
        """Write the records back and free their buffers."""
        leaving = [record for record in records if record in self._slots]
        if not leaving:
            return
        self.write_back(leaving)
        if self._lanes.device.type != "cpu":
            torch.accelerator.synchronize(self._lanes.device)  # other streams may get the memory
        self.drop(leaving)
        self._empty_cache()

    def drop(self, records: Iterable[Record]) -> None:
        """Free the records' buffers without writing them back; nothing may be under way there."""
        for record in list(records):
            self._slots.pop(record, None)
            self._chosen.discard(record)
            self._dirty.discard(record)
            self._stale.discard(record)
        self._is_current = False

    def reset(self) -> None:
        """After a failure: buffers that were being filled are filled again."""
        self._stale.update(self._slots.keys() - self._dirty)
        self._is_current = False

    def invalidate(self) -> None:
        """Choose again before the next step: records were added or removed, or have other sizes."""
        self._is_current = False

    # -- small parts

    def _fetch(self, record: Record) -> None:
        slot, lane, source = self._slots[record], self._lanes.host_to_device, record.bytes
        assert source is not None
        target = slot.buffer
        for event in (slot.updated, record.written_back):
            if event is not None:
                lane.wait(event)
        lane.copy(target, source, f"fetching {record.unit.label}")
        lane.record(slot.staged)
        self._stale.discard(record)

    def _shrink_to_fit(self, cached: int) -> None:
        """The device is full: evict the last records until the margin is free, and the ``cached`` bytes that the next
        forward will allocate again. The budget becomes what is left."""
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
        """Return the allocator's free blocks to the device, because they may belong to another stream's pool. Returns
        their size in bytes."""
        before = 0 if self._memory is None else self._memory.reserved()[0]
        if self._lanes.device.type != "cpu":
            torch.accelerator.memory.empty_cache()
        return before - (0 if self._memory is None else self._memory.reserved()[0])


def _front(records: Sequence[Record], budget: int) -> list[Record]:
    """The first records that fit, whole. A record that does not fit is skipped, and smaller ones after it may fit."""
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
