"""Moments that are kept in 8 bits between updates, with one fp32 scale for each block of neighbours in a row.

The scale is the block's largest magnitude. A code is that magnitude's root, in 127 or 255 steps::

    first moments, signed       |m| = scale · (code / 127)²
    never negative ones          v  = scale · (code / 255)⁴

Roots give small values finer steps: the update divides by the root of ``v``, which varies by orders of magnitude within
a block. A ``v`` above zero never becomes zero, because the update would then divide by ``eps`` alone.

The code is the largest whose value, less the part of a step that noise (or a half) stands for, is not above the
magnitude. It is guessed from a square root, which torch's CPU kernels do not round correctly, and then compared, so its
bits are the same everywhere. Of the noise 12 bits are used, from 1/8192 to 8191/8192 of a step: more would be lost in
rounding, and a decoded value must have its own code again whatever the noise is, because a step that is skipped on the
device encodes what it has decoded.

A block with an infinity or a NaN becomes NaN as a whole. With an infinite scale its other values would be NaN, and have
other codes than before.

Blocks lie within rows (the last dimension) of the whole parameter, so neither shards of the first dimension nor units
cut one, and a parameter has the same codes however it is divided. Decoded values have their own codes again: a
checkpoint of them is exact.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightstep.distributed import Window
from lightstep.precision.noise import CHUNK, Noise, Scratch, numbered, salt_of, signed
from lightstep.precision.shared_tables import SharedTable
from lightstep.precision.triton_launch import checked_kernels

__all__ = ["LARGEST_BLOCK", "SMALLEST_BLOCK", "Int8"]

LARGEST_BLOCK, SMALLEST_BLOCK = 128, 16
_MAGNITUDE, _INFINITY, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000
_KEPT = 8  # launches of an entry


class Int8:
    """A :class:`~lightstep.state.schema.Codec`: 8-bit codes and a scale for each block; for values that are never
    negative also a bit for the sign, which is not theirs.

    On CUDA it uses one Triton kernel for each direction, once a check on this device has found the bits of the torch
    version.

    Args:
        block: elements; a power of two from :data:`SMALLEST_BLOCK` to :data:`LARGEST_BLOCK`. All lengths are multiples.
        never_negative: the values are not negative, and their signs carry something else.
        noise: for stochastic rounding of the codes; ``None`` rounds to nearest.
    """

    dtype = torch.float32

    def __init__(self, block: int, never_negative: bool, noise: Noise | None = None) -> None:
        self.block, self.never_negative, self._noise = block, never_negative, noise
        self.planes: Sequence[tuple[str, torch.dtype, int]] = (
            ("", torch.uint8, 1),
            (" scales", torch.float32, block),
            *([(" signs", torch.uint8, 8)] if never_negative else []),
        )

    @property
    def is_stochastic(self) -> bool:
        return self._noise is not None

    def at(self, planes: Sequence[Tensor]) -> CodedInInt8:
        return CodedInInt8(planes, self.block, self._noise)


class CodedInInt8:
    """A :class:`~lightstep.state.schema.Coded`. It keeps launches of kernels from step to step."""

    def __init__(self, planes: Sequence[Tensor], block: int, noise: Noise | None) -> None:
        self.planes, self._block, self._noise = planes, block, noise
        self._launches: dict[Any, Any] = {}

    def decode(self, out: Tensor) -> None:
        kernels = _checked_kernels(out.device) if out.device.type == "cuda" else None
        if kernels is None:
            _decode(self.planes, out, self._block)
        else:
            tensors = kernels.decoded(self.planes, out)
            self._launch(kernels.decoding, out.data_ptr(), tensors, (), self._block)

    def encode(self, value: Tensor) -> None:
        self._encode(value, None, 0, Window())

    def encode_update(self, value: Tensor, entry: str, step: Any, numbers: Tensor | Window) -> None:
        assert self._noise is not None
        here = isinstance(step, Tensor) and step.device == value.device
        self._encode(value, step if here else self._noise.at(value.device, step).step, salt_of(entry), numbers)

    def _encode(self, value: Tensor, step: Tensor | None, salt: int, numbers: Tensor | Window) -> None:
        kernels = _checked_kernels(value.device) if value.device.type == "cuda" else None
        if kernels is None:
            scratch = None if step is None or self._noise is None else self._noise.at(value.device, step)
            _encode(value, self.planes, self._block, scratch, salt, numbers)
            return
        row, window = (numbers, Window()) if isinstance(numbers, Tensor) else (None, numbers)
        tensors, jumps = kernels.encoded(self.planes, value, step, row), window.jump != 0
        addresses = (value.data_ptr(), *(0 if one is None else one.data_ptr() for one in (step, row)), jumps)
        self._launch(kernels.encoding, addresses, tensors, (signed(salt), *window), jumps, self._block)

    def _launch(self, kernel: Any, key: Any, tensors: Any, numbers: tuple[int, ...], *constants: Any) -> None:
        known = self._launches.get(key)
        if known is not None and known(*numbers):
            return
        kernel(tensors[0].numel(), tensors, numbers, *constants)
        if len(self._launches) >= _KEPT:  # scratch memory has moved
            self._launches.clear()
        self._launches[key] = kernel.again(tensors[0].numel(), tensors, *constants)


def _decode(planes: Sequence[Tensor], out: Tensor, block: int) -> None:
    """The torch version, which the kernel is compared with."""
    codes, scales, *signs = planes
    for start in range(0, out.numel(), CHUNK):
        stop = min(start + CHUNK, out.numel())
        code, scale = codes[start:stop], scales[start // block : stop // block].unsqueeze(1)
        target = out[start:stop]
        if signs:
            target.copy_(_power(code.float(), 255).view(-1, block).mul_(scale).view(-1))
            bits = signs[0][start // 8 : stop // 8].unsqueeze(1) >> _places(out.device)
            target.view(torch.int32).bitwise_or_((bits & 1).view(-1).to(torch.int32) << 31)
        else:
            code = code.view(torch.int8).float()
            value = _power(code.abs(), 127).view(-1, block).mul_(scale).view(-1)
            target.copy_(value.copysign_(code))


def _encode(
    value: Tensor,
    planes: Sequence[Tensor],
    block: int,
    scratch: Scratch | None,
    salt: int,
    numbers: Tensor | Window,
) -> None:
    codes, scales, *signs = planes
    if scratch is not None:
        scratch.begin(salt)
    for start in range(0, value.numel(), CHUNK):
        stop = min(start + CHUNK, value.numel())
        bits = value[start:stop].view(torch.int32)
        magnitudes = bits & _MAGNITUDE
        scale = magnitudes.view(-1, block).amax(1)  # of integers: a NaN is the largest
        scale.masked_fill_(scale >= _INFINITY, _NAN)
        scales[start // block : stop // block].copy_(scale.view(torch.float32))
        divisor = scale.clamp(min=1).view(torch.float32).unsqueeze(1)  # 0 / tiny instead of 0 / 0
        steps = 255 if signs else 127
        part = (magnitudes.view(torch.float32).view(-1, block) / divisor).view(-1)
        root = part.sqrt().sqrt_() if signs else part.sqrt()
        up: Any = 0.5
        if scratch is not None:
            up = (scratch.row(numbers, start, stop - start)[0] >> 4).float().add_(0.5).mul_(2.0**-12)
        code = root.mul_(steps).add_(up).floor_()
        code.sub_((_power(code - up, steps) > part).to(code.dtype))
        code.add_((_power(code + 1 - up, steps) <= part).to(code.dtype))
        code.clamp_(min=0, max=steps)
        if signs:
            code = torch.where(magnitudes > 0, code.clamp_(min=1), 0)
        code = torch.where(part == part, code, steps)
        if signs:
            negative = (bits < 0).view(-1, 8).to(torch.uint8) << _places(value.device)
            signs[0][start // 8 : stop // 8].copy_(negative.sum(1, dtype=torch.uint8))
        else:
            code.copy_(torch.where(bits < 0, -code, code))
        codes[start:stop].view(torch.int8).copy_(code.to(torch.int32))  # int32 → int8 keeps the low bits


def _power(code: Tensor, steps: int) -> Tensor:
    """The part of the scale that a code in so many steps stands for; ``code`` is overwritten."""
    code.mul_(1 / steps)
    code.mul_(code)
    return code.mul_(code) if steps == 255 else code


def _places(device: torch.device) -> Tensor:
    return _kept_places(device).read()


@functools.cache
def _kept_places(device: torch.device) -> SharedTable:
    return SharedTable(torch.arange(8, dtype=torch.uint8, device=device))


@functools.cache
def _checked_kernels(device: torch.device) -> Any:
    """The fused kernels, if they give the torch version's bits on this device."""

    def load() -> ModuleType:
        from lightstep.precision import moments_int8_triton

        return moments_int8_triton

    return checked_kernels(load, _matches_torch, device, "8-bit moments are coded")


