"""Masters and state on the host, all of them brought to the device for the step and back after it.

Simple and without overlap: the step takes the time of both transfers. Everything is queued on the current stream, so
device memory is safely reused as soon as it is let go, and the host never waits; readers of the host tensors call
``synchronize`` first.

The module also holds the pair :func:`offload_fsdp_optimizer` / :func:`load_fsdp_optimizer`, the same movement for the
state of any ``torch.optim.Optimizer``.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightstep.distributed import like, local_tensor
from lightstep.state.backend import Managed, Piece, Schema
from lightstep.state.host_memory import HostSlab, require
from lightstep.state.resident import ResidentBackend


class HostCopies:
    """Host memory for tensors that come and go: one exact-size page-locked buffer per slot, kept and reused."""

    def __init__(self) -> None:
        self._slabs: dict[tuple[Any, str], HostSlab] = {}

    def buffer(self, owner: Any, key: str, like_: Tensor) -> Tensor:
        """The host tensor of this slot, with ``like_``'s shape and dtype; made at first use."""
        slab = self._slabs.get((owner, key))
        if slab is None or slab.nbytes < like_.nbytes:
            require(like_.nbytes, f"offloading {key!r}")
            slab = HostSlab(like_.nbytes, device=like_.device, what=f"offloaded {key!r}")
            self._slabs[owner, key] = slab
        return slab.tensor(like_.dtype, tuple(like_.shape))

    def forget(self, owners: Collection[Any]) -> None:
        """Give back the buffers of these owners."""
        for slot in [slot for slot in self._slabs if slot[0] in owners]:
            self._slabs.pop(slot).close()

    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs.values())


class BulkBackend(ResidentBackend):
    """The resident backend during a step, host memory between steps (12 bytes per parameter for Adam)."""

    name: ClassVar[str] = "bulk"

    def __init__(self) -> None:
        super().__init__()
        self._host = HostCopies()
        self._landed: dict[torch.device, torch.Event] = {}

    def register(self, managed: Sequence[Managed], schema: Schema, whole_tensors: bool = False) -> None:
        known = set(self._pieces)
        super().register(managed, schema, whole_tensors)
        self._host.forget(known - set(managed))
        for item in managed:
            if item not in known:
                self._offload(self._pieces[item])
        self._mark_landed()

    def prepare(self) -> None:
        """The memory is taken and let go of again: torch's allocator has it for ``begin`` then."""
        room = [
            _on_device(value, piece.owner.local.device) for piece in self._pieces.values() for value in _away(piece)
        ]
        del room

    def begin(self, managed: Collection[Managed], backwards: bool = False) -> None:
        for item in managed:
            _load_piece(self._pieces[item])

    def finish(self) -> None:
        for piece in self._pieces.values():
            self._offload(piece)
        self._mark_landed()

    def load(self, managed: Managed, entries: Mapping[str, Any]) -> None:
        self.synchronize()
        _load_piece(self._pieces[managed])
        super().load(managed, entries)
        self._offload(self._pieces[managed])
        self._mark_landed()

    def refresh(self, managed: Managed) -> None:
        if managed.own_master:
            self._pieces[managed].master = managed.local
        else:
            self.synchronize()
            self._pieces[managed].master.copy_(managed.local)

    def differs(self, managed: Managed) -> bool:
        self.synchronize()
        return super().differs(managed)

    def release_device_memory(self) -> None:
        """Nothing is on the device between steps."""

    def memory(self) -> dict[str, int]:
        return {"device_bytes": 0, "host_bytes": self._host.nbytes(), "ring_bytes": 0}

    def synchronize(self) -> None:
        for event in self._landed.values():
            event.synchronize()

    def close(self) -> None:
        self.synchronize()
        self._host.forget(set(self._pieces))
        super().close()

    def _offload(self, piece: Piece) -> None:
        """Queue the copies to the host; the device tensors go once they are done (same stream)."""
        owner = piece.owner
        if not owner.own_master:
            piece.master = self._to_host(owner, "master", piece.master)
        for key, value in piece.state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                piece.state[key] = self._to_host(owner, key, value)

    def _to_host(self, owner: Managed, key: str, value: Tensor) -> Tensor:
        if value.device.type == "cpu" and owner.local.device.type != "cpu":
            return value
        buffer = self._host.buffer(owner, key, value)
        return buffer if buffer.data_ptr() == value.data_ptr() else buffer.copy_(value, non_blocking=True)

    def _mark_landed(self) -> None:
        for device in {item.local.device for item in self._pieces if item.local.device.type != "cpu"}:
            self._landed.setdefault(device, torch.Event(device)).record(torch.accelerator.current_stream(device))


def _away(piece: Piece) -> list[Tensor]:
    """What :func:`_load_piece` brings to the device."""
    state = [value for value in piece.state.values() if isinstance(value, Tensor) and value.dim() > 0]
    return state if piece.owner.own_master else [*state, piece.master]


def _load_piece(piece: Piece) -> None:
    device = piece.owner.local.device
    if not piece.owner.own_master:
        piece.master = _to_device(piece.master, device)
    for key, value in piece.state.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            piece.state[key] = _to_device(value, device)


def _to_device(value: Tensor, device: torch.device) -> Tensor:
    """A copy on ``device``: also on the CPU, where host memory and device memory are the same kind."""
    return _on_device(value, device).copy_(value, non_blocking=True)


def _on_device(value: Tensor, device: torch.device) -> Tensor:
    """Memory for a copy."""
    return torch.empty_like(value, device=device)


_copies: weakref.WeakKeyDictionary[torch.optim.Optimizer, HostCopies] = weakref.WeakKeyDictionary()


@torch.no_grad()
def offload_fsdp_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Move the state of any torch optimizer to page-locked host memory; returns when it has arrived.

    Tensors with dimensions move (DTensors keep their placement over a local shard on the host); 0-dim counters and
    non-tensor entries stay as they are. The host memory is kept for the next time. Calling it twice does nothing more.
    A :class:`~lightstep.optimizer.base.BaseOptimizer` places its own state: set ``optimizer_state.backend`` instead.
    """
    copies = _copies.setdefault(optimizer, HostCopies())
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
    """Bring the state of any torch optimizer to ``device``, or to each parameter's own device when it is ``None``.

    Copies are queued on the current stream from page-locked memory, so that ``optimizer.step()`` right after is
    correct and nothing waits on the host. State that is already there is left alone.
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
