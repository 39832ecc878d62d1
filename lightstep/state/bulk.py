"""Masters and state on the host. A step copies all of them to the device, and back after the update.

Nothing overlaps: the step takes the time of both transfers. All copies are queued on the current stream, so device
memory can be reused as soon as it is freed, and the host never waits. Readers of the host tensors call ``synchronize``
first.

:func:`offload_fsdp_optimizer` and :func:`load_fsdp_optimizer` do the same for the state of any
``torch.optim.Optimizer``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightstep.distributed import like, local_tensor
from lightstep.state.backend import PinnedState
from lightstep.state.host_copy_pool import HostCopyPool
from lightstep.state.host_memory import HostSlab, require
from lightstep.state.record import Record, Slot
from lightstep.state.record_backend import RecordBackend
from lightstep.state.resident import ResidentBackend
from lightstep.state.schema import Managed, Unit
from lightstep.state.snapshot import Snapshot
from lightstep.state.versions import Versions


class OffloadBuffers:
    """Page-locked host buffers of exact size, one for each owner and key, which are kept and reused."""

    def __init__(self) -> None:
        self._slabs: dict[tuple[Any, str], HostSlab] = {}

    def buffer(self, owner: Any, key: str, like_: Tensor) -> Tensor:
        """The host tensor for this owner and key, with the shape and dtype of ``like_``; allocated at the first use."""
        slab = self._slabs.get((owner, key))
        if slab is None or slab.nbytes < like_.nbytes:
            require(like_.nbytes, f"offloading {key!r}")
            slab = HostSlab(like_.nbytes, device=like_.device, what=f"offloaded {key!r}")
            self._slabs[owner, key] = slab
        return slab.tensor(like_.dtype, tuple(like_.shape))


class BulkBackend(ResidentBackend):
    """Records on the host between steps, with whole masters (12 bytes per parameter for Adam)."""

    name: ClassVar[str] = "bulk"
    on_host = True

    def __init__(self) -> None:
        super().__init__()
        self._written_back: dict[torch.device, torch.Event] = {}
        self._versions = Versions("auto")

    def fresh(self) -> BulkBackend:
        return BulkBackend()

    def prepare(self) -> None:
        """Allocate the device memory and free it, so that torch's allocator has it for ``begin``."""
        RecordBackend.prepare(self)
        room = [_on_device(record) for record in self._records.values() if record not in self._slots]
        del room

    def begin(self, managed: Collection[Managed], order: Sequence[Unit] | None = None) -> None:
        RecordBackend.prepare(self)
        wanted = frozenset(managed)
        for record in self._records.values():
            if any(part.owner in wanted for part in record.parts):
                self._slots[record] = self._fetched(record)

    def _fetched(self, record: Record) -> Slot:
        slot = Slot(_on_device(record))
        if record.bytes is not None:
            slot.buffer.copy_(record.bytes, non_blocking=True)
        return slot

    def _acquire_slot(self, record: Record) -> Slot:
        return self._slots[record]

    def _reacquire_slot(self, record: Record, slot: Slot, relayout: Callable[[], None]) -> Slot:
        """Fetch the record again; parts that are not being updated are unchanged on the host."""
        self.synchronize()
        self._before_write([record])
        relayout()
        self._slots[record] = self._fetched(record)
        return self._slots[record]

    def finish(self, next_order: Sequence[Unit] | None = None) -> None:
        self._write_back(self._slots)
        self._slots = {}

    def _write_back(self, records: Iterable[Record]) -> None:
        """Queue the copies to the host. Device memory is freed in stream order, after them."""
        devices = set()
        for record in records:
            if record in self._slots and record.bytes is not None:
                self._versions.move_if_pinned(record)
                record.bytes.copy_(self._slots[record].buffer, non_blocking=True)
                devices.add(record.device)
        for device in devices:
            if device.type != "cpu":
                self._written_back.setdefault(device, torch.Event(device)).record(
                    torch.accelerator.current_stream(device)
                )

    def abandon(self) -> None:
        super().abandon()
        self._slots = {}

    def _before_edit(self, records: Iterable[Record]) -> None:
        self._write_back(records)
        self.synchronize()

    def pin(
        self,
        wanted: Mapping[Managed, Collection[str]],
        weight_of: Callable[[Tensor], Callable[[], Tensor]],
        copies: HostCopyPool | None,
    ) -> PinnedState | None:
        kept = [item for items in self._with_state(wanted).values() for item in items]
        if self._versions.pinned or not kept:
            return None
        self.synchronize()
        snapshot = Snapshot(self._versions, None)
        for item in kept:
            weight = None if item.own_master else weight_of(item.param)
            snapshot.add(item, wanted[item], self._parts[item], self._record_of, weight)
        snapshot.pin(None)
        return snapshot

    def _before_write(self, records: Iterable[Record]) -> None:
        for record in records:
            self._versions.move_if_pinned(record, keep=True)

    def _after_edit(self, records: Iterable[Record]) -> None:
        for record in records:
            if record in self._slots:
                self._slots[record] = self._fetched(record)

    def release_device_memory(self) -> None:
        """Free the scratch memory: nothing else is on the device between steps."""
        for staging in self._staging.values():
            staging.free()

    def memory(self) -> dict[str, int]:
        host = sum(record.slab.nbytes for record in self._records.values() if record.slab is not None)
        return {
            "device_bytes": 0,
            "host_bytes": host + self._versions.host_bytes(),
            "ring_bytes": self._ring_bytes(),
        }

    def synchronize(self) -> None:
        for event in self._written_back.values():
            event.synchronize()

    def close(self) -> None:
        self.synchronize()
        self._versions.release()
        for record in self._records.values():
            record.close()
        super().close()


