"""When each unit's update runs: one queue of units, in one order, and whoever needs a unit waits for it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

from lightstep.optimizer.group_values import GroupValues
from lightstep.optimizer.walk import Gradients, UnitWalk, Update
from lightstep.state.backend import Managed, StateBackend, Unit

__all__ = ["AtStep", "Job", "NextForward", "Schedule", "Written"]

Written = Callable[[Iterable[Managed]], Sequence[Managed]]

_EVERY = sys.maxsize


class Schedule:
    """Runs every unit of a step once, in order; others wait for one unit or for all. A failure ends the queue.

    Units are *lined up* with the update that they belong to, then *submitted* to the compute lane (or run here and
    now), and are *queued* there until the caller has waited for them. Subclasses say when units are lined up and how
    far ahead of those who wait they are submitted.

    Args:
        walk: updates one unit.
        backend: whose units these are.

    Attributes:
        started: updates of the step have begun in backward.
        redone: steps so far whose units were tried in vain.
        announce: called when weights have become other than a reader would expect, before ``step()``.
    """

    in_backward: ClassVar[bool] = False
    """Whether units are lined up while backward runs (:class:`~lightstep.optimizer.in_backward.InBackward`)."""
    deferred: ClassVar[bool] = False
    """Whether units run in the compute lane while the caller goes on after ``step()``."""
    at_once: ClassVar[int] = _EVERY
    """Units that ``step()`` submits."""
    ahead: ClassVar[int] = _EVERY
    """Units that are submitted behind the one that somebody waits for."""

    def __init__(self, walk: UnitWalk, backend: StateBackend) -> None:
        self._walk, self._backend = walk, backend
        self._waiting: deque[Job] = deque()  # lined up
        self._queued: deque[Job] = deque()  # submitted
        self._lined_up = 0  # jobs of this step
        self._in_lane = False
        self._values: GroupValues | None = None
        self._events: list[Any] = []  # one for each number
        self._ready: Any = None
        self._units: Sequence[Unit] = ()
        self._complete_with: dict[Managed, int] = {}  # number of the unit with which a parameter is complete
        self._arriving_with: dict[Managed, int] = {}  # the same for weights that other replicas send
        self._lock = threading.RLock()
        self.started = False
        self.redone = 0
        self.announce: Callable[[], object] = lambda: None

    @property
    def pending(self) -> bool:
        """Whether updates are under way that nobody has waited for."""
        return bool(self._queued or self._waiting)

    @property
    def undecided(self) -> bool:
        """Whether units were tried for a step that was not called yet."""
        return False

    # -- whole steps

    def holds(self, gradients: Gradients, groups: Sequence[dict[str, Any]], written: Written) -> bool:
        """Whether a step with these gradients and hyper-parameters may decide about what was tried.

        If not, it has been taken back.

        Args:
            written: those of some parameters that somebody else has written to.

        Raises:
            RuntimeError: somebody has written to a weight that was tried, and what he read there is gone.
        """
        return False

    def drop(self) -> None:
        """Gradients that wait for others of their layer are given up (``zero_grad``)."""

    def start(self, update: Update) -> None:
        """Update all units, now or later."""
        self.wait_for_update()
        update.drop_gradients(update.elsewhere)
        # When state is made for the first time memory is laid out, and the host takes part.
        deferred = self.deferred and all(item.updated for item in update.gradients)
        if deferred:
            update.values.detach()
        with self._lock, self._failing_once("the update under way"):
            self._begin(update.gradients.keys(), update.values, deferred)
            units = self._backend.units()
            if deferred:
                self._number(units)
            self._line_up([Job(unit, update) for unit in (*units, None)])
            self._submit_first()

    def overflows(self, update: Update) -> bool:
        """Whether the step is to be left out; the host waits for the device."""
        return bool(update.overflow)

    def _number(self, units: Sequence[Unit]) -> None:
        """Which unit each parameter is complete with; found anew when the units are others."""
        if list(units) != list(self._units):
            self._units = units
            self._complete_with = {item: number for number, unit in enumerate(units) for item, _, _ in unit.parts}
        self._arriving_with = self._backend.arriving_with(self._complete_with, len(units))

    # -- the queue

    def _begin(
        self,
        managed: Collection[Managed],
        values: GroupValues,
        in_lane: bool,
        order: Sequence[Unit] | None = None,
        ahead: bool = True,
    ) -> None:
        """A step that updates these begins: in the compute lane behind the caller's work so far, or here and now."""
        self._values, self._in_lane, self._lined_up = values, in_lane, 0
        begin = partial(self._walk.begin, managed, order, ahead)
        if in_lane:
            self._follow_caller()
            self._backend.lanes.compute.run(begin)
        else:
            begin()

    def _follow_caller(self) -> None:
        lanes = self._backend.lanes
        if self._ready is None:
            self._ready = lanes.event()
        lanes.compute.wait(lanes.caller().record(self._ready))

    def _line_up(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            job.number = self._lined_up
            self._waiting.append(job)
            self._lined_up += 1
        while self._in_lane and len(self._events) < self._lined_up:
            self._events.append(self._backend.lanes.event())

    def _submit(self, stop: int) -> None:
        """Run the units whose number is below ``stop``, in the compute lane; without it all, here and now."""
        while self._waiting and (self._waiting[0].number < stop or not self._in_lane):
            job = self._waiting[0]
            if self._in_lane:
                compute = self._backend.lanes.compute
                compute.run(partial(job.run, self._walk))
                compute.record(self._events[job.number])
                self._queued.append(self._waiting.popleft())
            else:
                job.run(self._walk)
                self._arrived(self._waiting.popleft())

    def _submit_first(self) -> None:
        """What ``step()`` submits: everything, where other processes wait for it."""
        self._submit(_EVERY if self._backend.awaited_by_others else self.at_once)

    def _wait(self, number: int) -> None:
        """The caller waits for the units up to this one, and their gradients are given up."""
        arriving = [job for job in self._queued if job.number <= number]
        if arriving:
            self._backend.lanes.caller().wait(self._events[arriving[-1].number])
        for _ in arriving:  # not before: an interrupt while waiting would lose them
            self._arrived(self._queued.popleft())

    def _arrived(self, job: Job) -> None:
        job.update.drop_gradients(job.complete)
        if job.ends:
            assert self._values is not None
            self._values.give_back()
            self._values = None

    # -- those who wait

    def wait_for_update(self, items: Iterable[Managed] | None = None) -> None:
        """What the caller does next finds these parameters updated; ``None`` is all of them, and their state.

        On an accelerator the current stream waits and the host does not; on the CPU the calling thread waits.
        """
        if not self.pending:
            return
        with self._lock:  # forwards of several threads: none goes on before what the first one waits for is there
            if not self.pending:
                return
            sent, last = ([], _EVERY) if items is None else self._last_of(items)
            with self._failing_once("the update under way"):
                self._submit(last + 1 + self.ahead)
            with self._failing_once("the update under way", interrupts=False):
                self._wait(last)
                self._backend.receive(sent)

    def wait_for_step(self) -> None:
        """Everything that ``step()`` has decided is done, for what the caller does next."""
        self.wait_for_update()

    def wait_on_stream(self, items: Iterable[Managed]) -> None:
        """The same for one stream that reads beside the one that goes on: nothing counts as waited for by it."""
        with self._lock:
            sent, last = self._last_of(items)
            if last < 0:
                return
            with self._failing_once("the update under way"):
                self._submit(last + 1 + self.ahead)
                self._backend.lanes.caller().wait(self._events[last])
                self._backend.receive(sent)

    def _last_of(self, items: Iterable[Managed]) -> tuple[list[Managed], int]:
        """Those of the parameters that another replica sends, and the number behind which all are there (-1: none)."""
        last = -1
        sent: list[Managed] = []
        for item in items:
            number = self._complete_with.get(item)
            if number is None:
                number = self._arriving_with.get(item, -1)
                if number >= 0:
                    sent.append(item)
            last = max(last, number)
        return sent, last

    # -- failure

    @property
    def _half_done(self) -> bool:
        """Whether breaking off now leaves some units updated and others not."""
        return bool(self._waiting)

    @contextlib.contextmanager
    def _failing_once(self, what: str, interrupts: bool = True) -> Iterator[None]:
        """When the update breaks off, nobody waits for the rest of it, and what broke it off is noted.

        Args:
            interrupts: an interrupt breaks it off as well; one that comes while the caller waits does not.
        """
        try:
            yield
        except BaseException as error:
            if not interrupts and not isinstance(error, Exception):
                raise
            broken = self._walk.broken
            known = bool(broken)
            if self._half_done and not known:
                broken.note(what, error)
            self.forget()
            if not known:
                self._backend.abandon()
            raise

    def forget(self) -> None:
        """Nothing is under way any more."""
        if self._in_lane:
            self._backend.lanes.compute.synchronize()
        self._waiting.clear()
        self._queued.clear()
        self._units, self._complete_with, self._arriving_with = (), {}, {}
        self._values = None

    def close(self) -> None:
        """Take hooks off the parameters, if there are any."""


class AtStep(Schedule):
    """``update: at_step``: all units within ``step()``, on the caller's stream."""


class NextForward(Schedule):
    """``update: next_forward``: units in the compute lane, while the caller goes on with the next forward.

    The update is the one that ``step()`` decided: its gradients are kept, and its hyper-parameters copied, until the
    caller has waited for it.

    Units are submitted some way ahead of the forward and not all at once. An accelerator takes about a thousand
    launches before it makes the host wait, and the forward's have to find room too. Replicas that send each other
    weights submit all of them in ``step()``: one may read alone (``if rank == 0: torch.save(...)``), or have its
    optimizer collected earlier, and would wait for units that the others, who wait for it, had not submitted.
    """

    deferred = True
    at_once = 40
    ahead = 24


class Job:
    """One unit's update, or (``None``) the end of the step.

    Attributes:
        number: its place in the step.
        ends: the step is over with it.
        complete: the parameters that are complete with it, known when its work was queued (on the CPU: is done).
    """

    def __init__(self, unit: Unit | None, update: Update) -> None:
        self.number, self.unit, self.update, self.ends = -1, unit, update, unit is None
        self.complete: list[Managed] = []

    def owners(self) -> Iterable[Managed]:
        """The parameters that whoever needs them waits for this one for."""
        return () if self.unit is None else (owner for owner, _, _ in self.unit.parts)

    def run(self, walk: UnitWalk) -> None:
        if self.unit is None:
            walk.finish(self.update.elsewhere)
        else:
            self.complete.extend(walk.unit(self.unit, self.update))
