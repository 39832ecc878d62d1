"""Moments in bf16: fp32 numbers rounded up or down at random, by noise that is a function of where they are.

Rounded to nearest, a second moment with ``beta2`` 0.999 stands still: an update changes it by less than half of the
last bit, and is lost. Rounded up with a probability of what would be cut off, it is right on average.

The noise is a hash of the parameter's step, the entry's name and the element's number in the whole parameter, and of
nothing else: it does not depend on how a parameter is sharded, staged or cut, and a run that is resumed goes on with
the noise of the one that was not interrupted. All of it is integer arithmetic, the same on every device::

    x  = number · NUMBER + a;   x ^= x >>> 16;   x = x · FIRST + b;   x ^= x >>> 15;   x *= SECOND     (mod 2^32)
    rounded = upper half of (fp32 bits + (x >>> 16))

with ``a`` and ``b`` made of the step and the name by the same kind of mixing. An element's number counts modulo 2^32.
What bf16 can represent stays as it is; NaN stay NaN.
"""

from __future__ import annotations

import functools
import logging
import zlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightstep.distributed import Window

__all__ = ["StochasticRounding"]

logger = logging.getLogger(__name__)

_CHUNK = 1 << 18  # elements per pass: the scratch stays small, and in cache
# Odd 32-bit numbers without structure; the last two are lowbias32's, the best known for two multiplications.
NUMBER, STEP, KEY = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
FIRST, SECOND = 0x7FEB352D, 0x846CA68B


class StochasticRounding:
    """Rounds fp32 to bf16; flat contiguous tensors, in place, nothing allocated after the first call on a device.

    On CUDA one Triton kernel does it, after it has been checked against the torch version on this very device.
    """

    def __init__(self) -> None:
        self._rooms: dict[torch.device, _Room] = {}

    def round(self, value: Tensor, out: Tensor, entry: str, step: Any, numbers: Tensor | Window) -> None:
        """Write ``value`` (fp32, ``[n]``) to ``out`` (bf16, ``[n]``).

        Args:
            entry: name of the state entry.
            step: how many updates the parameter has had: a 0-dim tensor on any device, or a number.
            numbers: of the elements in their whole parameters, modulo 2^32 (int32, ``[n]``); or where they are.
        """
        room = self._room(value.device)
        room.set_step(step)
        twin = _checked_twin(value.device) if value.device.type == "cuda" else None
        if twin is not None:
            twin.round_stochastically(value, out, room.step, _salt(entry), numbers)
        else:
            _round(value, out, _salt(entry), numbers, room)

    def _room(self, device: torch.device) -> _Room:
        if device not in self._rooms:
            self._rooms[device] = _Room(device)
        return self._rooms[device]