def _on_device(record: Record) -> Tensor:
    """Device memory for a copy of the record; a copy is made on the CPU, too."""
    return torch.empty(record.nbytes, dtype=torch.uint8, device=record.device)


_copies: weakref.WeakKeyDictionary[torch.optim.Optimizer, OffloadBuffers] = weakref.WeakKeyDictionary()


@torch.no_grad()
def offload_fsdp_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Move the state of any torch optimizer to page-locked host memory; returns when the copies are done.

    Tensors with dimensions are moved (a DTensor keeps its placements, and its local shard is on the host); 0-dim
    counters and non-tensor entries stay where they are. The host memory is kept for the next call. A second call in a
    row does nothing. For a :class:`~lightstep.optimizer.base.BaseOptimizer` set ``optimizer_state.backend`` instead.
    """
    copies = _copies.setdefault(optimizer, OffloadBuffers())
    moved: set[torch.device] = set()
    for state, key, parameter, value in _state_tensors(optimizer):
        local = local_tensor(value)
        if local.device.type == "cpu":
            continue
        moved.add(local.device)
        host = copies.buffer(parameter, key, local).copy_(local, non_blocking=True)
        state[key] = like(value, host)
    for device in moved:
        torch.accelerator.synchronize(device)


@torch.no_grad()
def load_fsdp_optimizer(optimizer: torch.optim.Optimizer, device: torch.device | str | int | None = None) -> None:
    """Move the state of any torch optimizer to ``device``, or to each parameter's own device if it is ``None``.

    The copies are queued on the current stream, so ``optimizer.step()`` may follow at once and the host does not wait.
    State that is already there does not move.
    """
    target = None if device is None else torch.device(device)
    for state, key, parameter, value in _state_tensors(optimizer):
        local = local_tensor(value)
        wanted = target or local_tensor(parameter).device
        if local.device.type == wanted.type and wanted.index in (None, local.device.index):
            continue
        state[key] = like(value, torch.empty_like(local, device=wanted).copy_(local, non_blocking=True))


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], str, Tensor, Tensor]]:
    if hasattr(optimizer, "memory_report"):
        raise TypeError(
            f"{type(optimizer).__name__} places its own state; choose with optimizer_state.backend: resident, bulk or "
            "stream in the strategy"
        )
    for parameter, state in optimizer.state.items():
        for key, value in list(state.items()):
            if isinstance(value, Tensor) and value.dim() > 0:
                yield state, key, parameter, value
