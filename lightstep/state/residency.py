"""Records that live on the device between steps: as many as fit a budget, in model order, or all of them.

Such a record has the same layout and coding as on the host, in device memory of its own that replaces the ring slot: it
is neither fetched nor written back, and its bits are the same. Under a budget its host memory stays allocated, so it
can always be evicted. The first records are those that a forward needs first; while they are updated, the link is free
for the others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch

from lightstep.state.host_memory import require
from lightstep.state.lanes import Lanes, LanesOfDevices
from lightstep.state.record import Record
from lightstep.state.ring import Slot
from lightstep.state.spare_memory import GIB, AutoBudget, DeviceMemory
from lightstep.state.versions import Versions

__all__ = ["Budget", "Residency"]

logger = logging.getLogger(__name__)

Budget = int | AutoBudget | None
"""In bytes, or an object that computes it before each step. ``None``: all records live on the device."""


class Residency:
    """Chooses the records that live on the device, and moves records between device and host.

    Args:
        lanes_of: the lanes of a device.
        versions: protects what snapshots still have to read.
        memory: of the device; ``None`` if it cannot be measured.

    Attributes:
        chosen: the records that live on the device or will: they do not go through the ring.
        has_to_choose: whether :meth:`choose` may change anything.
    """

    def __init__(
        self,
        lanes_of: LanesOfDevices,
        versions: Versions,
        memory: DeviceMemory | None = None,
        budget: Budget = None,
    ) -> None:
        self._lanes_of, self._versions, self._memory = lanes_of, versions, memory
        self._budget = budget
        self._allowed = budget if isinstance(budget, int) else 0
        self.chosen: set[Record] = set()
        self._preferred: Sequence[Record] = ()
        self._is_current, self.has_to_choose = False, True
        self._was_used = False  # some record has been resident

    # -- before a step, with no step under way

    def choose(self, records: Iterable[Record]) -> None:
        """Choose the resident ones among ``records`` (all of them), and evict the others."""
        if isinstance(self._budget, AutoBudget) and any(
            part.history is not None for record in records for part in record.parts
        ):
            allowed = self._budget.before_step(_device_bytes(records))
            self._is_current = self._is_current and allowed == self._allowed
            self._allowed = allowed
        if not self._is_current:
            self.shrink(records)
            self.chosen = set(self._front(records))

    def prefer(self, records: Sequence[Record]) -> None:
        """From the next step on, choose these before others."""
        if records != self._preferred:
            self._preferred = records
            self.invalidate()

    def shrink(self, records: Iterable[Record]) -> None:
        """Evict what exceeds the budget. The next step may choose other records."""
        if self._budget is None:
            return
        staying = frozenset(self._front(records))
        self.evict([record for record in records if record.slot is not None and record not in staying])

    def _front(self, records: Iterable[Record]) -> list[Record]:
        """The first records that fit, whole, those that are preferred before all others. A record that does not fit is
        skipped, and smaller ones after it may fit."""
        listed = dict.fromkeys(records)
        if self._budget is None:
            return list(listed)
        chosen, left = [], self._allowed
        for record in dict.fromkeys([*(one for one in self._preferred if one in listed), *listed]):
            if record.bytes is not None and record.nbytes <= left:
                chosen.append(record)
                left -= record.nbytes
        return chosen

    def bring(self, records: Iterable[Record]) -> None:
        """Move the chosen ones among ``records`` to the device.

        Raises:
            torch.OutOfMemoryError: the device has no room for all records; nothing has changed. Under a budget fewer
                records are moved instead.
        """
        if self._is_current:
            return
        arriving = sorted((one for one in records if one in self.chosen and one.slot is None), key=_unit_index)
        # The cache is emptied first, so that no buffer splits a block that activations will use again.
        cached = self._empty_cache(arriving) if arriving and self._budget is not None else 0
        slots: dict[Record, Slot] = {}
        try:
            for record in arriving:
                slots[record] = Slot(record.nbytes, self._lanes_of[record.device])
        except torch.OutOfMemoryError:
            if self._budget is None:
                raise
            self._shrink_to_fit([record for record in self.chosen if record.slot is not None], slots, cached)
        for device in {record.device for record in slots}:
            self._lanes_of[device].wait_for_caller()
        for record, slot in slots.items():
            self._fetch(record, slot)
        if slots:
            self._was_used = True
            if isinstance(self._budget, AutoBudget):
                self._budget.changed()
        self._is_current, self.has_to_choose = True, isinstance(self._budget, AutoBudget)

    def set_budget(self, budget: Budget) -> None:
        """Set the budget from the next step on; see :meth:`shrink`."""
        if isinstance(budget, AutoBudget) and self._was_used:
            budget.changed()  # evicted records may have made the peak
        self._budget = budget
        self.invalidate()
        self._allowed = budget if isinstance(budget, int) else 0

    def invalidate(self) -> None:
        """Choose again before the next step: records were added or removed, or have other sizes."""
        self._is_current, self.has_to_choose = False, True

    # -- moving to the host, with no step under way

    def evict_all(self, records: Sequence[Record]) -> None:
        """Evict all records. The next step chooses again."""
        self.evict([record for record in records if record.slot is not None])
        if isinstance(self._budget, AutoBudget):
            self._budget.remeasure()

    def evict(self, records: Sequence[Record]) -> None:
        """Move the records to the host and free their device memory. The host waits for the copies.

        Raises:
            HostMemoryError: the host has no room; nothing has changed.
        """
        if not records:
            return
        missing = sum(record.nbytes for record in records if record.slab is None)
        require(missing, "releasing device memory: the optimizer state on the host")
        self._versions.before_move(records)
        devices = {record.device for record in records}
        for record in records:
            record.allocate_on_host()
        for device in devices:
            self._write_back([record for record in records if record.device == device], self._lanes_of[device])
        for record in records:
            record.slot = None
            self.chosen.discard(record)
        self.invalidate()
        self._empty_cache(records)

    def forget(self, record: Record) -> None:
        """The record is not used any more."""
        self.chosen.discard(record)

    def reset(self, records: Iterable[Record]) -> None:
        """After a failure in the lanes: records that were being fetched live on the host, as before."""
        for record in records:
            if record.slot is not None and record.slot.arriving:
                record.slot = None
        self.invalidate()

    def _write_back(self, records: Sequence[Record], lanes: Lanes) -> None:
        lane, queued = lanes.device_to_host, lanes.event()
        lane.wait(lanes.caller().record(queued))
        for record in records:
            slot, target = record.slot, record.host
            assert slot is not None
            if slot.staged is not None:
                lane.wait(slot.staged)
            if target is not None:
                lane.copy(target, slot.buffer, f"writing back {record.unit.label}")
            record.written_back = lane.record(lanes.event() if record.written_back is None else record.written_back)
        lanes.synchronize()
        if lanes.device.type != "cpu":
            torch.accelerator.synchronize(lanes.device)  # other streams may get the memory

    # -- small parts

    def _fetch(self, record: Record, slot: Slot) -> None:
        lane, source = self._lanes_of[record.device].host_to_device, record.host
        if record.written_back is not None:
            lane.wait(record.written_back)
        if source is not None:
            lane.copy(slot.buffer, source, f"fetching {record.unit.label}")
        lane.record(slot.staged)
        slot.arriving = True
        record.slot = slot

    def _shrink_to_fit(self, resident: Sequence[Record], arriving: dict[Record, Slot], cached: int) -> None:
        """The device is full: evict the last records until the margin is free, and the ``cached`` bytes that the next
        forward will allocate again. The budget becomes what is left."""
        short = cached + (0 if self._memory is None else self._memory.margin)
        leaving: list[Record] = []
        for record in sorted([*resident, *arriving], key=_unit_index, reverse=True):
            if short <= 0:
                break
            leaving.append(record)
            short -= record.nbytes
        for record in leaving:
            arriving.pop(record, None)
        self.evict([record for record in leaving if record.slot is not None])
        self.chosen = {one for one in resident if one.slot is not None} | arriving.keys()
        self._empty_cache(self.chosen)
        self._allowed = sum(record.nbytes for record in self.chosen)
        if isinstance(self._budget, AutoBudget):
            self._budget.limit_to(self._allowed)
        device = next((record.device for record in [*resident, *leaving, *arriving]), "the device")
        logger.warning(
            "optimizer_state.resident_gib: %s has no room for more than %.2f GiB; that much stays on it",
            device,
            self._allowed / GIB,
        )

    def _empty_cache(self, records: Iterable[Record]) -> int:
        """Return the allocator's free blocks to the device, because they may belong to another stream's pool. Returns
        their size in bytes."""
        before = 0 if self._memory is None else self._memory.reserved()[0]
        if any(record.device.type != "cpu" for record in records):
            torch.accelerator.memory.empty_cache()
        return before - (0 if self._memory is None else self._memory.reserved()[0])


def _device_bytes(records: Iterable[Record]) -> int:
    return sum(record.slot.buffer.nbytes for record in records if record.slot is not None)


def _unit_index(record: Record) -> int:
    return record.unit.index
