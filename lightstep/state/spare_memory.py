"""Measures how much device memory is spare, for ``auto`` of ``resident_gib`` (state) and ``gradients_gib``."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["GIB", "AutoBudget", "DeviceMemory", "device_memory"]

GIB = 1 << 30


class DeviceMemory(Protocol):
    """The use of a device's memory, in bytes."""

    margin: int
    """Memory to leave free, for fragmentation and for libraries that allocate on their own."""

    def reserved(self) -> tuple[int, int]:
        """What this process's caching allocator has reserved now, and at its peak. Does not call the driver."""

    def available(self) -> int:
        """What this process has reserved or could allocate, given the present use by other processes."""


class _CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.margin = max(torch.cuda.get_device_properties(device).total_memory // 20, GIB)

    def reserved(self) -> tuple[int, int]:
        found = torch.cuda.memory_stats_as_nested_dict(self._device)["reserved_bytes"]["all"]
        return int(found["current"]), int(found["peak"])

    def available(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        limit = int(torch.cuda.get_per_process_memory_fraction(self._device) * total)
        return min(free + self.reserved()[0], limit)


def device_memory(device: torch.device) -> DeviceMemory | None:
    """``None`` on the CPU, and under an allocator that is not torch's own, which has no counters."""
    if device.type != "cuda" or torch.cuda.get_allocator_backend() not in ("native", "cudaMallocAsync"):
        return None
    return _CudaMemory(device)


class AutoBudget:
    """The budget for resident records, or for gradients that stay, in bytes: what the peak of all else leaves free.

    Everything else is the allocator's reserved memory less the resident records. Its peak is tracked from the first
    step on. The budget is computed once, and again when half of the margin is used up. In other steps it stays the
    same, and only the allocator's counters are read.

    Args:
        memory: that of the device; ``None``: the budget is 0.
    """

    first_steps = 3
    """Number of steps with all state streamed that are observed before any state stays."""

    def __init__(self, memory: DeviceMemory | None) -> None:
        self._memory = memory
        self._watched = 0
        self._other_bytes = 0
        self._peak: int | None = None
        self._available = 0
        self._size: int | None = None

    def before_step(self, held: int) -> int:
        """The budget from now on; called between a step's backward and its update, with ``held`` bytes resident."""
        if self._memory is None:
            return 0
        self._watch(held)
        self._watched += 1
        if self._watched < self.first_steps:
            return 0
        if self._size is None or self._available - self._other_bytes - held < self._memory.margin // 2:
            self._available = self._memory.available()
            self._size = max(self._available - self._other_bytes - self._memory.margin, 0)
        return self._size

    def _watch(self, held: int) -> None:
        """Update the peak of everything but the ``held`` bytes.

        A peak that has not changed since the last call is ignored: it was reached when other records were resident.
        The user may reset it at any time.
        """
        assert self._memory is not None
        reserved, peak = self._memory.reserved()
        self._other_bytes = max(self._other_bytes, (peak if peak != self._peak else reserved) - held, reserved - held)
        self._peak = peak

    def changed(self) -> None:
        """Records were loaded or evicted: ignore the peak that this made."""
        if self._memory is not None:
            _, self._peak = self._memory.reserved()

    def limit_to(self, nbytes: int) -> None:
        """Limit the budget to what could be allocated."""
        self._size = nbytes

    def remeasure(self) -> None:
        """Compute the budget again before the next step: something else has used the device."""
        self._size = None
