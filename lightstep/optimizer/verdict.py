"""What became of the factor that was assumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Verdict"]


class Verdict:
    """Whether the factor was the one that was assumed: written by the device, read by the host when it has to."""

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._event: Any = None

    def ask(self, overflow: Tensor, factors: Sequence[tuple[Tensor | None, Tensor | None]]) -> None:
        """``factors``: pairs of true and assumed ones; ``None`` is 1."""
        alike = overflow == 0
        for true, assumed in factors:
            if true is not None or assumed is not None:
                alike = alike & ((1.0 if true is None else true) == (1.0 if assumed is None else assumed))
        # 0: it was; 1: it was not; 2 and more: overflow
        found = (~alike).to(torch.int32) + 2 * (overflow != 0).to(torch.int32)
        if found.device.type == "cpu":
            self._host, self._event = found, None
            return
        if self._host is None or self._event is None:
            self._host = torch.zeros((), dtype=torch.int32, device="cpu", pin_memory=True)
            self._event = torch.Event(found.device)
        self._host.copy_(found, non_blocking=True)
        self._event.record(torch.accelerator.current_stream(found.device))

    def turn_down(self) -> None:
        """It was not on another rank: a commit becomes a redo."""
        if self.read() == "commit":
            assert self._host is not None
            self._host.fill_(1)

    def read(self) -> str:
        """``commit``, ``redo`` or ``drop``; the host waits for the device."""
        assert self._host is not None
        if self._event is not None:
            self._event.synchronize()
        found = int(self._host)
        return "drop" if found >= 2 else "redo" if found else "commit"
