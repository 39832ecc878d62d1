"""When the updates of a step happen: inside ``step()``, or until the next forward needs them."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from operator import itemgetter
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

    def __init__(self, walk: UnitWalk, backend: StateBackend) -> None:
        self._walk = walk
        self._backend = backend

    @property
    def pending(self) -> bool:
        """Whether updates are under way that nobody has waited for."""
        return False

    @abstractmethod
    def start(self, update: Update) -> None:
        """Update all units, now or later."""

    def land(self, items: Iterable[Managed] | None = None) -> None:  # noqa: B027  (nothing is ever left to wait for)
        """What the caller does next finds these parameters updated; ``None`` is all of them, and their state.

        On an accelerator the current stream waits and the host does not; on the CPU the calling thread waits.
        """

    def hold(self, items: Iterable[Managed]) -> None:  # noqa: B027
        """The same for one stream that reads beside the one that goes on: nothing is taken as landed by it."""


class AtStep(Updates):
    """``update: at_step``: all units, on the caller's stream."""

    def start(self, update: Update) -> None:
        self._walk.run(update)


class NextForward(Updates):
    """``update: next_forward``: units in the compute lane, while the caller goes on with the next forward.

    The update is the one that ``step()`` decided: its gradients are kept, and its hyper-parameters copied, until the
    caller has waited for it.
    """

    def __init__(self, walk: UnitWalk, backend: StateBackend) -> None:
        super().__init__(walk, backend)
        self._update: Update | None = None
        self._queued: deque[_Pending] = deque()
        self._number = 0  # of the last unit that was submitted, over all steps
        self._last: dict[Managed, tuple[int, Any]] = {}  # number and event of the unit with which it is complete
        self._events: dict[Unit | None, Any] = {}
        self._ready: Any = None
        self._landing = threading.RLock()

    @property
    def pending(self) -> bool:
        return bool(self._queued)

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
        end = self._last_pending()
        for item in update.elsewhere:
            own = self._backend.sent_after(item)
            self._last[item] = end if own is None else self._last[own]

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
        self._queued.append(pending)
        for owner, _, _ in unit.parts if unit is not None else ():
            self._last[owner] = self._last_pending()

    def _last_pending(self) -> tuple[int, Any]:
        return self._number, self._queued[-1].done

    def land(self, items: Iterable[Managed] | None = None) -> None:
        if not self._queued:
            return
        with self._landing:  # forwards of several threads: none goes on before what the first one waits for is there
            number, received = self._number, []
            if items is not None:
                waited_for = [item for item in items if item in self._last]
                number = max((self._last[item][0] for item in waited_for), default=0)
                received = [item for item in waited_for if item.elsewhere]
            arriving = list(itertools.takewhile(lambda pending: pending.number <= number, self._queued))
            if arriving:
                self._wait_for(arriving)
            self._backend.receive(received)

    def hold(self, items: Iterable[Managed]) -> None:
        with self._landing:
            waited_for = [item for item in items if item in self._last]
            if waited_for:
                _, done = max((self._last[item] for item in waited_for), key=itemgetter(0))
                self._backend.lanes.caller().wait(done)
                self._backend.receive([item for item in waited_for if item.elsewhere])

    def _wait_for(self, arriving: Sequence[_Pending]) -> None:
        assert self._update is not None
        try:
            self._backend.lanes.caller().wait(arriving[-1].done)
        except BaseException:
            self._forget()
            raise
        for pending in arriving:
            self._queued.popleft()
            self._update.drop_gradients(pending.complete)
        if not self._queued:
            self._update.values.give_back()
            self._update = None

    def _forget(self) -> None:
        """The update broke off."""
        self._queued.clear()
        self._last.clear()
        self._update = None


class _Pending:
    """One unit that is queued: the event that says it is done, and the parameters that are complete with it."""

    __slots__ = ("complete", "done", "number")

    def __init__(self) -> None:
        self.complete: list[Managed] = []
        self.done: Any = None
        self.number = 0
