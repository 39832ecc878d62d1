"""The update of one unit: acquire its state → scale gradients → the base optimizer's arithmetic → write back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightstep.optimizer.changed_weights import ChangedWeights
from lightstep.optimizer.classes import GroupClasses
from lightstep.optimizer.group_values import GroupValues
from lightstep.optimizer.host_gradients import HostGradients
from lightstep.optimizer.one_pass import OnePass
from lightstep.optimizer.shared_updates import SharedUpdates
from lightstep.optimizer.step_guard import BrokenStep
from lightstep.precision.adam_batch import Scaling
from lightstep.precision.gradient_stage import GradientStage, scalable_in_place
from lightstep.state.schema import Managed, Unit, versions_of
from lightstep.state.segment import Segment
from lightstep.state.store import Store

Gradients = dict[Managed, Tensor]

_NOTHING_ELSE = contextlib.nullcontext()


@dataclass(eq=False)
class Update:
    """One step's update of the parameters that are scaled and skipped together: of all, or of one layer.

    Attributes:
        gradients: local gradients; each is dropped when its parameter is updated.
        divisor, factor: 0-dim fp32; the base optimizer sees ``gradient / divisor * factor``. ``None`` is 1.
        overflow: 0-dim fp32; if it is 1 nothing changes.
        values: the groups' hyper-parameters.
        elsewhere: the parameters that other replicas update and send.
        without_state: the parameters that had no state when the update was made.
        keep_gradients: the gradients must not be changed.
        scalings: what :meth:`scaling_on` has made; updates with the same scaling share it.
    """

    gradients: Gradients
    divisor: Tensor | None
    factor: Tensor | None
    overflow: Tensor
    values: GroupValues
    elsewhere: list[Managed] = field(init=False)
    without_state: list[Managed] = field(init=False)
    keep_gradients: bool = False
    scalings: dict[torch.device, Scaling] = field(default_factory=dict, repr=False)
    versions: dict[Managed, tuple[int, int]] = field(default_factory=dict)
    """Of gradient and weight, where the update is deferred: nobody else may write to them before it."""

    def __post_init__(self) -> None:
        self.elsewhere = [item for item in self.gradients if item.is_remote]
        self.without_state = [item for item in self.gradients if not item.updated]

    def scaling_on(self, device: torch.device) -> Scaling:
        """Divisor, factor and overflow on a device: the same object for all units, which are updated in one lane."""
        if device not in self.scalings:
            divisor, factor = (None if value is None else value.to(device) for value in (self.divisor, self.factor))
            overflow = self.overflow.to(device)
            self.scalings[device] = Scaling(divisor, factor, overflow, 1 - overflow)
        return self.scalings[device]

    def note_versions(self) -> None:
        """From now on :meth:`refuse_written` finds gradients and weights that somebody else writes to."""
        weights = versions_of(self.gradients)
        pairs = zip(self.gradients.items(), weights, strict=True)
        self.versions = {item: (gradient._version, weight) for (item, gradient), weight in pairs}

    def note_own_writes(self, items: Iterable[Managed]) -> None:
        """These weights have their present versions from their own update."""
        known = [item for item in items if item in self.versions]
        for item, weight in zip(known, versions_of(known), strict=True):
            self.versions[item] = self.versions[item][0], weight

    def refuse_written(self, items: Iterable[Managed]) -> None:
        """Raise ``RuntimeError`` if somebody has written to these gradients or weights after ``step()``."""
        known = [item for item in items if item in self.versions and item in self.gradients]
        for item, now in zip(known, versions_of(known), strict=True):
            gradient, weight = self.versions[item]
            is_gradient = self.gradients[item]._version != gradient
            if is_gradient or now != weight:
                raise RuntimeError(
                    f"{f'the gradient of {item.name}' if is_gradient else item.name} was written to after step(), "
                    "before its deferred update (optimizer_state.update) had run: call optimizer.synchronize() before "
                    "you write to it"
                )

    def drop_gradients(self, items: list[Managed]) -> None:
        """Drop the gradients of these parameters, which are not read any more."""
        for item in items:
            if item in self.gradients:
                del self.gradients[item]


class UnitUpdater:
    """:meth:`begin`, then :meth:`update` for each unit in order, then :meth:`finish`; all on one stream or CPU thread.

    Args:
        broken: records what failed.
        record: called with the parameters of each unit after their update.
        host_gradients: brings gradients that are on the host.

    Attributes:
        changed: finds what updates change, if somebody asked for that.
        is_running: :meth:`run` has not come to its end.
    """

    def __init__(
        self,
        classes: GroupClasses,
        backend: Store,
        broken: BrokenStep,
        record: Callable[[Iterable[Managed]], None],
        host_gradients: HostGradients | None = None,
    ) -> None:
        self._classes = classes
        self._host_gradients = host_gradients
        self._backend = backend
        self.broken = broken
        self._record = record
        self.changed: ChangedWeights | None = None
        self.is_running = False
        self.stage = GradientStage()
        self.shared = SharedUpdates(classes, backend)
        self._one_pass = OnePass(classes, self.stage)

    # -- memory

    def reserve_stage(self, gradients: Gradients | None = None) -> None:
        """Allocate the memory in which gradients are copied and scaled; nothing else changes.

        Args:
            gradients: it is needed for those of these that cannot be scaled in place; ``None``: for those of any unit.

        Raises:
            torch.OutOfMemoryError: there is no room.
        """
        units = self._backend.units()
        if gradients is not None:
            staged = {item for item, gradient in gradients.items() if not scalable_in_place(gradient)}
            units = [unit for unit in units if any(owner in staged for owner in unit.owners)] if staged else []
        largest = max((unit.elements for unit in units), default=0)
        if largest:
            self.stage.reserve(largest, units[0].owners[0].local.device)

    # -- one step

    def run(self, updates: Sequence[Update]) -> None:
        """The whole step, here and now.

        Args:
            updates: one of all parameters, or one for each layer; all have the same overflow and values.
        """
        self.is_running = True
        self.begin([item for update in updates for item in update.gradients])
        units = self._backend.units()
        for unit, own in zip(units, updates_of(units, updates), strict=True):
            self.update(unit, own)
            completed = [owner for owner, _, stop in unit.parts if stop == owner.local.numel()]
            for update in own:
                update.drop_gradients(completed)
        self.finish([item for update in updates for item in update.elsewhere])
        self.write_back(updates[0].values)
        self.is_running = False

    def begin(self, managed: Collection[Managed], order: Sequence[Unit] | None = None, ahead: bool = True) -> None:
        """Begin a step.

        Args:
            managed: the parameters that it updates.
            order: the order in which units are expected; ``None``: that of the backend.
            ahead: the gradients of later units are complete when an earlier one is updated.
        """
        try:
            self._backend.begin(managed, order)
            if self._classes.exchanges or self.shared.units:
                self.shared.begin(managed, order, ahead)
                self.broken.stops_others = bool(self.shared.units)
        except BaseException as error:
            self.broken.fail("the beginning of the update", error)
            raise

    def update(self, unit: Unit, updates: Sequence[Update]) -> None:
        """Update one unit: of one layer, or of several with an update each.

        Args:
            updates: those of the unit's parameters. Units that ranks update together get all updates of the step, which
                have the same overflow.
        """
        gradients = updates[0].gradients if len(updates) == 1 else _joined(updates)
        deferred = [update for update in updates if update.versions]
        is_plain = self._host_gradients is None and self.changed is None
        try:
            with _NOTHING_ELSE if is_plain else self._around(unit, gradients):
                for update in deferred:
                    update.refuse_written(unit.owners)
                segments = self._update(unit, gradients, updates)
                for update in deferred:
                    update.note_own_writes(unit.owners)
        except BaseException as error:
            self.broken.fail(f"the update of {unit.label}", error)
            raise
        owners = [part.owner for segment in segments for part in segment.parts]
        for owner in owners:
            owner.updated = True
        self._record(owners)

    def _update(self, unit: Unit, gradients: Gradients, updates: Sequence[Update]) -> Sequence[Segment]:
        """Returns what has been updated."""
        if unit in self.shared.positions:
            segments: Sequence[Segment] = self._apply_shared(unit, gradients, updates)
        else:
            segments = self._backend.acquire(unit, gradients)
            if len(updates) == 1 and segments:
                self._apply(segments, updates[0])
            elif segments:
                for update, own in _divided(segments, updates):
                    self._apply(own, update)
        self._backend.release(unit, segments)
        return segments

    @contextlib.contextmanager
    def _around(self, unit: Unit, gradients: Gradients) -> Iterator[None]:
        """In the body the unit's gradients are on the device, and what it changes is found."""
        comparing = contextlib.nullcontext() if self.changed is None else self.changed.updating(unit)
        with self._bringing(unit, gradients), comparing:
            yield

    def _bringing(self, unit: Unit, gradients: Gradients) -> contextlib.AbstractContextManager[None]:
        """In the body the unit's gradients are on the device."""
        if self._host_gradients is None:
            return contextlib.nullcontext()
        own = {owner.param: gradients[owner] for owner in unit.owners if owner in gradients}
        return self._host_gradients.holding(own, update=True)

    def _apply_shared(self, unit: Unit, active: Gradients, updates: Sequence[Update]) -> list[Segment]:
        """Update a unit together with other ranks; the communication of later units is started first."""
        values, device = updates[0].values, unit.owners[0].local.device
        scaling = {update: update.scaling_on(device) for update in updates}

        def scaled(segments: Sequence[Segment]) -> list[Tensor]:
            rows: dict[Segment, Tensor] = {}
            for update, own in _divided(segments, updates):
                gradients = [[part.slice(update.gradients[part.owner]) for part in segment.parts] for segment in own]
                rows |= zip(own, self._scaled(own, gradients, update, scaling[update]), strict=True)
            return [rows[segment] for segment in segments]

        with contextlib.ExitStack() as stack:
            for later in self.shared.upcoming(unit):
                stack.enter_context(self._bringing(later, active))
            self.shared.start_ahead(unit, active, scaled, values)
        segments = self._backend.acquire(unit, active)
        self.shared.apply(unit, segments, scaled, scaling[updates[0]].overflow, values)
        return segments

    def finish(self, elsewhere: Collection[Managed], next_order: Sequence[Unit] | None = None) -> None:
        """End the step.

        Args:
            elsewhere: parameters whose weights other replicas have sent.
            next_order: the order in which the next step is expected to update units; ``None``: that of this step.
        """
        try:
            self._backend.finish(next_order)
        except BaseException as error:
            self.broken.fail("the end of the update", error)
            raise
        for item in elsewhere:
            item.updated = True
        self._record(elsewhere)

    def write_back(self, values: GroupValues) -> None:
        """See :meth:`GroupClasses.write_back`."""
        if not self._classes.may_write_groups:
            return
        try:
            self._classes.write_back(values)
        except BaseException as error:
            self.broken.fail("the end of the update", error)
            raise

    # -- speculative updates

    def speculate(self, unit: Unit, update: Update) -> None:
        """:meth:`update` in such a way that it can be rolled back; some parameter must have a gradient."""
        self._backend.speculate(unit)
        self.update(unit, [update])

    def refuse_written(self, update: Update, items: Iterable[Managed]) -> None:
        """Mark the step as broken, and raise ``RuntimeError``, if somebody has written to these."""
        try:
            update.refuse_written(items)
        except BaseException as error:
            self.broken.fail("the update", error)
            raise

    def complete(self, updates: Sequence[Update], items: list[Managed]) -> None:
        """The updates of these parameters are done: check and drop their gradients."""
        for update in updates:
            if update.versions:
                self.refuse_written(update, items)
            update.drop_gradients(items)

    def roll_back(self, unit: Unit) -> None:
        """Undo :meth:`speculate`."""
        if self._backend.speculative([unit]):
            try:
                self._backend.roll_back(unit)
            except BaseException as error:
                self.broken.fail(f"rolling back the update of {unit.label}", error)
                raise
            self._record(unit.owners)

    # -- the arithmetic

    def _apply(self, segments: Sequence[Segment], update: Update) -> None:
        available = update.gradients
        gradients = [
            [available[p.owner] if p.whole else p.slice(available[p.owner]) for p in segment.parts]
            for segment in segments
        ]
        scaling = update.scaling_on(segments[0].device)
        left = self._one_pass.update(segments, gradients, scaling, update.values)
        if left:
            unscaled = [own for segment, own in zip(segments, gradients, strict=True) if segment in left]
            scaled = self._scaled(left, unscaled, update, scaling)
            self._classes.apply(left, scaled, scaling.overflow, update.values)

    def _scaled(
        self, segments: Sequence[Segment], gradients: Sequence[list[Tensor]], update: Update, scaling: Scaling
    ) -> list[Tensor]:
        """Scaled gradients in the shapes and dtypes of the segments' masters."""
        if self._host_gradients is not None:
            self._host_gradients.wait_until_stored(part.owner.param for segment in segments for part in segment.parts)
        rows = self.stage.scaled(segments, gradients, *scaling[:2], in_place=not update.keep_gradients)
        dtypes = [segment.locals[0].dtype if segment.coding == "own" else torch.float32 for segment in segments]
        return [row.view(segment.shape).to(d) for segment, row, d in zip(segments, rows, dtypes, strict=True)]


def updates_of(units: Sequence[Unit], updates: Sequence[Update]) -> Sequence[Sequence[Update]]:
    """For each unit, the updates of its parameters.

    Units that ranks update together get all updates: the communication of later units starts with them.
    """
    if len(updates) == 1:
        return [updates] * len(units)
    update_of = {item: update for update in updates for item in update.gradients}
    shared = [any(owner.rows is not None for owner in unit.owners) for unit in units]
    own = [list(dict.fromkeys(update_of[owner] for owner in unit.owners if owner in update_of)) for unit in units]
    return [updates if together else mine for together, mine in zip(shared, own, strict=True)]


def _joined(updates: Sequence[Update]) -> Gradients:
    """The gradients of all of the updates."""
    return {item: gradient for update in updates for item, gradient in update.gradients.items()}


def _divided(segments: Sequence[Segment], updates: Sequence[Update]) -> list[tuple[Update, Sequence[Segment]]]:
    """Each update with its segments, if it has any: no segment has parts of two updates."""
    pairs = ((update, [s for s in segments if s.parts[0].owner in update.gradients]) for update in updates)
    return [(update, own) for update, own in pairs if own]
