"""Stochastic rounding of moments to bf16, with noise that is a function of each element's position.

Rounded to nearest, a second moment with ``beta2`` 0.999 does not change: updates are smaller than half of the last bit
and are lost. Rounded up with a probability in proportion to the cut-off part, it is right on average.

The noise is a hash of the parameter's step, the entry's name and the element's number in the whole parameter, and of
nothing else. So it does not depend on how a parameter is sharded, staged or cut, and a resumed run has the same noise
as an uninterrupted one. It is integer arithmetic, the same on every device::

    x  = number · NUMBER + a;   x ^= x >>> 16;   x = x · FIRST + b;   x ^= x >>> 15;   x *= SECOND     (mod 2^32)
    rounded = upper half of (fp32 bits + (x >>> 16))

with ``a`` and ``b`` mixed from the step and the name in the same way. An element's number is taken modulo 2^32. Values
that bf16 can represent do not change, and NaN stays NaN.
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

_CHUNK = 1 << 18  # elements per pass: the scratch memory stays small and in the cache
# Odd 32-bit numbers without structure. The last two are lowbias32's, the best known for two multiplications.
NUMBER, STEP, KEY = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
FIRST, SECOND = 0x7FEB352D, 0x846CA68B


class StochasticRounding:
    """Rounds fp32 to bf16, for flat contiguous tensors. Nothing is allocated after the first call on a device.

    On CUDA it uses one Triton kernel, once a check on this device has found the bits of the torch version.
    """

    def __init__(self) -> None:
        self._scratches: dict[torch.device, _Scratch] = {}

    def round(self, value: Tensor, out: Tensor, entry: str, step: Any, numbers: Tensor | Window) -> None:
        """Write ``value`` (fp32, ``[n]``) to ``out`` (bf16, ``[n]``).

        Args:
            entry: name of the state entry.
            step: number of updates of the parameter: a 0-dim tensor on any device, or a Python number.
            numbers: the elements' numbers in their whole parameters, modulo 2^32 (int32, ``[n]``), or their window.
        """
        scratch = self._scratch(value.device)
        scratch.set_step(step)
        kernels = _checked_kernels(value.device) if value.device.type == "cuda" else None
        if kernels is not None:
            kernels.round_stochastically(value, out, scratch.step, _salt(entry), numbers)
        else:
            _round(value, out, _salt(entry), numbers, scratch)

    def _scratch(self, device: torch.device) -> _Scratch:
        if device not in self._scratches:
            self._scratches[device] = _Scratch(device)
        return self._scratches[device]


class _Scratch:
    """Scratch memory on one device."""

    def __init__(self, device: torch.device) -> None:
        self.step, self.a, self.b, self.c = (torch.zeros((), dtype=torch.int32, device=device) for _ in range(4))
        self.device = device
        self.rows: tuple[Tensor, ...] = ()

    def set_step(self, step: Any) -> None:
        """Set the step, without waiting for the device if the step is on the host or on this device."""
        if isinstance(step, Tensor) and step.device == self.device:
            self.step.copy_(step)
        else:
            self.step.fill_(int(step))

    def rows_for(self, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Two int32 rows and one of flags for intermediate results, and 0, 1, 2 …, each ``[n]``."""
        if not self.rows or self.rows[0].numel() < n:
            size = min(_CHUNK, n)
            x, y = (torch.empty(size, dtype=torch.int32, device=self.device) for _ in range(2))
            flags = torch.empty(size, dtype=torch.bool, device=self.device)
            self.rows = x, y, flags, torch.arange(size, dtype=torch.int32, device=self.device)
        x, y, flags, counted = (row[:n] for row in self.rows)
        return x, y, flags, counted


def _salt(entry: str) -> int:
    return zlib.crc32(entry.encode())


def _round(value: Tensor, out: Tensor, salt: int, numbers: Tensor | Window, scratch: _Scratch) -> None:
    _mix_keys(salt, scratch)
    for start in range(0, value.numel(), _CHUNK):
        stop = min(start + _CHUNK, value.numel())
        x, y, flags, counted = scratch.rows_for(stop - start)
        _number(x, y, counted, numbers, start)
        x.mul_(_signed(NUMBER)).add_(scratch.a)
        _xor_shifted(x, 16, y)
        x.mul_(_signed(FIRST)).add_(scratch.b)
        _xor_shifted(x, 15, y)
        x.mul_(_signed(SECOND)).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
        exact, bits = value[start:stop], value[start:stop].view(torch.int32)
        x.add_(bits).bitwise_right_shift_(16)
        torch.ne(exact, exact, out=flags)
        torch.bitwise_right_shift(bits, 16, out=y).bitwise_or_(0x40)
        torch.where(flags, y, x, out=x)
        out[start:stop].view(torch.int16).copy_(x)  # int32 → int16 keeps the low half


def _mix_keys(salt: int, scratch: _Scratch) -> None:
    """Mix ``a`` and ``b`` from the step and the name."""
    scratch.a.copy_(scratch.step).mul_(_signed(STEP)).add_(_signed(salt))
    _mix(scratch.a, scratch.c)
    scratch.b.copy_(scratch.a).add_(_signed(KEY))
    _mix(scratch.b, scratch.c)


def _mix(x: Tensor, y: Tensor) -> None:
    _xor_shifted(x, 16, y)
    _xor_shifted(x.mul_(_signed(FIRST)), 15, y)
    _xor_shifted(x.mul_(_signed(SECOND)), 16, y)


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
    torch.add(counted, _signed(number), out=x)
    if numbers.jump:
        torch.add(counted, rest, out=y)
        x.add_(y.floor_divide_(numbers.inner).mul_(_signed(numbers.jump)))


def _signed(number: int) -> int:
    """``number`` modulo 2^32, as a signed 32-bit number."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


@functools.cache
def _checked_kernels(device: torch.device) -> ModuleType | None:
    """The fused kernel, if it gives the torch version's bits on this device."""
    try:
        from lightstep.precision import moments_triton

        if moments_triton.available and _matches_torch(moments_triton, device):
            return moments_triton
        reason = "it differs from the torch version" if moments_triton.available else "Triton is not installed"
    except Exception as error:  # compilers and drivers fail in many ways; the torch version works
        reason = f"{type(error).__name__}: {error}"
    logger.warning("moments are rounded by plain torch operations on %s, not by a fused kernel (%s)", device, reason)
    return None


def _matches_torch(kernels: ModuleType, device: torch.device) -> bool:
    """Whether ``kernels`` gives the torch version's bits for all kinds of numbers and positions."""
    generator = torch.Generator().manual_seed(0)  # its own: the user's random state does not change
    n = _CHUNK + 4099
    bits = torch.randint(-(2**31), 2**31, (2 * n,), generator=generator, dtype=torch.int64, device="cpu")
    value, listed = (half.to(torch.int32).to(device) for half in bits.split(n))
    scratch = _Scratch(device)
    scratch.set_step(4321)
    places = [Window(), Window((1 << 33) - 77), Window(5, 3 * 4099, 1 << 31, 12345), listed]
    for salt, numbers in enumerate(places, start=0x7FFFFFFE):
        expected, found = (torch.empty(n, dtype=torch.bfloat16, device=device) for _ in range(2))
        _round(value.view(torch.float32), expected, salt, numbers, scratch)
        kernels.round_stochastically(value.view(torch.float32), found, scratch.step, salt, numbers)
        if not torch.equal(expected.view(torch.int16), found.view(torch.int16)):
            return False
    return True
