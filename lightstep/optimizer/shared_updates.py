"""Updates that ranks do together: Muon's in three parts for each unit, of which two run ahead of the walk.

1. *start*: momentum, and this rank's blocks of what has to be whole, which are sent to the matrices' owners;
2. *turn*: each owner makes its matrices orthogonal, and sends the blocks back;
3. *apply*: they are added to the masters, when the walk has come to the unit.

While one unit is turned, the blocks of the next one are on their way, and so are the results of the one before. Owners
that have more to do in one unit than others do, and less in the next, wait for nobody. Tensors of other classes are
gathered when the walk is there (:mod:`~lightstep.optimizer.gathered_updates`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightstep.distributed import Journey, Rows
from lightstep.optimizer.arithmetic import BaseArithmetic
from lightstep.optimizer.classes import GroupClasses
from lightstep.optimizer.gathered_updates import GatheredUpdates, rows_of_segment
from lightstep.optimizer.group_values import GroupValues
from lightstep.optimizer.sharded_muon import MOMENTUM, apply_direction, direction_of, orthogonal
from lightstep.state.backend import Managed, StateBackend, Unit
from lightstep.state.segment import Segment

__all__ = ["SharedUpdates"]

Scaled = Callable[[Sequence[Segment]], Sequence[Tensor]]


@dataclass
class _Started:
    """Some matrices of a unit, under way among the ranks of one group."""

    segments: list[Segment]
    settings: list[dict[str, Any]]
    rows: list[Rows]
    journey: Journey


class SharedUpdates:
    """Those of one optimizer.

    Attributes:
        units: of the step under way, in the order in which the walk comes to them.
    """

    def __init__(self, classes: GroupClasses, backend: StateBackend) -> None:
        self._classes, self._exchanges, self._backend = classes, classes.exchanges, backend
        self._gathered = GatheredUpdates(classes.exchanges)
        self.units: list[Unit] = []
        self._places: dict[Unit, int] = {}
        self._ahead = self._begun = self._turned = 0
        self._under_way: dict[int, list[_Started]] = {}

    def begin(self, managed: Collection[Managed], order: Sequence[Unit] | None, ahead: bool) -> None:
        """The units of a step, in the order in which the walk will come to them; ``ahead``: see the walk."""
        wanted = frozenset(item for item in managed if item.rows is not None and not item.elsewhere)
        units = (self._backend.units() if order is None else order) if wanted else ()
        self.units = [unit for unit in units if any(owner in wanted for owner, _, _ in unit.parts)]
        self._places = {unit: place for place, unit in enumerate(self.units)}
        known = bool(self.units) and all(item.updated for item in managed)
        momenta = [item for item in wanted if self._classes.of(item.group).sends_directions]
        self._ahead = self._backend.ahead(momenta, MOMENTUM) if ahead and known and momenta else 0
        self._begun, self._turned, self._under_way = 0, 0, {}
        for exchange in self._exchanges.values():
            exchange.reset()

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._places

    def divide(self, units: Sequence[Unit]) -> tuple[list[Unit], list[Unit]]:
        """Those that this rank updates alone, and those that ranks may try together: the same on all of them.

        Left out are those of classes that ask the other ranks' hosts how it went.
        """
        if not self._exchanges:
            return list(units), []
        alone, together = [], []
        for unit in units:
            owners = [owner for owner, _, _ in unit.parts]
            if all(owner.rows is None for owner in owners):
                alone.append(unit)
            elif all(owner.rows is not None and self._classes.of(owner.group).sends_directions for owner in owners):
                together.append(unit)
        return alone, together

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The smallest that any rank has given, of each; the host waits for those of all ranks."""
        for exchange in self._exchanges.values():  # by one dimension of a mesh after the other: of all of it
            numbers = exchange.least(numbers)
        return list(numbers)

    def reach(self, unit: Unit, active: Collection[Managed], scaled: Scaled, values: GroupValues) -> None:
        """The walk is about to acquire this one: start what is ahead.

        Args:
            active: parameters with gradients.
            scaled: the gradients of some segments as the optimizer sees them, in their shapes.
        """
        if not self._ahead:
            return
        stop = min(self._places[unit] + self._ahead, len(self.units) - 1) + 1
        for place in range(self._begun, stop):
            found = self._backend.look_ahead(self.units[place], active)
            found = [(segment, entries) for segment, entries in found if self._is_muon(segment)]
            segments, momenta = [segment for segment, _ in found], [entries[MOMENTUM] for _, entries in found]
            self._start(place, segments, momenta, scaled(segments), values)
            self._turn(place)
        self._turn(self._places[unit] + self._ahead)

    def apply(
        self, unit: Unit, acquired: Sequence[Segment], scaled: Scaled, overflow: Tensor, values: GroupValues
    ) -> None:
        """Update the unit's segments, which are acquired."""
        place, segments = self._places[unit], [segment for segment in acquired if self._is_muon(segment)]
        if not self._ahead:
            for segment in segments:
                if MOMENTUM not in segment.state:
                    segment.state[MOMENTUM] = torch.zeros_like(segment.master)
            momenta = [segment.state[MOMENTUM] for segment in segments]
            self._start(place, segments, momenta, scaled(segments), values)
        self._turn(place + 1)
        with torch.no_grad():
            for started in self._under_way.pop(place):
                started.journey.arrive()
                parts = zip(started.segments, started.journey.blocks, started.settings, started.rows, strict=True)
                for segment, block, settings, rows in parts:
                    apply_direction(segment.master, block, settings, rows.shape)
                started.journey.end()
        by_class: dict[BaseArithmetic, list[Segment]] = {}
        for segment in (segment for segment in acquired if not self._is_muon(segment)):
            by_class.setdefault(self._classes.of(segment.group), []).append(segment)
        for arithmetic, own in by_class.items():
            self._gathered.apply(arithmetic, own, scaled(own), overflow, values)

    def _is_muon(self, segment: Segment) -> bool:
        return self._classes.of(segment.group).sends_directions

    def _start(
        self,
        place: int,
        segments: Sequence[Segment],
        momenta: Sequence[Tensor],
        gradients: Sequence[Tensor],
        values: GroupValues,
    ) -> None:
        by_group: dict[Any, list[int]] = {}
        rows = [rows_of_segment(segment) for segment in segments]
        for number, one in enumerate(rows):
            by_group.setdefault(one.group, []).append(number)
        started: list[_Started] = []
        self._under_way[place], self._begun = started, place + 1
        for group, numbers in by_group.items():
            own, own_rows = [segments[n] for n in numbers], [rows[n] for n in numbers]
            settings = [values.of(segment.group) for segment in own]
            keys = [segment.parts[0].owner for segment in own]
            journey = self._exchanges[group].start(keys, own_rows, torch.bfloat16, gradients[0].device)
            with torch.no_grad():
                for number, block, setting in zip(numbers, journey.blocks, settings, strict=True):
                    kept, gradient = momenta[number], gradients[number]
                    momentum = kept.to(gradient.dtype)  # a copy where moments are kept in bf16
                    block.copy_(direction_of(momentum, gradient, setting))
                    if momentum is not kept:
                        kept.copy_(momentum)
                journey.send()
            started.append(_Started(own, settings, own_rows, journey))

    def _turn(self, stop: int) -> None:
        """What was started before this place."""
        for place in range(self._turned, min(stop, len(self.units))):
            for started in self._under_way.get(place, ()):  # one that got no gradients was not started
                settings = started.settings
                with torch.no_grad():
                    started.journey.compute(lambda n, matrix, settings=settings: orthogonal(matrix, settings[n]))  # type: ignore[misc]
            self._turned = place + 1

    def nbytes(self) -> int:
        """Device memory held for what is under way."""
        return sum(exchange.nbytes() for exchange in self._exchanges.values())

    def free(self) -> None:
        """Give it back; nothing may be under way."""
        for exchange in self._exchanges.values():
            exchange.free()
