"""Which weights have changed since they were last published: one bit each, kept by the updates."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightstep.state.schema import Managed, Unit, aligned

__all__ = ["ChangedWeights", "Changes"]


class _Place(NamedTuple):
    """A parameter's elements from ``start`` to ``stop``, which begin at ``first`` in the flat order of a unit."""

    owner: Managed
    start: int
    stop: int
    first: int


def _places(unit: Unit) -> Iterator[_Place]:
    first = 0
    for owner, start, stop in unit.parts:
        yield _Place(owner, start, stop, first)
        first += aligned(stop - start)


class Changes:
    """What may have changed between two calls of :meth:`ChangedWeights.take`.

    It is made in the order of the current stream, where the bits were copied, and read on any other.

    Args:
        known: the parameters of which it is known.
        bits: for each unit, one bit for each element of its flat order (uint8).
        written: parameters of which all elements count as changed.
        begin, end: identify the calls; ``None``: there was none before.
    """

    def __init__(
        self,
        known: Collection[Tensor],
        bits: Mapping[Unit, Tensor],
        written: set[Tensor],
        begin: object | None,
        end: object,
    ) -> None:
        self.known = known
        self._bits, self._written = bits, written
        self._begin, self._end = begin, end
        devices = {own.device for own in bits.values() if own.device.type != "cpu"}
        self._copied = {device: torch.accelerator.current_stream(device).record_event() for device in devices}
        self._found: dict[Tensor, list[tuple[Tensor, _Place]]] = {}
        for unit, own in bits.items():
            for place in _places(unit):
                self._found.setdefault(place.owner.param, []).append((own, place))

    def follow(self, earlier: Changes) -> bool:
        """Whether these are all changes since ``earlier`` ended."""
        return self._begin is not None and self._begin is earlier._end

    def joined_to(self, earlier: Changes) -> Changes:
        """The changes of both, if these follow ``earlier``."""
        if not self.follow(earlier):
            return self
        for changes in (earlier, self):
            changes._wait_until_copied()
        bits = {**earlier._bits, **self._bits}
        bits |= {unit: self._bits[unit] | earlier._bits[unit] for unit in self._bits.keys() & earlier._bits.keys()}
        return Changes(self.known, bits, self._written | earlier._written, earlier._begin, self._end)

    def _wait_until_copied(self) -> None:
        for device, event in self._copied.items():
            torch.accelerator.current_stream(device).wait_event(event)

    def without_bits(self) -> Changes:
        """What others can follow."""
        return Changes((), {}, set(), None, self._end)

    def places_in(self, parameter: Tensor, elements: int, device: torch.device) -> Tensor:
        """The elements of a local shard that may have changed, in its flat order: int64, ascending."""
        found = self._found.get(parameter, [])
        if parameter in self._written or sum(place.stop - place.start for _, place in found) != elements:
            return torch.arange(elements, device=device)
        self._wait_until_copied()
        listed = []
        for bits, (_, start, stop, first) in sorted(found, key=lambda each: each[1].start):
            own = bits[first // 8 : (first + aligned(stop - start)) // 8].to(device)
            eights = own.nonzero().view(-1)
            number, bit = _unpacked(own[eights]).nonzero().unbind(1)
            listed.append(eights[number] * 8 + bit + start)
        return torch.cat(listed)


class ChangedWeights:
    """Finds which weights updates change: those that are other ones afterwards, in the dtype in which they are sent.

    A parameter that anybody else may have written to counts as changed in all of its elements.

    Args:
        units: those that are updated.
        sent: by parameter: a dtype of 2 bytes.

    Raises:
        torch.OutOfMemoryError: there is no room for one bit of each weight, and a copy of the largest unit's weights.
    """

    def __init__(self, units: Sequence[Unit], sent: Mapping[Tensor, torch.dtype]) -> None:
        self.sent = dict(sent)
        self._places = {unit: list(_places(unit)) for unit in units}
        self._bits = {
            unit: torch.zeros(unit.elements // 8, dtype=torch.uint8, device=unit.owners[0].local.device)
            for unit in units
        }
        most: dict[torch.device, int] = {}
        for unit, bits in self._bits.items():
            most[bits.device] = max(most.get(bits.device, 0), unit.elements)
        self._before = {device: torch.empty(n, dtype=torch.int16, device=device) for device, n in most.items()}
        self._differs = {
            device: torch.empty(min(n, _PIECE), dtype=torch.bool, device=device) for device, n in most.items()
        }
        self._written: set[Tensor] = set()
        self._taken: object | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        memory = (*self._bits.values(), *self._before.values(), *self._differs.values())
        return sum(tensor.nbytes for tensor in memory)

    def covers(self, units: Sequence[Unit], sent: Mapping[Tensor, torch.dtype]) -> bool:
        """Whether it was made for these."""
        return self.sent == sent and list(self._places) == list(units)

    def mark(self, items: Iterable[Managed]) -> None:
        """Somebody else may have written to these parameters."""
        self._written.update(item.param for item in items)

    @contextlib.contextmanager
    def updating(self, unit: Unit) -> Iterator[None]:
        """The body updates a unit. Its weights are on the device."""
        if unit not in self._places:
            self.mark(unit.owners)
            yield
            return
        bits = self._bits[unit]
        listed = [place for place in self._places[unit] if place.owner.param in self.sent]
        before = [self._before[bits.device][first : first + stop - start] for _, start, stop, first in listed]
        before = [copy.view(self.sent[place.owner.param]) for copy, place in zip(before, listed, strict=True)]
        if listed:
            torch._foreach_copy_(before, [_weights(place) for place in listed])
        try:
            yield
        except BaseException:
            self.mark(unit.owners)
            raise
        for copy, place in zip(before, listed, strict=True):
            self._set(bits[place.first // 8 :], copy, _weights(place))

    def _set(self, bits: Tensor, before: Tensor, weights: Tensor) -> None:
        """Set the bits of words that differ."""
        memory = self._differs[bits.device]
        for first in range(0, len(weights), _PIECE):
            now = weights[first : first + _PIECE].to(before.dtype)
            differs = memory[: aligned(len(now))]
            differs[len(now) :].zero_()
            then = before[first : first + _PIECE]
            torch.ne(then.view(torch.int16), now.view(torch.int16), out=differs[: len(now)])
            eights = differs.view(torch.int64).mul_(_GATHERING).bitwise_right_shift_(56)
            bits[first // 8 :][: len(eights)].bitwise_or_(eights)

    def take(self) -> Changes:
        """The changes since the last call. No update may be under way."""
        begin, self._taken = self._taken, object()
        written, self._written = self._written, set()
        own = list(self._bits.values())
        try:
            bits = [torch.empty_like(each) for each in own]
        except torch.OutOfMemoryError:
            return Changes(self.sent, {}, set(self.sent), begin, self._taken)
        if own:
            torch._foreach_copy_(bits, own)
            torch._foreach_zero_(own)
        return Changes(self.sent, dict(zip(self._bits, bits, strict=True)), written, begin, self._taken)


_PIECE = 1 << 24
"""Elements that are compared at a time."""

_GATHERING = 0x0102040810204080
"""Eight bytes of 0 or 1, multiplied with it as one int64, give their eight bits in its highest byte, in order."""


def _weights(place: _Place) -> Tensor:
    return place.owner.local.reshape(-1)[place.start : place.stop]


def _unpacked(bits: Tensor) -> Tensor:
    """The bits of n bytes, the lowest first: [n, 8], 0 or 1."""
    return bits.unsqueeze(1).bitwise_right_shift(torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1
