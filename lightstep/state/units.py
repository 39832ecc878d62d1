"""What is staged together: the parameters of one layer, cut so that no unit needs more than one ring slot."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from lightstep.state.backend import Managed, Unit

__all__ = ["CUT_ELEMENTS", "RingError", "group_by_layer", "plan_units"]

CUT_ELEMENTS = 128
"""Tensors are cut at multiples of this many elements: every part then starts on a 128-byte boundary or better."""

SMALL_UNIT = 4 << 20
"""Bytes: layers with less are staged together, up to this size. Below it copies do not reach link speed."""

_WORTH_A_CUT = 16  # the rest of a unit is filled with a piece of the next tensor only from 1/16 of a slot on

Part = tuple[Managed, int, int]
Bytes = Callable[[Managed, int], int]
"""``bytes_of(managed, elements)``: what a part of that many elements takes up in a slot; grows with ``elements``."""


class RingError(ValueError):
    """The ring of device buffers is too small for what has to go through it."""


def group_by_layer(managed: Iterable[Managed]) -> list[list[Managed]]:
    """Parameters with equal ``layer`` together, layers in order of first appearance, each parameter once.

    Layers are gathered also when they are not consecutive (one parameter group for weights and one for biases).
    Parameters without a layer form the remainder: each run of them is a group, so that what stands before the first
    block (the embedding) and what stands behind the last (norm, head) stay apart.
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
    """Units of at most ``capacity`` bytes each, in model order; every element of every parameter in exactly one part.

    A layer that needs several units is divided into ones of about equal size. Cuts inside a tensor fall on multiples of
    :data:`CUT_ELEMENTS`; tensors that their optimizer needs whole, and those that are not contiguous, are not cut.

    Raises:
        RingError: a piece that cannot be cut any smaller needs more than ``capacity``.
    """
    units = [
        parts
        for listed in apart(managed)
        for group in _merge_small_layers(group_by_layer(listed), bytes_of, min(SMALL_UNIT, capacity // 4))
        for parts in _divide_layer(group, bytes_of, capacity)
    ]
    return [Unit(index, tuple(parts)) for index, parts in enumerate(units)]


def apart(managed: Sequence[Managed]) -> list[list[Managed]]:
    """Parameters that ranks update together have units of their own, the same on all of them."""
    return [[item for item in managed if (item.rows is None) is alone] for alone in (True, False)]


def _merge_small_layers(layers: list[list[Managed]], bytes_of: Bytes, limit: int) -> list[list[Managed]]:
    """Layers that follow each other and need at most ``limit`` bytes together, as one."""
    together: list[list[Managed]] = []
    filled = limit + 1
    for layer in layers:
        size = sum(bytes_of(item, item.planned) for item in layer)
        if filled + size <= limit:
            together[-1].extend(layer)
            filled += size
        else:
            together.append(list(layer))
            filled = size
    return together


def smallest_piece(item: Managed, bytes_of: Bytes) -> int:
    """Bytes that a slot must have at the least for this parameter."""
    elements = item.planned
    return bytes_of(item, elements if _must_stay_whole(item) else min(elements, CUT_ELEMENTS))


def _must_stay_whole(item: Managed) -> bool:
    return item.whole_tensors or not item.local.is_contiguous()


def _divide_layer(group: list[Managed], bytes_of: Bytes, capacity: int) -> list[list[Part]]:
    """One layer as units of at most ``capacity`` bytes, about equal where tensors may be cut."""
    for item in group:
        needed = smallest_piece(item, bytes_of)
        if needed > capacity:
            raise RingError(f"{item.name} needs {needed} bytes in one piece, and a slot of the ring has {capacity}")
    total = sum(bytes_of(item, item.planned) for item in group)
    slack = max(bytes_of(item, min(item.local.numel(), CUT_ELEMENTS)) for item in group)
    size = min(capacity, -(-total // -(-max(total, 1) // capacity)) + slack)
    filling = _UnitPacker(bytes_of, size, capacity)
    for item in group:
        if _must_stay_whole(item):
            filling.add_whole(item)
        else:
            filling.add_in_parts(item)
    return filling.units()


class _UnitPacker:
    """Fills one unit after the other."""

    def __init__(self, bytes_of: Bytes, size: int, capacity: int) -> None:
        self._bytes_of, self._size, self._capacity = bytes_of, size, capacity
        self._units: list[list[Part]] = []
        self._open: list[Part] = []
        self._used = 0

    def add_whole(self, item: Managed) -> None:
        if self._used + self._bytes_of(item, item.planned) > self._capacity:
            self._close()
        self._append(item, 0, item.local.numel())

    def add_in_parts(self, item: Managed) -> None:
        start, end = 0, item.local.numel()
        # An empty unit has room for CUT_ELEMENTS of any of its tensors, so that this comes to an end.
        while self._used + self._bytes_of(item, end - start) > self._size:
            room = max(self._size - self._used, 0)
            fitting = self._fitting(item, end - start, room)
            if fitting and (not self._open or room * _WORTH_A_CUT >= self._size):
                self._append(item, start, start + fitting)
                start += fitting
            self._close()
        self._append(item, start, end)

    def _fitting(self, item: Managed, elements: int, room: int) -> int:
        """The most elements, a multiple of the cut, whose bytes fit ``room``."""
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
        self._used += self._bytes_of(item, stop - start if item.rows is None else item.planned)

    def _close(self) -> None:
        if self._open:
            self._units.append(self._open)
        self._open, self._used = [], 0

    def units(self) -> list[list[Part]]:
        self._close()
        return self._units
