"""How many units are tried in backward."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from lightstep.state.backend import StateBackend, Unit

__all__ = ["LinkShare", "spread"]

logger = logging.getLogger(__name__)


class LinkShare:
    """Which part of the units is tried: as many as the link carries while backward runs. The forward has the rest.

    When the last units become ready, the lane should be at those before them, and no further behind. On the CPU time
    says nothing about a link, and all units are tried.
    """

    def __init__(self, backend: StateBackend) -> None:
        self._backend = backend
        self.part = 1.0
        self._events: list[Any] = []  # backward begins; units are ready; those before them are done; all are done
        self._batches = 0

    def begin(self) -> None:
        """Backward begins."""
        self._batches = 0
        device = self._backend.lanes.device
        if device.type == "cpu":
            return
        if not self._events:
            self._events = [torch.Event(device, enable_timing=True) for _ in range(4)]
        self._backend.lanes.caller().record(self._events[0])

    def ready(self) -> None:
        """The gradients of some units are complete on the current stream."""
        if self._events:
            self._backend.lanes.caller().record(self._events[1])
            self._events[2:] = self._events[:1:-1]

    def done(self) -> None:
        """They are submitted."""
        if self._events:
            self._backend.lanes.compute.record(self._events[3])
            self._batches += 1

    def adapt(self) -> None:
        """Before the next backward, when all of it has been waited for."""
        batches, self._batches = self._batches, 0
        if batches < 3:
            return
        begun, ready, done, _ = self._events
        if not (ready.query() and done.query()):
            return
        span, late = begun.elapsed_time(ready), ready.elapsed_time(done)
        logger.debug("tried in backward: %.2f of the units; the lane was %.1f ms behind %.1f", self.part, late, span)
        layer = span / batches
        if late > layer:
            self.part = max(self.part * max(span / (span + late), 0.5), 0.05)
        elif late < layer / 2:
            self.part = min(self.part + 0.05, 1.0)


def spread(units: Sequence[Unit], part: float) -> list[Unit]:
    """A part of them, evenly spaced."""
    return [unit for n, unit in enumerate(units) if int((n + 1) * part + 0.5) > int(n * part + 0.5)]
