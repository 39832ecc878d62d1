"""Each device's :class:`~lightstep.state.segment.Staging` memory, and what splits masters there."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from lightstep.state.lanes import LanesOfDevices
from lightstep.state.record import Record, coded_entries
from lightstep.state.schema import aligned
from lightstep.state.segment import MasterSplitter, Sizes, Staging, is_own_segment

__all__ = ["Splitters", "StagingOfDevices"]


class Splitters(dict[torch.device, MasterSplitter]):
    """The splitter of each device, for masters on the parameters' device or on the host; made at the first use."""

    def __init__(self, make: Callable[..., MasterSplitter]) -> None:
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


class StagingOfDevices(dict[torch.device, Staging]):
    """The staging memory of each device, allocated before a step or at its first use, and kept for the next steps.

    Attributes:
        is_kept: :meth:`prepare` was called after the last :meth:`free`.
    """

    def __init__(self, lanes: LanesOfDevices) -> None:
        super().__init__()
        self._lanes = lanes
        self._sizes: dict[torch.device, Sizes] = {}
        self._records: Collection[Record] = ()
        self._masters = self.is_kept = False
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
        if self.is_kept and not self.is_steady and not any(used):
            self.is_steady = True
            self._measure()
        for device in self._sizes.keys() - self.keys():
            self.__missing__(device)
        self.is_kept = True

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
        self.is_kept = False
        self.free_temporary()

    def free_temporary(self) -> None:
        """Free what was allocated since :meth:`free` by somebody who is done with it now."""
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