def _matches_torch(kernels: ModuleType, device: torch.device) -> bool:
    """Whether ``kernels`` gives the torch version's bits for all kinds of numbers, blocks and positions."""
    generator = torch.Generator().manual_seed(0)  # its own: the user's random state does not change
    n = CHUNK + 41 * LARGEST_BLOCK
    bits = torch.randint(-(2**31), 2**31, (2 * n,), generator=generator, dtype=torch.int64, device="cpu")
    anything, listed = (half.to(torch.int32).to(device) for half in bits.split(n))
    usual = torch.randn(n, generator=generator, dtype=torch.float32, device="cpu").to(device).pow_(3).mul_(1e-6)
    usual[: 3 * LARGEST_BLOCK] = 0
    scratch = Scratch(device)
    scratch.set_step(4321)
    jumping = numbered(Window(5, 3 * 4099, 1 << 31, 12345), seed=2)
    places = [Window(), Window((1 << 33) - 77), jumping, listed]
    for number, value in enumerate((anything.view(torch.float32), usual) * len(places)):
        block, numbers = (LARGEST_BLOCK, 64, 32, SMALLEST_BLOCK)[number % 4], places[number // 2]
        for never_negative in (False, True):
            for noise in (None, scratch):
                codec, found, salt = Int8(block, never_negative), [], 0x7FFFFFFE + number
                for by_kernels in (False, True):
                    planes = [torch.empty(n // per, dtype=dtype, device=device) for _, dtype, per in codec.planes]
                    decoded = torch.empty(n, dtype=torch.float32, device=device)
                    if by_kernels:
                        kernels.encode(value, planes, block, None if noise is None else noise.step, salt, numbers)
                        kernels.decode(planes, decoded, block)
                    else:
                        _encode(value, planes, block, noise, salt, numbers)
                        _decode(planes, decoded, block)
                    found.append([*(plane.view(torch.uint8) for plane in planes), decoded.view(torch.int32)])
                values = [one[-1] for one in found]
                nan = [one.view(torch.float32).isnan() for one in values]  # whose payloads may differ
                if not all(map(torch.equal, found[0][:-1], found[1][:-1])) or not torch.equal(*nan):
                    return False
                if not torch.equal(*(one[~nan[0]] for one in values)):
                    return False
    return True
