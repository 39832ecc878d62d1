"""When the updates of a step happen: inside ``step()``, or until the next forward needs them."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, ClassVar

from lightstep.optimizer.walk import UnitWalk, Update
from lightstep.state.backend import Managed, StateBackend, Unit

__all__ = ["AtStep", "NextForward", "Updates"]


class Updates(ABC):
    """Carries out the update that a step decided upon.

    Args:
        walk: does the work.
        backend: whose units it goes through.
    """

    in_backward = False
    """Whether updates begin in backward (:class:`~lightstep.optimizer.in_backward.InBackward`)."""

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

    Units are submitted some way ahead of the forward and not all at once. An accelerator takes about a thousand
    launches before it makes the host wait, and the forward's have to find room too. How far is a fixed number, so that
    replicas that send each other weights submit in the same order.
    """

    at_once: ClassVar[int] = 40
    """Units that ``step()`` submits."""
    ahead: ClassVar[int] = 24
    """Units that are submitted behind the one that somebody waits for."""

    def __init__(self, walk: UnitWalk, backend: StateBackend) -> None:
        super().__init__(walk, backend)
        self._update: Update | None = None
        self._waiting: deque[_Unit] = deque()  # to be submitted
        self._queued: deque[_Unit] = deque()  # submitted
        self._last: dict[Managed, _Unit] = {}  # the unit with which a parameter is complete, of the last deferred step
        self._events: dict[Unit | None, Any] = {}
        self._ready: Any = None
        self._landing = threading.RLock()

    @property
    def pending(self) -> bool:
        return self._update is not None

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
        self._line_up(update)
        with self._landing, self._or_forget():
            lanes.compute.run(lambda: self._walk.begin(update.gradients.keys()))
            self._submit(self.at_once)

    def _line_up(self, update: Update) -> None:
        """All units in their order, and which one each parameter is complete with."""
        lanes, known = self._backend.lanes, self._events
        self._events, self._last = {}, {}  # units of before are let go of, and the weights that they hold
        for number, unit in enumerate([*self._backend.units(), None]):
            self._events[unit] = known[unit] if unit in known else lanes.event()
            self._waiting.append(_Unit(number, unit, self._events[unit]))
        for place in self._waiting:
            for owner, _, _ in place.unit.parts if place.unit is not None else ():
                self._last[owner] = place
        for item in update.elsewhere:
            own = self._backend.sent_after(item)
            self._last[item] = self._waiting[-1] if own is None else self._last[own]

    def _submit(self, stop: int) -> None:
        """Queue the units whose number is below ``stop``."""
        update, compute = self._update, self._backend.lanes.compute
        while self._waiting and self._waiting[0].number < stop:
            assert update is not None
            place = self._waiting[0]
            compute.run(partial(place.carry_out, self._walk, update))
            compute.record(place.done)
            self._queued.append(self._waiting.popleft())

    def land(self, items: Iterable[Managed] | None = None) -> None:
        if not self.pending:
            return
        with self._landing:  # forwards of several threads: none goes on before what the first one waits for is there
            if not self.pending:
                return
            places = None if items is None else [(item, self._last[item]) for item in items if item in self._last]
            number = None if places is None else max((place.number for _, place in places), default=-1)
            with self._or_forget():
                self._submit(_EVERY if number is None else number + 1 + self.ahead)
            with self._or_forget(interrupts=False):
                self._wait_for(_EVERY if number is None else number)
                self._backend.receive([item for item, _ in places or () if item.elsewhere])

    def _wait_for(self, number: int) -> None:
        """The caller waits for the units up to this one, and their gradients are given up."""
        update = self._update
        assert update is not None
        arriving = list(itertools.takewhile(lambda place: place.number <= number, self._queued))
        if arriving:
            self._backend.lanes.caller().wait(arriving[-1].done)
        for place in arriving:
            self._queued.popleft()
            update.drop_gradients(place.complete)
        if not self._queued and not self._waiting:
            update.values.give_back()
            self._update = None

    def hold(self, items: Iterable[Managed]) -> None:
        with self._landing:
            places = [(item, self._last[item]) for item in items if item in self._last]
            if not places:
                return
            last = max((place for _, place in places), key=lambda place: place.number)
            with self._or_forget():
                if self.pending:
                    self._submit(last.number + 1 + self.ahead)
                self._backend.lanes.caller().wait(last.done)
                self._backend.receive([item for item, _ in places if item.elsewhere])

    @contextlib.contextmanager
    def _or_forget(self, interrupts: bool = True) -> Iterator[None]:
        """When the update breaks off, nobody waits for the rest of it.

        Args:
            interrupts: an interrupt breaks it off as well; one that comes while the caller waits does not.
        """
        try:
            yield
        except BaseException as error:
            if not interrupts and not isinstance(error, Exception):
                raise
            if self._waiting and not self._walk.broken:
                self._walk.broken.note("the update under way", error)
            self._backend.lanes.compute.synchronize()
            self._waiting.clear()
            self._queued.clear()
            self._last.clear()
            self._update = None
            raise


_EVERY = sys.maxsize


class _Unit:
    """One unit of a deferred update, or (``None``) the end of the walk.

    Attributes:
        number: its place in the walk.
        done: event behind its work.
        complete: the parameters that are complete with it, known when its work was queued (on the CPU: is done).
    """

    __slots__ = ("complete", "done", "number", "unit")

    def __init__(self, number: int, unit: Unit | None, done: Any) -> None:
        self.number, self.unit, self.done = number, unit, done
        self.complete: list[Managed] = []

    def carry_out(self, walk: UnitWalk, update: Update) -> None:
        """Its part of the walk; in the compute lane."""
        if self.unit is None:
            walk.finish(update.elsewhere)
        else:
            self.complete.extend(walk.unit(self.unit, update))
