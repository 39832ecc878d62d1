"""Tensors whose memory is on the host for a while, as the same tensors: whoever holds one can go on using it there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightstep.state.host_memory import HostSlab, require

__all__ = ["Parking"]

_ALIGNMENT = 64  # bytes


@dataclass
class _Parked:
    """One storage's copy on the host (uint8), and the tensors that lie in it, with the element where each begins."""

    tensors: list[tuple[Tensor, int]]
    device: torch.device
    host: Tensor

    def lie_in(self, memory: Tensor) -> None:
        """The tensors are in ``memory`` (uint8) from now on, as they were in their storage."""
        for tensor, start in self.tensors:
            flat = memory[: memory.numel() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
            tensor.data = flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset() + start)


class Parking:
    """Page-locked host memory for device tensors; kept for the next time, because page-locking is slow.

    The tensors stay the same objects, with their memory on the host or on the device. Views that somebody made of them
    do not follow, and keep the memory alive that they were made of.
    """

    def __init__(self) -> None:
        self._slabs: dict[torch.device, HostSlab] = {}
        self._parked: list[_Parked] = []

    def host_bytes(self) -> int:
        """Host memory held."""
        return sum(slab.nbytes for slab in self._slabs.values())

    def away_bytes(self) -> int:
        """Device memory that is given back now."""
        return sum(parked.host.nbytes for parked in self._parked)

    def park(self, tensors: Iterable[Tensor], staying: Iterable[Tensor] = ()) -> None:
        """Move these to the host; the host waits. Nothing is done while others are parked.

        Args:
            tensors: of any devices; those that share a storage go on sharing it.
            staying: whatever lies in the storages of these stays there too.

        Raises:
            HostMemoryError: there is no room for them; nothing was changed.
        """
        if self._parked:
            return
        kept = {tensor.untyped_storage().data_ptr() for tensor in staying}
        by_storage: dict[tuple[torch.device, int], list[Tensor]] = {}
        for tensor in tensors:
            # A subclass (a quantised moment) has memory of its own kind, which stays.
            address = tensor.untyped_storage().data_ptr() if type(tensor) is Tensor else 0
            if address and address not in kept:
                by_storage.setdefault((tensor.device, address), []).append(tensor)
        parked = self._with_places(list(by_storage.values()))
        for one in parked:
            one.host.copy_(_storage_of(one.tensors[0][0]), non_blocking=True)
        _wait(parked)
        for one in parked:
            one.lie_in(one.host)
        self._parked = parked

    def bring_back(self) -> None:
        """Back to the device, ready for what is queued next on the current stream.

        Raises:
            torch.OutOfMemoryError: the device has no room for all of it now; nothing was changed.
        """
        memories = [torch.empty_like(one.host, device=one.device) for one in self._parked]
        for one, memory in zip(self._parked, memories, strict=True):
            one.lie_in(memory.copy_(one.host, non_blocking=True))
        self._parked = []

    def close(self) -> None:
        """Give the host memory back; nothing may be parked that is still needed."""
        for slab in self._slabs.values():
            slab.close()
        self._slabs, self._parked = {}, []

    def _with_places(self, groups: list[list[Tensor]]) -> list[_Parked]:
        """One place on the host for each group, one behind the other, in one slab per device."""
        sizes = [group[0].untyped_storage().nbytes() for group in groups]
        totals: dict[torch.device, int] = {}
        starts = []
        for group, size in zip(groups, sizes, strict=True):
            starts.append(totals.get(group[0].device, 0))
            totals[group[0].device] = starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT
        self._make_slabs(totals)
        parked = []
        for group, size, start in zip(groups, sizes, starts, strict=True):
            device = group[0].device
            host = self._slabs[device].tensor(torch.uint8, size, start)
            parked.append(_Parked([(tensor, int(tensor.storage_offset())) for tensor in group], device, host))
        return parked

    def _make_slabs(self, totals: dict[torch.device, int]) -> None:
        small = {d: size for d, size in totals.items() if d not in self._slabs or self._slabs[d].nbytes < size}
        freed = sum(self._slabs[device].nbytes for device in small if device in self._slabs)
        require(sum(small.values()) - freed, "releasing device memory: the optimizer state on the host")
        for device, size in small.items():
            if device in self._slabs:
                self._slabs.pop(device).close()
            self._slabs[device] = HostSlab(size, device=device, what="released optimizer state")


def _storage_of(tensor: Tensor) -> Tensor:
    """All bytes of the tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _wait(parked: Iterable[_Parked]) -> None:
    for device in {one.device for one in parked if one.device.type != "cpu"}:
        torch.accelerator.synchronize(device)
