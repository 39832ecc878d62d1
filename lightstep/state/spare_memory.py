"""How much device memory nobody needs, and what ``resident_gib: auto`` makes of it."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["GIB", "AutoBudget", "DeviceMemory", "device_memory"]

GIB = 1 << 30


class DeviceMemory(Protocol):
    """What a device's memory is in use for. In bytes."""

    margin: int
    """To be left free: for fragments, and for libraries that allocate on their own."""

    def reserved(self) -> tuple[int, int]:
        """What this process's caching allocator holds now, and has held at its peak; the driver is not asked."""

    def available(self) -> int:
        """What this process has or could have: other processes count as they are now."""


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
    """``None`` where it is the host's, and under an allocator that is not torch's own and counts nothing."""
    if device.type != "cuda" or torch.cuda.get_allocator_backend() not in ("native", "cudaMallocAsync"):
        return None
    return _CudaMemory(device)


class AutoBudget:
    """Bytes for resident records: what is left when everything else has had the most that it ever needed.

    Everything else is the allocator's reserved memory less the resident records. Its peak is followed from the first
    step on; the budget is made of it once, and again when the margin is half used up. Between those it is steady,
    and a step only reads the allocator's counters.

    Args:
        memory: of the device; ``None``: the budget is 0.
    """

    first_steps = 3
    """Steps with state, streamed as a whole, that are watched before anything stays."""

    def __init__(self, memory: DeviceMemory | None) -> None:
        self._memory = memory
        self._watched = 0
        self._other_bytes = 0
        self._peak: int | None = None
        self._available = 0
        self._size: int | None = None

    def before_step(self, held: int) -> int:
        """The budget from now on, between a step's backward and its update; ``held`` bytes are resident so far."""
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
        """Take note of what everything but the ``held`` bytes has needed.

        A peak that is the same as last time says nothing new: it was reached when other records were resident. The
        user may set it back at any time.
        """
        assert self._memory is not None
        reserved, peak = self._memory.reserved()
        self._other_bytes = max(self._other_bytes, (peak if peak != self._peak else reserved) - held, reserved - held)
        self._peak = peak

    def changed(self) -> None:
        """Records came or went, and the peak that this has made is not the others'."""
        if self._memory is not None:
            _, self._peak = self._memory.reserved()

    def limit_to(self, nbytes: int) -> None:
        """No more than this could be had."""
        self._size = nbytes

    def remeasure(self) -> None:
        """Before the next step: the device has been in other hands."""
        self._size = None
