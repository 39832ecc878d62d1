"""Divides parameters into units of such a size that the slots of a ring, and the scratch memory of a unit, fit into
``ring_mib``."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from lightstep.state.record import ExpectedLayouts, coded_entries, coding_of
from lightstep.state.schema import Managed, Unit, aligned
from lightstep.state.staging import LARGE
from lightstep.state.units import RingError, plan_units, smallest_piece

__all__ = ["MIB", "RingPlan"]

logger = logging.getLogger(__name__)

MIB = 1 << 20
_FAST_COPY = 4 * MIB  # below this a copy does not reach link speed
_FEWEST_SLOTS = 3  # one is fetched, one updated and one written back


class RingPlan:
    """Plans a ring.

    Args:
        slots: their number; fewer, if one has to be larger for the largest matrix.
        mib: device memory of the ring, including scratch for joined masters.

    Attributes:
        scratch_bytes: of the last plan.
    """

    BULK_UNIT = 128 * MIB
    """Bytes of the largest unit if each record has a slot of its own."""

    def __init__(self, slots: int, mib: float) -> None:
        self.slots, self.mib = slots, mib
        self.scratch_bytes = 0.0
        self._layouts = ExpectedLayouts()

    def units(self, managed: Sequence[Managed], one_slot_each: bool) -> list[Unit]:
        """Units for these parameters.

        Args:
            one_slot_each: each record has a slot of its own, whatever ``mib`` is.

        Raises:
            RingError: the smallest possible piece of a parameter does not fit.
        """
        self._layouts = ExpectedLayouts()
        if not one_slot_each:
            return plan_units(managed, self._bytes_of, self._capacity(managed))
        largest = max((smallest_piece(item, self._bytes_of) for item in managed), default=1)
        return plan_units(managed, self._bytes_of, max(largest, self.BULK_UNIT))

    def _bytes_of(self, owner: Managed, elements: int) -> int:
        """Size in a record; at least that of the weights, which bounds the units of stateless optimizers too."""
        return max(self._layouts.record_bytes(owner, elements), aligned(elements) * owner.local.itemsize)

    def _capacity(self, managed: Sequence[Managed]) -> int:
        """Bytes of a slot, such that all slots and the scratch memory for one unit fit into the ring."""
        if not managed:
            return 1
        needed, name = max((smallest_piece(item, self._bytes_of), item.name) for item in managed)
        scratch = max(self._scratch_ratio(item) for item in managed)
        capacity = int(self.mib * MIB / (self.slots + scratch))
        if needed > capacity:
            capacity = self._larger_slot(needed, min(self.slots, _FEWEST_SLOTS) + scratch, name, managed)
        self.scratch_bytes = scratch * capacity
        if capacity < min(_FAST_COPY, sum(self._bytes_of(item, item.local.numel()) for item in managed)):
            logger.warning(
                "optimizer_state.ring_mib is %g: slots of %.2f MiB; copies reach link speed from 4 MiB on",
                self.mib,
                capacity / MIB,
            )
        return capacity

    def slot_count(self, size: int) -> int:
        """How many slots of ``size`` bytes there are room for."""
        room = int(self.mib * MIB - self.scratch_bytes + self.slots)  # capacities were rounded down
        return min(self.slots, room // max(size, 1))

    def _larger_slot(self, needed: int, shares: float, name: str, managed: Sequence[Managed]) -> int:
        """``needed`` bytes, if the ring has room for ``shares`` times as many."""
        if needed * shares <= self.mib * MIB:
            return needed
        largest = next(item for item in managed if item.name == name)
        why = " (its optimizer needs whole tensors)" if largest.whole_tensors else ""
        why = why or ("" if largest.local.is_contiguous() else " (it is not contiguous, and so it cannot be cut)")
        allowed, enough = int(self.mib * MIB / shares), 1.005 * needed * shares / MIB
        raise RingError(
            f"optimizer_state.ring_mib is {self.mib:g}, which allows slots of {allowed} bytes, and {name} needs "
            f"{needed} bytes in one piece{why}. Set ring_mib to "
            f"{math.ceil(enough) if enough >= 10 else f'{enough:.3g}'} or more"
        )

    def _scratch_ratio(self, item: Managed) -> float:
        """Bytes of scratch per byte of record: gathered weights, and either gathered gradients or, without a fused
        kernel, joined masters and widened entries."""
        sample = 1 << 20
        gathered = 0 if item.local.numel() >= LARGE else item.local.itemsize
        other = 4 if item.fused_update or coding_of(item) in ("split", "rounded") else 0
        widened = 0 if item.fused_update else 4 * len(coded_entries(item))
        record_bytes = self._bytes_of(item, sample)
        return (other + gathered + widened) * sample / record_bytes if record_bytes else 0.0
