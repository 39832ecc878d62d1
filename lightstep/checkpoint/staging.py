"""Where a save reads its tensors: in place, or from copies and pinned records that training does not change.

An asynchronous save returns when training can no longer change what it will write. It copies no more than necessary:

- *Optimizer state in host records* (``stream``, ``bulk``) is pinned, not copied. The thread reads the records; an
  update of a record that has not been read yet is written to a spare slab (:mod:`lightstep.state.snapshot`).
- *Optimizer state on the device* (``resident``) is copied to the host in a lane of its own during the next iteration.
  The thread allocates the memory for it. An update of a record that is not copied yet waits
  (:mod:`lightstep.state.device_snapshot`).
- *Weights, buffers, and all else that users may write to at any time* (state of plain torch optimizers, state that was
  handed out) is copied on the current stream. The host does not wait; the next forward is queued after the copies. On
  the CPU the caller makes these copies.

Host memory: the copies take as many bytes as what is copied, page-locked. The memory is kept for the next save as long
as the model exists, because page-locking and first touch take longer than the copies. Joined masters take the memory of
what is on its way to the files (:data:`~lightstep.checkpoint.tensors.IN_FLIGHT_BYTES`).

A synchronous save reads everything in place. So does an asynchronous one if the host has not enough memory for its
copies: training waits for it, and a warning says so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightstep.checkpoint.tensors import Source
from lightstep.distributed import local_tensor
from lightstep.state.backend import PinnedState
from lightstep.state.host_copy_pool import HostCopyPool

_kept: weakref.WeakKeyDictionary[nn.Module, HostCopyPool] = weakref.WeakKeyDictionary()


def stage_sources(
    sources: Sequence[Source], model: nn.Module, optimizer: Any, until_written: ExitStack
) -> tuple[list[Source], Callable[[], object]]:
    """Sources of the same tensors that a thread can fetch, once each, while training continues.

    Also returns what the thread has to call as soon as it runs.

    Args:
        until_written: gets the pinned state, which is released when the checkpoint has been written.

    Raises:
        HostMemoryError: there is not enough host memory for the copies.
    """
    copies = _kept.setdefault(model, HostCopyPool())
    copies.reset()
    copies.reserve(sum(source.nbytes for source in sources if source.entry is None))
    for source in sources:  # first, because the next forward waits for these
        if source.entry is None and source.model_tensor is not None:
            copies.copy_once(source.model_tensor)

    def later(copy: Tensor) -> Callable[[], Tensor]:
        return partial(copies.wait_for, copy)

    pinned = _pin_state(sources, optimizer, lambda tensor: later(copies.copy_once(tensor)), copies, until_written)

    def detached(source: Source) -> Source:
        if pinned is not None and source.entry is not None and source.model_tensor in pinned:
            return _from_pinned(source, pinned)
        copy = (
            copies.copy(source.fetch())
            if source.model_tensor is None or source.entry is not None
            else copies.copy_once(source.model_tensor)
        )
        return source.with_fetch(later(copy))

    state = [source for source in sources if source.entry is not None]
    copies.reserve(sum(source.nbytes for source in state if pinned is None or source.model_tensor not in pinned))
    found = [detached(source) for source in _pinned_first(sources)]
    copies.seal()
    return found, pinned.begin if pinned is not None else lambda: None


def in_place(sources: Sequence[Source], optimizer: Any, until_written: ExitStack) -> list[Source]:
    """Sources of the same tensors for a synchronous save: records on the host are read without a copy."""
    pinned = _pin_state(sources, optimizer, lambda tensor: partial(_to_host, tensor), None, until_written)
    if pinned is None:
        return list(sources)
    return [
        _from_pinned(source, pinned) if source.entry is not None and source.model_tensor in pinned else source
        for source in _pinned_first(sources)
    ]


def _pin_state(
    sources: Sequence[Source],
    optimizer: Any,
    weight_of: Callable[[Tensor], Callable[[], Tensor]],
    copies: HostCopyPool | None,
    until_written: ExitStack,
) -> PinnedState | None:
    """Pin the optimizer's state that is among ``sources``; ``None`` if the optimizer has nothing to pin.

    Args:
        weight_of: called with a parameter, returns a function that returns its weights on the host.
        copies: where state on the device is copied to; ``None`` reads it in place.
    """
    wanted: dict[Tensor, set[str]] = {}
    for source in sources:
        if source.model_tensor is not None and source.entry is not None:
            wanted.setdefault(source.model_tensor, set()).add(source.entry)
    pin = getattr(optimizer, "pinned_state", None)
    pinned: PinnedState | None = None if pin is None else pin(wanted, weight_of, copies)
    if pinned is not None:
        until_written.callback(pinned.close)
    return pinned


def _from_pinned(source: Source, pinned: PinnedState) -> Source:
    assert source.model_tensor is not None and source.entry is not None
    return source.with_fetch(
        partial(pinned.take, source.model_tensor, source.entry),
        partial(pinned.written, source.model_tensor, source.entry),
    )


def _pinned_first(sources: Sequence[Source]) -> list[Source]:
    """Optimizer state first, so that records are unpinned soon."""
    return sorted(sources, key=lambda source: source.entry is None)


def _to_host(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach().to(torch.device("cpu"))
