"""Updates that ranks do together. Those of Muon run in three parts per unit, two of which run ahead of the unit.

1. *start*: update the momentum, and send this rank's blocks of the directions to the matrices' owners;
2. *orthogonalize*: each owner orthogonalizes its matrices, and sends the blocks back;
3. *apply*: add the blocks to the masters, when it is the unit's turn.

While one unit is orthogonalized, the blocks of the next one are being sent, and so are the results of the one before.
So owners that have more to do than others in one unit, and less in the next, make nobody wait.

Tensors of other classes, which need them whole, are gathered when it is their unit's turn. Gradient, master and state
of a tensor are gathered on one rank. The class takes its own step there, and the blocks of master and state are
scattered back. Other entries (row sums, counters) are replicated on all ranks. The hosts take part: they exchange the
replicated entries after each update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightstep.distributed import MatrixExchange, MatrixTransfer, Rows, empty_in_order, memory_order
from lightstep.optimizer.arithmetic import BaseArithmetic
from lightstep.optimizer.classes import GroupClasses
from lightstep.optimizer.matrix_stack import Matrix
from lightstep.optimizer.muon import MOMENTUM, Orthogonalizer, apply_direction, update_momentum
from lightstep.optimizer.update import GroupValues
from lightstep.state.schema import Coded, Managed, Unit
from lightstep.state.segment import Segment
from lightstep.state.store import Store

__all__ = ["GatheredUpdates", "SharedUpdates", "rows_of_segment"]


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


_EXACT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that fp32, in which everything is sent, represents exactly."""


class _ShardedEntry(NamedTuple):
    """An entry of the tensor's shape: its blocks are sent apart from this.

    Attributes:
        order: of its dimensions in memory, which its blocks keep: sums over it depend on that.
    """

    dtype: torch.dtype
    order: tuple[int, ...]


class _ReplicatedEntry(NamedTuple):
    """An entry that all ranks keep whole."""

    value: Any
    on_device: bool = False


StateLayout = dict[str, _ShardedEntry | _ReplicatedEntry]


class GatheredUpdates:
    """The gathered updates of one optimizer.

    Args:
        exchanges: by process group; they exist from the set-up on.
    """

    def __init__(self, exchanges: Mapping[Any, MatrixExchange]) -> None:
        self._exchanges = exchanges

    @torch.no_grad()
    def apply(
        self,
        arithmetic: BaseArithmetic,
        segments: Sequence[Segment],
        gradients: Sequence[Tensor],
        overflow: Tensor,
        values: GroupValues,
    ) -> None:
        """One update of acquired ``segments``; all ranks that share them call this in the same order."""
        alike: dict[tuple[Any, int], list[tuple[Segment, Tensor]]] = {}
        for segment, gradient in zip(segments, gradients, strict=True):
            key = rows_of_segment(segment).group, len(_sharded_keys(segment))
            alike.setdefault(key, []).append((segment, gradient))
        for (group, _), pairs in alike.items():
            _Gathered(arithmetic, self._exchanges[group], pairs).update(overflow, values)


