"""Device memory in which the segments of one unit are put together and taken apart, and what splits their masters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightstep.distributed import Window
from lightstep.state.lanes import LanesOfDevices
from lightstep.state.record import Part, Record, Run, coded_entries
from lightstep.state.schema import aligned

__all__ = ["LARGE", "MasterSplitter", "Splitters", "Staging", "StagingOfDevices", "WeightRow", "is_own_segment"]

LARGE = 1 << 18
"""Parts with at least so many elements are segments of their own: gathering them would cost more than a launch."""


WeightRow = tuple[Tensor, int, Sequence[tuple[int, int]], int]
"""16-bit weights whose fingerprints are wanted: weights, position of the first one, ranges, and index of the first
range's fingerprint."""


Sizes = tuple[int, dict[torch.dtype, int], tuple[int, int], int]
"""Elements of masters, of gathered weights by dtype, the number and length of rows for moments, and the elements of the
largest unit."""


class MasterSplitter(Protocol):
    """Splits fp32 masters into bf16 weights and the remaining bits, and joins them; see
    ``lightstep.precision.split``."""

    def split(self, master: Tensor, weight: Tensor, low: Tensor, extra: Tensor) -> None: ...
    def join(
        self, weight: Tensor, low: Tensor, extra: Tensor, master: Tensor, magnitudes: Tensor | None = None
    ) -> None: ...
    def fingerprints(self, weight: Tensor, first: int, ranges: Any, out: Tensor) -> None: ...
    def fingerprint_rows(self, rows: Sequence[WeightRow], out: Tensor) -> None: ...
    def nbytes(self) -> int: ...
    def free(self) -> None: ...


class Splitters(dict[torch.device, MasterSplitter]):
    """The splitter of each device, for masters on the parameters' device or on the host; made at the first use."""

    def __init__(self, make: Callable[[torch.device], MasterSplitter]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, device: torch.device) -> MasterSplitter:
        splitter = self[device] = self._make(device)
        return splitter

    def nbytes(self) -> int:
        """Size of their scratch memory on devices."""
        return sum(splitter.nbytes() for device, splitter in self.items() if device.type != "cpu")

    def free(self) -> None:
        """Free that memory."""
        for splitter in self.values():
            splitter.free()


def is_own_segment(part: Part) -> bool:
    """Whether a part must be a segment of its own: it is large, or a 16-bit parameter that is its own master, which
    torch's CPU kernels round vector by vector."""
    return part.elements >= LARGE or (part.coding == "own" and part.owner.local.dtype != torch.float32)


