"""The walk through the units: acquire state → base optimizer's arithmetic → write back → release."""

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
from lightstep.precision.adam_kernel import Scaling
from lightstep.precision.gradient_stage import GradientStage, scalable_in_place
from lightstep.state.backend import Managed, StateBackend, Unit
from lightstep.state.record import aligned
from lightstep.state.segment import Segment

Gradients = dict[Managed, Tensor]


@dataclass
class Update:
    """One step's update of all units, as ``step()`` decided it.

    Attributes:
        gradients: local gradients, each in its charge until its parameter is updated.
        divisor, factor: 0-dim fp32: ``gradient / divisor * factor`` is what the base optimizer sees; ``None`` is 1.
            Where each layer is clipped by itself, ``factor`` has one for each parameter, the same object in a layer.
        overflow: 0-dim fp32; with 1 nothing changes. Where layers are left out one by one, as ``factor``.
        values: the groups' hyper-parameters.
        elsewhere: parameters that other replicas update; here their weights arrive.
        read_again: the gradients must stay what they are.
    """

    gradients: Gradients
    divisor: Tensor | None
    factor: Tensor | Mapping[Managed, Tensor | None] | None
    overflow: Tensor | Mapping[Managed, Tensor]
    values: GroupValues
    elsewhere: list[Managed] = field(default_factory=list)
    read_again: bool = False

    def __post_init__(self) -> None:
        self.elsewhere = [item for item in self.gradients if item.elsewhere]

    @classmethod
    def of_layers(cls, updates: Sequence[Update]) -> Update:
        """Those of several layers as one, which takes over their gradients."""
        if len(updates) == 1:
            return updates[0]
        together = cls({}, updates[0].divisor, {}, {}, updates[0].values)
        for update in updates:
            together.factor.update(dict.fromkeys(update.gradients, update.factor))  # type: ignore[union-attr]
            together.overflow.update(dict.fromkeys(update.gradients, update.overflow))  # type: ignore[union-attr]
            together.gradients.update(update.gradients)
            update.gradients.clear()
        return together

    @property
    def apart(self) -> Mapping[Managed, object] | None:
        """Parameters with different objects here are not updated as one."""
        return next((own for own in (self.overflow, self.factor) if isinstance(own, Mapping)), None)

    def alike(self, segments: list[Segment]) -> list[tuple[list[Segment], Tensor | None, Tensor]]:
        """The segments with equal factors together, the factor, and their overflow."""
        if self.apart is None:
            return [(segments, self.factor, self.overflow)] if segments else []  # type: ignore[list-item]
        found: dict[tuple[int, int], tuple[list[Segment], Tensor | None, Tensor]] = {}
        for segment in segments:
            owner = segment.parts[0].owner
            factor, overflow = (of[owner] if isinstance(of, Mapping) else of for of in (self.factor, self.overflow))
            found.setdefault((id(factor), id(overflow)), ([], factor, overflow))[0].append(segment)  # type: ignore[arg-type]
        return list(found.values())

    def drop_gradients(self, items: list[Managed]) -> None:
        """These are not read any more."""
        for item in items:
            self.gradients.pop(item, None)


