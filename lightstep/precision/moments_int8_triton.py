"""The kernels of :class:`~lightstep.precision.moments_int8.Int8`, one for each direction.

They are used only if they give the bits of the torch version on the device. ``available`` is False without Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightstep.distributed import Window
from lightstep.precision.noise import signed
from lightstep.precision.triton_launch import Launcher

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

available = triton is not None
_TILE, _WARPS = 1024, 4


def decode(planes: Sequence[Tensor], out: Tensor, block: int) -> None:
    """Write the values to ``out`` (fp32, ``[n]``)."""
    decoding(out.numel(), decoded(planes, out), (), block)


def encode(
    value: Tensor, planes: Sequence[Tensor], block: int, step: Tensor | None, salt: int, numbers: Tensor | Window
) -> None:
    """Encode ``value`` (fp32, ``[n]``), with the noise of ``step`` (0-dim, on the device), or to nearest without."""
    row, window = (numbers, Window()) if isinstance(numbers, Tensor) else (None, numbers)
    tensors = encoded(planes, value, step, row)
    encoding(value.numel(), tensors, (signed(salt), *window), window.jump != 0, block)


def decoded(planes: Sequence[Tensor], out: Tensor) -> tuple[Tensor | None, ...]:
    """The tensors for a launch of :data:`decoding`."""
    codes, scales, *signs = planes
    return out, codes, scales, signs[0] if signs else None


def encoded(
    planes: Sequence[Tensor], value: Tensor, step: Tensor | None, numbers: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The tensors for a launch of :data:`encoding`."""
    codes, scales, *signs = planes
    return value.view(torch.int32), codes, scales, signs[0] if signs else None, step, numbers


