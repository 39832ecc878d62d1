"""How many units are tried in backward."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from lightstep.state.backend import StateBackend, Unit

__all__ = ["LinkShare", "spread"]

logger = logging.getLogger(__name__)

_STEP = 0.05


class LinkShare:
    """Which part of the units is tried: as many as the link carries while backward runs. The forward has the rest.

    Towards the end of backward the lane should be just through with what is complete: what it is behind then, the next
    forward waits for. What is complete with the very last layer crosses the link after backward in any case, and says
    nothing about that. Nor does the first backward, in which kernels are compiled and memory is taken. On the CPU time
    says nothing about a link, and all units are tried.
    """

    def __init__(self, backend: StateBackend) -> None:
        self._backend = backend
        self.part = 1.0
        self._step = _STEP
        self._begun: Any = None
        self._ready: list[Any] = []  # events: the gradients of a batch of units are complete
        self._done: list[Any] = []  # they have been tried
        self._batches = 0
        self._first = True

    @property
    def _timed(self) -> bool:
        return self._backend.lanes.device.type != "cpu"

    def begin(self) -> None:
        """Backward begins."""
        self._batches = 0
        if self._timed:
            self._begun = self._begun or self._event()
            self._backend.lanes.caller().record(self._begun)

    def ready(self) -> None:
        """The gradients of some units are complete on the current stream."""
        if self._timed:
            if self._batches == len(self._ready):
                self._ready.append(self._event())
                self._done.append(self._event())
            self._backend.lanes.caller().record(self._ready[self._batches])

    def done(self) -> None:
        """They are submitted."""
        if self._timed:
            self._backend.lanes.compute.record(self._done[self._batches])
            self._batches += 1

    def _event(self) -> Any:
        return torch.Event(self._backend.lanes.device, enable_timing=True)

    def adapt(self) -> None:
        """Before the next backward, when all of it has been waited for."""
        batches, self._batches = self._batches, 0
        ready, done = self._ready[:batches], self._done[:batches]
        if batches < 3 or not (ready[-1].query() and done[-1].query()):
            return
        if self._first:
            self._first = False
            return
        span = self._begun.elapsed_time(ready[-1])
        layer = span / batches
        last = next((n for n in range(batches - 2, 0, -1) if ready[n].elapsed_time(ready[-1]) > layer / 2), 1)
        late = ready[last].elapsed_time(done[last - 1])
        logger.debug("tried in backward: %.2f of the units; the lane was %.1f ms behind %.1f", self.part, late, span)
        if late > layer / 2:
            self.part = max(self.part * max(span / (span + late), 0.5), 0.05)
            self._step = _STEP
        elif late < 0:
            self.part = min(self.part + self._step, 1.0)
            self._step = min(2 * self._step, 0.4)


def spread(units: Sequence[Unit], part: float) -> list[Unit]:
    """A part of them, evenly spaced."""
    return [unit for n, unit in enumerate(units) if int((n + 1) * part + 0.5) > int(n * part + 0.5)]
