"""Updates that ranks do together. Those of Muon run in three parts per unit, two of which run ahead of the unit.

1. *start*: update the momentum, and send this rank's blocks of the directions to the matrices' owners;
2. *orthogonalize*: each owner orthogonalizes its matrices, and sends the blocks back;
3. *apply*: add the blocks to the masters, when it is the unit's turn.

While one unit is orthogonalized, the blocks of the next one are being sent, and so are the results of the one before.
So owners that have more to do than others in one unit, and less in the next, make nobody wait. Tensors of other classes
are gathered when it is their unit's turn (:mod:`~lightstep.optimizer.gathered_updates`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightstep.distributed import MatrixTransfer, Rows
from lightstep.optimizer.arithmetic import BaseArithmetic
from lightstep.optimizer.classes import GroupClasses
from lightstep.optimizer.gathered_updates import GatheredUpdates, rows_of_segment
from lightstep.optimizer.group_values import GroupValues
from lightstep.optimizer.orthogonalizer import Orthogonalizer
from lightstep.optimizer.sharded_muon import MOMENTUM, apply_direction, update_momentum
from lightstep.state.schema import Coded, Managed, Unit
from lightstep.state.segment import Segment
from lightstep.state.store import Store

__all__ = ["SharedUpdates"]

Scaled = Callable[[Sequence[Segment]], Sequence[Tensor]]


@dataclass
class _Started:
    """Matrices of one unit that the ranks of one group are exchanging."""

    segments: list[Segment]
    settings: list[dict[str, Any]]
    rows: list[Rows]
    transfer: MatrixTransfer


class SharedUpdates:
    """The shared updates of one optimizer.

    Attributes:
        units: the units of this step that ranks update together, in update order.
        positions: their positions in it.
    """

    def __init__(self, classes: GroupClasses, backend: Store) -> None:
        self._classes, self._exchanges, self._backend = classes, classes.exchanges, backend
        self._gathered, self._orthogonalizer = GatheredUpdates(classes.exchanges), Orthogonalizer()
        self.units: list[Unit] = []
        self.positions: dict[Unit, int] = {}
        self._ahead = self._num_started = self._num_orthogonalized = 0
        self._started: dict[int, list[_Started]] = {}  # by position

    def begin(self, managed: Collection[Managed], order: Sequence[Unit] | None, ahead: bool) -> None:
        """Begin a step; for the arguments see :meth:`UnitUpdater.begin`."""
        wanted = frozenset(item for item in managed if item.rows is not None and not item.is_remote)
        units = (self._backend.units() if order is None else order) if wanted else ()
        self.units = [unit for unit in units if any(owner in wanted for owner in unit.owners)]
        self.positions = {unit: position for position, unit in enumerate(self.units)}
        has_state = bool(self.units) and all(item.updated for item in managed)
        with_momentum = [item for item in wanted if self._classes.arithmetic_for(item.group).sends_directions]
        self._ahead = self._backend.ahead(with_momentum, MOMENTUM) if ahead and has_state and with_momentum else 0
        self._num_started, self._num_orthogonalized, self._started = 0, 0, {}
        for exchange in self._exchanges.values():
            exchange.reset()
        self._orthogonalizer.retain({exchange.address for exchange in self._exchanges.values()})

    def partition(self, units: Sequence[Unit]) -> tuple[list[Unit], list[Unit]]:
        """The units that this rank updates alone, and the shared ones that can be updated speculatively.

        The second list is the same on all ranks. Units of classes whose updates need the host are in neither.
        """
        if not self._exchanges:
            return list(units), []
        local, shared = [], []
        for unit in units:
            owners = unit.owners
            if all(owner.rows is None for owner in owners):
                local.append(unit)
            elif all(
                owner.rows is not None and self._classes.arithmetic_for(owner.group).sends_directions
                for owner in owners
            ):
                shared.append(unit)
        return local, shared

    def all_reduce_min(self, numbers: Sequence[int]) -> list[int]:
        """The minimum over all ranks of each number; the host waits."""
        for exchange in self._exchanges.values():  # one per mesh dimension: together they span all ranks
            numbers = exchange.all_reduce_min(numbers)
        return list(numbers)

    def upcoming(self, unit: Unit) -> Sequence[Unit]:
        """The units that :meth:`start_ahead` starts before this one is acquired."""
        return self.units[self._num_started : self.positions[unit] + self._ahead + 1] if self._ahead else ()

    def start_ahead(self, unit: Unit, active: Collection[Managed], scaled: Scaled, values: GroupValues) -> None:
        """Before ``unit`` is acquired: start and orthogonalize the units behind it (:meth:`upcoming`).

        Args:
            active: parameters with gradients.
            scaled: returns the scaled gradients of some segments, in their shapes.
        """
        if not self._ahead:
            return
        for later in self.upcoming(unit):
            position = self.positions[later]
            found = self._backend.look_ahead(later, active)
            found = [(segment, views) for segment, views in found if self._is_muon(segment)]
            segments = [segment for segment, _ in found]
            momenta = [views.coded.get(MOMENTUM) or views.entries[MOMENTUM] for _, views in found]
            self._start(position, segments, momenta, scaled(segments), values)
            self._orthogonalize(position)
        self._orthogonalize(self.positions[unit] + self._ahead)

    def apply(
        self, unit: Unit, acquired: Sequence[Segment], scaled: Scaled, overflow: Tensor, values: GroupValues
    ) -> None:
        """Update the unit's acquired segments."""
        position, segments = self.positions[unit], [segment for segment in acquired if self._is_muon(segment)]
        if not self._ahead:
            for segment in segments:
                if MOMENTUM not in segment.state:
                    segment.state[MOMENTUM] = torch.zeros_like(segment.master)
            momenta = [segment.state[MOMENTUM] for segment in segments]
            self._start(position, segments, momenta, scaled(segments), values)
        self._orthogonalize(position + 1)
        with torch.no_grad():
            for started in self._started.pop(position):
                started.transfer.wait()
                parts = zip(started.segments, started.transfer.blocks, started.settings, started.rows, strict=True)
                for segment, block, settings, rows in parts:
                    apply_direction(segment.master, block, settings, rows.shape)
                started.transfer.release()
        by_class: dict[BaseArithmetic, list[Segment]] = {}
        for segment in (segment for segment in acquired if not self._is_muon(segment)):
            by_class.setdefault(self._classes.arithmetic_for(segment.group), []).append(segment)
        for arithmetic, own in by_class.items():
            self._gathered.apply(arithmetic, own, scaled(own), overflow, values)

    def _is_muon(self, segment: Segment) -> bool:
        return self._classes.arithmetic_for(segment.group).sends_directions

    def _start(
        self,
        position: int,
        segments: Sequence[Segment],
        momenta: Sequence[Tensor | Coded],
        gradients: Sequence[Tensor],
        values: GroupValues,
    ) -> None:
        by_group: dict[Any, list[int]] = {}
        rows = [rows_of_segment(segment) for segment in segments]
        for number, divided in enumerate(rows):
            by_group.setdefault(divided.group, []).append(number)
        started: list[_Started] = []
        self._started[position], self._num_started = started, position + 1
        for group, numbers in by_group.items():
            own, own_rows = [segments[n] for n in numbers], [rows[n] for n in numbers]
            settings = [values.settings(segment.group) for segment in own]
            keys = [segment.parts[0].owner for segment in own]
            transfer = self._exchanges[group].start(keys, own_rows, torch.bfloat16, gradients[0].device)
            with torch.no_grad():
                for number, block, setting in zip(numbers, transfer.blocks, settings, strict=True):
                    kept, gradient = momenta[number], gradients[number]
                    momentum = kept if isinstance(kept, Tensor) else torch.empty_like(gradient, dtype=torch.float32)
                    if not isinstance(kept, Tensor):
                        kept.decode(momentum.view(-1))
                    block.copy_(update_momentum(momentum, gradient, setting))
                    if not isinstance(kept, Tensor):
                        kept.encode(momentum.view(-1))
                transfer.send()
            started.append(_Started(own, settings, own_rows, transfer))

    def _orthogonalize(self, stop: int) -> None:
        """Orthogonalize the units before this position that have been started."""
        for position in range(self._num_orthogonalized, min(stop, len(self.units))):
            for started in self._started.get(position, ()):  # a unit without gradients has not been started

                def orthogonalized(n: int, matrix: Tensor, settings: Sequence[Any] = started.settings) -> Tensor:
                    return self._orthogonalizer(matrix, settings[n])

                with torch.no_grad():
                    started.transfer.compute(orthogonalized)
            self._num_orthogonalized = position + 1

    def nbytes(self) -> int:
        """Device memory held for exchanges and graphs."""
        return self._orthogonalizer.nbytes() + sum(exchange.nbytes() for exchange in self._exchanges.values())

    def free(self) -> None:
        """Free that memory; no step may be under way."""
        self._orthogonalizer.free()
        for exchange in self._exchanges.values():
            exchange.free()
