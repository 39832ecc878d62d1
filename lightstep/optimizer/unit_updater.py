"""The update of one unit: acquire its state → scale gradients → the base optimizer's arithmetic → write back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightstep.optimizer.broken_step import BrokenStep
from lightstep.optimizer.classes import GroupClasses
from lightstep.optimizer.group_values import GroupValues
from lightstep.optimizer.one_pass import OnePass
from lightstep.optimizer.shared_updates import SharedUpdates
from lightstep.precision.adam_batch import Scaling
from lightstep.precision.gradient_stage import GradientStage, scalable_in_place
from lightstep.state.backend import StateBackend
from lightstep.state.schema import Managed, Unit
from lightstep.state.segment import Segment

Gradients = dict[Managed, Tensor]


@dataclass
class Update:
    """One step's update, as ``step()`` decided it.

    Attributes:
        gradients: local gradients; each is dropped when its parameter is updated.
        divisor, factor: 0-dim fp32; the base optimizer sees ``gradient / divisor * factor``. ``None`` is 1. If layers
            are clipped one by one, ``factor`` maps each parameter to its factor: the same object within a layer.
        overflow: 0-dim fp32; if it is 1 nothing changes. If layers are skipped one by one, a mapping like ``factor``.
        values: the groups' hyper-parameters.
        elsewhere: the parameters that other replicas update and send.
        without_state: the parameters that had no state when the update was made.
        separated_by: parameters with different objects in this mapping go to different segments.
        keep_gradients: the gradients must not be changed.
    """

    gradients: Gradients
    divisor: Tensor | None
    factor: Tensor | Mapping[Managed, Tensor | None] | None
    overflow: Tensor | Mapping[Managed, Tensor]
    values: GroupValues
    elsewhere: list[Managed] = field(init=False)
    without_state: list[Managed] = field(init=False)
    separated_by: Mapping[Managed, object] | None = field(init=False)
    keep_gradients: bool = False
    versions: dict[Managed, tuple[int, int]] = field(default_factory=dict)
    """Of gradient and weight, where the update is deferred: nobody else may write to them before it."""

    def __post_init__(self) -> None:
        self.elsewhere = [item for item in self.gradients if item.is_remote]
        self.without_state = [item for item in self.gradients if not item.updated]
        by_layer = (mapping for mapping in (self.overflow, self.factor) if isinstance(mapping, Mapping))
        self.separated_by = next(by_layer, None)

    @classmethod
    def merge(cls, updates: Sequence[Update]) -> Update:
        """The updates of several layers as one, which takes over their gradients."""
        if len(updates) == 1:
            return updates[0]
        merged = cls({}, updates[0].divisor, {}, {}, updates[0].values)
        for update in updates:
            merged.factor.update(dict.fromkeys(update.gradients, update.factor))  # type: ignore[union-attr]
            merged.overflow.update(dict.fromkeys(update.gradients, update.overflow))  # type: ignore[union-attr]
            merged.gradients.update(update.gradients)
            update.gradients.clear()
        return merged

    def by_factor(self, segments: list[Segment]) -> list[tuple[list[Segment], Tensor | None, Tensor]]:
        """Groups of segments with the same factor and overflow, each with these two."""
        if self.separated_by is None:
            return [(segments, self.factor, self.overflow)] if segments else []  # type: ignore[list-item]
        groups: dict[tuple[int, int], tuple[list[Segment], Tensor | None, Tensor]] = {}
        for segment in segments:
            owner = segment.parts[0].owner
            factor, overflow = (v[owner] if isinstance(v, Mapping) else v for v in (self.factor, self.overflow))
            groups.setdefault((id(factor), id(overflow)), ([], factor, overflow))[0].append(segment)  # type: ignore[arg-type]
        return list(groups.values())

    def note_versions(self) -> None:
        """From now on :meth:`refuse_written` finds gradients and weights that somebody else writes to."""
        self.versions = {item: (gradient._version, item.local._version) for item, gradient in self.gradients.items()}

    def note_own_writes(self, items: Iterable[Managed]) -> None:
        """These weights have their present versions from their own update."""
        for item in items:
            if item in self.versions:
                self.versions[item] = self.versions[item][0], item.local._version

    def refuse_written(self, items: Iterable[Managed]) -> None:
        """Raise ``RuntimeError`` if somebody has written to these gradients or weights after ``step()``."""
        for item in items:
            if item not in self.versions or item not in self.gradients:
                continue
            gradient, weight = self.versions[item]
            is_gradient = self.gradients[item]._version != gradient
            if is_gradient or item.local._version != weight:
                raise RuntimeError(
                    f"{f'the gradient of {item.name}' if is_gradient else item.name} was written to after step(), "
                    "before its deferred update (optimizer_state.update) had run: call optimizer.synchronize() before "
                    "you write to it"
                )

    def drop_gradients(self, items: list[Managed]) -> None:
        """Drop the gradients of these parameters, which are not read any more."""
        for item in items:
            self.gradients.pop(item, None)


class UnitUpdater:
    """:meth:`begin`, then :meth:`update` for each unit in order, then :meth:`finish`; all on one stream or CPU thread.

    Args:
        broken: records what failed.
        record: called with the parameters of each unit after their update.
    """

    def __init__(
        self,
        classes: GroupClasses,
        backend: StateBackend,
        broken: BrokenStep,
        record: Callable[[Iterable[Managed]], None],
    ) -> None:
        self._classes = classes
        self._backend = backend
        self.broken = broken
        self._record = record
        self.stage = GradientStage()
        self.shared = SharedUpdates(classes, backend)
        self._one_pass = OnePass(classes, self.stage)

    # -- memory

    def reserve_stage(self) -> None:
        """Allocate memory in which the gradients of any unit can be copied and scaled.

        Raises:
            torch.OutOfMemoryError: there is no room.
        """
        units = self._backend.units()
        if units:
            self._reserve_stage(units, units[0].owners[0].local.device)

    def reserve_stage_for(self, gradients: Gradients) -> None:
        """Allocate the memory in which these gradients are scaled, unless there is some; nothing else changes.

        Raises:
            torch.OutOfMemoryError: there is no room.
        """
        if self.stage.nbytes():
            return
        staged = {item for item, gradient in gradients.items() if not scalable_in_place(gradient)}
        units = [unit for unit in self._backend.units() if any(owner in staged for owner in unit.owners)]
        if units:
            self._reserve_stage(units, next(iter(staged)).local.device)

    def _reserve_stage(self, units: Sequence[Unit], device: torch.device) -> None:
        largest = max(unit.elements for unit in units)
        if largest:
            self.stage.reserve(largest, device)

    # -- one step

    def run(self, update: Update) -> None:
        """The whole step, here and now."""
        update.drop_gradients(update.elsewhere)
        self.begin(update.gradients.keys())
        for unit in self._backend.units():
            self.update(unit, update)
            update.drop_gradients([owner for owner, _, stop in unit.parts if stop == owner.local.numel()])
        self.finish(update.elsewhere)
        self.write_back(update.values)

    def begin(self, managed: Collection[Managed], order: Sequence[Unit] | None = None, ahead: bool = True) -> None:
        """Begin a step.

        Args:
            managed: the parameters that it updates.
            order: the order in which units are expected; ``None``: that of the backend.
            ahead: the gradients of later units are complete when an earlier one is updated.
        """
        with self._guard("the beginning of the update"):
            self._backend.begin(managed, order)
            self.shared.begin(managed, order, ahead)

    def update(self, unit: Unit, update: Update) -> None:
        """Update one unit."""
        if unit in self.shared:
            self._update_shared(unit, update)
            return
        with self._guard(f"the update of {unit.label}"):
            update.refuse_written(unit.owners)
            segments = self._backend.acquire(unit, update.gradients, update.separated_by)
            for group, factor, overflow in update.by_factor(segments):
                self._apply(group, update, _on(group[0].device, update.divisor, factor, overflow))
            self._backend.release(unit, segments)
            update.note_own_writes(unit.owners)
        self._mark_updated(segments)

    def _update_shared(self, unit: Unit, update: Update) -> None:
        """Update a unit together with other ranks; the communication of later units is started first."""
        divisor, factor, overflow = update.divisor, update.factor, update.overflow
        assert isinstance(overflow, Tensor) and not isinstance(factor, Mapping), "it is not updated in backward"
        scaling = _on(unit.owners[0].local.device, divisor, factor, overflow)

        def scaled(segments: Sequence[Segment]) -> list[Tensor]:
            gradients = [[part.slice(update.gradients[part.owner]) for part in segment.parts] for segment in segments]
            return self._scaled(segments, gradients, update, scaling)

        with self._guard(f"the update of {unit.label}"):
            update.refuse_written(unit.owners)
            self.shared.start_ahead(unit, update.gradients, scaled, update.values)
            segments = self._backend.acquire(unit, update.gradients, update.separated_by)
            self.shared.apply(unit, segments, scaled, scaling.overflow, update.values)
            self._backend.release(unit, segments)
            update.note_own_writes(unit.owners)
        self._mark_updated(segments)

    def finish(self, elsewhere: Collection[Managed], next_order: Sequence[Unit] | None = None) -> None:
        """End the step.

        Args:
            elsewhere: parameters whose weights other replicas have sent.
            next_order: the order in which the next step is expected to update units; ``None``: that of this step.
        """
        with self._guard("the end of the update"):
            self._backend.finish(next_order)
        for item in elsewhere:
            item.updated = True
        self._record(elsewhere)

    def write_back(self, values: GroupValues) -> None:
        """See :meth:`GroupClasses.write_back`."""
        with self._guard("the end of the update"):
            self._classes.write_back(values)

    # -- speculative updates

    def speculate(self, unit: Unit, update: Update) -> None:
        """:meth:`update` in such a way that it can be rolled back; does nothing if no parameter has a gradient."""
        if any(owner in update.gradients for owner in unit.owners):
            self._backend.speculate(unit)
            self.update(unit, update)

    def refuse_written(self, update: Update) -> None:
        """Mark the step as broken, and raise ``RuntimeError``, if somebody has written to a gradient or a weight."""
        with self._guard("the update"):
            update.refuse_written(update.gradients)

    def complete(self, update: Update, items: list[Managed]) -> None:
        """The updates of these parameters are done: check and drop their gradients."""
        with self._guard("the update"):
            update.refuse_written(items)
        update.drop_gradients(items)

    def roll_back(self, unit: Unit) -> None:
        """Undo :meth:`speculate`."""
        if self._backend.is_speculative(unit):
            with self._guard(f"rolling back the update of {unit.label}"):
                self._backend.roll_back(unit)
            self._record(unit.owners)

    def commit(self, units: Iterable[Unit]) -> None:
        """Make speculative updates final."""
        for unit in units:
            if self._backend.is_speculative(unit):
                self._backend.commit(unit)

    # -- the arithmetic

    def _guard(self, what: str) -> AbstractContextManager[None]:
        consequence = "; other ranks wait for this one until its process ends" if self.shared.units else ""
        return self.broken.guard(what, consequence)

    def _apply(self, segments: list[Segment], update: Update, scaling: Scaling) -> None:
        gradients = {
            segment: [part.slice(update.gradients[part.owner]) for part in segment.parts] for segment in segments
        }
        left = self._one_pass.update(segments, [*gradients.values()], scaling, update.values)
        if left:
            scaled = self._scaled(left, [gradients[segment] for segment in left], update, scaling)
            self._classes.apply(left, scaled, scaling.overflow, update.values)

    def _scaled(
        self, segments: Sequence[Segment], gradients: Sequence[list[Tensor]], update: Update, scaling: Scaling
    ) -> list[Tensor]:
        """Scaled gradients in the shapes and dtypes of the segments' masters."""
        rows = self.stage.scaled(segments, gradients, *scaling[:2], in_place=not update.keep_gradients)
        dtypes = [segment.locals[0].dtype if segment.coding == "own" else torch.float32 for segment in segments]
        return [row.view(segment.shape).to(d) for segment, row, d in zip(segments, rows, dtypes, strict=True)]

    def _mark_updated(self, segments: list[Segment]) -> None:
        owners = [part.owner for segment in segments for part in segment.parts]
        for owner in owners:
            owner.updated = True
        self._record(owners)


def _on(device: torch.device, divisor: Tensor | None, factor: Tensor | None, overflow: Tensor) -> Scaling:
    divisor, factor = (None if value is None else value.to(device) for value in (divisor, factor))
    return Scaling(divisor, factor, overflow.to(device))
