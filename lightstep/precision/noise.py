"""Noise for stochastic rounding: 16 bits that are a function of each element's position.

They are a hash of a seed, the parameter's step, the entry's name and the element's number in the whole parameter, and
of nothing else. So they do not depend on how a parameter is sharded, staged or cut, and a resumed run has the same
noise as an uninterrupted one. It is integer arithmetic, the same on every device::

    x  = number · NUMBER + a;   x ^= x >>> 16;   x = x · FIRST + b;   x ^= x >>> 15;   x *= SECOND     (mod 2^32)
    noise = x >>> 16

with ``a`` and ``b`` mixed from the step and the name in the same way. An element's number is taken modulo 2^32.
Elements are counted from a number that the seed is mixed to, 0 for seed 0. So the seed is in windows and lists of
numbers, and the kernels need not know it.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from lightstep.distributed import Window

__all__ = ["CHUNK", "Noise", "Scratch", "check_seed", "numbered"]

CHUNK = 1 << 18  # elements per pass: the scratch memory stays small and in the cache
# Odd 32-bit numbers without structure. The last two are lowbias32's, the best known for two multiplications.
NUMBER, STEP, KEY = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
FIRST, SECOND = 0x7FEB352D, 0x846CA68B


class Noise:
    """Scratch memory on each device. Nothing is allocated after the first call on a device."""

    def __init__(self) -> None:
        self._scratches: dict[torch.device, Scratch] = {}

    def at(self, device: torch.device, step: Any) -> Scratch:
        """The noise of a step on a device.

        Args:
            step: number of updates of the parameter: a 0-dim tensor on any device, or a Python number.
        """
        if device not in self._scratches:
            self._scratches[device] = Scratch(device)
        scratch = self._scratches[device]
        scratch.set_step(step)
        return scratch


class Scratch:
    """Scratch memory on one device, and the step (0-dim int32)."""

    def __init__(self, device: torch.device) -> None:
        self.step, self._a, self._b, self._c = (torch.zeros((), dtype=torch.int32, device=device) for _ in range(4))
        self._device = device
        self._rows: tuple[Tensor, ...] = ()

    def set_step(self, step: Any) -> None:
        """Set the step, without waiting for the device if the step is on the host or on this device."""
        if isinstance(step, Tensor) and step.device == self._device:
            self.step.copy_(step)
        else:
            self.step.fill_(int(step))

    def begin(self, salt: int) -> None:
        """Mix ``a`` and ``b`` from the step and the salt."""
        self._a.copy_(self.step).mul_(signed(STEP)).add_(signed(salt))
        _mix(self._a, self._c)
        self._b.copy_(self._a).add_(signed(KEY))
        _mix(self._b, self._c)

    def row(self, numbers: Tensor | Window, start: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The noise (int32, ``[count]``) of the elements from ``start`` on, after :meth:`begin`; and a row of int32 and
        one of flags, for intermediate results. They are valid until the next call.

        Args:
            numbers: the elements' numbers in their whole parameters, modulo 2^32 (int32), or their window.
        """
        x, y, flags, counted = self._rows_for(count)
        _number(x, y, counted, numbers, start)
        x.mul_(signed(NUMBER)).add_(self._a)
        _xor_shifted(x, 16, y)
        x.mul_(signed(FIRST)).add_(self._b)
        _xor_shifted(x, 15, y)
        x.mul_(signed(SECOND)).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
        return x, y, flags

    def _rows_for(self, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if not self._rows or self._rows[0].numel() < n:
            size = min(CHUNK, n)
            x, y = (torch.empty(size, dtype=torch.int32, device=self._device) for _ in range(2))
            flags = torch.empty(size, dtype=torch.bool, device=self._device)
            self._rows = x, y, flags, torch.arange(size, dtype=torch.int32, device=self._device)
        x, y, flags, counted = (row[:n] for row in self._rows)
        return x, y, flags, counted


def numbered(window: Window, seed: int) -> Window:
    """``window`` with elements that are counted from the seed's number. Starts fit into 32 bits, as kernels prefer."""
    return window._replace(start=signed(window.start + _mixed(seed)))


def check_seed(seed: int) -> int:
    """Raise ``ValueError`` unless this is an integer from 0 to 2^32 - 1."""
    if type(seed) is not int or not 0 <= seed < 1 << 32:
        raise ValueError(f"rounding_seed is {seed!r}; allowed: integers from 0 to {(1 << 32) - 1}")
    return seed


def salt_of(entry: str) -> int:
    """What the noise of a state entry depends on instead of its name."""
    return zlib.crc32(entry.encode())


def signed(number: int) -> int:
    """``number`` modulo 2^32, as a signed 32-bit number."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def _mix(x: Tensor, y: Tensor) -> None:
    _xor_shifted(x, 16, y)
    _xor_shifted(x.mul_(signed(FIRST)), 15, y)
    _xor_shifted(x.mul_(signed(SECOND)), 16, y)


def _mixed(x: int) -> int:
    """As :func:`_mix`, of one number from 0 to 2^32 - 1; 0 stays 0."""
    x = (x ^ x >> 16) * FIRST % (1 << 32)
    x = (x ^ x >> 15) * SECOND % (1 << 32)
    return x ^ x >> 16


def _xor_shifted(x: Tensor, by: int, y: Tensor) -> None:
    """``x ^= x >>> by``; ``y`` is scratch. torch has only arithmetic shifts, so the sign bits are masked."""
    torch.bitwise_right_shift(x, by, out=y)
    x.bitwise_xor_(y.bitwise_and_((1 << (32 - by)) - 1))


def _number(x: Tensor, y: Tensor, counted: Tensor, numbers: Tensor | Window, start: int) -> None:
    """Write the elements' numbers from ``start`` on, modulo 2^32, to ``x``."""
    if isinstance(numbers, Tensor):
        x.copy_(numbers[start : start + x.numel()])
        return
    number, rest = numbers.at(start)
    torch.add(counted, signed(number), out=x)
    if numbers.jump:
        torch.add(counted, rest, out=y)
        x.add_(y.floor_divide_(numbers.inner).mul_(signed(numbers.jump)))
