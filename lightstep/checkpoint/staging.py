"""What a save reads its tensors from: the run itself, or what training does not write to meanwhile.

A save that a thread writes returns when its tensors cannot change any more. How that is reached depends on where they
are, and nothing is copied that need not be:

- *Optimizer state in the host's records* (``stream``, ``bulk``) is pinned. The thread reads the records; an update of
  one that is not read yet goes to a spare slab (:mod:`lightstep.state.snapshot`).
- *Optimizer state on the device* (``resident``) is copied to the host in a lane of its own, behind the next iteration.
  An update of a record that is still being copied waits for it on the device (:mod:`lightstep.state.device_snapshot`).
- *Weights, buffers, and what else users may write to at any time* (state of plain torch optimizers, state that was
  handed out) are copied on the current stream: the host goes on, the next forward comes behind them. On the CPU the
  caller makes these copies.

Host memory: the copies take as much as what is copied, page-locked. It is kept for the next save, as long as the model
exists: page-locking and first touch would take longer than the copies. Joined masters take what is on its way to the
files (:data:`~lightstep.checkpoint.tensors.PART_BYTES`).

A save that is waited for reads everything where it is. So does one for whose copies the host has no memory: training
waits for it, and a warning says so.
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
from lightstep.state.kept_copies import KeptCopies

_kept: weakref.WeakKeyDictionary[nn.Module, KeptCopies] = weakref.WeakKeyDictionary()


def staged(sources: Sequence[Source], model: nn.Module, optimizer: Any, until_written: ExitStack) -> list[Source]:
    """The same, to be fetched once each by one thread, whatever training does meanwhile.

    Raises:
        HostMemoryError: there is not enough for the copies.
    """
    copies = _kept.setdefault(model, KeptCopies())
    copies.start_over()
    copies.reserve(sum(source.nbytes for source in sources if source.entry is None))
    for source in sources:  # the caller waits for these, and the lanes' copies of state would take turns with them
        if source.entry is None and source.of is not None:
            copies.of(source.of)

    def later(copy: Tensor) -> Callable[[], Tensor]:
        return partial(copies.arrived, copy)

    pinned = _pinned(sources, optimizer, lambda tensor: later(copies.of(tensor)), copies, until_written)

    def detached(source: Source) -> Source:
        if pinned is not None and source.entry is not None and source.of in pinned:
            return _taken(source, pinned)
        copy = copies.copy(source.fetch()) if source.of is None or source.entry is not None else copies.of(source.of)
        return source.read_by(later(copy))

    state = [source for source in sources if source.entry is not None]
    copies.reserve(sum(source.nbytes for source in state if pinned is None or source.of not in pinned))
    found = [detached(source) for source in _pinned_first(sources)]
    copies.seal()
    return found


def in_place(sources: Sequence[Source], optimizer: Any, until_written: ExitStack) -> list[Source]:
    """The same, while nothing else happens: the host's records are read without a copy of them."""
    pinned = _pinned(sources, optimizer, lambda tensor: partial(_on_host, tensor), None, until_written)
    if pinned is None:
        return list(sources)
    return [
        _taken(source, pinned) if source.entry is not None and source.of in pinned else source
        for source in _pinned_first(sources)
    ]


def _pinned(
    sources: Sequence[Source],
    optimizer: Any,
    weight_of: Callable[[Tensor], Callable[[], Tensor]],
    copies: KeptCopies | None,
    until_written: ExitStack,
) -> PinnedState | None:
    wanted: dict[Tensor, set[str]] = {}
    for source in sources:
        if source.of is not None and source.entry is not None:
            wanted.setdefault(source.of, set()).add(source.entry)
    pin = getattr(optimizer, "pinned_state", None)
    pinned: PinnedState | None = None if pin is None else pin(wanted, weight_of, copies)
    if pinned is not None:
        until_written.callback(pinned.close)
    return pinned


def _taken(source: Source, pinned: PinnedState) -> Source:
    assert source.of is not None and source.entry is not None
    return source.read_by(
        partial(pinned.take, source.of, source.entry), partial(pinned.written, source.of, source.entry)
    )


def _pinned_first(sources: Sequence[Source]) -> list[Source]:
    """So that records are let go of soon."""
    return sorted(sources, key=lambda source: source.entry is None)


def _on_host(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach().to(torch.device("cpu"))