class _Room:
    """Working memory on one device."""

    def __init__(self, device: torch.device) -> None:
        self.step, self.a, self.b, self.c = (torch.zeros((), dtype=torch.int32, device=device) for _ in range(4))
        self.device = device
        self.rows: tuple[Tensor, ...] = ()

    def set_step(self, step: Any) -> None:
        """A number that the host knows is handed over without waiting for the device."""
        if isinstance(step, Tensor) and step.device == self.device:
            self.step.copy_(step)
        else:
            self.step.fill_(int(step))

    def of(self, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Two rows and flags to work in, and 0, 1, 2 ..."""
        if not self.rows or self.rows[0].numel() < n:
            size = min(_CHUNK, n)
            x, y = (torch.empty(size, dtype=torch.int32, device=self.device) for _ in range(2))
            flags = torch.empty(size, dtype=torch.bool, device=self.device)
            self.rows = x, y, flags, torch.arange(size, dtype=torch.int32, device=self.device)
        x, y, flags, counted = (row[:n] for row in self.rows)
        return x, y, flags, counted


def _salt(entry: str) -> int:
    return zlib.crc32(entry.encode())


def _round(value: Tensor, out: Tensor, salt: int, numbers: Tensor | Window, room: _Room) -> None:
    _mix_keys(salt, room)
    for start in range(0, value.numel(), _CHUNK):
        stop = min(start + _CHUNK, value.numel())
        x, y, flags, counted = room.of(stop - start)
        _number(x, y, counted, numbers, start)
        x.mul_(_signed(NUMBER)).add_(room.a)
        _shifted_onto(x, 16, y)
        x.mul_(_signed(FIRST)).add_(room.b)
        _shifted_onto(x, 15, y)
        x.mul_(_signed(SECOND)).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
        exact, bits = value[start:stop], value[start:stop].view(torch.int32)
        x.add_(bits).bitwise_right_shift_(16)
        torch.ne(exact, exact, out=flags)
        torch.bitwise_right_shift(bits, 16, out=y).bitwise_or_(0x40)
        torch.where(flags, y, x, out=x)
        out[start:stop].view(torch.int16).copy_(x)  # int32 → int16 keeps the low half


def _mix_keys(salt: int, room: _Room) -> None:
    """``a`` and ``b`` of step and name."""
    room.a.copy_(room.step).mul_(_signed(STEP)).add_(_signed(salt))
    _mix(room.a, room.c)
    room.b.copy_(room.a).add_(_signed(KEY))
    _mix(room.b, room.c)


def _mix(x: Tensor, y: Tensor) -> None:
    _shifted_onto(x, 16, y)
    _shifted_onto(x.mul_(_signed(FIRST)), 15, y)
    _shifted_onto(x.mul_(_signed(SECOND)), 16, y)


def _shifted_onto(x: Tensor, by: int, y: Tensor) -> None:
    """``x ^= x >>> by``; torch's shifts are arithmetic."""
    torch.bitwise_right_shift(x, by, out=y)
    x.bitwise_xor_(y.bitwise_and_((1 << (32 - by)) - 1))


def _number(x: Tensor, y: Tensor, counted: Tensor, numbers: Tensor | Window, start: int) -> None:
    """The elements' numbers from ``start`` on, modulo 2^32, into ``x``."""
    if isinstance(numbers, Tensor):
        x.copy_(numbers[start : start + x.numel()])
        return
    number, rest = numbers.at(start)
    torch.add(counted, _signed(number), out=x)
    if numbers.jump:
        torch.add(counted, rest, out=y)
        x.add_(y.floor_divide_(numbers.inner).mul_(_signed(numbers.jump)))


def _signed(number: int) -> int:
    """Modulo 2^32, as a signed 32-bit number."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


@functools.cache
def _checked_twin(device: torch.device) -> ModuleType | None:
    """The fused kernel, once it has given the torch version's bits on this device."""
    try:
        from lightstep.precision import moments_triton

        if moments_triton.available and _agrees(moments_triton, device):
            return moments_triton
        reason = "it differs from the torch version" if moments_triton.available else "Triton is not installed"
    except Exception as error:  # a compiler or driver that fails in its own way: the torch version works
        reason = f"{type(error).__name__}: {error}"
    logger.warning("moments are rounded by plain torch operations on %s, not by a fused kernel (%s)", device, reason)
    return None


def _agrees(twin: ModuleType, device: torch.device) -> bool:
    """Whether ``twin`` gives the torch version's bits on every kind of number and place."""
    generator = torch.Generator().manual_seed(0)  # leaves the user's dropout alone
    n = _CHUNK + 4099
    bits = torch.randint(-(2**31), 2**31, (2 * n,), generator=generator, dtype=torch.int64, device="cpu")
    value, listed = (half.to(torch.int32).to(device) for half in bits.split(n))
    room = _Room(device)
    room.set_step(4321)
    places = [Window(), Window((1 << 33) - 77), Window(5, 3 * 4099, 1 << 31, 12345), listed]
    for salt, numbers in enumerate(places, start=0x7FFFFFFE):
        expected, found = (torch.empty(n, dtype=torch.bfloat16, device=device) for _ in range(2))
        _round(value.view(torch.float32), expected, salt, numbers, room)
        twin.round_stochastically(value.view(torch.float32), found, room.step, salt, numbers)
        if not torch.equal(expected.view(torch.int16), found.view(torch.int16)):
            return False
    return True
