"""Updates of sharded tensors by classes that need whole tensors.

Gradient, master and state of a tensor are gathered on one rank. The class takes its own step there, and the blocks of
master and state are scattered back. Other entries (row sums, counters) are replicated on all ranks. The hosts take
part: they exchange the replicated entries after each update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightstep.distributed import MatrixExchange, MatrixTransfer, Rows
from lightstep.optimizer.arithmetic import BaseArithmetic
from lightstep.optimizer.group_values import GroupValues
from lightstep.optimizer.matrix_stack import Matrix
from lightstep.state.segment import Segment

__all__ = ["GatheredUpdates", "rows_of_segment"]

_EXACT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that fp32, in which everything is sent, represents exactly."""


class _ShardedEntry(NamedTuple):
    """An entry of the tensor's shape: its blocks are sent apart from this."""

    dtype: torch.dtype


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
            self._step(number, wholes, [tensor.dtype for tensor in local[number]], overflow, values)

        transfer = self._start_transfer(each)
        flat = [tensor for tensors in local for tensor in tensors]
        for block, tensor in zip(transfer.blocks, flat, strict=True):
            block.copy_(tensor.reshape(block.shape))
        transfer.send()
        transfer.compute_together(each, step)
        layouts = self._exchange_layouts()
        transfer.wait()
        for number, (block, tensor) in enumerate(zip(transfer.blocks, flat, strict=True)):
            if number % each:  # the first of each is the gradient
                tensor.copy_(block.view(tensor.shape))
        transfer.release()
        new = [self._adopt_layout(number, layout) for number, layout in enumerate(layouts)]
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
        self, number: int, wholes: list[Tensor], dtypes: list[torch.dtype], overflow: Tensor, values: GroupValues
    ) -> None:
        """The class's own step, on the owner; the results are left in ``wholes``."""
        segment = self._segments[number]
        gradient, master, *entries = (whole.to(dtype) for whole, dtype in zip(wholes, dtypes, strict=True))
        sharded = dict(zip(_sharded_keys(segment), entries, strict=True))
        state = {key: sharded.get(key, value) for key, value in segment.state.items()}
        self._arithmetic.update(
            [(Matrix(master, segment.group, state, segment.attributes), gradient)], overflow, values
        )
        results = [master, *(state.get(key, old) for key, old in sharded.items())]
        for whole, result in zip(wholes[1:], results, strict=True):
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
        """Store the replicated entries; returns the names of sharded entries that are new."""
        state, device = self._segments[number].state, self._segments[number].master.device
        before, new = dict(state), []
        state.clear()
        for key, entry in layout.items():
            if isinstance(entry, _ShardedEntry):
                if key not in before:
                    new.append(key)
                state[key] = before.get(key)  # keeps the class's order of entries
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
                segment.state[key] = next(blocks).view(segment.master.shape).to(entry.dtype, copy=True)
        transfer.release()


def rows_of_segment(segment: Segment) -> Rows:
    """How the only parameter of a segment is divided among ranks."""
    rows = segment.parts[0].owner.rows
    assert rows is not None
    return rows


def _sharded_keys(segment: Segment) -> list[str]:
    shape = segment.master.shape
    return [key for key, value in segment.state.items() if isinstance(value, Tensor) and value.shape == shape]


def _layout_of(state: Mapping[str, Any], shape: torch.Size) -> StateLayout:
    layout: StateLayout = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            layout[key] = _ReplicatedEntry(value)
        elif value.shape == shape:
            layout[key] = _ShardedEntry(value.dtype)
        else:
            layout[key] = _ReplicatedEntry(value.detach().cpu(), value.device.type != "cpu")
    return layout
