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
        """The fp32 values of codes of numbers with a sign; NaN has none."""
        root = ((code ^ 0x80).to(tl.int32) + 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0  # 2^23 + 128
        root = root * 0.007874015748031496
        return root * tl.abs(root) * scale

    @triton.jit
    def decode_positive(code, scale):  # type: ignore[no-untyped-def]
        """The fp32 values of codes of numbers that are never negative."""
        large = (code.to(tl.int32) + 0x4B000000).to(tl.float32, bitcast=True)  # 2^23 more
        square = tl.fma(large, 0.00392156862745098, -32896.50390625)
        square = square * square
        return square * square * scale

    @triton.jit
    def share_of_noise(noise):  # type: ignore[no-untyped-def]
        """The part of a step that 16 bits of noise stand for."""
        large = ((noise >> 4) + 0x4B000000).to(tl.float32, bitcast=True)  # 2^23 more than the upper 12 bits
        return tl.fma(large, 0.000244140625, -2047.9998779296875)

    @triton.jit
    def inverse(divisor):  # type: ignore[no-untyped-def]
        """The rounded reciprocal, and what it lacks of the exact one."""
        rounded = tl.div_rn(1.0, divisor)
        return rounded, tl.fma(rounded * -1.0, divisor, 1.0) * rounded

    @triton.jit
    def quotient(x, divisor, rounded, rest):  # type: ignore[no-untyped-def]
        """``x / divisor``, correctly rounded, with the divisor's :func:`inverse`; nothing is infinite or tiny."""
        found = tl.fma(x, rounded, x * rest)
        return tl.fma(tl.fma(found * -1.0, divisor, x), rounded, found)

    @triton.jit
    def places_in_eights(TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        """The places of elements (``[TILE / 8, 8]``), as coding has them: eight neighbours share a byte of signs."""
        return tl.arange(0, TILE // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]

    @triton.jit
    def _larger(x, y):  # type: ignore[no-untyped-def]
        return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)

    @triton.jit
    def encode_in_eights(value, up, POSITIVE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Codes (uint8, ``[n / 8, 8]``) and scales (``[n / 8]``) of fp32 numbers.

        Args:
            value: ``[n / 8, 8]``.
            up: the part of a step that is rounded up.
        """
        magnitude = tl.abs(value)
        largest = tl.reduce(magnitude, 1, _larger)
        EIGHTS: tl.constexpr = BLOCK // 8
        rows = tl.reshape(largest, (largest.shape[0] // EIGHTS, EIGHTS))
        scale = tl.reshape(tl.broadcast_to(tl.reduce(rows, 1, _larger)[:, None], rows.shape), largest.shape)
        scale = tl.where(scale < float("inf"), scale.to(tl.int32, bitcast=True), 0x7FC00000)
        # Both are multiplied by a power of two that brings the divisor near 1. What gets tiny by that has code 0.
        near_1 = ((254 - tl.minimum(scale >> 23, 253)) << 23).to(tl.float32, bitcast=True)
        divisor = tl.maximum(scale, 1).to(tl.float32, bitcast=True) * near_1
        rounded, rest = inverse(divisor)
        part = quotient(magnitude * near_1[:, None], divisor[:, None], rounded[:, None], rest[:, None])
        # `up` is from 1/8192 to 8191/8192, and the root's error is less than 1/8192 of a step: at most 2^-22.9 of each
        # reciprocal root, and 2^-22.4 of the power. So the root's floor is the code or one too low.
        if POSITIVE:
            steps = 255.0
            # Zero has code 0, and the rest at least that of 1.00001 steps, which is 1 whatever `up` is.
            least = tl.minimum(magnitude * 1.7014118346046923e38, 2.3651323e-10)
            part = _larger(part, least)
            root = tl.fma(tl.rsqrt(tl.rsqrt(part)), steps, -0.5)
        else:
            steps = 127.0
            root = tl.fma(part, tl.rsqrt(tl.fma(part, 6.2000124e-05, 1e-37)), -0.5)
        code = tl.minimum(root + 12582912.0, 12582912.0 + steps)  # 3 * 2^22: rounded to integers; NaN has all steps
        next_one = code - 12582911.0
        is_next = power(next_one - up, POSITIVE) <= part
        if POSITIVE:
            code = tl.where(is_next, code + 1.0, code)
        else:
            bits = tl.where(is_next, next_one, next_one - 1.0).to(tl.int32, bitcast=True)
            bits |= value.to(tl.int32, bitcast=True) & -2147483648
            code = bits.to(tl.float32, bitcast=True) + 12582912.0
        return code.to(tl.int32, bitcast=True).to(tl.uint8), scale.to(tl.float32, bitcast=True)

    @triton.jit
    def signs_of(bytes):  # type: ignore[no-untyped-def]
        """The eight bits of bytes (``[n / 8]``), as int32 (``[n / 8, 8]``)."""
        return (bytes.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1

    @triton.jit
    def sign_bytes(signs):  # type: ignore[no-untyped-def]
        """Bytes of eight bits."""
        return tl.sum(signs << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8)

    @triton.jit(do_not_specialize=["n"])
    def _decode_kernel(out, codes, scales, signs, n, BLOCK: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        inside = place < n
        code = tl.load(codes + place, mask=inside, other=0)
        scale = tl.load(scales + place // BLOCK, mask=inside, other=0)
        if signs is not None:
            byte = tl.load(signs + place // 8, mask=inside, other=0).to(tl.int32)
            bits = decode_positive(code, scale).to(tl.int32, bitcast=True)
            bits |= (byte >> (place % 8).to(tl.int32)) << 31
            tl.store(out + place, bits.to(tl.float32, bitcast=True), mask=inside)
        else:
            bits = decode_signed(code, scale).to(tl.int32, bitcast=True)
            bits |= code.to(tl.int8, bitcast=True).to(tl.int32) & -2147483648
            tl.store(out + place, bits.to(tl.float32, bitcast=True), mask=inside)

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
        up = 0.5
        if step is not None:
            a = mix(tl.load(step).to(tl.int32) * -2048144777 + salt)
            up = share_of_noise(
                noise_of(numbers, place, inside, a, mix(a + -1028477379), start, inner, jump, skipped, JUMPS)
            )
        code, scale = encode_in_eights(bits.to(tl.float32, bitcast=True), up, signs is not None, BLOCK)
        is_first = (eight % (BLOCK // 8) == 0) & (eight < n // 8)
        tl.store(scales + eight // (BLOCK // 8), scale, mask=is_first)
        if signs is not None:
            tl.store(signs + eight, sign_bytes((bits >> 31) & 1), mask=eight < n // 8)
        tl.store(codes + place, code, mask=inside)

    decoding = Launcher(_decode_kernel, _TILE, _WARPS, enable_fp_fusion=False)
    encoding = Launcher(_encode_kernel, _TILE, _WARPS, enable_fp_fusion=False)