class Staging:
    """Device memory for one unit in its flat order: joined masters, gathered weights, and fp32 copies of entries that
    are stored in a shorter dtype."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        masters, rows, (count, length), self._largest = sizes
        self.masters = torch.empty(masters, dtype=torch.float32, device=device)
        self.moments = [torch.zeros(length, dtype=torch.float32, device=device) for _ in range(count)]
        self._rows = {dtype: torch.zeros(n, dtype=dtype, device=device) for dtype, n in rows.items() if n}
        self._numbers: WeakKeyDictionary[Part, Tensor] = WeakKeyDictionary()
        self.was_used = False  # masters were joined, or moments widened
        self._gather_rows: WeakKeyDictionary[Run, tuple[Tensor, list[Tensor], list[Tensor]]] = WeakKeyDictionary()

    def element_numbers(self, run: Run) -> Tensor | Window:
        """The positions of its elements in their whole parameters: a window for one part, a list (int32, modulo 2^32)
        for several."""
        head = run.parts[0]
        if len(run.parts) == 1:
            return self.window_of(head)
        length, known = run.stop - run.first, self._numbers.get(head)
        if known is None or known.numel() < length:
            row = torch.zeros(length, dtype=torch.int32, device="cpu")
            for part, (a, b) in zip(run.parts, run.ranges, strict=True):
                row[a:b] = part.owner.window.numbers(part.start, part.stop)
            known = self._numbers[head] = row.to(run.device)
        return known[:length]

    @staticmethod
    def window_of(part: Part) -> Window:
        """Where its elements are in their whole parameter."""
        return part.owner.window._replace(first=part.start)

    def masters_for(self, run: Run) -> Tensor:
        """The row for a run's joined masters."""
        self.was_used = True
        if self.masters.numel() < run.stop:  # for all units at once: another stream may use what would be replaced
            self.masters = torch.empty(max(run.stop, self._largest), dtype=torch.float32, device=run.device)
        return self.masters[run.first : run.stop]

    def moments_for(self, run: Run, index: int) -> Tensor:
        """The row for one of a run's widened moments."""
        self.was_used = True
        while len(self.moments) <= index:
            self.moments.append(self.masters.new_empty(0))
        if self.moments[index].numel() < run.stop:
            self.moments[index] = torch.zeros(max(run.stop, self._largest), dtype=torch.float32, device=run.device)
        return self.moments[index][run.first : run.stop]

    def gather_row(self, run: Run) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The row for a run's gathered weights, views of its parts, and of the padding between them. The row of a run
        with ``flat`` weights is those, and needs no parts."""
        place = self._gather_rows.get(run)
        if place is None and run.flat is not None:
            place = self._gather_rows[run] = run.flat, [], []
        elif place is None:
            local = run.locals[0]
            rows = self._rows.get(local.dtype)  # None if all shards of this dtype are empty
            row = local.new_empty(0) if rows is None else rows[run.first : run.stop]
            gaps = [row[b : a + aligned(b - a)] for a, b in run.ranges[:-1] if b - a != aligned(b - a)]
            place = self._gather_rows[run] = row, run.parts_of(row), gaps
        return place

    def nbytes(self) -> int:
        held = (self.masters, *self.moments, *self._rows.values(), *self._numbers.values())
        return sum(row.nbytes for row in held)

    def free(self) -> None:
        """Free the memory, for good."""
        self.masters, self._rows, self.moments = self.masters.new_empty(0), {}, []
        self._gather_rows.clear()
        self._numbers.clear()


class StagingOfDevices(dict[torch.device, Staging]):
    """The staging memory of each device, allocated before a step or at its first use, and kept for the next steps."""

    def __init__(self, lanes: LanesOfDevices) -> None:
        super().__init__()
        self._lanes = lanes
        self._sizes: dict[torch.device, Sizes] = {}
        self._records: Collection[Record] = ()
        self._masters = self._kept = False
        self.is_steady = False
        """There is nothing that only first updates need, or it is not allocated any more."""

    def plan(self, records: Collection[Record], masters: bool) -> None:
        """Plan memory for the largest of these records; for joined ``masters``, too, or only when they are needed."""
        self._records, self._masters = records, masters
        self.is_steady = not any(part.owner.fused_update for record in records for part in record.parts)
        self._measure()

    def _measure(self) -> None:
        """Plan, and free the memory of devices that need another one."""
        before = self._sizes
        self._sizes = {
            device: _required_sizes(
                [one for one in self._records if one.device == device], self._masters, self.is_steady
            )
            for device in {record.device for record in self._records}
        }
        for device in [device for device in self if self._sizes.get(device) != before[device]]:
            self._lanes.wait_until_idle(device)  # other streams may use it
            self.pop(device).free()

    def prepare(self) -> None:
        """Allocate the memory. What only first updates need is freed after a step that did not use it.

        Raises:
            torch.OutOfMemoryError: there is no room.
        """
        used = [staging.was_used for staging in self.values()]
        for staging in self.values():
            staging.was_used = False
        if self._kept and not self.is_steady and not any(used):
            self.is_steady = True
            self._measure()
        for device in self._sizes.keys() - self.keys():
            self.__missing__(device)
        self._kept = True

    def __missing__(self, device: torch.device) -> Staging:
        try:
            staging = self[device] = Staging(self._sizes[device], device)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"no room on {device} for the masters of one unit (backend stream: lower optimizer_state.ring_mib)"
            ) from error
        return staging

    def nbytes(self) -> int:
        return sum(staging.nbytes() for staging in self.values())

    def free(self) -> None:
        """Free the memory; the next step allocates it again."""
        self._kept = False
        self.free_unless_kept()

    def free_unless_kept(self) -> None:
        """Free what was allocated since :meth:`free` by somebody who is done with it now."""
        if not self._kept:
            for staging in self.values():
                staging.free()
            self.clear()


def _required_sizes(records: Collection[Record], masters: bool, steady: bool) -> Sizes:
    """The sizes for the largest of these records.

    Args:
        masters: allocate memory for joined masters.
        steady: all parameters have state, so fused kernels need neither joined masters nor widened moments.
    """
    joined, rows = 0, dict.fromkeys((torch.bfloat16, torch.float16, torch.float32), 0)
    count = length = largest = 0
    for record in records:
        for part in record.parts:
            end = part.first + aligned(part.elements)
            largest = max(largest, end)
            by_class = not (steady and part.owner.fused_update)
            if part.coding in ("split", "rounded") and masters and by_class:
                joined = max(joined, end)
            if by_class and (kept := coded_entries(part.owner)):
                count, length = max(count, len(kept)), max(length, end)
            if not (is_own_segment(part) and part.owner.local.is_contiguous()):
                rows[part.owner.local.dtype] = max(rows[part.owner.local.dtype], end)
    return joined, rows, (count, length), largest
