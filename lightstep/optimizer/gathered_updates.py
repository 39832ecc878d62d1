"""Updates by classes that need whole tensors, of tensors that are divided among ranks.

Gradient, master and state of a tensor are brought together on one rank. There the class takes its own step, and the
blocks of master and state go back. What a class keeps beside (row sums, counters) all ranks have whole. The host takes
part: it tells the others what the class has made of those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightstep.distributed import MatrixExchange, Rows
from lightstep.optimizer.arithmetic import BaseArithmetic
from lightstep.optimizer.group_values import GroupValues
from lightstep.optimizer.matrix_stack import Matrix
from lightstep.state.segment import Segment

__all__ = ["GatheredUpdates", "rows_of_segment"]

_CARRIED = (torch.float32, torch.bfloat16, torch.float16)
"""What fp32, in which everything travels, holds exactly."""


class _Divided(NamedTuple):
    """In the place of an entry that has the tensor's shape."""

    dtype: torch.dtype


class _Kept(NamedTuple):
    """An entry that all ranks keep, as it is sent."""

    value: Any
    on_device: bool = False


Told = dict[str, _Divided | _Kept]


class GatheredUpdates:
    """Those of one optimizer.

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
        """One update of ``segments``, which are acquired; called by all ranks that share them, in the same order."""
        alike: dict[tuple[Any, int], list[tuple[Segment, Tensor]]] = {}
        for segment, gradient in zip(segments, gradients, strict=True):
            key = rows_of_segment(segment).group, len(_divided_keys(segment))
            alike.setdefault(key, []).append((segment, gradient))
        for (group, _), pairs in alike.items():
            _Gathered(arithmetic, self._exchanges[group], pairs).update(overflow, values)


class _Gathered:
    """Some tensors of one unit, with as many divided entries each."""

    def __init__(
        self, arithmetic: BaseArithmetic, exchange: MatrixExchange, pairs: Sequence[tuple[Segment, Tensor]]
    ) -> None:
        self._arithmetic, self._exchange, self._pairs = arithmetic, exchange, pairs
        self._segments = [segment for segment, _ in pairs]
        self._rows = [rows_of_segment(segment) for segment in self._segments]
        self._owned: dict[int, dict[str, Any]] = {}

    def update(self, overflow: Tensor, values: GroupValues) -> None:
        local = [self._travelling(segment, gradient) for segment, gradient in self._pairs]

        def step(number: int, wholes: list[Tensor]) -> None:
            self._step(number, wholes, [one.dtype for one in local[number]], overflow, values)

        journey = self._journey(len(local[0]))
        flat = [tensor for own in local for tensor in own]
        for block, tensor in zip(journey.blocks, flat, strict=True):
            block.copy_(tensor.reshape(block.shape))
        journey.send()
        journey.compute_together(len(local[0]), step)
        told = self._tell()
        journey.arrive()
        for number, (block, tensor) in enumerate(zip(journey.blocks, flat, strict=True)):
            if number % len(local[0]):  # the first of each is the gradient
                tensor.copy_(block.view(tensor.shape))
        journey.end()
        made = [self._made(number, told[number]) for number in range(len(self._segments))]
        for keys in sorted({tuple(keys) for keys in made if keys}):
            self._bring_made([number for number, own in enumerate(made) if tuple(own) == keys], keys, told)

    def _travelling(self, segment: Segment, gradient: Tensor) -> list[Tensor]:
        return [gradient, segment.master, *(segment.state[key] for key in _divided_keys(segment))]

    def _journey(self, each: int, numbers: Sequence[int] | None = None) -> Any:
        numbers = range(len(self._segments)) if numbers is None else numbers
        rows = [self._rows[number] for number in numbers]
        keys = [self._segments[number].parts[0].owner for number in numbers]
        return self._exchange.start(keys, rows, torch.float32, self._segments[0].master.device, each)

    def _step(
        self, number: int, wholes: list[Tensor], dtypes: list[torch.dtype], overflow: Tensor, values: GroupValues
    ) -> None:
        """On the owner; what is sent back is left in ``wholes``."""
        segment = self._segments[number]
        gradient, master, *entries = (whole.to(dtype) for whole, dtype in zip(wholes, dtypes, strict=True))
        divided = dict(zip(_divided_keys(segment), entries, strict=True))
        state = {key: divided.get(key, value) for key, value in segment.state.items()}
        one = Matrix(master, segment.group, state)
        self._arithmetic.update([(one, gradient)], overflow, values)
        for whole, tensor in zip(
            wholes[1:], [master, *(one.state.get(key, old) for key, old in divided.items())], strict=True
        ):
            whole.copy_(tensor)
        self._owned[number] = one.state

    def _tell(self) -> list[Told]:
        """What the states consist of now, by number.

        Raises:
            ValueError: an entry that cannot be told from a block, or that would be rounded on its way; on all ranks.
        """
        mine = {number: _told(state, self._rows[number].shape) for number, state in self._owned.items()}
        found: dict[int, Told] = {}
        for own in self._exchange.tell(mine):
            found.update(own)
        for number, told in found.items():
            self._check(number, told)
        return [found[number] for number in range(len(self._segments))]

    def _check(self, number: int, told: Told) -> None:
        name, rows = self._segments[number].parts[0].owner.name, self._rows[number]
        for key, entry in told.items():
            what = f"{self._arithmetic.name} keeps {key!r} of {name}, which is sharded, "
            if isinstance(entry, _Divided) and entry.dtype not in _CARRIED:
                raise ValueError(f"{what}in {entry.dtype}; float32, bfloat16 and float16 can be divided among ranks")
            if (
                isinstance(entry, _Kept)
                and isinstance(entry.value, Tensor)
                and entry.value.shape in rows.local_shapes()
            ):
                raise ValueError(
                    f"{what}in shape {tuple(entry.value.shape)}, which a rank's part of it has too: nobody could tell "
                    "them apart. Use another number of ranks, or sharding.kind single or ddp"
                )

    def _made(self, number: int, told: Told) -> list[str]:
        """Take over what all ranks keep; the divided entries that are new."""
        state, device = self._segments[number].state, self._segments[number].master.device
        known, made = dict(state), []
        state.clear()
        for key, entry in told.items():
            if isinstance(entry, _Divided):
                if key not in known:
                    made.append(key)
                state[key] = known.get(key)  # in the order in which the class has them
            elif isinstance(entry.value, Tensor):
                state[key] = entry.value.to(device) if entry.on_device else entry.value
            else:
                state[key] = entry.value
        return made

    def _bring_made(self, numbers: Sequence[int], keys: Sequence[str], told: Sequence[Told]) -> None:
        """The blocks of entries that the class has just made: its first update."""
        journey = self._journey(len(keys), numbers)
        for block in journey.blocks:
            block.zero_()
        journey.send()

        def fill(place: int, wholes: list[Tensor]) -> None:
            for whole, key in zip(wholes, keys, strict=True):
                whole.copy_(self._owned[numbers[place]][key])

        journey.compute_together(len(keys), fill)
        journey.arrive()
        blocks = iter(journey.blocks)
        for number in numbers:
            segment = self._segments[number]
            for key in keys:
                entry = told[number][key]
                assert isinstance(entry, _Divided)
                segment.state[key] = next(blocks).view(segment.master.shape).to(entry.dtype, copy=True)
        journey.end()


def rows_of_segment(segment: Segment) -> Rows:
    """How the one parameter of a segment is divided."""
    rows = segment.parts[0].owner.rows
    assert rows is not None
    return rows


def _divided_keys(segment: Segment) -> list[str]:
    shape = segment.master.shape
    return [key for key, value in segment.state.items() if isinstance(value, Tensor) and value.shape == shape]


def _told(state: Mapping[str, Any], shape: torch.Size) -> Told:
    told: Told = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            told[key] = _Kept(value)
        elif value.shape == shape:
            told[key] = _Divided(value.dtype)
        else:
            told[key] = _Kept(value.detach().cpu(), value.device.type != "cpu")
    return told
