"""Moments that are kept in bf16 between updates.

Rounded to nearest, a second moment with ``beta2`` 0.999 does not change: updates are smaller than half of the last bit
and are lost. Rounded up with a probability in proportion to the cut-off part, it is right on average::

    rounded = upper half of (fp32 bits + noise)

with the noise of :mod:`lightstep.precision.noise`. Values that bf16 can represent do not change, and NaN stays NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightstep.distributed import Window
from lightstep.precision.noise import CHUNK, Noise, Scratch, numbered, salt_of
from lightstep.precision.triton_launch import checked_kernels

__all__ = ["BFloat16"]


class BFloat16:
    """A :class:`~lightstep.state.schema.Codec`: bf16. The sign is kept as it is.

    On CUDA, stochastic rounding uses one Triton kernel, once a check on this device has found the bits of the torch
    version.

    Args:
        noise: for stochastic rounding; ``None`` rounds to nearest.
    """

    dtype = torch.bfloat16
    planes: Sequence[tuple[str, torch.dtype, int]] = (("", torch.bfloat16, 1),)
    block = 1

    def __init__(self, noise: Noise | None = None) -> None:
        self._noise = noise

    @property
    def is_stochastic(self) -> bool:
        return self._noise is not None

    def at(self, planes: Sequence[Tensor]) -> CodedInBFloat16:
        return CodedInBFloat16(planes, self._noise)


class CodedInBFloat16:
    """A :class:`~lightstep.state.schema.Coded`."""

    def __init__(self, planes: Sequence[Tensor], noise: Noise | None) -> None:
        self.planes, self._noise = planes, noise
        self._codes = planes[0]

    def decode(self, out: Tensor) -> None:
        out.copy_(self._codes)

    def encode(self, value: Tensor) -> None:
        self._codes.copy_(value)
        codes, upper = self._codes.view(torch.int16), value.view(torch.int16)[1::2]
        codes.bitwise_xor_(upper).bitwise_and_(0x7FFF).bitwise_xor_(upper)  # a cast loses the sign of a NaN

    def encode_update(self, value: Tensor, entry: str, step: Any, numbers: Tensor | Window) -> None:
        assert self._noise is not None
        scratch = self._noise.at(value.device, step)
        kernels = _checked_kernels(value.device) if value.device.type == "cuda" else None
        if kernels is not None:
            kernels.round_stochastically(value, self._codes, scratch.step, salt_of(entry), numbers)
        else:
            _round(value, self._codes, salt_of(entry), numbers, scratch)


def _round(value: Tensor, out: Tensor, salt: int, numbers: Tensor | Window, scratch: Scratch) -> None:
    scratch.begin(salt)
    for start in range(0, value.numel(), CHUNK):
        stop = min(start + CHUNK, value.numel())
        x, y, flags = scratch.row(numbers, start, stop - start)
        exact, bits = value[start:stop], value[start:stop].view(torch.int32)
        x.add_(bits).bitwise_right_shift_(16)
        torch.ne(exact, exact, out=flags)
        torch.bitwise_right_shift(bits, 16, out=y).bitwise_or_(0x40)
        torch.where(flags, y, x, out=x)
        out[start:stop].view(torch.int16).copy_(x)  # int32 → int16 keeps the low half


@functools.cache
def _checked_kernels(device: torch.device) -> Any:
    """The fused kernels, if they give the torch version's bits on this device."""

    def load() -> ModuleType:
        from lightstep.precision import moments_triton

        return moments_triton

    return checked_kernels(load, _matches_torch, device, "moments are rounded")


def _matches_torch(kernels: ModuleType, device: torch.device) -> bool:
    """Whether ``kernels`` gives the torch version's bits for all kinds of numbers and positions."""
    generator = torch.Generator().manual_seed(0)  # its own: the user's random state does not change
    n = CHUNK + 4099
    bits = torch.randint(-(2**31), 2**31, (2 * n,), generator=generator, dtype=torch.int64, device="cpu")
    value, listed = (half.to(torch.int32).to(device) for half in bits.split(n))
    scratch = Scratch(device)
    scratch.set_step(4321)
    jumping = numbered(Window(5, 3 * 4099, 1 << 31, 12345), seed=2)
    places = [Window(), Window((1 << 33) - 77), jumping, listed]
    for salt, numbers in enumerate(places, start=0x7FFFFFFE):
        expected, found = (torch.empty(n, dtype=torch.bfloat16, device=device) for _ in range(2))
        _round(value.view(torch.float32), expected, salt, numbers, scratch)
        kernels.round_stochastically(value.view(torch.float32), found, scratch.step, salt, numbers)
        if not torch.equal(expected.view(torch.int16), found.view(torch.int16)):
            return False
    return True
