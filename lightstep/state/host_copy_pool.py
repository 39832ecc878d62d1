"""Copies of tensors on the host, in page-locked memory that is kept and reused.

On an accelerator a copy is queued on the current stream: the caller goes on, and later work on that stream may write to
the tensor. Or the caller makes a copy on the device, and :meth:`HostCopyPool.bring` copies that to the host in the
background, so that later work does not wait for the host. On the CPU a copy is made at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightstep.distributed import local_tensor
from lightstep.state.host_memory import HostSlab, require
from lightstep.state.lanes import Event, LanesOfDevices
from lightstep.state.shared_memory import Address, SharedMemory

__all__ = ["HostCopyPool"]

_SMALLEST, _LARGEST = 1 << 20, 256 << 20
"""Bytes of a new slab: as many as all slabs so far, within these limits; more if one tensor needs more."""

_ALIGNMENT = 64


class HostCopyPool:
    """Copies of the tensors of one moment at a time; :meth:`reset` reuses their memory for the next.

    Args:
        what: what the memory is for, in errors.
        advice: what to do with less memory.
        is_shared: other processes of the host can map it, if the system has such memory.
    """

    def __init__(
        self,
        what: str = "copying what is saved while training goes on",
        advice: str = "A synchronous save (asynchronous=False) needs no copy",
        is_shared: bool = False,
    ) -> None:
        self._what, self._advice, self._is_shared = what, advice, is_shared
        self._slabs: dict[torch.device, list[HostSlab]] = {}
        self._used: dict[HostSlab, int] = {}
        self._made: dict[Tensor, Tensor] = {}
        self._expected = 0
        self._queued: list[Event] = []
        self._lanes = LanesOfDevices(small_pieces=True)

    @property
    def nbytes(self) -> int:
        """Size of the host memory."""
        return sum(slab.nbytes for slab in list(self._used))  # another thread may be adding one

    def reset(self) -> None:
        """Drop all copies, and reuse their memory. Nobody may read them any more."""
        self._used = dict.fromkeys(self._used, 0)
        self._made, self._expected, self._queued = {}, 0, []

    def reserve(self, nbytes: int) -> None:
        """Check that there is memory for ``nbytes`` more, which will be needed.

        Raises:
            HostMemoryError: there is not enough; nothing has been allocated.
        """
        self._expected += nbytes
        if self._expected > self.nbytes:
            require(self._expected - self.nbytes, self._what, self._advice)

    def allocate(self, tensor: Tensor) -> Tensor:
        """Host memory for a copy of ``tensor``, contiguous.

        Raises:
            HostMemoryError: there is not enough.
        """
        return self.allocate_bytes(tensor.nbytes, tensor.device).view(tensor.dtype).view(tensor.shape)

    def allocate_bytes(self, nbytes: int, device: torch.device) -> Tensor:
        """``nbytes`` bytes of host memory for copies from ``device``: 1-D uint8.

        Raises:
            HostMemoryError: there is not enough.
        """
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        slabs = self._slabs.setdefault(device, [])
        slab = next((slab for slab in slabs if slab.nbytes - self._used[slab] >= nbytes), None)
        if slab is None:
            slab = self._new_slab(nbytes, device)
            slabs.append(slab)
        start = self._used.get(slab, 0)
        self._used[slab] = start + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return slab.tensor(torch.uint8, (nbytes,), start)

    def _new_slab(self, needed: int, device: torch.device) -> HostSlab:
        nbytes = max(needed, min(max(self.nbytes, _SMALLEST), _LARGEST))
        shared = SharedMemory.create(nbytes) if self._is_shared else None
        return HostSlab(nbytes, device=device, what=self._what, touch=False, shared=shared)

    def place_of(self, copy: Tensor) -> tuple[Address, int] | None:
        """Where other processes find a copy: memory, and the first byte there. ``None``: they cannot."""
        for slab in list(self._used):
            start = slab.place_of(copy)
            if start is not None:
                return None if slab.shared is None else (slab.shared.address, start)
        return None

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy a tensor's local part, in the order of the current stream; read the copy with :meth:`wait_for`."""
        local = local_tensor(tensor).detach()
        return self.allocate(local).copy_(local, non_blocking=True)

    def copy_once(self, tensor: Tensor) -> Tensor:
        """:meth:`copy`, made once per tensor until :meth:`seal`."""
        if tensor not in self._made:
            self._made[tensor] = self.copy(tensor)
        return self._made[tensor]

    def bring(self, target: Tensor, source: Tensor, filled: Event) -> Event:
        """Copy ``source`` to ``target`` in the background. Returns an event after the copy.

        Args:
            target: from :meth:`allocate_bytes`.
            source: 1-D uint8 on an accelerator. The caller gives it up.
            filled: from :meth:`seal`, after ``source`` was written.
        """
        lanes = self._lanes[source.device]
        lane = lanes.device_to_host
        lane.wait(filled)
        lane.copy(target, source, self._what)
        assert lane.stream is not None
        source.record_stream(lane.stream)
        return lane.record(lanes.event())

    def load(self, target: Tensor, source: Tensor) -> None:
        """Copy host memory to an accelerator, in the order of the current stream. Both are 1-D uint8."""
        self._lanes[target.device].load(target, source)

    def wait_for_background(self) -> None:
        """The current streams wait for all that :meth:`bring` has queued, also for an earlier moment."""
        for lanes in list(self._lanes.values()):
            lanes.caller().wait(lanes.device_to_host.record(lanes.event()))

    def seal(self) -> Event | None:
        """End the copies of this moment, and record an event after them on each device. Returns the last one."""
        self._made = {}
        for device in self._slabs:
            if device.type != "cpu":
                self._queued.append(torch.accelerator.current_stream(device).record_event())
        return self._queued[-1] if self._queued else None

    def wait_for(self, copy: Tensor) -> Tensor:
        """Wait for the copies, and return ``copy``; for the thread that reads, after :meth:`seal`."""
        for event in self._queued:
            event.synchronize()
        return copy