if available:
    from lightstep.precision.moments_triton import mix, noise_of

    @triton.jit
    def power(code, FOURTH: tl.constexpr):  # type: ignore[no-untyped-def]
        """The part of the scale that a code stands for."""
        if FOURTH:
            square = code * 0.00392156862745098
            square = square * square
            return square * square
        else:
            root = code * 0.007874015748031496
            return root * root

    @triton.jit
    def decode_signed(code, scale):  # type: ignore[no-untyped-def]
        """The fp32 values of codes of numbers with a sign."""
        signed = code.to(tl.int8, bitcast=True).to(tl.int32)
        bits = (power(tl.abs(signed).to(tl.float32), False) * scale).to(tl.int32, bitcast=True)
        return (bits | (signed & -2147483648)).to(tl.float32, bitcast=True)

    @triton.jit
    def decode_positive(code, scale, byte, place):  # type: ignore[no-untyped-def]
        """The fp32 values of codes of numbers that are never negative; ``byte`` has the sign of each at ``place``."""
        bits = (power(code.to(tl.float32), True) * scale).to(tl.int32, bitcast=True)
        sign = (byte.to(tl.int32) >> (place % 8).to(tl.int32)) & 1
        return (bits | (sign << 31)).to(tl.float32, bitcast=True)

    @triton.jit
    def share_of_noise(noise):  # type: ignore[no-untyped-def]
        """The part of a step that 16 bits of noise stand for."""
        return (noise >> 4).to(tl.float32) * 0.000244140625 + 0.0001220703125

    @triton.jit
    def quotient(x, divisor, reciprocal):  # type: ignore[no-untyped-def]
        """``x / divisor``, correctly rounded, from the divisor's rounded reciprocal; nothing is infinite or tiny."""
        found = x * reciprocal
        found = tl.fma(tl.fma(found * -1.0, divisor, x), reciprocal, found)
        return tl.fma(tl.fma(found * -1.0, divisor, x), reciprocal, found)

    @triton.jit
    def places_in_eights(TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        """The places of elements (``[TILE / 8, 8]``), as coding has them: eight neighbours share a byte of signs."""
        return tl.arange(0, TILE // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]

    @triton.jit
    def encode_in_eights(bits, up, POSITIVE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Codes (int32, ``[n / 8, 8]``) and scales (the bits of fp32 numbers, ``[n / 8]``) of fp32 numbers.

        Args:
            bits: of the numbers, ``[n / 8, 8]``.
            up: the part of a step that is rounded up.
        """
        magnitude = bits & 0x7FFFFFFF
        largest = tl.max(magnitude, axis=1)
        EIGHTS: tl.constexpr = BLOCK // 8
        rows = tl.reshape(largest, (largest.shape[0] // EIGHTS, EIGHTS))
        scale = tl.reshape(tl.broadcast_to(tl.max(rows, axis=1)[:, None], rows.shape), largest.shape)
        scale = tl.where(scale < 0x7F800000, scale, 0x7FC00000)
        # Both are multiplied by a power of two that brings the divisor near 1. What gets tiny by that has code 0.
        near_1 = ((254 - tl.minimum(scale >> 23, 253)) << 23).to(tl.float32, bitcast=True)
        divisor = tl.maximum(scale, 1).to(tl.float32, bitcast=True) * near_1
        reciprocal = tl.div_rn(1.0, divisor)
        part = magnitude.to(tl.float32, bitcast=True) * near_1[:, None]
        part = quotient(part, divisor[:, None], reciprocal[:, None])
        root = tl.sqrt(part)  # not exact: the guess is right or one too low
        steps = 127.0
        if POSITIVE:
            root = tl.sqrt(root)
            steps = 255.0
        code = tl.floor(root * steps + (up - 0.001))
        code = tl.where(power(code + 1.0 - up, POSITIVE) <= part, code + 1.0, code)
        code = tl.minimum(tl.maximum(code, 0.0), steps)
        if POSITIVE:
            code = tl.where(magnitude > 0, tl.maximum(code, 1.0), 0.0)
        code = tl.where(part == part, code, steps).to(tl.int32)
        if not POSITIVE:
            code = tl.where(bits < 0, -code, code)
        return code, scale

    @triton.jit
    def sign_bytes(bits):  # type: ignore[no-untyped-def]
        """The signs of numbers with these bits (``[n / 8, 8]``), eight in a byte."""
        return tl.sum(((bits >> 31) & 1) << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8)

    @triton.jit(do_not_specialize=["n"])
    def _decode_kernel(out, codes, scales, signs, n, BLOCK: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        inside = place < n
        code = tl.load(codes + place, mask=inside, other=0)
        scale = tl.load(scales + place // BLOCK, mask=inside, other=0)
        if signs is not None:
            byte = tl.load(signs + place // 8, mask=inside, other=0)
            tl.store(out + place, decode_positive(code, scale, byte, place), mask=inside)
        else:
            tl.store(out + place, decode_signed(code, scale), mask=inside)

    @triton.jit(do_not_specialize=["salt", "start", "inner", "jump", "skipped", "n"])
    def _encode_kernel(  # type: ignore[no-untyped-def]
        value,
        codes,
        scales,
        signs,
        step,
        numbers,
        salt,
        start,
        inner,
        jump,
        skipped,
        n,
        JUMPS: tl.constexpr,
        BLOCK: tl.constexpr,
        TILE: tl.constexpr,
    ):
        first = tl.program_id(0).to(tl.int64) * TILE
        eight = first // 8 + tl.arange(0, TILE // 8)
        place = first + places_in_eights(TILE)
        inside = place < n
        bits = tl.load(value + place, mask=inside, other=0)
        if step is None:
            up = tl.full(place.shape, 0.5, tl.float32)
        else:
            a = mix(tl.load(step).to(tl.int32) * -2048144777 + salt)
            up = share_of_noise(
                noise_of(numbers, place, inside, a, mix(a + -1028477379), start, inner, jump, skipped, JUMPS)
            )
        code, scale = encode_in_eights(bits, up, signs is not None, BLOCK)
        is_first = (eight % (BLOCK // 8) == 0) & (eight < n // 8)
        tl.store(scales + eight // (BLOCK // 8), scale.to(tl.float32, bitcast=True), mask=is_first)
        if signs is not None:
            tl.store(signs + eight, sign_bytes(bits), mask=eight < n // 8)
        tl.store(codes + place, code.to(tl.uint8), mask=inside)

    decoding = Launcher(_decode_kernel, _TILE, _WARPS, enable_fp_fusion=False)
    encoding = Launcher(_encode_kernel, _TILE, _WARPS, enable_fp_fusion=False)
