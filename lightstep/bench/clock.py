"""Time between steps: device events on a GPU, the host's clock on a CPU."""

from __future__ import annotations

import time

import torch


class Clock:
    """`lap()` marks a moment in the current stream; `read()` gives the milliseconds between the marks."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def lap(self) -> None:
        if not self._cuda:
            self._times.append(time.perf_counter() * 1e3)
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def read(self) -> list[float]:
        if not self._cuda:
            return [end - start for start, end in zip(self._times, self._times[1:], strict=False)]
        self._marks[-1].synchronize()
        return [start.elapsed_time(end) for start, end in zip(self._marks, self._marks[1:], strict=False)]
