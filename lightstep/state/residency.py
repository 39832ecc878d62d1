"""Records that stay on the device between steps: as many as fit a budget, from the front of the walk on.

A resident record keeps the layout and the coding that it has on the host, in a buffer of its own that takes the place
of a ring slot: no fetch, no write-back, and the same bits. Its host memory stays allocated, so it can always be brought
down. The front of the walk is what a forward needs first, and while it is updated the link is free for the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from lightstep.state.lanes import Lanes
from lightstep.state.records import Record
from lightstep.state.ring import Slot

__all__ = ["GIB", "AutoBudget", "Residency", "spare_memory"]

logger = logging.getLogger(__name__)

GIB = 1 << 30
Spare = Callable[[torch.device], int]


def spare_memory(device: torch.device) -> int:
    """Bytes of ``device`` that were free when this process needed most, less a margin; negative: the margin is in use.

    The peak is that of torch's caching allocator (``torch.cuda.max_memory_reserved``). The margin, 5 % of the device
    and at least 1 GiB, is for what the allocator cannot use (fragments) and for libraries that allocate on their own.
    Other processes count as they are now. 0 on the CPU.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
    return free - max(kept, 0) - max(total // 20, GIB)


class AutoBudget:
    """``resident_gib: auto``: what was spare at the peak of the first steps, and less when the peak grows later.

    Args:
        spare: says how many bytes more may be taken now.
    """

    first_steps = 3
    """Steps with state, streamed as a whole, before anything stays."""

    def __init__(self, spare: Spare = spare_memory) -> None:
        self._spare = spare
        self._seen = 0

    def after_step(self, device: torch.device, held: int) -> int:
        """The budget in bytes for the next step; ``held`` bytes stay now."""
        self._seen += 1
        if self._seen < self.first_steps:
            return 0
        spare = self._spare(device)
        if self._seen == self.first_steps:
            return max(spare, 0)
        return max(held + min(spare, 0), 0)


class Residency:
    """The device buffers of resident records.

    Args:
        budget: bytes, or what decides about them after each step.
    """

    def __init__(self, budget: int | AutoBudget) -> None:
        self.budget = budget
        self._allowed = 0 if isinstance(budget, AutoBudget) else budget
        self._slots: dict[Record, Slot] = {}
        self._stale: set[Record] = set()
        self._settled = False

    def __contains__(self, record: Record) -> bool:
        return record in self._slots

    def nbytes(self) -> int:
        """Device memory held."""
        return sum(slot.buffer.nbytes for slot in self._slots.values())

    # -- one step

    def begin(self, records: Sequence[Record], lanes: Lanes) -> None:
        """Bring up what fits the budget of ``records`` (all, in the order of the walk); nothing when that is done."""
        if self._settled:
            return
        self.shrink(records, lanes)
        self._settled = True
        for record in _front(records, self._allowed):
            if record not in self._slots and not self._bring_up(record, lanes):
                break

    def take(self, record: Record, lanes: Lanes) -> Slot:
        """The record's buffer, ready for what the caller does next."""
        slot, caller = self._slots[record], lanes.caller()
        caller.wait(slot.staged)
        caller.wait(slot.updated)
        return slot

    def give_back(self, record: Record, lanes: Lanes, changed: bool) -> None:
        """What the caller does with it is queued."""
        lanes.caller().record(self._slots[record].updated)
        if changed:
            self._stale.add(record)

    def exchange(self, record: Record, lanes: Lanes) -> Slot:
        """A new buffer for a resident record that was laid out anew, with nothing in it; nothing may be under way."""
        del self._slots[record]
        self._slots[record] = slot = _new_slot(record.nbytes, lanes)
        return slot

    def after_step(self, device: torch.device) -> None:
        """The step is queued: ``auto`` decides about the next one."""
        if isinstance(self.budget, AutoBudget):
            allowed = self.budget.after_step(device, self.nbytes())
            if allowed != self._allowed:
                self._allowed, self._settled = allowed, False

    def set_budget(self, budget: int | AutoBudget) -> None:
        """From the next step on; see :meth:`shrink`."""
        self.budget, self._settled = budget, False
        self._allowed = 0 if isinstance(budget, AutoBudget) else budget

    def shrink(self, records: Sequence[Record], lanes: Lanes) -> None:
        """What is over the budget leaves the device now; nothing may be under way in the lanes."""
        staying = _front(records, self._allowed)
        self.evict([record for record in self._slots if record not in staying], lanes)

    def unsettle(self) -> None:
        """Records have changed their sizes: the next step chooses anew."""
        self._settled = False

    # -- from outside, with nothing under way in the lanes

    def bring_down(self, records: Iterable[Record], lanes: Lanes) -> None:
        """The records' host memory becomes up to date; the host waits."""
        stale = [record for record in records if record in self._stale]
        for record in stale:
            slot, lane = self._slots[record], lanes.device_to_host
            lane.wait(slot.updated)
            lane.run(partial(_copy, slot.buffer, record), f"bringing down {record.unit.label}")
            record.landed = lane.record(slot.drained)
        if stale:
            lanes.synchronize()
            self._stale.difference_update(stale)

    def evict(self, records: Iterable[Record], lanes: Lanes) -> None:
        """Back to the host; whoever still fits comes up again with the next step."""
        leaving = [record for record in records if record in self._slots]
        self.bring_down(leaving, lanes)
        if leaving and lanes.device.type != "cpu":
            torch.accelerator.synchronize(lanes.device)  # the memory may be given to other streams
        self.forget(leaving)

    def forget(self, records: Iterable[Record]) -> None:
        """What the device holds of these is of no interest any more; nothing may be under way there."""
        for record in list(records):
            self._slots.pop(record, None)
            self._stale.discard(record)
            self._settled = False

    def _bring_up(self, record: Record, lanes: Lanes) -> bool:
        try:
            slot = _new_slot(record.nbytes, lanes)
        except torch.OutOfMemoryError:
            held = self.nbytes()
            logger.warning(
                "optimizer_state.resident_gib: no room on %s for more than %.2f GiB; that much stays on it",
                lanes.device,
                held / GIB,
            )
            self._allowed = held
            return False
        source, target = record.bytes, slot.buffer
        assert source is not None
        lane = lanes.host_to_device
        if record.landed is not None:
            lane.wait(record.landed)
        lane.run(lambda: target.copy_(source, non_blocking=True), f"bringing up {record.unit.label}")
        lane.record(slot.staged)
        self._slots[record] = slot
        return True


def _front(records: Sequence[Record], budget: int) -> list[Record]:
    """Those from the front on that fit, whole ones only; one that does not is left out."""
    chosen = []
    for record in records:
        if record.bytes is not None and record.nbytes <= budget:
            chosen.append(record)
            budget -= record.nbytes
    return chosen


def _copy(buffer: Tensor, record: Record) -> None:
    assert record.bytes is not None
    record.bytes.copy_(buffer, non_blocking=True)


def _new_slot(nbytes: int, lanes: Lanes) -> Slot:
    slot = Slot(nbytes, lanes)
    allocated = lanes.event()
    lanes.caller().record(allocated)
    for lane in (lanes.host_to_device, lanes.compute, lanes.device_to_host):
        lane.wait(allocated)  # fresh device memory may still be read by what was queued before it was let go
    return slot
