"""``update: overlap``: some units are updated in backward, before the norm is known, the rest in the next forward.

The factor by which a step multiplies its gradients is known only when all of them are complete. But if nothing is
clipped, the factor is exactly 1 (or exactly one over the loss scale), and an update by that factor is right whenever it
runs. So a unit is updated *speculatively* as soon as its gradients are complete: its new record goes to another slab,
and its old weights are kept. ``step()`` measures the norm as always, schedules the updates of all other units by the
true factor, and returns. The first caller that needs a weight makes the host read the *verdict*, whether the factor was
the one that was assumed:

- *commit*: it was. The speculative updates are final.
- *redo*: it was not (clipping). They are rolled back, and these units are updated by the true factor.
- *drop*: there was an overflow. They are rolled back, and nothing is updated.

Updates by the true factor are right under every verdict. So ``step()`` submits the first of them at once, while the
device still computes the norm, and the host has little left to do when it has read the verdict. Units that backward
completes last and the next forward needs first (an embedding, what FSDP2 reduces with the outermost module) come before
all others. They are not updated speculatively, because the link can carry them only after backward: so they need
neither a second slab nor old weights.

The bits are those of a step that knew the norm first. Nobody sees half-updated weights between backward and ``step()``:
a read of a weight that has been updated rolls everything back, and ``step()`` then updates like ``next_forward``. So do
a second backward, changed hyper-parameters, gradients that were written to, and an error in backward.

Units that ranks update together are updated speculatively by all of these ranks or by none. The ranks agree before
backward on which units, and update them in one order, whatever order gradients arrive in. A rank that rolls back during
backward still runs its part of the rest, since others wait for it. In ``step()`` the ranks agree on the verdict: they
commit only if none of them has rolled back.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightstep.optimizer.arrivals import LinkShare, Verdict, evenly_spaced
from lightstep.optimizer.queue import (
    NEXT_FORWARD,
    Early,
    EarlyStep,
    Factors,
    Job,
    Queue,
    UpdateTime,
    refuse_older_graphs,
)
from lightstep.optimizer.step_guard import no_grad_no_inference
from lightstep.optimizer.unit_updater import UnitUpdater
from lightstep.optimizer.update import Gradients, GroupValues, Update, versions_of
from lightstep.precision.adam_batch import Scaling
from lightstep.state.lanes import Lanes
from lightstep.state.schema import Managed, Unit

__all__ = ["OVERLAP", "SpeculativeUpdates"]

logger = logging.getLogger(__name__)

Peek = Callable[[Tensor], Tensor | None]
"""Returns the gradient of a parameter if it is complete, and leaves it where it is."""
FindWritten = Callable[[Iterable[Managed]], Sequence[Managed]]
"""Returns those of some parameters that somebody else has written to."""

_LONGEST_PAUSE = 16
"""Steps without speculation after several whose speculative updates had to be rolled back."""

_A_HABIT = 3
"""The number of rollbacks before ``step()`` that is worth a warning: something undoes updates in every step."""


class Plan:
    """Which units backwards update speculatively. It holds until something changes on which it depends.

    Args:
        local: units to update that this rank updates alone.
        shared: units to update that several ranks update together, in the order in which backward completes them.
        after_backward: units that ``step()`` submits first, with the true factor.
        expected: all units, in the order in which backward completes them.

    Attributes:
        shared_order: the units of ``shared``, in order.
        owners: the parameters of ``local`` and ``shared``.
        first: the parameters of the units that ``step()`` submits first.
        order: the order in which backward, and the step after it, are expected to submit units.
        made_for, candidates, ready: what it was made from.
    """

    def __init__(
        self,
        local: Collection[Unit],
        shared: Sequence[Unit],
        after_backward: Sequence[Unit],
        expected: Iterable[Unit],
    ) -> None:
        self.local, self.shared, self.shared_order = frozenset(local), frozenset(shared), tuple(shared)
        self.after_backward = after_backward
        self.owners = frozenset(owner for unit in (*local, *shared) for owner in unit.owners)
        self.first = frozenset(owner for unit in after_backward for owner in unit.owners)
        self.order = self.in_order(expected)
        self.made_for: Any = None
        self.candidates: Collection[Unit] = ()
        self.ready: Sequence[Unit] = ()

    def in_order(self, expected: Iterable[Unit]) -> list[Unit]:
        """:attr:`order` if backward completes units in the ``expected`` one. That of shared units is agreed on."""
        shared = iter(self.shared_order)
        known = (unit for unit in expected if unit in self.local or unit in self.shared)
        return [*(next(shared) if unit in self.shared else unit for unit in known), *self.after_backward]


@dataclass(eq=False)
class Speculation:
    """The speculative updates of one backward.

    Attributes:
        plan: which units.
        values: the hyper-parameters at the beginning of the backward.
        assumed: the assumed scaling of the gradients, and their overflow, as in :class:`Update`.
        used: the gradients that updates have used, on which the verdict depends; kept for all steps.
        done: event behind the last update that has been submitted.
        shared_queue: shared units that have not been submitted yet.
        gradients: the gradients that are complete.
        submitted: the units that have been submitted, in order.
        updated: stands for those of them that the verdict decides about, from ``step()`` on.
        weights_changed: a weight was written to by somebody else before its update.
        invalid: some updates have been rolled back already, so that none will be committed.
        update: the true update of the step, from ``step()`` on.
        scalings: see :class:`Update`.
        own_versions: versions of weights as our own updates left them.
    """

    plan: Plan
    values: GroupValues
    assumed: tuple[Tensor | None, Tensor | None, Tensor]
    used: Verdict
    done: Any
    shared_queue: deque[Unit]
    gradients: Gradients = field(default_factory=dict)
    submitted: list[Unit] = field(default_factory=list)
    updated: Job | None = None
    weights_changed: bool = False
    invalid: bool = False
    update: Update | None = None
    scalings: dict[torch.device, Scaling] = field(default_factory=dict)
    own_versions: dict[Managed, int] = field(default_factory=dict)

    def let_go(self, items: Iterable[Managed]) -> None:
        """Gradients that go to the host are not kept on the device.

        But those of shared units that have not been submitted are: when they are, the host may not have them yet.
        """
        waiting = {owner for unit in self.shared_queue for owner in unit.owners}
        for item in items:
            if item.home is not None and item in self.gradients and item not in waiting:
                self.gradients[item] = item.home.gradient(self.gradients[item].dtype)


def _speculate(
    speculation: Speculation, updater: UnitUpdater, unit: Unit, update: Update, versions: Sequence[int]
) -> None:
    """Update one unit, in the compute lane.

    A unit whose weights have been changed is skipped. A shared unit is updated nevertheless, since other ranks wait
    for it.

    Args:
        versions: those of the unit's weights when it was submitted. An earlier unit with another part of
            the same weight raises the version, too.
    """
    own, owners = speculation.own_versions, unit.owners
    known = versions
    if not own.keys().isdisjoint(owners):
        known = [own.get(owner, version) for owner, version in zip(owners, versions, strict=True)]
    speculation.weights_changed |= versions_of(owners) != known
    if not speculation.weights_changed or unit in speculation.plan.shared:
        updater.update(unit, [update], speculative=True)
    own.update(zip(owners, versions_of(owners), strict=True))


class SpeculativeUpdates(Early):
    """Updates units speculatively in backward; all other updates are deferred by the queue.

    After a step that was rolled back, speculation pauses for a number of steps that would have been committed: one,
    two, four and so on, up to 16. The norm is that of all ranks, so all of them pause alike.
    """

    def __init__(self, queue: Queue) -> None:
        super().__init__(queue)
        self.speculation: Speculation | None = None
        self._lanes: Lanes | None = None  # what follows is of these
        self._no_overflow: Tensor
        self._done: Any  # event behind the last update of a backward
        self._plan: Plan | None = None  # of the last backward, if it may hold for the next one
        self._has_shared = False  # in this step all ranks update shared units speculatively
        self._verdict, self._link_share = Verdict(), LinkShare(self._backend)
        self._pause, self._next_pause = 0, 1
        self._verdict_unread = False
        self._assumed: Factors | None = None  # by the step whose backward has begun
        self._find_written: FindWritten = lambda items: ()
        self._said_written: frozenset[str] = frozenset()  # labels of units, in the log

    @property
    def is_half_done(self) -> bool:
        return self.speculation is not None

    # -- backward

    def awaits(self, item: Managed, gradient: Tensor) -> bool:
        kept = None if self.speculation is None else self.speculation.gradients.get(item)
        return kept is not None and kept.numel() > 0 and kept.data_ptr() == gradient.data_ptr()

    def is_first(self, item: Managed) -> bool:
        return self.speculation is not None and item in self.speculation.plan.first

    @contextlib.contextmanager
    def updating(self, step: EarlyStep) -> Iterator[None]:
        """The last backward of a step runs in the body; units are updated as it completes their gradients.

        Weights that somebody else has written to since the last step are left to ``step()``: they may be written back
        before it (SAM), and masters are rebuilt of those that are there then.
        """
        prepared = step.prepare_backward(final=False)
        if prepared is None:
            yield
            return
        (layers, assumed), managed = prepared, step.managed
        with no_grad_no_inference():
            written = managed.find_written(managed.by_parameter.values())
            if written and not managed.are_unmoved(written):  # they will get other records
                written = list(managed)
        self._find_written = managed.find_written
        if self._pause or self._verdict_unread:
            self._update_pause()
        self._assumed = assumed
        without_gradient = [item for item in managed.by_parameter.values() if not item.updated]
        self._arrivals.set_layers(layers, self._backend.units(), batched=True, without_gradient=without_gradient)
        plan = self._plan_for(step.param_groups, written)
        self._has_shared = bool(plan.shared)
        if not plan.owners:
            yield
            return
        values = GroupValues(step.param_groups, deferred=True)
        assert self._lanes is not None
        share = self._link_share
        measuring = contextlib.nullcontext() if share.device.type == "cpu" else share.measuring(self._lanes.caller())
        assumed_now, verdict = (*assumed, self._no_overflow), self._verdict
        speculation = Speculation(plan, values, assumed_now, verdict, self._done, deque(plan.shared_order))
        try:
            self.speculation = speculation
            self._queue.begin(self._arrivals.layer_of.keys(), values, True, plan.order, ahead=False)
        except BaseException as error:
            self._queue.abort("the backward with speculative updates", error)
            raise
        try:
            with measuring, self._arrivals.listening(partial(self._on_gradient, step.gradients.reader)):
                yield
                if speculation.shared_queue:
                    self._speculate_shared(speculation, flush=True)
        except BaseException:
            self._fail(speculation)
            raise
        if speculation.invalid:
            self._queue.guard.work("backward()", self.roll_back, "it continued in backward")
        elif self.speculation is speculation:
            self._queue.on_early_update()

    def _fail(self, speculation: Speculation) -> None:
        """After an error in backward."""
        speculation.shared_queue.clear()
        if self._updater.broken:
            self._queue.reset()
        self._queue.guard.work("backward()", self._roll_back, "an error in backward")

    def _plan_for(self, groups: Sequence[dict[str, Any]], written: Collection[Managed]) -> Plan:
        """The plan of the last backward, or another one if something has changed on which that depends."""
        if self._link_share.device.type != "cpu":
            self._link_share.adapt()
        plan, now = self._plan, (self._arrivals.changes, self._link_share.fraction)
        holds = plan is not None and plan.made_for == now and not written
        if plan is not None and holds and self._backend.reserve_speculation(plan.candidates) is plan.ready:
            return plan
        return self._make_plan(groups, written)

    def _make_plan(self, groups: Sequence[dict[str, Any]], written: Collection[Managed]) -> Plan:
        """Which units to update speculatively, and which ones ``step()`` submits first.

        The shared units are the same on all ranks. There are none of either kind if a learning rate is on the device:
        the host could not tell later whether it has changed.
        """
        arrivals, backend, fraction = self._arrivals, self._backend, self._link_share.fraction
        numbers = (value for group in groups for value in group.values() if isinstance(value, Tensor))
        comparable = all(number.device.type == "cpu" for number in numbers)
        local, offered = self._updater.shared.partition(backend.units()[::-1])
        known = frozenset(local)
        after_backward = [unit for unit in arrivals.last_in_backward() if unit in known]
        backend.prefer_resident(after_backward)
        candidates = known.difference(after_backward).union(offered)
        found = backend.reserve_speculation(candidates) if comparable and not self._pause else ()
        ready = frozenset(found)
        if written:
            ready = ready.difference(self._units_with(written, ready))
        local = evenly_spaced([unit for unit in local if unit in candidates and unit in ready], fraction)
        shared = self._agree_on_units([unit in ready for unit in offered], offered, fraction) if offered else []
        backend.expect_speculation([*local, *shared])
        plan = Plan(local, shared, after_backward, arrivals.backward_order())
        plan.made_for, plan.candidates, plan.ready = (arrivals.changes, fraction), candidates, found
        if plan.owners:
            self._reserve(len(plan.owners))
        # Ranks that share units agree anew before each backward.
        self._plan = plan if plan.owners and not (written or offered) else None
        return plan

    def _reserve(self, gradients: int) -> None:
        """Make what updates in backward need for so many gradients, unless it is there."""
        lanes = self._backend.lanes
        if self._lanes is not lanes:
            self._lanes, self._done = lanes, lanes.event()
            self._no_overflow = torch.zeros((), dtype=torch.float32, device=lanes.device)
            self._link_share.device = lanes.device
        self._verdict.reserve(gradients, lanes.device)
        self._updater.reserve_stage()

    def _agree_on_units(self, are_ready: Sequence[bool], units: Sequence[Unit], fraction: float) -> list[Unit]:
        """Those of the shared units that all ranks can update speculatively."""
        *agreed, permille = self._updater.shared.all_reduce_min([*are_ready, int(1000 * fraction)])
        return evenly_spaced([unit for unit, yes in zip(units, agreed, strict=True) if yes], permille / 1000)

    def _units_with(self, written: Collection[Managed], units: Collection[Unit]) -> frozenset[Unit]:
        """Those of the units that have a part of a written parameter; the log says so when they change."""
        known = frozenset(written)
        found = frozenset(unit for unit in units if any(owner in known for owner in unit.owners))
        labels = frozenset(unit.label for unit in found)
        if found and labels != self._said_written:
            self._said_written = labels
            name = next(item.name for item in written if any(item in unit.owners for unit in found))
            logger.info(
                "updates in backward: %d of %d units are left to step(), because their weights were written to after "
                "the last one (%s and %d others)",
                len(found),
                len(units),
                name,
                len(written) - 1,
            )
        return found

    def _on_gradient(self, peek: Peek, item: Managed) -> None:
        """A gradient is complete: with the last one of its batch, the units of the batch are updated.

        Raises:
            RuntimeError: the parameter has been updated in this backward already.
        """
        speculation = self.speculation
        if speculation is None or not item.updated:
            return
        gradient = peek(item.param)
        if gradient is None:
            return
        if item in speculation.gradients and item in speculation.used:
            raise self._second_gradient(item)
        layer = self._arrivals.add_gradient(item, gradient, speculation.gradients)
        if layer is None:
            return
        if speculation.shared_queue:
            self._speculate_shared(speculation)
        if self._arrivals.count_layer(layer):
            units = self._arrivals.units_of[self._arrivals.batch_of[layer]]
            local = [unit for unit in reversed(units) if unit in speculation.plan.local]
            if local:
                self._queue.guard.work("backward()", self._submit_speculative, speculation, local)
            if self._backend.host_weights is not None:
                speculation.let_go([owner for unit in units for owner in unit.owners])

    def _speculate_shared(self, speculation: Speculation, flush: bool = False) -> None:
        """Update the next shared units whose layers are complete.

        Ranks may get gradients in different orders, but must communicate in one order. So a complete unit waits for
        those before it.

        Args:
            flush: backward is over: units without gradients have none on any rank, and are skipped.
        """
        if self.speculation is speculation:
            self._queue.wait_for_caller()
        while speculation.shared_queue and self.speculation is speculation:
            layers = {self._arrivals.layer_of[owner] for owner in speculation.shared_queue[0].owners}
            complete = all(map(self._arrivals.is_complete, layers))
            if not (complete or flush):
                return
            unit = speculation.shared_queue.popleft()
            if complete:
                self._queue.guard.work("backward()", self._submit_speculative, speculation, [unit])
                if self._backend.host_weights is not None:
                    speculation.let_go(unit.owners)

    def _submit_speculative(self, speculation: Speculation, units: Sequence[Unit]) -> None:
        """Submit the speculative updates of units whose gradients are complete."""
        if self.speculation is not speculation:  # a hook has read a weight meanwhile
            return
        available = speculation.gradients
        gradients = {owner: available[owner] for unit in units for owner in unit.owners if owner in available}
        if not gradients:
            return
        if self._backend.host_weights is not None:
            self._backend.note_kept_weights(units)
        refuse_older_graphs(speculation.used.add(gradients))
        scaling, values = speculation.assumed, speculation.values
        update = Update(gradients, *scaling, values, keep_gradients=True, scalings=speculation.scalings)
        assert self._lanes is not None
        compute, caller = self._lanes.compute, self._queue.wait_for_caller()
        on_cpu = self._lanes.device.type == "cpu"
        if not on_cpu:
            self._link_share.mark(caller)
        for unit in [unit for unit in units if not gradients.keys().isdisjoint(unit.owners)]:
            speculation.submitted.append(unit)  # first: an interrupt in between must not hide the update
            compute.run(partial(_speculate, speculation, self._updater, unit, update, versions_of(unit.owners)))
        compute.record(speculation.done)
        if not on_cpu:
            self._link_share.mark(compute)
        self._queue.on_early_update()

    def roll_back(self, reason: str) -> None:
        """Undo all speculative updates: what the caller does next sees the weights from before backward.

        During backward the remaining shared units are still updated after this, since other ranks wait for them.

        Args:
            reason: for the log.

        Raises:
            RuntimeError: somebody has written to a weight after its speculative update; the value is gone.
        """
        written = self._roll_back(reason)
        if written:
            raise RuntimeError(
                f"{written[0].name} was written to between backward() and step(), where optimizer_state.update overlap "
                "has begun to update it: call optimizer.synchronize() before such an edit, or set update: next_forward"
            )

    def _roll_back(self, reason: str) -> Sequence[Managed]:
        """:meth:`roll_back`; returns the parameters that somebody has written to."""
        speculation = self.speculation
        if speculation is None:
            return ()
        if speculation.submitted and not speculation.invalid:
            self._queue.rolled_back += 1
            level = logging.WARNING if self._queue.rolled_back == _A_HABIT else logging.INFO
            said = "updates in backward: rolled back before step() (%d so far): %s"
            logger.log(level, said, self._queue.rolled_back, reason)
        written = self._written_after_update(speculation)
        speculation.invalid = bool(speculation.shared_queue)
        self._roll_back_units(speculation)
        if not speculation.invalid:
            self._queue.values = self.speculation = None  # last: until then weights are in between
        return written

    def _written_after_update(self, speculation: Speculation) -> Sequence[Managed]:
        if not speculation.submitted or self._updater.broken:
            return ()
        self._wait_for_updates(speculation)  # on the CPU they have written only then
        updated = self._backend.speculative(speculation.submitted)
        owners = dict.fromkeys(owner for unit in updated for owner in unit.owners)
        return self._find_written(owner for owner in owners if owner in speculation.used)

    def _wait_for_updates(self, speculation: Speculation) -> None:
        try:
            self._backend.lanes.caller().wait(speculation.done)
        except Exception as error:
            self._queue.abort("the update under way", error)
            raise

    def _roll_back_units(self, speculation: Speculation) -> None:
        compute = self._backend.lanes.compute
        try:
            for unit in reversed(speculation.submitted):
                compute.run(partial(self._updater.roll_back, unit))
            compute.record(speculation.done)
            self._queue.wait_for_event(speculation.done, is_end=True)
        except Exception as error:  # after an interrupt it can be done again
            self._queue.abort("rolling back speculative updates", error)
            raise
        if speculation.submitted:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, _LONGEST_PAUSE)
            self._plan = None
        speculation.submitted.clear()
        speculation.used.clear()

    # -- step

    @property
    def awaits_step(self) -> bool:
        return self.speculation is not None and self.speculation.update is None

    def validate(self, gradients: Gradients, step: EarlyStep) -> bool:
        speculation, managed = self.speculation, step.managed
        if speculation is None:
            return False
        if self._backend.lanes.device.type == "cpu":  # what others have written is known when the updates are done
            self._wait_for_updates(speculation)
        if not speculation.values.matches(step.param_groups):
            self.roll_back("hyper-parameters were changed")
        elif [item for item in gradients if not item.updated] or not speculation.used.are_in(gradients):
            self.roll_back("gradients were changed")
        elif speculation.weights_changed:
            self.roll_back("weights were written to before their update")
        elif (written := managed.find_written(gradients)) and not managed.adopt_writes(written, speculation.used):
            self.roll_back("weights were written to")
        return self.speculation is not None

    def start(self, updates: Sequence[Update]) -> bool:
        speculation = self.speculation
        self._request_verdict(updates)
        if self._has_shared:
            self._agree_on_verdict()
        if speculation is None:
            return False
        (update,) = updates
        try:
            update.values, speculation.update = speculation.values, update
            update.drop_gradients(update.elsewhere)
            unused = [item for item in update.gradients if item not in speculation.used]
            refuse_older_graphs([*update.elsewhere, *unused])
            update.note_versions()
            done, first = self._backend.speculative(speculation.submitted), speculation.plan.after_backward
            speculation.updated = Job(done, [update], are_done=True)
            next_order, arrivals = speculation.plan.order, self._arrivals
            if arrivals.completed != arrivals.previously_completed:
                next_order = speculation.plan.in_order(arrivals.backward_order())
            self._schedule(speculation.updated, update, first, next_order)
            in_step = 0 if self._backend.peers_wait else self._queue.jobs_in_step
            self._queue.submit(min(max(1 + len(first), in_step), self._queue.num_jobs - 1))  # not the end
        except BaseException as error:
            self._queue.abort("the update under way", error)
            raise
        if self._backend.peers_wait:
            self.resolve(None)
        return True

    def _schedule(self, updated: Job, update: Update, first: Sequence[Unit], next_order: Sequence[Unit]) -> None:
        """Schedule the updates of all other units, by the true factor, and the end of the step."""
        known = {*updated.units, *first}
        left = [unit for unit in self._backend.units() if unit not in known]
        self._queue.begin(update.gradients.keys(), update.values, True, [*first, *left])
        jobs = [*(Job([unit], [update]) for unit in first), updated, *(Job([unit], [update]) for unit in left)]
        self._queue.schedule([*jobs, Job((), [update], end=(update.elsewhere, next_order))])

    def overflows(self, updates: Sequence[Update]) -> bool | None:
        """The verdict tells it, if there is one: the host waits once."""
        return self._verdict.read() == "drop" if self._request_verdict(updates) else None

    def skip(self) -> None:
        """The verdict is ``drop``, and it has been read."""
        speculation = self.speculation
        if speculation is not None and speculation.update is None:
            self._log_verdict("drop")
            self._roll_back_units(speculation)
            self._queue.values = self.speculation = None

    def _request_verdict(self, updates: Sequence[Update]) -> bool:
        """Have the device compare this update with the assumed one, once per step; ``False``: nothing was assumed."""
        assumed, self._assumed = self._assumed, None
        if assumed is None:
            return False
        (update,), (divisor, factor) = updates, assumed
        speculation = self.speculation
        gradients = None if speculation is None else update.gradients
        self._verdict.compute(update.overflow, [(update.divisor, divisor), (update.factor, factor)], gradients)
        self._verdict_unread = True
        return True

    def _agree_on_verdict(self) -> None:
        """Ranks that have updated shared units commit only if all of them can."""
        self._has_shared = False
        speculation, can_commit = self.speculation, False
        if speculation is not None and self._verdict.read() == "commit":
            shared = [unit for unit in speculation.submitted if unit in speculation.plan.shared]
            can_commit = len(self._backend.speculative(shared)) == len(shared)
        if self._updater.shared.all_reduce_min([can_commit]) == [0] and speculation is not None:
            self._verdict.overrule()

    def _update_pause(self) -> None:
        """A step without speculation that would have been committed shortens the pause."""
        if self._verdict_unread and self._pause:
            self._pause -= self._verdict.read() == "commit"
        self._verdict_unread = False

    # -- waiting

    def resolve(self, items: Iterable[Managed] | None) -> bool:
        """Commit or roll back before these parameters are read; returns whether there may be jobs to wait for.

        Before ``step()`` speculative updates are rolled back if they concern these parameters. After it the verdict
        decides.
        """
        speculation = self.speculation
        if speculation is None:
            return True
        if speculation.update is None:
            read = () if items is None else [item.name for item in items if item in speculation.used]
            if items is None:
                self.roll_back("everything was read, or another backward began")
            elif read:
                self.roll_back(f"{read[0]} was read")
            return False
        self._apply_verdict(speculation, speculation.update)
        return True

    def _apply_verdict(self, speculation: Speculation, update: Update) -> None:
        """Read the verdict: commit the speculative updates, or roll them back and, unless it is to drop, redo them."""
        verdict, queue = self._verdict.read(), self._queue
        try:
            self._verdict_unread = False
            if verdict == "commit":
                self._next_pause = max(self._next_pause // 2, 1)
                updated = speculation.updated
                assert updated is not None
                self._backend.lanes.compute.run(partial(self._backend.commit, updated.units))
                if self._backend.peers_wait:
                    queue.record_again(updated.number)  # commits send weights: who receives others' waits for that
                    queue.submit(queue.jobs_in_step)
            else:
                queue.redone += verdict == "redo"
                self._log_verdict(verdict)
                self._undo(speculation, update, again=verdict == "redo")
            speculation.used.clear()
            self.speculation = None  # last: until then weights are in between
        except BaseException as error:
            queue.abort("the update under way", error)
            raise

    def _undo(self, speculation: Speculation, update: Update, again: bool) -> None:
        """Roll back what is speculative. What ``step()`` has submitted since is right under every verdict."""
        lanes = self._backend.lanes
        lanes.caller().wait(lanes.compute.record(speculation.done))
        self._updater.complete([update], list(update.gradients), drop=False)
        updated = Job(self._queue.withdraw(), [update], are_done=True)
        self._roll_back_units(speculation)
        self._queue.values = None
        update.note_own_writes(update.gradients)
        if again or self._backend.peers_wait:  # others get weights in every step
            self._schedule(updated, update, (), self._backend.units())  # after a rollback there is a pause
            self._queue.submit(self._queue.jobs_in_step)

    def _log_verdict(self, verdict: str) -> None:
        reason = self._verdict.reason()
        logger.info("updates in backward: %s (%d steps redone so far): %s", verdict, self._queue.redone, reason)

    def reset(self) -> None:
        if self.speculation is not None:
            self.speculation.used.clear()
        self.speculation = None


OVERLAP = UpdateTime("overlap", deferred=True, early=SpeculativeUpdates, without_early=NEXT_FORWARD)
"""Units are updated in backward as if nothing were clipped, the rest while the caller runs the next forward."""
