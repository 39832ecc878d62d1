"""When each unit's update runs: one queue of units in one order; whoever needs a unit waits for it."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from lightstep.optimizer.group_values import GroupValues
from lightstep.optimizer.step_guard import StepGuard
from lightstep.optimizer.unit_updater import Gradients, UnitUpdater, Update
from lightstep.state.backend import StateBackend
from lightstep.state.lanes import Lane
from lightstep.state.schema import Managed, Unit

__all__ = ["AdoptWrites", "AtStep", "FindWritten", "Job", "NextForward", "Schedule", "refuse_older_graphs"]

FindWritten = Callable[[Iterable[Managed]], Sequence[Managed]]
"""Returns those of some parameters that somebody else has written to."""
AdoptWrites = Callable[[Iterable[Managed], Container[Managed]], bool]
"""Adopts writes to some parameters; returns ``False`` if that is impossible, because others have been used already."""

_ALL = sys.maxsize


class Schedule:
    """Runs every unit of a step once, in order. Callers wait for single units or for all; an error ends the queue.

    Callers outside of this room pass the guard first; only what hooks call in backward passes it here.

    A unit's update is a *job*. It is first *scheduled*, then *submitted*: to the compute lane, or run at once on the
    caller's stream. A job in the lane counts as submitted until the caller has waited for it. Subclasses decide when
    jobs are scheduled, and how far ahead of the callers that wait they are submitted.

    Args:
        updater: updates one unit.
        backend: where the state of the units lives.

    Attributes:
        guard: admits one thread at a time.
        started: a backward has begun to update units of the current step.
        redone: steps so far whose speculative updates had to be redone.
        rolled_back: how often speculative updates were rolled back before ``step()``.
        on_early_update: called when weights may change before ``step()``.
    """

    in_backward: ClassVar[bool] = False
    """Whether updates that count run during backward (:class:`~lightstep.optimizer.in_backward.InBackward`)."""
    deferred: ClassVar[bool] = False
    """Whether ``step()`` returns before the updates have run, in the compute lane."""
    submit_in_step: ClassVar[int] = _ALL
    """Jobs that ``step()`` submits."""
    submit_ahead: ClassVar[int] = _ALL
    """Jobs that are submitted behind the one that somebody waits for."""

    def __init__(self, updater: UnitUpdater, backend: StateBackend) -> None:
        self._updater, self._backend = updater, backend
        self._scheduled: deque[Job] = deque()
        self._submitted: deque[Job] = deque()
        self._num_jobs = 0  # of this step
        self._in_lane = False
        self._values: GroupValues | None = None
        self._events: list[Any] = []  # by job number
        self._caller: Lane | None = None  # where the gradients come from
        self._caller_event: Any = None
        self._units: Sequence[Unit] = ()
        self._completing_job: dict[Managed, int] = {}  # the job with which all of a parameter is updated
        self._arrival_job: dict[Managed, int] = {}  # the same for weights that other replicas send
        self.guard = StepGuard(backend)
        self.started = False
        self.redone = self.rolled_back = 0
        self.on_early_update: Callable[[], object] = lambda: None

    @property
    def pending(self) -> bool:
        """Whether there are updates that nobody has waited for."""
        return bool(self._submitted or self._scheduled)

    @property
    def has_open_speculation(self) -> bool:
        """Whether there are speculative updates whose ``step()`` has not been called yet."""
        return False

    # -- whole steps

    def validate_speculation(
        self, gradients: Gradients, groups: Sequence[dict[str, Any]], adopt_writes: AdoptWrites
    ) -> bool:
        """Whether a step with these gradients and hyper-parameters may use the speculative updates.

        If not, they are rolled back.

        Raises:
            RuntimeError: somebody has written to a weight after its speculative update, and read a value that is gone.
        """
        return False

    def drop_gradients(self) -> None:
        """Drop gradients that wait for others of their layer (``zero_grad``)."""

    def start(self, updates: Sequence[Update]) -> None:
        """Update all units, now or later.

        Args:
            updates: one of all parameters, or one for each layer; all have the same overflow and values.
        """
        self.wait_for_update()
        for update in updates:
            update.drop_gradients(update.elsewhere)
        # The first update of a parameter makes its state: memory is laid out, and the host takes part.
        deferred = self.deferred and not any(update.without_state for update in updates)
        values, elsewhere = updates[0].values, [item for update in updates for item in update.elsewhere]
        if deferred:
            values.copy_mutable()
        with self._aborting("the update under way"):
            gradients = [item for update in updates for item in update.gradients]
            self._begin(gradients, values, deferred)
            units = self._backend.units()
            if deferred:
                refuse_older_graphs(gradients)
                for update in updates:
                    update.note_versions()
                self._map_parameters(units)
            self._schedule([*_jobs(units, updates), Job(None, updates, elsewhere)])
            self._submit_in_step()

    def overflows(self, updates: Sequence[Update]) -> bool:
        """Whether the step is to be skipped; the host waits for the device."""
        return bool(updates[0].overflow)

    def skip(self) -> None:
        """Update nothing: the step overflows."""
        self.wait_for_update()

    def _map_parameters(self, units: Sequence[Unit]) -> None:
        """Find the job that completes each parameter; kept while the units stay the same."""
        if list(units) != list(self._units):
            self._units = units
            self._completing_job = {item: number for number, unit in enumerate(units) for item in unit.owners}
        self._arrival_job = self._backend.arrival_jobs(self._completing_job, len(units))

    # -- the queue

    def _begin(
        self,
        managed: Collection[Managed],
        values: GroupValues,
        in_lane: bool,
        order: Sequence[Unit] | None = None,
        ahead: bool = True,
    ) -> None:
        """Begin a step that updates these parameters: in the compute lane, behind the caller's work so far, or here.

        Args:
            order, ahead: see :meth:`UnitUpdater.begin`.
        """
        self._values, self._in_lane, self._num_jobs = values, in_lane, 0
        begin = partial(self._updater.begin, managed, order, ahead)
        if in_lane:
            self._wait_for_caller()
            self._backend.lanes.compute.run(begin)
        else:
            begin()

    def _wait_for_caller(self) -> None:
        """The compute lane waits for the caller's work so far."""
        lanes = self._backend.lanes
        if self._caller_event is None:
            self._caller_event = lanes.event()
        self._caller = lanes.caller()
        lanes.compute.wait(self._caller.record(self._caller_event))

    def _schedule(self, jobs: Iterable[Job]) -> None:
        """Schedule jobs, among them all that update parts of the same parameters: the last one completes them."""
        jobs = list(jobs)
        last = {owner: job for job in jobs for owner in job.owners}
        for owner in last:
            last[owner].completed.append(owner)
        for job in jobs:
            job.number = self._num_jobs
            self._scheduled.append(job)
            self._num_jobs += 1
        while self._in_lane and len(self._events) < self._num_jobs:
            self._events.append(self._backend.lanes.event())

    def _submit(self, stop: int) -> None:
        """Submit the jobs with numbers below ``stop`` to the compute lane; without the lane, run all of them here."""
        while self._scheduled and (self._scheduled[0].number < stop or not self._in_lane):
            job = self._scheduled[0]
            if self._in_lane:
                compute = self._backend.lanes.compute
                compute.run(partial(job.run, self._updater))
                compute.record(self._events[job.number])
                self._submitted.append(self._scheduled.popleft())
            else:
                job.run(self._updater)
                self._complete(self._scheduled.popleft())

    def _submit_in_step(self) -> None:
        """Submit what ``step()`` submits: all jobs if other processes wait for them."""
        self._submit(_ALL if self._backend.peers_wait else self.submit_in_step)

    def _wait(self, number: int) -> None:
        """The caller waits for the jobs up to this one; their gradients are freed.

        If the caller is on another stream than their backward, that stream waits too: it gets their memory back.
        """
        awaited = [job for job in self._submitted if job.number <= number]
        if awaited:
            caller, done = self._backend.lanes.caller(), self._events[awaited[-1].number]
            caller.wait(done)
            if self._caller is not None and self._caller.stream != caller.stream:
                self._caller.wait(done)
        for _ in awaited:  # not earlier: an interrupt during the wait would lose them
            self._complete(self._submitted.popleft())

    def _complete(self, job: Job) -> None:
        self._updater.complete(job.updates, job.completed)
        if job.is_end:
            assert self._values is not None
            self._updater.write_back(self._values)
            self._values = None

    # -- waiting

    def wait_for_update(self, items: Iterable[Managed] | None = None) -> None:
        """What the caller does next sees these parameters updated; ``None``: all parameters, and their state.

        On an accelerator the current stream waits and the host does not. On the CPU the calling thread waits.
        """
        if not self.pending:
            return
        sent, last = ([], _ALL) if items is None else self._last_job_of(items)
        with self._aborting("the update under way"):
            self._submit(last + 1 + self.submit_ahead)
        with self._aborting("the update under way", on_interrupt=False):
            self._wait(last)
            self._backend.receive(sent)

    def wait_for_step(self) -> None:
        """What the caller does next sees all updates that ``step()`` has decided."""
        self.wait_for_update()

    def wait_on_stream(self, items: Iterable[Managed]) -> None:
        """The current stream waits for these parameters, and no other stream does: the jobs stay unwaited for."""
        sent, last = self._last_job_of(items)
        if last < 0:
            return
        with self._aborting("the update under way"):
            self._submit(last + 1 + self.submit_ahead)
            self._backend.lanes.caller().wait(self._events[last])
            self._backend.receive(sent)

    def _last_job_of(self, items: Iterable[Managed]) -> tuple[list[Managed], int]:
        """Those of the parameters that other replicas send, and the job that completes the last one (-1: none)."""
        last = -1
        sent: list[Managed] = []
        for item in items:
            number = self._completing_job.get(item)
            if number is None:
                number = self._arrival_job.get(item, -1)
                if number >= 0:
                    sent.append(item)
            last = max(last, number)
        return sent, last

    # -- errors

    @property
    def _is_half_done(self) -> bool:
        """Whether an error now leaves some units updated and others not."""
        return bool(self._scheduled)

    @contextlib.contextmanager
    def _aborting(self, what: str, on_interrupt: bool = True) -> Iterator[None]:
        """On an error in the body, drop the rest of the update and mark the step as broken.

        Args:
            what: names the body in the error message.
            on_interrupt: do so on an interrupt, too. An interrupt during a wait changes nothing.
        """
        try:
            yield
        except BaseException as error:
            if not on_interrupt and not isinstance(error, Exception):
                raise
            broken = self._updater.broken
            already_broken = bool(broken)
            if self._is_half_done and not already_broken:
                broken.mark_failed(what, error)
            self.reset()
            if not already_broken:
                self._backend.abandon()
            raise

    def reset(self) -> None:
        """Drop everything that is scheduled or submitted."""
        if self._in_lane:
            self._backend.lanes.compute.synchronize()
        self._scheduled.clear()
        self._submitted.clear()
        self._units, self._completing_job, self._arrival_job = (), {}, {}
        self._values = None

    def close(self) -> None:
        """Remove hooks from the parameters, if there are any."""