class _Gathered:
    """Tensors of one unit with the same number of sharded entries."""

    def __init__(
        self, arithmetic: BaseArithmetic, exchange: MatrixExchange, pairs: Sequence[tuple[Segment, Tensor]]
    ) -> None:
        self._arithmetic, self._exchange, self._pairs = arithmetic, exchange, pairs
        self._segments = [segment for segment, _ in pairs]
        self._rows = [rows_of_segment(segment) for segment in self._segments]
        self._owned: dict[int, dict[str, Any]] = {}

    def update(self, overflow: Tensor, values: GroupValues) -> None:
        local = [self._tensors_to_send(segment, gradient) for segment, gradient in self._pairs]
        each = len(local[0])

        def step(number: int, wholes: list[Tensor]) -> None:
            self._step(number, wholes, local[number], overflow, values)

        transfer = self._start_transfer(each)
        flat = [tensor for tensors in local for tensor in tensors]
        for block, tensor in zip(transfer.blocks, flat, strict=True):
            block.copy_(tensor.reshape(block.shape))
        transfer.send()
        transfer.compute_together(each, step)
        layouts, sent = self._exchange_layouts(), [_sharded_keys(segment) for segment in self._segments]
        new = [self._adopt_layout(number, layout) for number, layout in enumerate(layouts)]
        transfer.wait()
        for number, (segment, names) in enumerate(zip(self._segments, sent, strict=True)):
            _, master, *entries = transfer.blocks[number * each : (number + 1) * each]
            segment.master.copy_(master.view(segment.master.shape))
            for key, block in zip(names, entries, strict=True):
                if isinstance(layouts[number].get(key), _ShardedEntry):
                    segment.state[key].copy_(block.view(segment.master.shape))
        transfer.release()
        for keys in sorted({tuple(keys) for keys in new if keys}):
            self._scatter_new([number for number, own in enumerate(new) if tuple(own) == keys], keys, layouts)

    def _tensors_to_send(self, segment: Segment, gradient: Tensor) -> list[Tensor]:
        return [gradient, segment.master, *(segment.state[key] for key in _sharded_keys(segment))]

    def _start_transfer(self, each: int, numbers: Sequence[int] | None = None) -> MatrixTransfer:
        numbers = range(len(self._segments)) if numbers is None else numbers
        rows = [self._rows[number] for number in numbers]
        keys = [self._segments[number].parts[0].owner for number in numbers]
        return self._exchange.start(keys, rows, torch.float32, self._segments[0].master.device, each)

    def _step(
        self, number: int, wholes: list[Tensor], local: list[Tensor], overflow: Tensor, values: GroupValues
    ) -> None:
        """The class's own step, on the owner; the results are left in ``wholes``."""
        segment = self._segments[number]
        gradient, master, *entries = (_as_part(whole, part) for whole, part in zip(wholes, local, strict=True))
        sharded = dict(zip(_sharded_keys(segment), entries, strict=True))
        state = {key: sharded.get(key, value) for key, value in segment.state.items()}
        self._arithmetic.update(
            [(Matrix(master, segment.group, state, segment.attributes), gradient)], overflow, values
        )
        for whole, result in zip(wholes[1:], [master, *(state.get(key) for key in sharded)], strict=True):
            if isinstance(result, Tensor) and result.shape == whole.shape:
                whole.copy_(result)
        self._owned[number] = state

    def _exchange_layouts(self) -> list[StateLayout]:
        """The state layout of each tensor, from its owner.

        Raises:
            ValueError: on all ranks: an entry that cannot be told from a block, or that sending would round.
        """
        owned = {number: _layout_of(state, self._rows[number].shape) for number, state in self._owned.items()}
        layouts: dict[int, StateLayout] = {}
        for part in self._exchange.all_gather_object(owned):
            layouts.update(part)
        for number, layout in layouts.items():
            self._check(number, layout)
        return [layouts[number] for number in range(len(self._segments))]

    def _check(self, number: int, layout: StateLayout) -> None:
        name, rows = self._segments[number].parts[0].owner.name, self._rows[number]
        for key, entry in layout.items():
            what = f"{self._arithmetic.name} keeps {key!r} of {name}, which is sharded, "
            if isinstance(entry, _ShardedEntry):
                if entry.dtype not in _EXACT_DTYPES:
                    raise ValueError(f"{what}in {entry.dtype}; float32, bfloat16 and float16 can be sharded")
            elif isinstance(entry.value, Tensor) and entry.value.shape in rows.local_shapes():
                raise ValueError(
                    f"{what}in shape {tuple(entry.value.shape)}, which is also the shape of a rank's part of it: the "
                    "two could not be told apart. Use another number of ranks, or sharding.kind single or ddp"
                )

    def _adopt_layout(self, number: int, layout: StateLayout) -> list[str]:
        """Store the replicated entries, and make room for the sharded ones; returns the names of those that are new."""
        state, master = self._segments[number].state, self._segments[number].master
        before, new, device = dict(state), [], master.device
        state.clear()
        for key, entry in layout.items():
            if isinstance(entry, _ShardedEntry):
                known = before.get(key)
                if not isinstance(known, Tensor) or known.shape != master.shape:
                    new.append(key)
                elif (known.dtype, memory_order(known)) != entry:
                    known = empty_in_order(master.shape, entry.order, entry.dtype, device)
                state[key] = known  # keeps the class's order of entries
            elif isinstance(entry.value, Tensor):
                state[key] = entry.value.to(device) if entry.on_device else entry.value
            else:
                state[key] = entry.value
        return new

    def _scatter_new(self, numbers: Sequence[int], keys: Sequence[str], layouts: Sequence[StateLayout]) -> None:
        """Scatter sharded entries that the class has just made, in its first update."""
        transfer = self._start_transfer(len(keys), numbers)
        for block in transfer.blocks:
            block.zero_()
        transfer.send()

        def fill(position: int, wholes: list[Tensor]) -> None:
            for whole, key in zip(wholes, keys, strict=True):
                whole.copy_(self._owned[numbers[position]][key])

        transfer.compute_together(len(keys), fill)
        transfer.wait()
        blocks = iter(transfer.blocks)
        for number in numbers:
            segment = self._segments[number]
            for key in keys:
                entry = layouts[number][key]
                assert isinstance(entry, _ShardedEntry)
                part = empty_in_order(segment.master.shape, entry.order, entry.dtype, segment.master.device)
                segment.state[key] = part.copy_(next(blocks).view(part.shape))
        transfer.release()


def rows_of_segment(segment: Segment) -> Rows:
    """How the only parameter of a segment is divided among ranks."""
    rows = segment.parts[0].owner.rows
    assert rows is not None
    return rows


def _sharded_keys(segment: Segment) -> list[str]:
    shape = segment.master.shape
    return [key for key, value in segment.state.items() if isinstance(value, Tensor) and value.shape == shape]


def _as_part(whole: Tensor, part: Tensor) -> Tensor:
    """The row-major ``whole`` in the dtype of its ``part``, and in the order in memory."""
    order = memory_order(part)
    if order == tuple(range(whole.dim())):
        return whole.to(part.dtype)
    return empty_in_order(whole.shape, order, part.dtype, whole.device).copy_(whole)


def _layout_of(state: Mapping[str, Any], shape: torch.Size) -> StateLayout:
    layout: StateLayout = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            layout[key] = _ReplicatedEntry(value)
        elif value.shape == shape:
            layout[key] = _ShardedEntry(value.dtype, memory_order(value))
        else:
            layout[key] = _ReplicatedEntry(value.detach().cpu(), value.device.type != "cpu")
    return layout
