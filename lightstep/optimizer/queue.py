"""When each unit's update runs: one queue of units in one order; whoever needs a unit waits for it."""

from __future__ import annotations

import contextlib
import sys
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lightstep.optimizer.arrivals import Arrivals
from lightstep.optimizer.managed_parameters import ManagedParameters
from lightstep.optimizer.step_guard import StepGuard
from lightstep.optimizer.unit_updater import UnitUpdater, updates_of
from lightstep.optimizer.update import Gradients, GroupValues, Update
from lightstep.precision.gradients import GradientAccumulator
from lightstep.state.host_weights import WeightGroup
from lightstep.state.lanes import Lane, Lanes
from lightstep.state.schema import Managed, Unit
from lightstep.state.store import Store

__all__ = [
    "AT_STEP",
    "NEXT_FORWARD",
    "Early",
    "EarlyStep",
    "Factors",
    "Job",
    "Queue",
    "UpdateTime",
    "refuse_older_graphs",
]

_ALL = sys.maxsize
_READ = "a read of weights that are being updated"

SUBMIT_IN_STEP = 40
"""Jobs that a deferred ``step()`` submits. An accelerator queues about a thousand launches before it makes the host
wait, and the next forward needs room for its own."""
SUBMIT_AHEAD = 24
"""Jobs that are submitted behind the one that somebody waits for."""
SUBMIT_BEFORE_WEIGHTS = 8
"""At most so many of both, if weights rest on the host: what they bring crosses the link before the next forward's."""


Factors = tuple[Tensor | None, Tensor | None]
"""``(divisor, factor)``, as in :class:`Update`."""


class EarlyStep(Protocol):
    """What the engine does for updates in backward."""

    accumulating: bool | None
    param_groups: list[dict[str, Any]]
    managed: ManagedParameters
    gradients: GradientAccumulator

    def prepare_backward(self, final: bool) -> tuple[Sequence[Sequence[Managed]], Factors] | None:
        """Set up what the updates need; returns the parameters of each layer, in the order of the model, and the
        scaling of gradients that are not clipped.

        ``None``: nothing may be updated before all gradients are known.

        Args:
            final: the updates count, and weights that somebody else has written to must be adopted before. They need no
                scaling.
        """

    def take(self, item: Managed) -> Tensor | None:
        """The gradient of a parameter if it has one; it is gone afterwards."""

    def make_layer_update(self, layer: int, gradients: Gradients, values: GroupValues) -> Update | None:
        """The update of one layer whose gradients have been taken; ``None`` if the layer is to be skipped."""


class Early(ABC):
    """Updates units in backward, when their gradients are complete: subclasses say which ones, and by which factor.

    Args:
        queue: holds this object, so this one must not hold it: a weak reference.

    Attributes:
        is_half_done: an error now leaves some units updated and others not.
        speculation: updates that may still be rolled back; ``None``: there are none.
        awaits_step: these updates' ``step()`` has not been called yet.
    """

    speculation: Any = None

    def __init__(self, queue: Queue) -> None:
        self._queue, self._updater, self._backend = queue, queue.updater, queue.backend
        self._arrivals = Arrivals()

    @property
    @abstractmethod
    def is_half_done(self) -> bool: ...

    @property
    def awaits_step(self) -> bool:
        return False

    @abstractmethod
    def updating(self, step: EarlyStep) -> contextlib.AbstractContextManager[None]:
        """The last backward of a step runs in the body, which holds :attr:`StepGuard.backward`.

        Args:
            step: what the engine does for it.
        """

    def _second_gradient(self, item: Managed) -> RuntimeError:
        """For a parameter that has been updated in this backward already."""
        assert self._queue.time.without_early is not None
        return RuntimeError(
            f"a second gradient of {item.name} arrived in one backward, after it was updated: reentrant activation "
            "checkpointing does that to parameters that are used several times (use use_reentrant=False), and a loss "
            "of sharded weights themselves does it beside that of the model (give each a backward of its own); or set "
            f"optimizer_state.update: {self._queue.time.without_early.name}"
        )

    def complete(self, step: EarlyStep) -> None:
        """In ``step()``, if it has started in backward: update what is left."""
        raise AssertionError("no step has started")

    def validate(self, gradients: Gradients, step: EarlyStep) -> bool:
        """Whether a step with these gradients and the present hyper-parameters may use the speculative updates.

        If not, they are rolled back.

        Raises:
            RuntimeError: somebody has written to a weight after its speculative update, and read a value that is gone.
        """
        return False

    def start(self, updates: Sequence[Update]) -> bool:
        """In ``step()``: update the units that are not updated yet. ``False``: none are, and this does nothing."""
        return False

    def overflows(self, updates: Sequence[Update]) -> bool | None:
        """Whether the step is to be skipped, if this object knows it."""
        return None

    def skip(self) -> None:  # noqa: B027  (an optional hook)
        """The step is skipped."""

    def resolve(self, items: Iterable[Managed] | None) -> bool:
        """These parameters (``None``: all) are about to be read; returns whether there may be jobs to wait for.

        If so, it has not iterated over them.
        """
        return True

    def awaits(self, item: Managed, gradient: Tensor) -> bool:
        """Whether an update in backward is still to be submitted that reads this gradient of a parameter."""
        return False

    def is_first(self, item: Managed) -> bool:
        """Whether ``step()`` will update this parameter before all others."""
        return False

    def drop_gradients(self) -> None:  # noqa: B027  (an optional hook)
        """Drop gradients that wait for others of their layer (``zero_grad``)."""

    @abstractmethod
    def reset(self) -> None:
        """The step has failed: forget it."""

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        self._arrivals.close()


