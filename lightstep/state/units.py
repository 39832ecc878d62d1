"""Divides parameters into units: a unit is one layer, cut into pieces that fit into a slot of the ring.

The slots of the ring, and the scratch memory of a unit, fit into ``ring_mib``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Sequence

from lightstep.state.record import ExpectedLayouts, coded_entries, coding_of
from lightstep.state.schema import Managed, Unit, aligned
from lightstep.state.segment import LARGE

__all__ = ["CUT_ELEMENTS", "MIB", "RingError", "RingPlan", "group_by_layer", "pack_whole", "plan_units"]

logger = logging.getLogger(__name__)

MIB = 1 << 20

CUT_ELEMENTS = 128
"""Tensors are cut at multiples of this many elements: every part then starts on a 128-byte boundary or better."""

SMALL_UNIT = 16 << 20
"""Bytes: consecutive smaller layers form one unit of at most this size: the host makes hundreds of calls for each."""

_FAST_COPY = 4 * MIB  # below this a copy does not reach link speed
_FEWEST_SLOTS = 3  # one is fetched, one updated and one written back

ParameterRange = tuple[Managed, int, int]
Bytes = Callable[[Managed, int], int]
"""``bytes_of(managed, elements)``: the size of such a part in a slot; grows with ``elements``."""


class RingError(ValueError):
    """The ring of device buffers is too small for the smallest possible pieces."""


def group_by_layer(managed: Iterable[Managed]) -> list[list[Managed]]:
    """Groups parameters by ``layer``, in order of first appearance; each parameter is listed once.

    A layer need not be consecutive: there may be one parameter group for weights and one for biases. Each run of
    parameters without a layer is a group, which separates those before the first block (the embedding) from those after
    the last (norm, head).
    """
    groups: dict[Hashable, list[Managed]] = {}
    seen: set[int] = set()
    run = -1
    in_run = False
    for item in managed:
        if id(item.param) in seen:
            continue
        seen.add(id(item.param))
        if item.layer is None and not in_run:
            run += 1
        in_run = item.layer is None
        key: Hashable = ("remainder", run) if item.layer is None else ("layer", item.layer)
        groups.setdefault(key, []).append(item)
    return list(groups.values())


def plan_units(managed: Sequence[Managed], bytes_of: Bytes, capacity: int) -> list[Unit]:
    """Units of at most ``capacity`` bytes, in model order. Each element of each parameter is in exactly one part.

    A layer that needs several units is divided into about equal ones. Tensors are cut at multiples of
    :data:`CUT_ELEMENTS`. Those that their optimizer needs whole, and non-contiguous ones, are not cut.

    Raises:
        RingError: the smallest piece of some parameter needs more than ``capacity``.
    """
    units = [
        parts
        for listed in split_shared_updates(managed)
        for group in _merge_small_layers(group_by_layer(listed), bytes_of, min(SMALL_UNIT, capacity // 4))
        for parts in _divide_layer(group, bytes_of, capacity)
    ]
    return [Unit(index, tuple(parts)) for index, parts in enumerate(units)]


def pack_whole(managed: Sequence[Managed], limit: int) -> list[Unit]:
    """Units of consecutive whole parameters on one device: at most ``limit`` elements, or one larger parameter."""
    units: list[list[Managed]] = []
    for listed in split_shared_updates(managed):
        filled, device = limit + 1, None
        for item in listed:
            filled += item.planned_elements
            if filled > limit or item.local.device != device:
                units.append([])
                filled, device = item.planned_elements, item.local.device
            units[-1].append(item)
    return [Unit(i, tuple((m, 0, m.local.numel()) for m in unit)) for i, unit in enumerate(units)]


def split_shared_updates(managed: Sequence[Managed]) -> list[list[Managed]]:
    """Two lists: parameters that this rank updates alone, and those that ranks update together.

    The latter get units of their own, which are the same on all ranks.
    """
    return [[item for item in managed if (item.rows is None) is alone] for alone in (True, False)]


def _merge_small_layers(layers: list[list[Managed]], bytes_of: Bytes, limit: int) -> list[list[Managed]]:
    """Merges consecutive layers that need at most ``limit`` bytes together."""
    together: list[list[Managed]] = []
    filled = limit + 1
    for layer in layers:
        size = sum(bytes_of(item, item.planned_elements) for item in layer)
        if filled + size <= limit:
            together[-1].extend(layer)
            filled += size
        else:
            together.append(list(layer))
            filled = size
    return together


def smallest_piece(item: Managed, bytes_of: Bytes) -> int:
    """Bytes of the smallest slot for this parameter."""
    elements = item.planned_elements
    return bytes_of(item, elements if _must_stay_whole(item) else min(elements, CUT_ELEMENTS))


def _must_stay_whole(item: Managed) -> bool:
    return item.whole_tensors or not item.local.is_contiguous()


def _divide_layer(group: list[Managed], bytes_of: Bytes, capacity: int) -> list[list[ParameterRange]]:
    """One layer as units of at most ``capacity`` bytes, about equal where tensors may be cut."""
    for item in group:
        needed = smallest_piece(item, bytes_of)
        if needed > capacity:
            raise RingError(
                f"{item.name} needs {needed} bytes in one piece, and a slot of the ring has {capacity}; raise "
                "optimizer_state.ring_mib"
            )
    total = sum(bytes_of(item, item.planned_elements) for item in group)
    slack = max(bytes_of(item, min(item.local.numel(), CUT_ELEMENTS)) for item in group)
    size = min(capacity, -(-total // -(-max(total, 1) // capacity)) + slack)
    packer = _UnitPacker(bytes_of, size, capacity)
    for item in group:
        if _must_stay_whole(item):
            packer.add_whole(item)
        else:
            packer.add_in_parts(item)
    return packer.units()


class _UnitPacker:
    """Packs parameters into units."""

    def __init__(self, bytes_of: Bytes, size: int, capacity: int) -> None:
        self._bytes_of, self._size, self._capacity = bytes_of, size, capacity
        self._units: list[list[ParameterRange]] = []
        self._open: list[ParameterRange] = []
        self._used = 0

    def add_whole(self, item: Managed) -> None:
        if self._used + self._bytes_of(item, item.planned_elements) > self._capacity:
            self._close()
        self._append(item, 0, item.local.numel())

    def add_in_parts(self, item: Managed) -> None:
        start, end = 0, item.local.numel()
        # This ends, because an empty unit has room for CUT_ELEMENTS of any tensor.
        while self._used + self._bytes_of(item, end - start) > self._size:
            room = max(self._size - self._used, 0)
            fitting = self._fitting(item, end - start, room)
            if fitting:
                self._append(item, start, start + fitting)
                start += fitting
            self._close()
        self._append(item, start, end)

    def _fitting(self, item: Managed, elements: int, room: int) -> int:
        """The largest multiple of CUT_ELEMENTS, less than ``elements``, that fits into ``room`` bytes."""
        low, high = 0, (elements - 1) // CUT_ELEMENTS
        while low < high:
            middle = (low + high + 1) // 2
            if self._bytes_of(item, middle * CUT_ELEMENTS) <= room:
                low = middle
            else:
                high = middle - 1
        return low * CUT_ELEMENTS

    def _append(self, item: Managed, start: int, stop: int) -> None:
        self._open.append((item, start, stop))
        self._used += self._bytes_of(item, stop - start if item.rows is None else item.planned_elements)

    def _close(self) -> None:
        if self._open:
            self._units.append(self._open)
        self._open, self._used = [], 0

    def units(self) -> list[list[ParameterRange]]:
        self._close()
        return self._units


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
