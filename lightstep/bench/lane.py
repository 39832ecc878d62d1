"""One queue of copies beside the compute stream: a CUDA stream, or nothing on a CPU (copies are done at once)."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch


class Lane:
    """A side stream of `device`, made once and kept."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def queue(self) -> AbstractContextManager[object]:
        """What is launched inside goes to this lane."""
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()

    def follow(self) -> None:
        """The lane waits for what the current stream has queued so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        """The current stream waits for what the lane has queued so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """An event after what the lane has queued so far; None on a CPU."""
        return self._stream.record_event() if self._stream is not None else None

    def keep(self, tensors: list[torch.Tensor]) -> None:
        """The allocator must not hand these out again before this lane is done with them."""
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(self._stream)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def synchronize(event: torch.cuda.Event | None) -> None:
    """The host waits for an event of `Lane.mark()`."""
    if event is not None:
        event.synchronize()


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """A zeroed host tensor of that shape and dtype, from torch's pinned allocator when the tensor is on a GPU."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