class UnitWalk:
    """``begin``, ``unit`` for each unit in order, ``finish``: all of them on one stream (on the CPU: one thread).

    Args:
        broken: told what was being done when something fails.
        record: called with each parameter once it is as the optimizer leaves it.
    """

    def __init__(
        self, classes: GroupClasses, backend: StateBackend, broken: BrokenStep, record: Callable[[Managed], None]
    ) -> None:
        self._classes = classes
        self._backend = backend
        self.broken = broken
        self._record = record
        self.stage = GradientStage()
        self.shared = SharedUpdates(classes, backend)
        self._one_pass = OnePass(classes, self.stage)

    def make_room_for_copies(self) -> None:
        """Take the memory in which any unit's gradients are copied before they are scaled.

        Raises:
            torch.OutOfMemoryError: there is no room.
        """
        units = self._backend.units()
        largest = max((sum(aligned(b - a) for _, a, b in unit.parts) for unit in units), default=0)
        if largest:
            self.stage.reserve(largest, units[0].parts[0][0].local.device)

    def make_room(self, gradients: Gradients) -> None:
        """Take the memory in which these will be scaled, where none is held: without it nothing has happened.

        Raises:
            torch.OutOfMemoryError: there is no room.
        """
        if self.stage.nbytes():
            return
        staged = {item for item, gradient in gradients.items() if not scalable_in_place(gradient)}
        units = [unit for unit in self._backend.units() if any(owner in staged for owner, _, _ in unit.parts)]
        if units:
            largest = max(sum(aligned(b - a) for _, a, b in unit.parts) for unit in units)
            self.stage.reserve(largest, next(iter(staged)).local.device)

    def run(self, update: Update) -> None:
        """All of it, here and now."""
        update.drop_gradients(update.elsewhere)
        self.begin(update.gradients.keys())
        for unit in self._backend.units():
            update.drop_gradients(self.unit(unit, update))
        self.finish(update.elsewhere)
        update.values.give_back()

    def begin(self, managed: Collection[Managed], order: Sequence[Unit] | None = None, ahead: bool = True) -> None:
        """``order``: in which the units will come, as far as is known; ``None`` is the backend's own.

        Args:
            ahead: the gradients of later units are there when an earlier one is updated.
        """
        with self._guard("the beginning of the update"):
            self._backend.begin(managed, order)
            self.shared.begin(managed, order, ahead)

    def unit(self, unit: Unit, update: Update) -> list[Managed]:
        """Update one unit; returns the parameters that are complete with it."""
        if unit in self.shared:
            return self._shared_unit(unit, update)
        with self._guard(f"the update of {unit.label}"):
            segments = self._backend.acquire(unit, update.gradients, update.apart)
            for alike, factor, overflow in update.alike(segments):
                self._apply(alike, update, _on(alike[0].device, update.divisor, factor, overflow))
            self._backend.release(unit, segments)
        return self._noted(segments)

    def _shared_unit(self, unit: Unit, update: Update) -> list[Managed]:
        """One that ranks update together; others behind it are begun first."""
        divisor, factor, overflow = update.divisor, update.factor, update.overflow
        assert isinstance(overflow, Tensor) and not isinstance(factor, Mapping), "it is not updated in backward"
        scaling = _on(unit.parts[0][0].local.device, divisor, factor, overflow)

        def scaled(segments: Sequence[Segment]) -> list[Tensor]:
            gradients = [[part.of(update.gradients[part.owner]) for part in one.parts] for one in segments]
            return self._scaled(segments, gradients, update, scaling)

        with self._guard(f"the update of {unit.label}"):
            self.shared.reach(unit, update.gradients, scaled, update.values)
            segments = self._backend.acquire(unit, update.gradients, update.apart)
            self.shared.apply(unit, segments, scaled, scaling.overflow, update.values)
            self._backend.release(unit, segments)
        return self._noted(segments)

    def attempt(self, unit: Unit, update: Update) -> None:
        """:meth:`unit`, so that it can be taken back; nothing happens to a unit whose entries become others."""
        if any(owner in update.gradients for owner, _, _ in unit.parts):
            self._backend.attempt(unit)
            self.unit(unit, update)

    def take_back(self, unit: Unit) -> None:
        """Undo :meth:`attempt`."""
        if self._backend.tried(unit):
            with self._guard(f"taking back the update of {unit.label}"):
                self._backend.take_back(unit)
            for owner, _, _ in unit.parts:
                self._record(owner)

    def commit(self, units: Iterable[Unit]) -> None:
        """What was tried counts."""
        for unit in units:
            if self._backend.tried(unit):
                self._backend.commit(unit)

    def finish(self, elsewhere: Iterable[Managed]) -> None:
        """``elsewhere``: parameters whose weights other replicas have sent."""
        with self._guard("the end of the update"):
            self._backend.finish()
        for item in elsewhere:
            item.updated = True
            self._record(item)

    def _guard(self, what: str) -> AbstractContextManager[None]:
        waited_for = "; other ranks wait for this one until its process ends" if self.shared.units else ""
        return self.broken.guard(what, waited_for)

    def _apply(self, segments: list[Segment], update: Update, scaling: Scaling) -> None:
        gradients = {one: [part.of(update.gradients[part.owner]) for part in one.parts] for one in segments}
        left = self._one_pass.update(segments, [*gradients.values()], scaling, update.values)
        if left:
            scaled = self._scaled(left, [gradients[one] for one in left], update, scaling)
            self._classes.apply(left, scaled, scaling.overflow, update.values)

    def _scaled(
        self, segments: Sequence[Segment], gradients: Sequence[list[Tensor]], update: Update, scaling: Scaling
    ) -> list[Tensor]:
        """In the shapes and dtypes of the segments' masters."""
        rows = self.stage.scaled(segments, gradients, *scaling[:2], in_place=not update.read_again)
        dtypes = [one.locals[0].dtype if one.coding == "own" else torch.float32 for one in segments]
        return [row.view(one.shape).to(dtype) for one, row, dtype in zip(segments, rows, dtypes, strict=True)]

    def _noted(self, updated: list[Segment]) -> list[Managed]:
        owners = [part.owner for segment in updated for part in segment.parts]
        for owner in owners:
            owner.updated = True
            self._record(owner)
        return [part.owner for one in updated for part in one.parts if part.stop == part.owner.local.numel()]


def _on(device: torch.device, divisor: Tensor | None, factor: Tensor | None, overflow: Tensor) -> Scaling:
    divisor, factor = (None if value is None else value.to(device) for value in (divisor, factor))
    return Scaling(divisor, factor, overflow.to(device))
