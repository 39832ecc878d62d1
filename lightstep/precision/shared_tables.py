"""Small tensors on a device that are made once, and read on any stream."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SharedTable"]


class SharedTable:
    """A tensor that the current stream is making, for readers on other streams, too.

    Nobody waits on the host: :meth:`read` lets the reader's stream wait until the tensor is complete.

    Attributes:
        complete: the tensor, once it is known that nobody has to wait for it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._event = tensor, None
        self.complete: Tensor | None = tensor if tensor.device.type == "cpu" else None
        if tensor.device.type != "cpu":
            self._event = torch.Event(tensor.device)
            self._event.record(torch.accelerator.current_stream(tensor.device))

    def read(self) -> Tensor:
        """The tensor, for work on the current stream."""
        event = self._event  # another thread may find that it is complete
        if event is not None and not event.query():
            torch.accelerator.current_stream(self._tensor.device).wait_event(event)
        elif event is not None:
            self._event, self.complete = None, self._tensor
        return self._tensor
