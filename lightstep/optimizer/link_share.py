"""How many units are updated speculatively in backward."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch

from lightstep.state.schema import Unit
from lightstep.state.store import Store

__all__ = ["LinkShare", "evenly_spaced"]

logger = logging.getLogger(__name__)

_STEP = 0.05

_HELD = 16
"""Backwards before more is tried again, after one that was late: with each share other units are laid out anew."""


class LinkShare:
    """The fraction of units to update in backward: as many as the link can carry meanwhile. The forward has the rest.

    The fraction is adapted after each backward, by how far the compute lane was behind at its end: the next forward has
    to wait for that. Weights and gradients that rest on the host cross the same link, and the lane may be in time
    because backward itself waits for them: so what the model waited in backward counts, too. Three measurements are
    left out:

    - units that are complete with the very last layer: they cross the link after backward in any case;
    - the first backward, which compiles kernels and allocates memory;
    - the CPU, where time says nothing about a link. All units are updated in backward there.
    """

    def __init__(self, backend: Store) -> None:
        self._backend = backend
        self.fraction = 1.0
        self._step = _STEP
        self._begin_event: Any = None
        self._ready_events: list[Any] = []  # the gradients of a batch of units are complete
        self._done_events: list[Any] = []  # the units of that batch are updated
        self._batches, self._timed = 0, False
        self._held = 0  # backwards before more is tried
        self._first = True
        self._advised = False

    def record_begin(self) -> None:
        """Backward begins."""
        self._batches, self._timed = 0, self._backend.lanes.device.type != "cpu"
        if self._timed:
            if self._backend.host_weights is not None:
                self._backend.host_weights.measure_waits(begin=True)
            self._begin_event = self._begin_event or self._event()
            self._backend.lanes.caller().record(self._begin_event)

    def record_ready(self) -> None:
        """The gradients of a batch of units are complete on the current stream."""
        if self._timed:
            if self._batches == len(self._ready_events):
                self._ready_events.append(self._event())
                self._done_events.append(self._event())
            self._backend.lanes.caller().record(self._ready_events[self._batches])

    def record_done(self) -> None:
        """The updates of that batch have been submitted."""
        if self._timed:
            self._backend.lanes.compute.record(self._done_events[self._batches])
            self._batches += 1

    def record_end(self) -> None:
        """Backward is over."""
        if self._backend.host_weights is not None:
            self._backend.host_weights.measure_waits(begin=False)

    def _event(self) -> Any:
        return torch.Event(self._backend.lanes.device, enable_timing=True)

    def adapt(self) -> None:
        """Adapt the fraction before the next backward, once all work of the last one has been waited for."""
        batches, self._batches = self._batches, 0
        ready, done = self._ready_events[:batches], self._done_events[:batches]
        if batches < 3 or not (ready[-1].query() and done[-1].query()):
            return
        host_weights = self._backend.host_weights
        waited = 0.0 if host_weights is None else host_weights.waited()
        if waited is None:
            return
        if self._first:
            self._first = False
            return
        span = self._begin_event.elapsed_time(ready[-1])
        layer = span / batches
        last = next((n for n in range(batches - 2, 0, -1) if ready[n].elapsed_time(ready[-1]) > layer / 2), 1)
        late = ready[last].elapsed_time(done[last - 1])
        logger.debug(
            "updated in backward: %.2f of the units; the lane was %.1f ms behind %.1f, of which the model waited %.1f",
            self.fraction,
            late,
            span,
            waited,
        )
        self._held = max(self._held - 1, 0)
        if max(late, 0.0) + waited > layer / 2:
            self._held = _HELD
            kept = (span - waited) / (span + max(late, 0.0))
            self.fraction = max(self.fraction * max(kept, 0.5), 0.05)
            self._step = _STEP
            self._advise()
        elif late < 0 and not self._held:
            self.fraction = min(self.fraction + self._step, 1.0)
            self._step = min(2 * self._step, 0.4)

    def _advise(self) -> None:
        if self._advised:
            return
        self._advised = True
        logger.info(
            "the link takes longer than backward: %.0f %% of the units are updated there, the others during the next "
            "forward. Less has to cross it with a larger optimizer_state.resident_gib",
            100 * self.fraction,
        )


def evenly_spaced(units: Sequence[Unit], fraction: float) -> list[Unit]:
    """This fraction of the units, evenly spaced. Neighbours whose weights rest on the host together stay together:
    weights and gradients of all of them cross the link for the update of one."""
    parts = [list(part) for _, part in groupby(units, key=_what_crosses)]
    chosen = (part for n, part in enumerate(parts) if int((n + 1) * fraction + 0.5) > int(n * fraction + 0.5))
    return [unit for part in chosen for unit in part]


def _what_crosses(unit: Unit) -> int:
    home = unit.owners[0].home
    return id(unit if home is None else home.group)
