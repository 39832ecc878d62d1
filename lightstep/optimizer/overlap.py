"""``update: overlap``: units are updated in backward before the norm is known, and the rest during the next forward.

The factor by which a step multiplies its gradients is known only when all of them are there. But when nothing is to be
clipped it is exactly 1 (or exactly one over the loss scale), and an update by that is the right one, whenever it is
done. So a unit is *tried* as soon as its gradients are complete: its new record goes to another slab, and its old
weights are kept. ``step()`` measures the norm as ever and returns. The first one who needs a weight lets the host read
whether the factor was the one that was assumed:

- it was: the units that were tried count (*commit*), and what is left is updated during the forward;
- it was not (clipped): they are taken back, one by one, in front of their update by the true factor (*redo*);
- there was an overflow: they are taken back, and nothing is updated (*drop*).

The bits are those of a step that knew the norm first. Between backward and ``step()`` weights are not to be seen in
between: whoever reads one that was tried takes everything back, and ``step()`` updates as ``next_forward`` does. So do
a second backward, hyper-parameters that were changed, gradients that were written to, and an error in backward.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightstep.optimizer.arrivals import Arrivals
from lightstep.optimizer.group_values import GroupValues
from lightstep.optimizer.schedule import Job, NextForward
from lightstep.optimizer.walk import Gradients, UnitWalk, Update
from lightstep.state.backend import Managed, StateBackend, Unit

__all__ = ["Overlap"]

logger = logging.getLogger(__name__)

Peek = Callable[[Managed], Tensor | None]
Written = Callable[[Iterable[Managed]], Sequence[Managed]]
Divided = tuple[Tensor | None, Tensor | None]

_LONGEST_PAUSE = 16
"""Steps that are not tried after several that had to be redone."""


class Overlap(NextForward):
    """Tries units in backward; what is not tried, or in vain, runs as with :class:`NextForward`.

    After a step whose units were tried in vain the next ones wait for as many steps that would have counted: one, two,
    four and so on, up to 16. The norm is that of all ranks, and so all of them do the same.

    Attributes:
        announce: called when weights have become other than a reader would expect, before ``step()``.
    """

    def __init__(self, walk: UnitWalk, backend: StateBackend) -> None:
        super().__init__(walk, backend)
        self._arrivals = Arrivals()
        self._trial: _Trial | None = None
        self._verdict, self._share = _Verdict(), _Share(backend)
        self._pause, self._next_pause = 0, 1
        self._asked = False  # the verdict of the last step was not read yet
        self._divided: Divided | None = None  # what the step that has begun assumes
        self.announce: Callable[[], object] = lambda: None

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
        units = [] if self._pause else self._units_to_try(groups)
        if not units:
            yield
            return
        with self._failing_once("the backward in which units are tried"):
            self._walk.make_room_for_copies()
            self._arrivals.lay_out(layers, self._backend.units(), together=True)
            trial = self._trial = _Trial(units, GroupValues(groups), *divided, self._backend.lanes.event())
            trial.values.detach()
            everything = [item for layer in self._arrivals.layers for item in layer]
            self._arrivals.await_gradients({item for item in everything if not item.updated})
            self._begin(everything, trial.values, True, units)
            self._share.begin()
        try:
            with self._arrivals.listening(lambda item: self._collect(item, peek)):
                yield
        except BaseException:
            if self._walk.broken:
                self.forget()
            self.withdraw()
            raise
        if self._trial is trial:
            self.announce()

    def _units_to_try(self, groups: Sequence[dict[str, Any]]) -> list[Unit]:
        """In the order in which backward completes them.

        None with a learning rate on the device: nobody knows before the device does whether it is still the same.
        """
        numbers = (value for group in groups for value in group.values() if isinstance(value, Tensor))
        if any(number.device.type != "cpu" for number in numbers):
            return []
        return self._share.of(list(reversed(self._backend.can_try())))

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
        if not again and self._arrivals.is_last(number) and self._arrivals.is_last_of_batch(number):
            self._try(trial, self._arrivals.batch_of(number))

    def _try(self, trial: _Trial, batch: int) -> None:
        units = [unit for unit in reversed(self._arrivals.units_of(batch)) if unit in trial.planned]
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
        """What was tried does not count: what the caller does next finds the weights of before."""
        with self._lock:
            trial, self._trial = self._trial, None
            if trial is None:
                return
            if trial.units:
                self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, _LONGEST_PAUSE)
            with self._failing_once("taking back what was tried"):
                compute, caller = self._backend.lanes.compute, self._backend.lanes.caller()
                for unit in reversed(trial.units):
                    compute.run(partial(self._walk.take_back, unit))
                compute.record(trial.done)
                caller.wait(trial.done)
                trial.values.take_back()
            self._values = None

    # -- step

    @property
    def undecided(self) -> bool:
        """Whether units were tried for a step that was not called yet."""
        return self._trial is not None and self._trial.decided is None

    def holds(self, gradients: Gradients, groups: Sequence[dict[str, Any]], written: Written) -> bool:
        """Whether a step with these gradients and hyper-parameters may decide about what was tried.

        If not, it has been taken back.

        Args:
            written: those of some parameters that somebody else has written to.

        Raises:
            RuntimeError: somebody has written to a weight that was tried, and what he read there is gone.
        """
        trial = self._trial
        if trial is None:
            return False
        holds = trial.values.still_holds(groups) and all(item.updated for item in gradients)
        if not holds or not all(i in gradients and _is_same(gradients[i], *used) for i, used in trial.used.items()):
            self.withdraw()
            return False
        if self._backend.lanes.device.type == "cpu":  # who has written what is known when it is done
            with self._failing_once("the update under way", interrupts=False):
                self._backend.lanes.caller().wait(trial.done)
        if trial.edited:
            self.withdraw()
            return False
        found = written(trial.used)
        if found:
            self.withdraw()
            raise RuntimeError(
                f"{found[0].name} was written to between backward() and step(), where optimizer_state.update overlap "
                "has begun to update it: call optimizer.synchronize() before such an edit, or set update: next_forward"
            )
        return True

    def start(self, update: Update) -> None:
        trial = self._trial
        self._ask(update)
        if trial is None:
            super().start(update)
        else:
            update.values.detach()
            trial.decided = update

    def _ask(self, update: Update) -> None:
        """Have the device say whether this update is the one that was assumed, or would have been."""
        divided, self._divided = self._divided, None
        if divided is not None and isinstance(update.factor, Tensor | None) and isinstance(update.overflow, Tensor):
            divisor, factor = divided
            self._verdict.ask(update.overflow, [(update.divisor, divisor), (update.factor, factor)])
            self._asked = True

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

    def _decide(self, trial: _Trial, update: Update) -> None:
        """Read the verdict, and line up what it leaves to be done."""
        verdict = self._verdict.read()
        self._asked = False
        with self._failing_once("the update under way"):
            self._backend.lanes.caller().wait(trial.done)
            self._trial = None
            tried = [unit for unit in trial.units if self._backend.tried(unit)]
            units = list(self._backend.units())
            if verdict == "commit":
                self._next_pause = max(self._next_pause // 2, 1)
                update.values = trial.values
                left = [unit for unit in units if unit not in tried]
                jobs = [_Commit(tried, left, update), *(Job(unit, update) for unit in left)]
            else:
                trial.values.take_back()
                self.redone += verdict == "redo"
                logger.info("updates in backward: %s (%d steps redone so far)", verdict, self.redone)
                self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, _LONGEST_PAUSE)
                left = units if verdict == "redo" else []
                jobs = [_Redo(unit, update, verdict == "redo") for unit in units if unit in tried or left]
            self._begin(update.gradients.keys(), update.values, True, left)
            self._units = ()
            self._complete_with = {item: n for n, job in enumerate(jobs) for item in job.owners()}
            self._arriving_with = {}
            self._line_up([*jobs, Job(None, update)])
            self._submit(self.at_once)

    def forget(self) -> None:
        self._trial = None
        super().forget()

    def close(self) -> None:
        """Take the hooks off."""
        self._arrivals.close()


class _Trial:
    """What is tried in one backward.

    Attributes:
        planned: units that there is room for.
        values: hyper-parameters at its beginning.
        arrived: gradients that are complete.
        used: those of them that were used, and their versions then.
        units: those that were submitted, in order.
        done: event behind the last of them.
        edited: somebody wrote to a weight before it was tried.
        decided: the step's update, once ``step()`` was called.
    """

    def __init__(
        self, planned: Collection[Unit], values: GroupValues, divisor: Tensor | None, factor: Tensor | None, done: Any
    ) -> None:
        self.planned, self.values, self.done = frozenset(planned), values, done
        self.divisor, self.factor = divisor, factor
        self.arrived: Gradients = {}
        self.used: dict[Managed, tuple[Tensor, int]] = {}
        self.units: list[Unit] = []
        self.edited = False
        self.decided: Update | None = None
        self._fits: Tensor | None = None

    def attempt(self, walk: UnitWalk, unit: Unit, update: Update, seen: Sequence[tuple[Tensor, int]]) -> None:
        """Try one unit, in the compute lane; ``seen``: its weights, and their versions when it was submitted."""
        if self.edited or any(weight._version != version for weight, version in seen):
            self.edited = True
        else:
            walk.attempt(unit, update)

    def update(self, gradients: Gradients) -> Update:
        """By which units are tried."""
        if self._fits is None:
            self._fits = torch.zeros((), dtype=torch.float32, device=next(iter(gradients.values())).device)
        return Update(gradients, self.divisor, self.factor, self._fits, self.values, read_again=True)


class _Share:
    """How many units are tried: as many as the link can carry while backward runs. The rest is left to the forward.

    When the last units become ready, the lane should be at those before them, and no further behind. On the CPU time
    says nothing about a link, and all units are tried.
    """

    def __init__(self, backend: StateBackend) -> None:
        self._backend = backend
        self.part = 1.0
        self._events: list[Any] = []  # backward begins; units are ready; those before them are done; all are done
        self._batches = 0

    def of(self, units: Sequence[Unit]) -> list[Unit]:
        """So many of them, evenly spaced."""
        return [u for n, u in enumerate(units) if int((n + 1) * self.part + 0.5) > int(n * self.part + 0.5)]

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


class _Verdict:
    """Whether the factor was the one that was assumed: written by the device, read by the host when it has to."""

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._event: Any = None

    def ask(self, overflow: Tensor, factors: Sequence[tuple[Tensor | None, Tensor | None]]) -> None:
        """``factors``: pairs of true and assumed ones; ``None`` is 1."""
        alike = overflow == 0
        for true, assumed in factors:
            if true is not None or assumed is not None:
                alike = alike & ((1.0 if true is None else true) == (1.0 if assumed is None else assumed))
        # 0: it was; 1: it was not; 2 and more: overflow
        found = (~alike).to(torch.int32) + 2 * (overflow != 0).to(torch.int32)
        if found.device.type == "cpu":
            self._host, self._event = found, None
            return
        if self._host is None or self._event is None:
            self._host = torch.zeros((), dtype=torch.int32, device="cpu", pin_memory=True)
            self._event = torch.Event(found.device)
        self._host.copy_(found, non_blocking=True)
        self._event.record(torch.accelerator.current_stream(found.device))

    def read(self) -> str:
        """``commit``, ``redo`` or ``drop``; the host waits for the device."""
        assert self._host is not None
        if self._event is not None:
            self._event.synchronize()
        found = int(self._host)
        return "drop" if found >= 2 else "redo" if found else "commit"


class _Commit(Job):
    """The units that were tried count; their parameters are complete, unless one of their other units is left."""

    def __init__(self, tried: Sequence[Unit], left: Sequence[Unit], update: Update) -> None:
        super().__init__(None, update)
        waiting = {owner for unit in left for owner, _, _ in unit.parts}
        self._tried = tried
        self._owners = dict.fromkeys(o for unit in tried for o, _, _ in unit.parts if o not in waiting)
        self.ends = False

    def owners(self) -> Iterable[Managed]:
        return self._owners

    def run(self, walk: UnitWalk) -> None:
        walk.commit(self._tried)
        self.complete.extend(self._owners)


class _Redo(Job):
    """A unit that was tried is taken back, and updated by the true factor if there is a step at all."""

    def __init__(self, unit: Unit, update: Update, updates: bool) -> None:
        super().__init__(unit, update)
        self._updates = updates

    def run(self, walk: UnitWalk) -> None:
        assert self.unit is not None
        walk.take_back(self.unit)
        if self._updates:
            super().run(walk)


def _is_same(now: Tensor, then: Tensor, version: int) -> bool:
    return now.data_ptr() == then.data_ptr() and now.shape == then.shape and then._version == version