@dataclass(frozen=True)
class UpdateTime:
    """When updates run.

    Attributes:
        name: in ``optimizer_state.update``.
        deferred: ``step()`` returns before the updates have run, in the compute lane. They are those that it decided.
            Gradients are kept and hyper-parameters copied until the caller has waited.
        early: makes what updates units in backward; ``None``: nothing does.
        in_backward: the updates in backward count, whatever the other gradients are.
        without_early: the update time that does the same without updates in backward.
    """

    name: str
    deferred: bool = False
    early: Callable[[Queue], Early] | None = None
    in_backward: bool = False
    without_early: UpdateTime | None = None


AT_STEP = UpdateTime("at_step")
"""All units are updated within ``step()``, on the caller's stream."""

NEXT_FORWARD = UpdateTime("next_forward", deferred=True)
"""Units are updated in the compute lane, while the caller runs the next forward."""


class Queue:
    """Runs every unit of a step once, in order. Callers wait for single units or for all; an error ends the queue.

    Callers outside of this room pass the guard first; only what hooks call in backward passes it here.

    A step that is not deferred is run at once (:meth:`UnitUpdater.run`). In others a unit's update is a *job*. It is
    first *scheduled*, then *submitted*: to the compute lane, or, if updates in backward have no lane, run at once. What
    is in the lane counts as submitted until the caller has waited for it.

    Jobs are submitted some way ahead of the forward and not all at once: see :data:`SUBMIT_IN_STEP`. But replicas that
    send each other weights submit all jobs in ``step()``. Otherwise one replica that reads alone (``if rank == 0:
    torch.save(...)``), or whose optimizer is collected first, would wait for jobs that the others, which wait for it,
    have not submitted.

    Args:
        updater: updates one unit.
        backend: where the state of the units lives.
        time: when updates run.
        managed: the parameters.

    Attributes:
        early: updates units in backward; ``None``: nothing does.
        guard: admits one thread at a time.
        started: a backward has begun to update units of the current step for good.
        num_jobs: scheduled so far in this step.
        jobs_in_step: how many jobs ``step()`` submits.
        lanes: those in whose compute lane this step's jobs run; ``None``: they run here.
        values: this step's hyper-parameters.
        redone: steps so far whose speculative updates had to be redone.
        rolled_back: how often speculative updates were rolled back before ``step()``.
        on_early_update: called when weights may change before ``step()``.
    """

    def __init__(self, updater: UnitUpdater, backend: Store, time: UpdateTime, managed: ManagedParameters) -> None:
        self.updater, self.backend, self.time = updater, backend, time
        self._scheduled: deque[Job] = deque()
        self._submitted: deque[Job] = deque()
        self.num_jobs = self.jobs_in_step = self._ahead = 0
        self.lanes: Lanes | None = None
        self.values: GroupValues | None = None
        self._events: list[Any] = []  # by job number
        self._caller: Lane | None = None  # where the gradients come from
        self._caller_event: Any = None
        self._end: Any = None  # of the last work in the lane, once a stream has waited for it
        self._streams_behind_end: list[Any] = []
        self._completing_job: dict[Managed, int] = {}  # the job with which all of a parameter is updated
        self._arrival_job: dict[Managed, int] = {}  # with which replicas start to send each other a weight
        self.guard = StepGuard(backend, managed)
        self.started = False
        self.redone = self.rolled_back = 0
        self.on_early_update: Callable[[], object] = lambda: None
        self.early = None if time.early is None else time.early(weakref.proxy(self))

    @property
    def pending(self) -> bool:
        """Whether there are updates that nobody has waited for."""
        early = self.early
        return bool(self._submitted or self._scheduled or (early is not None and early.speculation is not None))

    @property
    def may_be_pending(self) -> bool:
        """Whether there are updates to wait for: pending ones, or those of a step that another thread runs."""
        guard = self.guard
        found = self.pending or guard.is_busy_elsewhere or (self.started and guard.is_foreign)
        return found and not guard.is_forked

    @property
    def may_be_ahead(self) -> bool:
        """Whether the current stream may be ahead of updates: pending ones, or those that another one has awaited."""
        return self.may_be_pending or (self._is_ahead_of_end and not self.guard.is_forked)

    @property
    def _is_ahead_of_end(self) -> bool:
        return self._end is not None and self.backend.lanes.caller().stream not in self._streams_behind_end

    # -- whole steps

    def start(self, updates: Sequence[Update]) -> None:
        """Update all units, now or later.

        Args:
            updates: one of all parameters, or one for each layer; all have the same overflow and values.
        """
        if self.early is not None and self.early.start(updates):
            return
        self.wait_for_update()
        for update in updates:
            if update.elsewhere:
                update.drop_gradients(update.elsewhere)
                refuse_older_graphs(update.elsewhere)
        # The first update of a parameter makes its state: memory is laid out, and the host takes part.
        deferred = self.time.deferred and not any(update.without_state for update in updates)
        try:
            if deferred:
                self._defer(updates)
            else:
                self._end = None
                self.updater.run(updates)
        except BaseException as error:
            self.abort("the update under way", error)
            raise

    def _defer(self, updates: Sequence[Update]) -> None:
        """Update all units in the compute lane, while the caller goes on."""
        values, elsewhere = updates[0].values, [item for update in updates for item in update.elsewhere]
        gradients = [item for update in updates for item in update.gradients]
        self.begin(gradients, values, in_lane=True)
        refuse_older_graphs(gradients)
        for update in updates:
            update.note_versions()
        units = self.backend.units()
        jobs = [Job([unit], own) for unit, own in zip(units, updates_of(units, updates), strict=True)]
        self.schedule([*jobs, Job((), updates, end=(elsewhere, None))])
        self.submit(self.jobs_in_step)

    def overflows(self, updates: Sequence[Update]) -> bool:
        """Whether the step is to be skipped; the host waits for the device."""
        known = None if self.early is None else self.early.overflows(updates)
        return bool(updates[0].overflow) if known is None else known

    def skip(self) -> None:
        """Update nothing: the step overflows."""
        if self.early is not None:
            self.early.skip()
        self.wait_for_update()

    # -- the queue

    def begin(
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
        lanes = self.backend.lanes if in_lane else None
        self.values, self.lanes, self.num_jobs = values, lanes, 0
        self._completing_job, self._arrival_job, self._end = {}, {}, None
        limit = _ALL if self.backend.host_weights is None else SUBMIT_BEFORE_WEIGHTS
        self._ahead = min(SUBMIT_AHEAD, limit)
        self.jobs_in_step = _ALL if self.backend.peers_wait else min(SUBMIT_IN_STEP, limit)
        begin = partial(self.updater.begin, managed, order, ahead)
        if lanes is not None:
            self.wait_for_caller()
            lanes.compute.run(begin)
        else:
            begin()

    def wait_for_caller(self) -> Lane:
        """The compute lane waits for the caller's work so far. Returns the caller's lane."""
        lanes = self.lanes
        assert lanes is not None
        if self._caller_event is None:
            self._caller_event = lanes.event()
        self._caller = lanes.caller()
        lanes.compute.wait(self._caller.record(self._caller_event))
        return self._caller

    def schedule(self, jobs: Sequence[Job]) -> None:
        """Schedule jobs, among them all that update parts of the same parameters: the last one completes them.

        With the end of a deferred step, what other replicas send is expected, too.
        """
        last = {owner: job for job in jobs for unit in job.units for owner in unit.owners}
        for job in jobs:
            job.number = self.num_jobs
            job.completed = [owner for unit in job.units for owner in unit.owners if last[owner] is job]
            self.num_jobs += 1
        self._scheduled.extend(jobs)
        if self.lanes is not None:
            self._completing_job.update({owner: job.number for owner, job in last.items()})
            while len(self._events) < self.num_jobs:
                self._events.append(self.lanes.event())
            if self.time.deferred and self.backend.peers_wait and jobs[-1].end is not None:
                self._arrival_job = self.backend.arrival_jobs(self._completing_job, jobs[-1].number)

    def withdraw(self) -> list[Unit]:
        """Forget the step's jobs; returns the units of those that were submitted. The caller must wait for the lane."""
        units = [unit for job in self._submitted if not job.are_done for unit in job.units]
        self._scheduled.clear()
        self._submitted.clear()
        self._completing_job, self._arrival_job, self._end = {}, {}, None
        return units

    def submit(self, stop: int) -> None:
        """Submit the jobs with numbers below ``stop`` to the compute lane; without the lane, run all of them here."""
        compute = None if self.lanes is None else self.lanes.compute
        while self._scheduled and (self._scheduled[0].number < stop or compute is None):
            job, updater = self._scheduled[0], self.updater
            work: Callable[[], object] | None = None
            if job.end is not None:
                work = partial(updater.finish, *job.end)
            elif not job.are_done:
                work = partial(updater.update, job.units[0], job.updates)
            if compute is not None:
                if work is not None:
                    compute.run(work)
                compute.record(self._events[job.number])
                self._submitted.append(self._scheduled.popleft())
            else:
                if work is not None:
                    work()
                self._complete(self._scheduled.popleft())

    def record_again(self, number: int) -> None:
        """Whoever waits for this job from now on waits for all that is in the lane by now."""
        assert self.lanes is not None
        self.lanes.compute.record(self._events[number])

    def wait(self, number: int) -> None:
        """The caller waits for the jobs up to this one; their gradients are freed.

        If the caller is on another stream than their backward, that stream waits too: it gets their memory back.
        """
        awaited = [job for job in self._submitted if job.number <= number]
        if awaited:
            self.wait_for_event(self._events[awaited[-1].number], is_end=awaited[-1].end is not None)
        for _ in awaited:  # not earlier: an interrupt during the wait would lose them
            self._complete(self._submitted.popleft())

    def wait_for_event(self, event: Any, is_end: bool) -> None:
        """The caller waits, and so does the stream that made the gradients, if it is another one.

        Args:
            is_end: nothing is pending behind the event. Other streams may still be ahead of it.
        """
        assert self.lanes is not None
        waiting = [self.lanes.caller()]
        if self._caller is not None and self._caller.stream != waiting[0].stream:
            waiting.append(self._caller)
        for lane in waiting:
            lane.wait(event)
        if is_end:
            self._end, self._streams_behind_end = event, [lane.stream for lane in waiting]

    def _complete(self, job: Job) -> None:
        self.updater.complete(job.updates, job.completed)
        if job.end is not None:
            assert self.values is not None
            if self.updater.classes.may_write_groups:
                self.updater.write_back(self.values)
            self.values = None

    # -- waiting

    def wait_for_update(self, items: Iterable[Managed] | None = None, decided: bool = False) -> None:
        """What the caller does next sees these parameters updated; ``None``: all parameters, and their state.

        On an accelerator the current stream waits and the host does not. On the CPU the calling thread waits.

        Args:
            decided: only what ``step()`` has decided. Speculative updates for a step that has not been called yet stay
                as they are.
        """
        if self.early is not None and ((decided and self.early.awaits_step) or not self.early.resolve(items)):
            return
        if not self.pending:
            return
        sent, last = ([], _ALL) if items is None else self._last_job_of(items)
        try:
            self.submit(last + 1 + self._ahead)
        except BaseException as error:
            self.abort("the update under way", error)
            raise
        try:
            self.wait(last)
            if self.backend.peers_wait:
                self.backend.receive(sent)
        except Exception as error:  # an interrupt during a wait changes nothing
            self.abort("the update under way", error)
            raise

    def wait_outside_step(self, items: Iterable[Managed] | None = None, decided: bool = False) -> None:
        """:meth:`wait_for_update`, for a caller that has not passed the guard. A fork waits for nothing: see
        ``step_guard.py``."""
        if self.may_be_pending:
            self.guard.work(_READ, self.wait_for_update, items, decided)
            if self.guard.is_foreign:
                self.guard.settle()

    def wait_on_stream_outside_step(self, items: Iterable[Managed]) -> None:
        """:meth:`wait_on_stream`, likewise."""
        if self.may_be_ahead:
            self.guard.work(_READ, self.wait_on_stream, items)
            if self.guard.is_foreign:
                self.guard.settle()

    def wait_on_stream(self, items: Iterable[Managed]) -> None:
        """The current stream waits for these parameters, and no other stream does: the jobs stay unwaited for.

        If another stream has waited for all jobs, this one waits for their end. It need not wait for a step that has
        :attr:`started`: by the next forward an earlier reader or ``step()`` has.
        """
        if self.started or (self.early is not None and not self.early.resolve(items)):
            return
        if not self.pending:
            self._follow_end()
            return
        sent, last = self._last_job_of(items)
        if last < 0:
            return
        try:
            self.submit(last + 1 + self._ahead)
            self.backend.lanes.caller().wait(self._events[last])
            self.backend.receive(sent)
        except BaseException as error:
            self.abort("the update under way", error)
            raise

    def _follow_end(self) -> None:
        if self._is_ahead_of_end:
            caller = self.backend.lanes.caller()
            caller.wait(self._end)
            self._streams_behind_end.append(caller.stream)

    def _last_job_of(self, items: Iterable[Managed]) -> tuple[list[Managed], int]:
        """Those of the parameters that replicas send, and the job that completes, or sends, the last one (-1: none)."""
        last = -1
        sent: list[Managed] = []
        completing, arrival = self._completing_job, self._arrival_job
        for item in items:
            number = -1
            if item in arrival:
                number = arrival[item]
                sent.append(item)
            elif item in completing:
                number = completing[item]
            if number > last:
                last = number
        return sent, last

    # -- errors

    def abort(self, what: str, error: BaseException) -> None:
        """After an error: drop the rest of the update, and mark the step as broken.

        Args:
            what: names what has failed in the message.
        """
        broken = self.updater.broken
        already_broken = bool(broken)
        begun = bool(self._scheduled) or self.updater.is_running
        half_done = begun or (self.early is not None and self.early.is_half_done)
        if half_done and not already_broken:
            broken.mark_failed(what, error)
        self.reset()
        if not already_broken:
            self.backend.abandon()

    def reset(self) -> None:
        """Drop everything that is scheduled or submitted."""
        if self.early is not None:
            self.early.reset()
        if self.lanes is not None:
            self.lanes.compute.synchronize()
        self.withdraw()
        self.values, self.updater.is_running = None, False
        for unit in self.backend.speculative(self.backend.units()):
            self.backend.drop_speculation(unit)

    def close(self) -> None:
        """Remove hooks from the parameters, if there are any."""
        if self.early is not None:
            self.early.close()


@dataclass(eq=False)
class Job:
    """The update of one unit, or the end of a step.

    Attributes:
        units: the unit; none at the end.
        updates: those of the units' parameters.
        are_done: it stands for units that are updated already: whoever waits for it waits for the work in the lane
            before it.
        end: the step ends with it: arguments of :meth:`UnitUpdater.finish`.
        number: its position in the step.
        completed: the parameters that are complete with it, because it is the last one with a part of them.
    """

    units: Sequence[Unit]
    updates: Sequence[Update]
    are_done: bool = False
    end: tuple[Collection[Managed], Sequence[Unit] | None] | None = None
    number: int = -1
    completed: list[Managed] = field(default_factory=list)


def refuse_older_graphs(items: Iterable[Managed]) -> None:
    """Weights that the compute lane, or another replica, will write to count as written from now on.

    So autograd refuses a backward through a graph that has saved them, as it does after ``torch.optim``'s own step.
    Otherwise it would read them while they are updated.
    """
    listed = list(items)
    torch.autograd.graph.increment_version([item.local for item in listed if item.home is None])
    by_group: dict[WeightGroup, list[Tensor]] = {}
    for home, parameter in [(item.home, item.param) for item in listed if item.home is not None]:
        by_group.setdefault(home.group, []).append(parameter)
    for group, written in by_group.items():
        group.note_own_write(written)
