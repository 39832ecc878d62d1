"""When the updates of a step happen: inside ``step()``, or until the next forward needs them."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from lightstep.optimizer.walk import UnitWalk, Update
from lightstep.state.backend import Managed, StateBackend, Unit

__all__ = ["AtStep", "NextForward", "Updates"]


class Updates(ABC):
    """Carries out the update that a step decided upon.

    Args:
        walk: does the work.
        backend: whose units it goes through.
    """

    deferred = False
    """Whether hyper-parameters may change before the update has read them."""

    def __init__(self, walk: UnitWalk, backend: StateBackend) -> None:
        self._walk = walk
        self._backend = backend

    @abstractmethod
    def start(self, update: Update) -> None:
        """Update all units, now or later."""

    def land(self, items: Iterable[Managed] | None = None) -> None:  # noqa: B027  (nothing is ever left to wait for)
        """What the caller does next finds these parameters updated; ``None`` is all of them, and their state.

        On an accelerator the current stream waits and the host does not; on the CPU the calling thread waits.
        """


class AtStep(Updates):
    """``update: at_step``: all units, on the caller's stream."""

    def start(self, update: Update) -> None:
        self._walk.run(update)


class NextForward(Updates):
    """``update: next_forward``: units in the compute lane, while the caller goes on with the next forward.

    The update is the one that ``step()`` decided: its gradients are kept, and its hyper-parameters copied, until the
    caller has waited for it.
    """

    deferred = True

    def __init__(self, walk: UnitWalk, backend: StateBackend) -> None:
        super().__init__(walk, backend)
        self._update: Update | None = None
        self._pending: deque[_Pending] = deque()
        self._number = 0  # of the last unit that was submitted, over all steps
        self._last: dict[Managed, int] = {}
        self._events: dict[Unit | None, Any] = {}
        self._ready: Any = None
        self._landing = threading.RLock()

    def start(self, update: Update) -> None:
        self.land()
        if not all(item.updated for item in update.gradients):
            self._walk.run(update)  # state is made for the first time: memory is laid out, the host takes part
            return
        update.values.detach()
        update.drop_gradients(update.elsewhere)
        lanes = self._backend.lanes
        if self._ready is None:
            self._ready = lanes.event()
        lanes.compute.wait(lanes.caller().record(self._ready))
        self._update = update
        try:
            lanes.compute.run(lambda: self._walk.begin(update))
            for unit in self._backend.units():
                self._submit(unit, update)
            self._submit(None, update)
        except BaseException:
            lanes.compute.synchronize()
            self._forget()
            raise

    def _submit(self, unit: Unit | None, update: Update) -> None:
        """Queue one unit, or the end of the walk."""
        lanes = self._backend.lanes
        pending = _Pending()
        if unit is None:
            lanes.compute.run(lambda: self._walk.finish(update))
        else:
            lanes.compute.run(lambda: pending.complete.extend(self._walk.unit(unit, update)))
        if unit not in self._events:
            self._events[unit] = lanes.event()
        pending.done = lanes.compute.record(self._events[unit])
        self._number += 1
        pending.number = self._number
        self._pending.append(pending)
        for owner, _, _ in unit.parts if unit is not None else ():
            self._last[owner] = self._number
        for item in update.elsewhere if unit is None else ():
            self._last[item] = self._number

    def land(self, items: Iterable[Managed] | None = None) -> None:
        if not self._pending:
            return
        with self._landing:  # forwards of several threads: none goes on before what the first one waits for is there
            number = self._number if items is None else max((self._last.get(item, 0) for item in items), default=0)
            arriving = list(itertools.takewhile(lambda pending: pending.number <= number, self._pending))
            if arriving:
                self._wait_for(arriving)

    def _wait_for(self, arriving: Sequence[_Pending]) -> None:
        assert self._update is not None
        try:
            self._backend.lanes.caller().wait(arriving[-1].done)
        except BaseException:
            self._forget()
            raise
        for pending in arriving:
            self._pending.popleft()
            self._update.drop_gradients(pending.complete)
        if not self._pending:
            self._update.values.give_back()
            self._update = None

    def _forget(self) -> None:
        """The update broke off."""
        self._pending.clear()
        self._update = None


class _Pending:
    """One unit that is queued: the event that says it is done, and the parameters that are complete with it."""

    __slots__ = ("complete", "done", "number")

    def __init__(self) -> None:
        self.complete: list[Managed] = []
        self.done: Any = None
        self.number = 0
