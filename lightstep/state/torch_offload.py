"""The state of any ``torch.optim.Optimizer``, moved to page-locked host memory and back."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightstep.distributed import like, local_tensor
from lightstep.state.host_memory import HostSlab, require


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
