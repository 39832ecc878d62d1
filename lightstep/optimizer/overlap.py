"""``update: overlap``: units are updated in backward before the norm is known, and the rest during the next forward.

The factor by which a step multiplies its gradients is known only when all of them are there. But when nothing is to be
clipped it is exactly 1 (or exactly one over the loss scale), and an update by that is the right one, whenever it is
done. So a unit is *tried* as soon as its gradients are complete: its new record goes to another slab, and its old
weights are kept. ``step()`` measures the norm as ever and returns. The first one who needs a weight lets the host read
whether the factor was the one that was assumed:

- it was: the units that were tried count (*commit*), and what is left is updated during the forward;
- it was not (clipped): they are taken back, and all units are updated by the true factor (*redo*);
- there was an overflow: they are taken back, and nothing is updated (*drop*).

What backward completes last and the next forward needs first (an embedding, what FSDP2 reduces with the outermost
module) is not tried. The link has it only after backward, when the device knows the norm: ``step()`` submits it, to be
updated by the true factor, which is right in each of the three cases. It needs neither a second slab nor old weights.

The bits are those of a step that knew the norm first. Between backward and ``step()`` weights are not to be seen in
between: whoever reads one that was tried takes everything back, and ``step()`` updates as ``next_forward`` does. So do
a second backward, hyper-parameters that were changed, gradients that were written to, and an error in backward.

Units that ranks update together are tried by all of them or by none. Before backward they agree on which, and all ranks
try them in one order, whatever order gradients arrive in. A rank that takes its part back in backward goes on with the
rest, since others wait for it. In ``step()`` the ranks agree on the verdict: a commit only if none of them has taken
anything back.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from lightstep.optimizer.arrivals import Arrivals
from lightstep.optimizer.group_values import GroupValues
from lightstep.optimizer.link_share import LinkShare, spread
from lightstep.optimizer.schedule import Job, NextForward, Written
from lightstep.optimizer.trial import Commit, Trial, is_same
from lightstep.optimizer.verdict import Verdict
from lightstep.optimizer.walk import Gradients, UnitWalk, Update
from lightstep.state.backend import Managed, StateBackend, Unit

__all__ = ["Overlap"]

logger = logging.getLogger(__name__)

Peek = Callable[[Managed], Tensor | None]
Divided = tuple[Tensor | None, Tensor | None]

_LONGEST_PAUSE = 16
"""Steps that are not tried after several that had to be redone."""


class Overlap(NextForward):
    """Tries units in backward; what is not tried, or in vain, runs as with :class:`NextForward`.

    After a step whose units were tried in vain the next ones wait for as many steps that would have counted: one, two,
    four and so on, up to 16. The norm is that of all ranks, and so all of them do the same.
    """

    def __init__(self, walk: UnitWalk, backend: StateBackend) -> None:
        super().__init__(walk, backend)
        self._arrivals = Arrivals()
        self._trial: Trial | None = None
        self._together = False  # units that ranks update together are tried in this step, on all of them
        self._verdict, self._share = Verdict(), LinkShare(backend)
        self._pause, self._next_pause = 0, 1
        self._asked = False  # the verdict of the last step was not read yet
        self._divided: Divided | None = None  # what the step that has begun assumes

    @property
    def pending(self) -> bool:
        return self._trial is not None or super().pending

    @property
    def _half_done(self) -> bool:
        return self._trial is not None or super()._half_done

    # -- backward

    @contextlib.contextmanager
    def trying(
        self, layers: Sequence[Sequence[Managed]], groups: Sequence[dict[str, Any]], peek: Peek, divided: Divided
    ) -> Iterator[None]:
        """The last backward of a step: units are tried as their gradients are completed in here.

        Args:
            layers: the parameters that are complete together, in the order of the model.
            groups: their hyper-parameters.
            peek: the whole gradient of a parameter that is complete, or ``None``; nothing is given up.
            divided: ``(divisor, factor)`` by which gradients are scaled that are not clipped.
        """
        self._count_verdict()
        self._share.adapt()
        self._divided = divided
        self._arrivals.lay_out(layers, self._backend.units(), together=True)
        alone, together, last = self._plan(groups)
        self._together = bool(together)
        if not (alone or together):
            yield
            return
        with self._failing_once("the backward in which units are tried"):
            trial = self._begin_trial(Trial(alone, together, last, GroupValues(groups), *divided))
        try:
            with self._arrivals.listening(lambda item: self._collect(item, peek)):
                yield
                self._try_together(trial, rest=True)
        except BaseException:
            trial.line.clear()
            if self._walk.broken:
                self.forget()
            self.withdraw()
            raise
        if trial.spoiled:
            self.withdraw()
        elif self._trial is trial:
            self.announce()

    def _plan(self, groups: Sequence[dict[str, Any]]) -> tuple[list[Unit], list[Unit], list[Unit]]:
        """The units to try, in the order in which backward completes them: those of this rank alone, and those that
        ranks update together, which are the same on all of them. And those of this rank alone that ``step()`` submits.

        None with a learning rate on the device: nobody knows before the device does whether it is still the same.
        """
        numbers = (value for group in groups for value in group.values() if isinstance(value, Tensor))
        known = all(number.device.type == "cpu" for number in numbers)
        alone, together = self._walk.shared.divide(self._backend.units()[::-1])
        own = frozenset(alone)
        last = [unit for unit in self._arrivals.complete_last() if unit in own]
        self._backend.keep_first(last)
        own = own.difference(last)
        alone = [unit for unit in alone if unit in own]
        ready = frozenset(self._backend.can_try({*alone, *together}) if known and not self._pause else ())
        part = self._share.part
        alone = spread([unit for unit in alone if unit in ready], part)
        if together:
            *able, permille = self._walk.shared.least([*(unit in ready for unit in together), int(1000 * part)])
            together = spread([unit for unit, yes in zip(together, able, strict=True) if yes], permille / 1000)
        return alone, together, last

    def _begin_trial(self, trial: Trial) -> Trial:
        self._walk.make_room_for_copies()
        self._trial, trial.done = trial, self._backend.lanes.event()
        trial.values.detach()
        everything = [item for layer in self._arrivals.layers for item in layer]
        self._arrivals.await_gradients({item for item in everything if not item.updated})
        line = iter(trial.line)
        order = [next(line) if unit in trial.together else unit for unit in self._arrivals.in_order() if unit in trial]
        self._begin(everything, trial.values, True, [*order, *trial.last], ahead=False)
        self._share.begin()
        return trial

    def _collect(self, item: Managed, peek: Peek) -> None:
        """A gradient is complete: its batch is tried with the last of them.

        Raises:
            RuntimeError: the parameter was tried in this backward already.
        """
        trial = self._trial
        if trial is None or not item.updated:
            return
        gradient = peek(item)
        if gradient is None:
            return
        if item in trial.used:
            raise RuntimeError(
                f"a second gradient of {item.name} arrived in one backward, after it was updated: reentrant activation "
                "checkpointing does that to parameters that are used several times; use use_reentrant=False, or "
                "optimizer_state.update: next_forward"
            )
        again = item in trial.arrived
        trial.arrived[item] = gradient
        number = self._arrivals.number_of(item)
        if again or not self._arrivals.is_last(number):
            return
        self._try_together(trial)
        if self._arrivals.is_last_of_batch(number):
            units = self._arrivals.units_of(self._arrivals.batch_of(number))
            self._try(trial, [unit for unit in reversed(units) if unit in trial.alone])

    def _try_together(self, trial: Trial, rest: bool = False) -> None:
        """The next ones that ranks update together, as far as their layers are complete.

        Ranks may see gradients in different orders, and the order of what they send each other has to be one. So one
        that is complete waits for those before it.

        Args:
            rest: backward is over; what has got no gradients has got none on any rank.
        """
        if trial.line and self._trial is trial:
            self._follow_caller()
        while trial.line and self._trial is trial:
            layers = {self._arrivals.number_of(owner) for owner, _, _ in trial.line[0].parts}
            complete = all(map(self._arrivals.is_complete, layers))
            if not (complete or rest):
                return
            unit = trial.line.popleft()
            self._try(trial, [unit] if complete else [])

    def _try(self, trial: Trial, units: Sequence[Unit]) -> None:
        owners = dict.fromkeys(owner for unit in units for owner, _, _ in unit.parts if owner in trial.arrived)
        if not owners:
            return
        gradients = {item: trial.arrived[item] for item in owners}
        trial.used.update({item: (gradient, gradient._version) for item, gradient in gradients.items()})
        update = trial.update(gradients)
        compute = self._backend.lanes.compute
        with self._lock:
            self._follow_caller()
            self._share.ready()
            for unit in units:
                seen = [(owner.local, owner.local._version) for owner, _, _ in unit.parts]
                compute.run(partial(trial.attempt, self._walk, unit, update, seen))
                trial.units.append(unit)
            compute.record(trial.done)
            self._share.done()
        self.announce()

    def withdraw(self) -> None:
        """What was tried does not count: what the caller does next finds the weights of before.

        In backward, what ranks update together is still tried behind that: the others wait for it.
        """
        with self._lock:
            trial = self._trial
            if trial is None:
                return
            trial.spoiled = bool(trial.line)
            if not trial.spoiled:
                self._trial = None
            self._take_back(trial)

    def _take_back(self, trial: Trial) -> None:
        """Everything that was tried so far."""
        if trial.units:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, _LONGEST_PAUSE)
        with self._failing_once("taking back what was tried"):
            compute, caller = self._backend.lanes.compute, self._backend.lanes.caller()
            for unit in reversed(trial.units):
                compute.run(partial(self._walk.take_back, unit))
            compute.record(trial.done)
            caller.wait(trial.done)
            trial.values.take_back()
        trial.units.clear()
        trial.used.clear()
        if self._trial is None:
            self._values = None

    # -- step

    @property
    def undecided(self) -> bool:
        return self._trial is not None and self._trial.decided is None

    def holds(self, gradients: Gradients, groups: Sequence[dict[str, Any]], written: Written) -> bool:
        trial = self._trial
        if trial is None:
            return False
        holds = trial.values.still_holds(groups) and all(item.updated for item in gradients)
        if not holds or not all(i in gradients and is_same(gradients[i], *used) for i, used in trial.used.items()):
            self.withdraw()
            return False
        if self._backend.lanes.device.type == "cpu":  # who has written what is known when it is done
            with self._failing_once("the update under way", interrupts=False):
                self._backend.lanes.caller().wait(trial.done)
        if trial.edited:
            self.withdraw()
            return False
        found = written(gradients)
        tried = [item.name for item in found if item in trial.used]
        if found:
            self.withdraw()
        if tried:
            raise RuntimeError(
                f"{tried[0]} was written to between backward() and step(), where optimizer_state.update overlap "
                "has begun to update it: call optimizer.synchronize() before such an edit, or set update: next_forward"
            )
        return not found

    def start(self, update: Update) -> None:
        trial = self._trial
        self._ask(update)
        self._agree()
        if trial is None:
            super().start(update)
            return
        update.values, trial.decided = trial.values, update
        update.drop_gradients(update.elsewhere)
        with self._lock, self._failing_once("the update under way"):
            self._follow_caller()
            for unit in trial.last:
                self._backend.lanes.compute.run(partial(Job(unit, update).run, self._walk))
            self._backend.lanes.compute.record(trial.done)
        if self._backend.awaited_by_others:
            self._settle(None)

    def overflows(self, update: Update) -> bool:
        """With the verdict, for one wait of the host."""
        return self._verdict.read() == "drop" if self._ask(update) else super().overflows(update)

    def _ask(self, update: Update) -> bool:
        """Have the device say whether this update is the one that was assumed, or would have been; once in a step."""
        divided, self._divided = self._divided, None
        if divided is None or isinstance(update.factor, Mapping) or isinstance(update.overflow, Mapping):
            return False
        divisor, factor = divided
        self._verdict.ask(update.overflow, [(update.divisor, divisor), (update.factor, factor)])
        self._asked = True
        return True

    def _agree(self) -> None:
        """What ranks have tried together counts if it does on all of them."""
        together, self._together = self._together, False
        if not together:
            return
        trial, counts = self._trial, False
        if trial is not None and self._verdict.read() == "commit":
            counts = all(self._backend.tried(unit) for unit in trial.units if unit in trial.together)
        if self._walk.shared.least([counts]) == [0] and trial is not None:
            self._verdict.turn_down()

    def _count_verdict(self) -> None:
        """A step that was not tried, and would have counted, shortens the pause."""
        if self._asked and self._pause:
            self._pause = max(self._pause - 1, 0) if self._verdict.read() == "commit" else self._pause
        self._asked = False

    # -- those who wait

    def wait_for_update(self, items: Iterable[Managed] | None = None) -> None:
        if self._trial is not None and not self._settle(items):
            return
        super().wait_for_update(items)

    def wait_for_step(self) -> None:
        """What ``step()`` has decided is done, for what the caller does next; what was tried for the next one stays."""
        if not self.undecided:
            self.wait_for_update()

    def wait_on_stream(self, items: Iterable[Managed]) -> None:
        items = list(items)
        if self._trial is None or self._settle(items):
            super().wait_on_stream(items)

    def _settle(self, items: Iterable[Managed] | None) -> bool:
        """Decide about what was tried, if the step has; otherwise take it back, if it is asked for.

        Whether the queue may hold something for these parameters.
        """
        with self._lock:
            trial = self._trial
            if trial is None:
                return True
            if trial.decided is None:
                if items is None or any(item in trial.used for item in items):
                    self.withdraw()
                return False
            self._decide(trial, trial.decided)
            return True

    def _decide(self, trial: Trial, update: Update) -> None:
        """Read the verdict, and have done what it leaves to be done."""
        verdict = self._verdict.read()
        with self._failing_once("the update under way"):
            self._backend.lanes.caller().wait(trial.done)
        self._asked, self._trial = False, None
        if verdict == "commit":
            self._next_pause = max(self._next_pause // 2, 1)
        else:
            self.redone += verdict == "redo"
            logger.info("updates in backward: %s (%d steps redone so far)", verdict, self.redone)
            self._take_back(trial)
        if verdict != "drop" or self._backend.awaited_by_others:  # they get weights in every step
            self._line_up_rest(trial, update)

    def _line_up_rest(self, trial: Trial, update: Update) -> None:
        """What was tried and not taken back counts, and what is left is lined up."""
        done = dict.fromkeys([*(unit for unit in trial.units if self._backend.tried(unit)), *trial.last])
        left = [unit for unit in self._backend.units() if unit not in done]
        with self._failing_once("the update under way"):
            jobs = [Commit(list(done), left, update), *(Job(unit, update) for unit in left)]
            self._begin(update.gradients.keys(), update.values, True, left)
            self._units = ()
            self._complete_with = {item: n for n, job in enumerate(jobs) for item in job.owners()}
            self._arriving_with = self._backend.arriving_with(self._complete_with, len(jobs))
            self._line_up([*jobs, Job(None, update)])
            self._submit_first()

    def forget(self) -> None:
        self._trial = None
        super().forget()

    def close(self) -> None:
        """Take the hooks off."""
        self._arrivals.close()