class AtStep(Schedule):
    """``update: at_step``: all units are updated within ``step()``, on the caller's stream."""


class NextForward(Schedule):
    """``update: next_forward``: units are updated in the compute lane, while the caller runs the next forward.

    The update is the one that ``step()`` decided. Its gradients are kept and its hyper-parameters copied until the
    caller has waited for it.

    Jobs are submitted some way ahead of the forward and not all at once: an accelerator queues about a thousand
    launches before it makes the host wait, and the forward needs room for its own.

    Replicas that send each other weights submit all jobs in ``step()``. Otherwise one replica that reads alone
    (``if rank == 0: torch.save(...)``), or whose optimizer is collected first, would wait for jobs that the others,
    which wait for it, have not submitted.
    """

    deferred = True
    submit_in_step = 40
    submit_ahead = 24


class Job:
    """The update of one unit, or (``unit`` is ``None``) the end of the step.

    Args:
        updates: those of the unit's parameters.
        elsewhere, next_order: see :meth:`UnitUpdater.finish`.

    Attributes:
        number: its position in the step.
        is_end: the step ends with it.
        owners: the parameters that it updates, or parts of which it updates.
        completed: the parameters that are complete with it, because it is the last one with a part of them.
    """

    def __init__(
        self,
        unit: Unit | None,
        updates: Sequence[Update],
        elsewhere: Collection[Managed] = (),
        next_order: Sequence[Unit] | None = None,
    ) -> None:
        self.number, self.unit, self.updates, self.is_end = -1, unit, updates, unit is None
        self.owners = [] if unit is None else unit.owners
        self._elsewhere, self._next_order = elsewhere, next_order
        self.completed: list[Managed] = []

    def run(self, updater: UnitUpdater) -> None:
        if self.unit is None:
            updater.finish(self._elsewhere, self._next_order)
        else:
            updater.update(self.unit, self.updates)


def _jobs(units: Sequence[Unit], updates: Sequence[Update]) -> list[Job]:
    """A job for each unit, with the updates of its parameters.

    Units that ranks update together get all updates: the communication of later units starts with them.
    """
    if len(updates) == 1:
        return [Job(unit, updates) for unit in units]
    update_of = {item: update for update in updates for item in update.gradients}
    shared = [any(owner.rows is not None for owner in unit.owners) for unit in units]
    own = [list(dict.fromkeys(update_of[owner] for owner in unit.owners if owner in update_of)) for unit in units]
    return [Job(unit, updates if together else mine) for unit, together, mine in zip(units, shared, own, strict=True)]


def refuse_older_graphs(items: Iterable[Managed]) -> None:
    """Weights that the compute lane will write to count as written from now on.

    So autograd refuses a backward through a graph that has saved them, as it does after ``torch.optim``'s own step.
    Otherwise it would read them while they are updated.
    """
    torch.autograd.graph.increment_version([item.local for item in items])
